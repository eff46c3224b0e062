"""Paced jobs of the all-reduce study: every scheme exchanges what it should, on hosts behind limited links."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dpro_search.errors import MissingCapabilityError
from experiments.allreduce.schemes import JOB, SCHEMES

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="shaped hosts need root, ip and tc"),
]
RATE_BPS = 1e8
WAITS_US, MOMENTS = [50e3, 50e3, 50e3], [[1000, 250_000], [250_000]]
LATENCY = {"kind": "latency", "sizes_bytes": [4, 4_000_000], "calls": [2, 1], "bursts": [[1000] * 4], "burst_calls": 1}
TRAINING = {"kind": "training", "waits_us": WAITS_US, "moments": MOMENTS, "warm_up": 1, "steps": 2}


WAITED = """
import time
from tensorflow_waits import tf, wait
waits = tf.function(lambda: wait(0.5e6, [wait(0.5e6, [])]))
waits()
for _ in range(3):
    begun = time.monotonic()
    waits().numpy()
    print(time.monotonic() - begun)
"""
COMPUTED = """
import time
from tensorflow_waits import set_threads, tf, wait
set_threads()
def many():
    token = wait(1, [])
    for _ in range(99):
        token = wait(1, [token])
    return token
waits = tf.function(many)
waits()
for _ in range(5):
    begun = time.process_time()
    waits().numpy()
    print((time.process_time() - begun) / 100)
"""


def _printed(program: str) -> list[float]:
    try:
        python = SCHEMES["tf-ring"].python()
    except MissingCapabilityError as error:
        pytest.skip(str(error))
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True, cwd=JOB.parent)
    return [float(text) for text in done.stdout.split()]


def test_a_wait_of_tensorflow_takes_its_time_once() -> None:
    least_s = min(_printed(WAITED))  # other work on the machine only adds
    assert 1.0 <= least_s < 1.5


def test_a_wait_of_tensorflow_leaves_the_core_to_others() -> None:
    least_s = min(_printed(COMPUTED))
    assert least_s < 1.5e-3, "eight workers share two cores, and a step has up to 64 waits"


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_waits_exchanges_and_says_when_steps_ended(name: str, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    try:
        scheme.python()
    except MissingCapabilityError as error:
        pytest.skip(str(error))
    (tmp_path / "cases.json").write_text(json.dumps([LATENCY, TRAINING]))
    scheme.start(2, tmp_path, RATE_BPS, 180.0)
    latency, training = (json.loads((tmp_path / f"result-{number}.json").read_text()) for number in (0, 1))
    small, large = latency["us"]
    link_us = 4_000_000 * 8 / RATE_BPS * 1e6
    assert small < 0.3 * link_us
    assert 0.5 * link_us < large < 10 * link_us
    begin, *ends = training["ends_s"]
    step_s = (ends[-1] - begin) / 2
    assert step_s > sum(WAITS_US) / 1e6 + 0.5 * 250_000 * 4 * 8 / RATE_BPS, "the last gradients are exchanged after the last wait"
    assert step_s < 10
