"""`collect` and `validate`, ended with SIGKILL at random points: no process is left, nothing half-written, the next call works."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from dpro_search.collect.trace import Trace
from dpro_search.search import SearchResult

pytestmark = pytest.mark.integration

TRAIN = Path(__file__).parents[2] / "experiments" / "workloads" / "train.py"
JOB = (TRAIN, "--model", "vgg16", "--batch", 2, "--steps", 30)
KILLS = 3


def dpro(*args: object) -> list[str]:
    return [sys.executable, "-m", "dpro_search.cli", *map(str, args)]


def processes_of(mark: str) -> list[int]:
    """Those that inherited the mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def killed_after(seconds: float, command: list[str]) -> None:
    """Start a command and end it after a time; its children must follow it."""
    mark = f"DPRO_SEARCH_TEST={uuid.uuid4()}"
    with subprocess.Popen(
        command, env={**os.environ, **dict([mark.split("=")])}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=seconds)
        process.kill()
    deadline = time.monotonic() + 30
    while processes_of(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(mark) == []


def succeeds(command: list[str]) -> float:
    """How many seconds it took."""
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return time.monotonic() - started


def test_recordings_and_validations_that_are_killed(tensorflow_python, tmp_path):
    chance = random.Random(3)
    rate = ("--rate", "1gbit") if os.geteuid() == 0 else ()
    collect = ("collect", *rate, "--out")
    seconds = succeeds(dpro(*collect, tmp_path / "trace", "--", tensorflow_python, *JOB))
    for number in range(KILLS):
        out = tmp_path / f"trace{number}"
        killed_after(chance.uniform(1, seconds), dpro(*collect, out, "--", tensorflow_python, *JOB))
        if out.exists():
            assert Trace.load(out).meta.ranks == 2
    succeeds(dpro("run", tmp_path / "trace", "--trials", 30, "--out", tmp_path / "run"))
    before = SearchResult.load(tmp_path / "run")
    for _ in range(KILLS):
        killed_after(chance.uniform(1, 3 * seconds), dpro("validate", tmp_path / "run", "--top", 1, "--", tensorflow_python, *JOB))
        assert SearchResult.load(tmp_path / "run") == before
        validation = tmp_path / "run" / "validation.json"
        assert not validation.exists() or json.loads(validation.read_bytes())["plans"]
    succeeds(dpro("report", tmp_path / "run", "--out", tmp_path / "page.html"))
    succeeds(dpro(*collect, tmp_path / "again", "--", tensorflow_python, *JOB))
