"""`capture --timed`: a JAX step that runs here on processes, and what the verbs say of it and of its other meshes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from dpro_search.collect.readers.xla import collectives
from dpro_search.kinds.xla.program import read_program
from dpro_search.kinds.xla.times import wire_bytes
from tests.kinds.verbs import verb

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="shaped hosts need root, ip and tc"),
]

SCRIPT = Path(__file__).parent / "jax_step_job.py"
RATE_BPS = 5e8


@pytest.fixture(scope="module")
def captured(jax_python, tmp_path_factory):
    out = tmp_path_factory.mktemp("timed") / "captured"
    on = ("--jax", "--on", "2xtestbed@500mbit", "--mesh", "fsdp=2,tp=1", "--python", jax_python)
    verb("capture", f"{SCRIPT}:step", *on, "--timed", "--out", out)
    return out


def test_a_timed_program_is_replayed_as_it_ran(captured):
    answer = verb("replay", captured)
    steps_us = json.loads((captured / "times.json").read_text())["steps_us"]
    assert answer["predicted_iteration_us"] == pytest.approx(sum(steps_us) / len(steps_us), rel=0.05)
    assert answer["measured_iteration_us"] > 0
    assert sum(answer["breakdown_us"].values()) == pytest.approx(answer["predicted_iteration_us"])


def test_collectives_take_at_least_the_time_of_their_bytes_on_the_link(captured):
    program = read_program(captured)
    moving = collectives(program.module)
    assert {each.kind for each in moving} >= {"all-gather"}
    for each in moving:
        size = each.output_bytes if each.kind == "all-gather" else each.operand_bytes
        wire_us = wire_bytes(each.kind, each.group_size, size) / (RATE_BPS / 8e6)
        burst_us = (128 << 10) / (RATE_BPS / 8e6)  # which a link lets through at once
        assert program.times.instructions_us[each.start.name] > 0.9 * wire_us - burst_us, each


def test_a_faster_link_makes_communication_shorter_and_nothing_else(captured):
    before, after = verb("replay", captured), verb("replay", captured, "--what-if", "bandwidth=2")
    assert after["breakdown_us"]["compute"] == pytest.approx(before["breakdown_us"]["compute"])
    shorter = "exposed_communication"
    assert 0.4 * before["breakdown_us"][shorter] < after["breakdown_us"][shorter] < before["breakdown_us"][shorter]


def test_meshes_are_searched_and_the_best_ones_run_with_equal_losses(captured, tmp_path, monkeypatch):
    monkeypatch.setenv("DPRO_SEARCH_PROGRAMS", str(tmp_path / "kept"))
    run = tmp_path / "run"
    plans = verb("run", captured, "--trials", "3", "--out", run)["plans"]
    assert any(plan["plan"].get("mesh") == "fsdp=1+tp=2" for plan in plans)
    validated = verb("validate", run, "--rounds", "2", "--warmup", "2", "--", f"{SCRIPT}:step")
    (row,) = validated["plans"]
    assert row["measured_us"] > 0
    assert row["losses"]["verdict"] == "same", row["losses"]
