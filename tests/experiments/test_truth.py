"""``experiments.truth score``: errors of predictions of published runs, and why rows are left out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAD = (
    "source,gpu,gpus_per_node,n_gpus,model,layers,hidden,heads,kv_heads,ffn_hidden,vocab,seq_len,precision,dp,tp,pp,micro_batch,"
    "global_batch,framework,status,step_time_s,tier,memory_gb"
)
RUN = "{source},H100,8,8,llama,32,4096,32,8,14336,128256,4096,bf16,8,1,1,1,64,NeMo,{status},{seconds},A,{memory}"


def score(folder, *options):
    command = [sys.executable, "-m", "experiments.truth", "score", str(folder), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def runs(tmp_path):
    rows = [
        RUN.format(source="one", status="ok", seconds=4, memory=60),
        RUN.format(source="one", status="oom", seconds="", memory=""),
        RUN.format(source="two", status="ok", seconds=8, memory="").replace("H100", "K80"),
    ]
    (tmp_path / "runs.csv").write_text("\n".join([HEAD, *rows]) + "\n")
    return tmp_path


def test_errors_are_given_for_each_source_and_in_all(runs):
    found = json.loads(score(runs, "--json").stdout)
    assert (found["all"]["rows"], found["all"]["supported"]) == (2, 1)
    one = found["source"]["one"]
    keys = {
        "rows",
        "supported",
        "mape_pct",
        "median_ape_pct",
        "p90_ape_pct",
        "bias_pct",
        "kendall_tau",
        "memory_rows",
        "memory_mape_pct",
        "memory_median_ape_pct",
        "memory_within_5_pct",
        "oom",
    }
    assert keys | {"seconds_per_row"} == set(one)
    assert one["mape_pct"] == abs(one["bias_pct"]) < 50


def test_calibration_is_scored_on_rows_that_it_was_not_fitted_to(tmp_path):
    """Runs that all take 1.4 times as long: the fifth says so, and the others come out nearer."""
    cold = json.loads(score(written(tmp_path, 1.0), "--json").stdout)
    error = cold["all"]["bias_pct"] / 100
    slower = [
        json.loads(score(written(tmp_path, 1.4 * (1 + error)), *options, "--json").stdout)
        for options in ((), ("--calibrated", "0"))
    ]
    assert slower[0]["all"]["mape_pct"] == pytest.approx(100 * (1 - 1 / 1.4), abs=5)
    assert slower[1]["all"]["mape_pct"] < slower[0]["all"]["mape_pct"] * 0.7  # two rows against what is assumed before
    assert slower[1]["all"]["rows"] == 8  # of ten groups


def written(folder, factor):
    """Runs of ten batch sizes, so as many groups."""
    batches = [64 + 8 * number for number in range(10)]
    rows = (
        RUN.format(source="one", status="ok", seconds=factor * batch / 16, memory="").replace(",64,NeMo", f",{batch},NeMo")
        for batch in batches
    )
    (folder / "runs.csv").write_text("\n".join([HEAD, *rows]) + "\n")
    return folder


def test_intervals_are_those_of_other_sources(tmp_path):
    rows = [
        RUN.format(source=name, status="ok", seconds=seconds, memory="") for name, seconds in (("one", 4), ("two", 4), ("three", 8))
    ]
    (tmp_path / "runs.csv").write_text("\n".join([HEAD, *rows]) + "\n")
    found = json.loads(score(tmp_path, "--intervals").stdout)
    assert found["ratio"]["bound by the device"]["rows"] == 3
    assert found["coverage_of_source_left_out"] == {"one": 1.0, "two": 1.0, "three": 0.0}


def test_intervals_of_one_source_are_one_line(runs):
    done = score(runs, "--intervals")
    assert (done.returncode, done.stdout) == (2, "")
    assert "at least two sources" in done.stderr


def test_rows_that_are_left_out_are_counted_with_the_reason(runs):
    found = json.loads(score(runs, "--json").stdout)
    assert found["unsupported"] == [{"source": "two", "reason": "no bundled machine or device has the GPU K80", "rows": 1}]


def test_a_folder_without_runs_is_one_line(tmp_path):
    done = score(tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no CSV files of runs" in done.stderr
