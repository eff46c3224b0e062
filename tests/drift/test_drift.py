"""Predictions and outputs of commands stay what they were, unless a commit says why not."""

import pytest

from tests.drift import update
from tests.drift.commands import COMMANDS, output_of
from tests.drift.jobs import JOBS, NO_JOBS, SHARED, SHARED_FILES
from tests.drift.predictions import predictions_of
from tests.drift.snapshot import HOW, drift, read, shown
from tests.in_process import called

RECORDED = {"as recorded": {"iteration_us": 1000.0, "interval_us": [900.0, 1100.0], "peak_memory_bytes": 2**30}}


def fail_if_moved(snapshot: str, name: str, now: dict) -> None:
    moved = drift(read(snapshot).values.get(name), now)
    if moved:
        pytest.fail(f"{name}: {len(moved)} values moved\n  {shown(moved)}\n{HOW}", pytrace=False)


@pytest.mark.parametrize("name", JOBS)
def test_predictions_of_a_job_are_what_they_were(name):
    if JOBS[name].is_shared and not SHARED.is_dir():
        pytest.skip("real traces are not beside the repository (shared/traces)")
    fail_if_moved("predictions", name, predictions_of(JOBS[name]))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_output_of_a_command_is_what_it_was(name):
    fail_if_moved("commands", name, output_of(name))


def test_the_snapshots_say_why_they_were_changed_and_hold_nothing_else():
    for snapshot, known in {"predictions": JOBS, "commands": COMMANDS}.items():
        assert read(snapshot).reason
        assert set(read(snapshot).values) == {*known}, HOW


def test_every_shared_file_is_watched_or_known_to_be_no_recording():
    if not SHARED.is_dir():
        pytest.skip("real traces are not beside the repository (shared/traces)")
    known = {path for paths in SHARED_FILES.values() for path in paths} | set(NO_JOBS)
    files = [path.relative_to(SHARED) for path in SHARED.rglob("*") if path.is_file()]
    assert [str(path) for path in files if not known & {str(path), *map(str, path.parents)}] == []


@pytest.mark.parametrize(
    ("changed", "moved"),
    [
        ({}, []),
        ({"iteration_us": 1000.0009}, []),
        ({"iteration_us": 1000.01}, ["as recorded / iteration_us: was 1000.0, is 1000.01 (+1e-05 of it)"]),
        ({"iteration_us": float("nan")}, ["as recorded / iteration_us: was 1000.0, is NaN (+nan of it)"]),
        ({"interval_us": [900.0, 1200.0]}, ["as recorded / interval_us[1]: was 1100.0, is 1200.0 (+0.0909 of it)"]),
        ({"peak_memory_bytes": float(2**30)}, ["as recorded / peak_memory_bytes: was 1073741824, is 1073742000.0 (+0 of it)"]),
        ({"infeasible": True}, ["as recorded / infeasible: is new: true"]),
    ],
)
def test_drift_is_any_difference_in_a_key_a_type_or_a_millionth_of_a_number(changed, moved):
    assert drift(RECORDED, {"as recorded": RECORDED["as recorded"] | changed}) == moved


def test_a_refusal_is_drift():
    lines = drift(RECORDED, {"as recorded": {"refused": "GraphError"}})
    assert lines[-1] == 'as recorded / refused: is new: "GraphError"'


def test_an_update_needs_a_reason():
    done = called(update)
    assert done.returncode == 2
    assert "--reason" in done.stderr
