"""What `validate` tells of runs, of those that failed as well; real jobs are in tests/integration."""

import json

import numpy as np
import pytest

import dpro_search
from dpro_search.cli import main
from dpro_search.cli.real_runs.validate import validate
from dpro_search.collect.launch.step_times import StepTimes
from dpro_search.deploy.step_split import ComparedSplit, StepSplit
from dpro_search.deploy.validate import FailedPlan, Validation
from dpro_search.errors import JobError
from dpro_search.search.calibration import Calibration
from dpro_search.space.plan import Plan

REASON = "rank 1 ended with code 3: [rank1] \x1b[2Jno memory"


@pytest.fixture
def validated(monkeypatch, tmp_path):
    """The run folder of a search, and runs of the recorded setting, and of a plan whose second run failed."""

    dpro_search.load().search(trials=2, sampler="mcmc", out=tmp_path / "run")

    def run(*_, on_run, **options):
        times = np.full(9, 2e5)
        on_run("recorded", StepTimes(iteration_us=times, compute_cpu_us=times, comm_cpu_us=times))
        on_run("plan 0", JobError(REASON))
        failed = FailedPlan(plan=Plan.of(cycle_time_us=1.0), predicted_us=1e5, reason=REASON, runs=1, measured_us=1.1e5)
        validation = Validation(
            baseline_us=2e5, baseline_predicted_us=2e5, baseline_error_pct=0, noise_pct=1, rounds=2, plans=(), failed=(failed,)
        )
        return validation, Calibration()

    monkeypatch.setattr("dpro_search.kinds._real_runs.validate_run", run)
    return tmp_path / "run"


def test_a_failed_plan_is_printed_with_its_reason(validated, capsys):
    validate(validated)
    printed = capsys.readouterr()
    assert "plan 0: failed: rank 1 ended with code 3: [rank1] \\u{1b}[2Jno memory\n" in printed.err
    assert "failed in run 2: rank 1 ended with code 3: [rank1] \\u{1b}[2Jno memory\n" in printed.out
    assert "110.0 ms" in printed.out


def test_a_machine_reads_it_under_failed(validated, capsys):
    validate(validated, as_json=True)
    (failed,) = json.loads(capsys.readouterr().out)["failed"]
    assert (failed["reason"], failed["runs"], failed["measured_us"]) == (REASON, 1, 1.1e5)


def test_shares_of_paced_steps_are_printed_beside_the_predicted_ones(validated, monkeypatch, capsys):
    measured, predicted = (
        StepSplit(step_us=2e5, compute=0.9 - bubble, bubble=bubble, exposed_communication=0.1, contention=0.02)
        for bubble in (0.4, 0.3)
    )
    us = {"baseline_us": 2e5, "baseline_predicted_us": 2e5, "baseline_error_pct": 0, "noise_pct": 1}
    validation = Validation(**us, rounds=2, plans=(), paced=True, baseline_split=ComparedSplit.of(measured, predicted))
    monkeypatch.setattr("dpro_search.kinds._real_runs.validate_run", lambda *_, **__: (validation, Calibration()))
    validate(validated)
    assert "30.0% 40.0%" in capsys.readouterr().out
    validate(validated, as_json=True)
    assert json.loads(capsys.readouterr().out)["baseline_split"]["points"]["bubble"] == pytest.approx(-10.0)


def test_an_interrupted_validation_says_in_which_run_and_what_is_kept(validated, monkeypatch, capsys):
    def run(*_, on_start, **__):
        on_start("recorded", 0, 8)
        on_start("plan 0", 1, 8)
        raise KeyboardInterrupt

    monkeypatch.setattr("dpro_search.kinds._real_runs.validate_run", run)
    (validated / "validation.json").write_text("{}")
    with pytest.raises(SystemExit, match="1"):
        main(["validate", str(validated), "--", "python", "train.py"])
    errors = capsys.readouterr().err
    assert "run 2 of 8, plan 0" in errors
    assert (
        "interrupted in run 2 of 8: the job was ended, and its measurements are not kept; validation.json of an earlier" in errors
    )


def test_an_interrupted_validation_names_the_rounds_that_it_keeps(validated, monkeypatch, capsys):
    def run(*_, on_start, on_kept, **__):
        on_kept(1)
        on_start("recorded", 0, 4)
        raise KeyboardInterrupt

    monkeypatch.setattr("dpro_search.kinds._real_runs.validate_run", run)
    with pytest.raises(SystemExit, match="1"):
        main(["validate", str(validated), "--", "python", "train.py"])
    errors = " ".join(capsys.readouterr().err.split())
    assert "counting 1 finished round of an interrupted call; remove" in errors
    assert "interrupted in run 1 of 4: the job was ended; 1 finished round kept: the same command continues" in errors
