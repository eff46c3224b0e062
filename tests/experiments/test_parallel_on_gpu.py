"""One rank's blocks on a GPU (`experiments.parallel.on_gpu`): rows that were measured on an H200, and predictions of them."""

import json
from pathlib import Path

import pytest

from experiments.parallel import on_gpu

ROWS = Path(on_gpu.__file__).parents[1] / "results" / "parallel-on-gpu-h200-2026-11-26.json"


@pytest.fixture(scope="module")
def scored():
    """Of some cases: where the device is busy, and where it waits for the host."""
    rows_to_score = {("llama", settings) for settings in ("micro_batch=1", "micro_batch=2", "tp=8")}
    measured = json.loads(ROWS.read_text())
    cases = [case for case in measured["cases"] if (case["model"], case["settings"]) in rows_to_score]
    return on_gpu.score(measured | {"cases": cases})


def error(values, source):
    return abs(values[source] / values["measured"] - 1)


def test_one_recording_predicts_another_micro_batch_of_a_busy_gpu(scored):
    (row,) = [row for row in scored["rows"] if row["settings"] == "micro_batch=2"]
    assert error(row["step_us"], "first") < 0.05
    assert error(row["peak_bytes"], "cold") < 0.05
    assert error(row["blocks"][1]["forward_us"], "cold") < 0.05


def test_a_recording_knows_the_host_that_a_data_sheet_does_not(scored):
    (row,) = [row for row in scored["rows"] if row["settings"] == "tp=8"]
    assert error(row["step_us"], "first") < 0.3 < error(row["step_us"], "cold")


def test_scores_are_printed_as_tables(scored):
    lines = list(on_gpu._tables(scored))
    assert lines[0].startswith("NVIDIA H200")
    assert sum(line.startswith("| llama tp=8 |") for line in lines) == 4  # three blocks, and the step
