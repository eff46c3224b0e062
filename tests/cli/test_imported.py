"""The verbs on a trace that was imported."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from importer_kit import shared_traces
from kineto_files import distributed, small_job
from kineto_machine import Launch, Synchronize, run, run_graph

from tests.in_process import dpro

DATA = Path(__file__).parents[1] / "data"


def as_json(*args: object) -> dict:
    done = dpro(*args, "--json")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("imported")
    profile, _ = run([Launch("gemm", 10, 400), Launch("relu", 10, 100), Synchronize(50)], 6)
    as_json("import", profile.write(folder / "profile.json.gz"), "--out", folder / "T")
    return folder / "T"


def test_import_says_what_it_made(tmp_path):
    paths = [small_job().write(tmp_path / f"rank{rank}.json", header=distributed(rank, 2)) for rank in range(2)]
    facts = as_json("import", *paths, "--out", tmp_path / "T")
    assert {"trace", "format", "ranks", "steps", "ops", "dropped", "collectives", "clock_residual_us"} <= set(facts)
    assert (facts["format"], facts["ranks"], facts["steps"], facts["ops"]) == ("kineto", 2, 3, 18)
    assert facts["collectives"] == {"matched": 0, "unmatched": 0}
    assert facts["dropped"] == {"device copies of annotations": 6}


@pytest.fixture(scope="module")
def eight_real_ranks(tmp_path_factory) -> tuple[Path, dict]:
    """An imported recording of one step, with what the import printed."""
    folder = tmp_path_factory.mktemp("dlrm") / "T"
    return folder, as_json("import", shared_traces() / "kineto_dlrm_8ranks", "--out", folder)


def test_import_of_eight_real_ranks(eight_real_ranks):
    _, facts = eight_real_ranks
    assert facts["collectives"] == {"matched": 8, "unmatched": 0}
    assert 0 < facts["clock_residual_us"] < 10


def test_import_never_writes_over_a_folder_nor_leaves_half_of_one(tmp_path):
    profile = small_job().write(tmp_path / "profile.json")
    (tmp_path / "T").mkdir()
    done = dpro("import", profile, "--out", tmp_path / "T")
    assert (done.returncode, done.stdout) == (2, "")
    assert "exists already" in done.stderr
    (tmp_path / "bad.json").write_bytes(b'[{"ph": "X", "cat": "kernel"')
    done = dpro("import", tmp_path / "bad.json", "--out", tmp_path / "U")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "U").exists()


def test_replay_compares_with_the_measurement(trace):
    result = as_json("replay", trace)
    assert abs(result["error_pct"]) < 0.5
    assert set(result["breakdown_us"]) == {"compute", "exposed_communication", "waiting_for_ranks", "unknown", "idle"}


def test_replay_says_which_order_it_inferred(tmp_path):
    program = [Launch("gemm", 0, 400), Launch("copy", 0, 300, stream=9, waits_for=7), Launch("update", 0, 60, waits_for=9)]
    profile, _ = run_graph(program, 5)
    profile.write(tmp_path / "graph.json")
    assert dpro("import", tmp_path / "graph.json", "--out", tmp_path / "trace").returncode == 0
    assert (
        "assumed: 10 of 35 dependencies are inferred, because no call in the profile shows them"
        in dpro("replay", tmp_path / "trace").stdout
    )


def test_replay_of_a_question_has_no_measurement(trace):
    result = as_json("replay", trace, "--what-if", "compute=0.5")
    assert result["measured_iteration_us"] is None
    assert result["predicted_iteration_us"] < 0.7 * as_json("replay", trace)["predicted_iteration_us"]


def test_a_held_out_step_stands_beside_the_median_of_the_others(trace):
    result = as_json("replay", trace, "--holdout-step", 3)
    assert abs(result["error_pct"]) < 0.5
    assert abs(result["baseline_error_pct"]) < 0.5


def test_own_durations_tell_the_error_of_each_step(trace):
    result = as_json("replay", trace, "--own-durations")
    assert result["error_pct"] < 0.1
    assert [row["step"] for row in result["steps"]] == [1, 2, 3, 4, 5]
    assert all(row["replayed_us"] == pytest.approx(row["measured_us"], rel=1e-3) for row in result["steps"])


def test_of_one_step_the_recorded_window_is_compared_and_is_no_iteration(eight_real_ranks):
    folder, _ = eight_real_ranks
    result = as_json("replay", folder, "--own-durations")
    (window,) = result["steps"]
    assert window["measured_us"] == pytest.approx(20_707, rel=1e-3)
    assert result["error_pct"] == pytest.approx(abs(window["error_pct"]))
    assert result["measured_iteration_us"] is None
    shown = dpro("replay", folder, "--own-durations").stdout
    assert "the recorded window, with its own durations: measured 20.7 ms, replayed 20.7 ms, error 0.0 %" in shown


@pytest.mark.parametrize("of_one_step", [False, True])
def test_whatever_asks_gets_the_same_iteration(of_one_step, trace, eight_real_ranks):
    folder, _ = eight_real_ranks if of_one_step else (trace, None)
    replayed, diagnosed = as_json("replay", folder), as_json("diagnose", folder)
    for result in (replayed, as_json("replay", folder, "--own-durations")):
        assert result["predicted_iteration_us"] == diagnosed["iteration_us"]
        assert result["measured_iteration_us"] == diagnosed["measured_iteration_us"]
        low_us, high_us = result["interval_us"]
        assert low_us < result["predicted_iteration_us"] < high_us, "one step has an interval too"
        assert sum(result["breakdown_us"].values()) == pytest.approx(result["predicted_iteration_us"], rel=1e-6)
    for row in diagnosed["ranks"]:
        assert sum(row[f"{part}_us"] for part in replayed["breakdown_us"]) == pytest.approx(diagnosed["iteration_us"], rel=1e-6)
    for part, mean_us in replayed["breakdown_us"].items():
        assert np.mean([row[f"{part}_us"] for row in diagnosed["ranks"]]) == pytest.approx(mean_us)
    for gain in diagnosed["gains"][:3]:
        changed = as_json("replay", folder, "--what-if", gain["what_if"])
        assert changed["predicted_iteration_us"] == pytest.approx(gain["predicted_iteration_us"])
        assert diagnosed["iteration_us"] - changed["predicted_iteration_us"] == pytest.approx(gain["gain_us"])
    for sentence in diagnosed["findings"] if of_one_step else ():
        assert any(f"(--what-if {gain['what_if']})" in sentence and gain["gain_pct"] >= 3 for gain in diagnosed["gains"])


def test_ops_are_written_for_the_viewer_and_as_a_table(trace, tmp_path):
    as_json("replay", trace, "--perfetto", tmp_path / "t.json", "--timeline", tmp_path / "t.csv", "--samples", 5)
    assert {"gemm@0", "relu@0"} <= {event["name"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]}
    with (tmp_path / "t.csv").open(newline="") as file:
        assert "host until the launch of relu@0" in {row["name"] for row in csv.DictReader(file)}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--set", "groups=4"), "an imported trace has no knob 'groups'"),
        (("--what-if", "rank1.compute=0.5"), "the trace has rank 0"),
        (("--holdout-step", 99), "steps with a measured iteration are 1 to 5"),
        (("--holdout-step", 3, "--what-if", "compute=0.5"), "leave out --plan, --cluster, --set and --what-if"),
        (("--holdout-step", 3, "--own-durations"), "give one of them"),
    ],
)
def test_bad_questions_are_one_line_and_exit_code_2(trace, args, message):
    done = dpro("replay", trace, *args)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert message in line


def test_diagnose_reports_the_ranks_the_path_the_gains_and_what_stands_out(trace):
    result = as_json("diagnose", trace)
    assert {"critical_path", "ranks", "gains", "findings"} <= set(result)
    (row,) = result["ranks"]
    assert row["compute_us"] == pytest.approx(500)
    assert sum(
        row[f"{part}_us"] for part in ("compute", "exposed_communication", "waiting_for_ranks", "unknown", "idle")
    ) == pytest.approx(result["iteration_us"])
    gains = [gain["gain_us"] for gain in result["gains"]]
    assert gains == sorted(gains, reverse=True)
    assert any("Devices compute for" in sentence for sentence in result["findings"])


def test_diagnose_of_eight_real_ranks_fits_80_columns(eight_real_ranks):
    done = dpro("diagnose", eight_real_ranks[0])
    assert done.returncode == 0, done.stderr
    commands = [line for line in done.stdout.splitlines() if line.startswith("  dpro-search ")]  # in one line, to be copied
    assert commands
    assert max(len(line) for line in done.stdout.splitlines() if line not in commands) <= 80
    assert "Host-bound" in done.stdout


def test_ddp_buckets_of_unknown_sizes_are_predicted_as_recorded_and_listed_nowhere(tmp_path: Path) -> None:
    profiles = [DATA / "ddp_mlp" / f"rank{rank}" / "kineto.json.gz" for rank in (0, 1)]
    as_json("import", *profiles, "--out", tmp_path / "T")
    facts = as_json("replay", tmp_path / "T")
    assert facts["predicted_iteration_us"] == pytest.approx(facts["measured_iteration_us"], rel=0.01)
    assert as_json("diagnose", tmp_path / "T")["buckets"] == []
