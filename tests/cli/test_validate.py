"""What `validate` tells of runs, of those that failed as well; real jobs are in tests/integration."""

import json

import numpy as np
import pytest

import dpro_search
from dpro_search.cli.validate import validate
from dpro_search.collect.step_times import StepTimes
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
        found = Validation(
            baseline_us=2e5, baseline_predicted_us=2e5, baseline_error_pct=0, noise_pct=1, rounds=2, plans=(), failed=(failed,)
        )
        return found, Calibration()

    monkeypatch.setattr("dpro_search.deploy.of_run.validate_run", run)
    return tmp_path / "run"


def test_a_failed_plan_is_printed_with_its_reason(validated, capsys):
    validate(validated)
    told = capsys.readouterr()
    assert "plan 0: failed: rank 1 ended with code 3: [rank1] \\u{1b}[2Jno memory\n" in told.err
    assert "failed in run 2: rank 1 ended with code 3: [rank1] \\u{1b}[2Jno memory\n" in told.out
    assert "110.0 ms" in told.out


def test_a_machine_reads_it_under_failed(validated, capsys):
    validate(validated, as_json=True)
    (failed,) = json.loads(capsys.readouterr().out)["failed"]
    assert (failed["reason"], failed["runs"], failed["measured_us"]) == (REASON, 1, 1.1e5)
