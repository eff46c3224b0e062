"""Predictions stay what they were, unless a commit says why not."""

import subprocess
import sys

import pytest

from tests.drift.predictions import JOBS, NO_JOBS, ROOT, SHARED, cases
from tests.drift.snapshot import HOW, drift, read

CASES = list(cases())
RECORDED = {"iteration_us": 1000.0, "breakdown_us": {"compute": 900.0, "idle": 100.0}}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_prediction_is_what_it_was(case):
    moved = drift(read().predictions.get(case.name), case.predict())
    if moved:
        pytest.fail(f"{case.name}: the prediction moved\n  " + "\n  ".join(moved) + f"\n{HOW}", pytrace=False)


def test_the_snapshot_says_why_it_was_changed_and_holds_nothing_else():
    found = read()
    assert found.reason
    names = {case.name for case in CASES} | {f"shared: {name}" for name in JOBS}
    assert set(found.predictions) == names, HOW


def test_every_shared_file_is_watched_or_known_to_be_no_recording():
    if not SHARED.is_dir():
        pytest.skip("real traces are not beside the repository (shared/traces)")
    known = {path for paths in JOBS.values() for path in paths} | set(NO_JOBS)
    files = [path.relative_to(SHARED) for path in SHARED.rglob("*") if path.is_file()]
    assert [str(path) for path in files if not known & {str(path), *map(str, path.parents)}] == []


@pytest.mark.parametrize(
    ("now", "moved"),
    [
        (RECORDED, []),
        ({"iteration_us": 1009.0, "breakdown_us": {"compute": 909.0, "idle": 100.0}}, []),
        ({"iteration_us": 1011.0, "breakdown_us": {"compute": 911.0, "idle": 100.0}}, ["iteration", "compute"]),
        ({"iteration_us": 1000.0, "breakdown_us": {"compute": 920.0, "idle": 80.0}}, ["compute", "idle"]),
        ({"iteration_us": 1000.0, "breakdown_us": {"compute": 900.0, "host": 100.0}}, ["host", "idle"]),
        ({"iteration_us": float("nan"), "breakdown_us": {"compute": 900.0, "idle": 100.0}}, ["iteration"]),
        ({"refused": "GraphError"}, ["was 1000.0 us, is refused (GraphError)"]),
    ],
)
def test_drift_is_more_than_a_hundredth_of_the_iteration(now, moved):
    assert [line.split(":")[0] for line in drift(RECORDED, now)] == moved


def test_an_update_needs_a_reason():
    done = subprocess.run([sys.executable, "-m", "tests.drift.update"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--reason" in done.stderr
