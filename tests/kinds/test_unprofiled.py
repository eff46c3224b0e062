"""A profile, told what a step takes without the profiler: the host is as fast as then, kernels are as recorded."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dpro_search.cli import main
from dpro_search.collect.readers.kineto.importer import read
from dpro_search.collect.trace import Trace
from dpro_search.errors import InputError
from dpro_search.kinds import JobInScenario, PlanOptions, job_of
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scale, Scenario
from tests.collect.kineto_files import START, Profile
from tests.profiles import under

KERNEL_US = 40.0
KERNELS = 5
LAUNCH_US = 10.0  # from a launch to its kernel


def host_bound(folder: Path, between_us: float, *, steps: int = 5) -> Trace:
    """Steps of kernels that a thread launches so far apart, with nothing else to do."""
    profile = Profile()
    for step in range(steps):
        begin = START + step * KERNELS * between_us
        profile.step(step, begin, KERNELS * between_us - 1)
        for number in range(KERNELS):
            launched = begin + (number + 0.5) * between_us
            profile.kernel("gemm", launched + LAUNCH_US, KERNEL_US, launched=launched, call_us=1.0)
    return read([profile.write(folder / f"{between_us:g}.json")])


def iteration_us(job: JobInScenario, *what_if: str, measured_us: float | None = None) -> float:
    changed, plan = job.under(Scenario(scales=tuple(map(Scale.parse, what_if)), measured_us=measured_us))
    return changed.predict(plan).iteration_us


@pytest.mark.parametrize("what_if", [(), ("compute=2",), ("kernels.gemm=0.5",), ("launch=0",), ("host=0.5",)])
def test_what_ifs_are_those_of_a_profile_without_the_profilers_work(tmp_path, what_if):
    slow, plain = (job_of(host_bound(tmp_path, us), PlanOptions()) for us in (100.0, 60.0))
    assert iteration_us(slow) == pytest.approx(500.0)
    assert iteration_us(slow, *what_if, measured_us=300.0) == pytest.approx(iteration_us(plain, *what_if), rel=0.01)


def test_a_step_that_the_device_bounds_is_left_as_it_is(tmp_path):
    job = job_of(host_bound(tmp_path, 100.0), PlanOptions())
    bound = under(job.job, "compute=5")
    assert bound.predict(Plan()).iteration_us == pytest.approx(1000.0, rel=0.01)
    assert under(job.job, "measured=495us").predict(Plan()) == job.predict(Plan())  # within what replays differ by anyway


def test_it_is_said_what_the_host_was_scaled_by(tmp_path):
    job, _ = job_of(host_bound(tmp_path, 100.0), PlanOptions()).under(Scenario(measured_us=300.0))
    as_profiled = job_of(job.trace, PlanOptions())
    assert "the profiler slows the host" in as_profiled.diagnose().findings[0]
    assert any("host threads take 0.60 times" in line for line in job.assumptions)
    assert job.measurement.median_us == 300.0
    assert job.diagnose().iteration_us == pytest.approx(300.0, rel=0.01)
    assert "slows the host" not in " ".join(job.diagnose().findings)
    assert job.job.compared(None).error_pct == pytest.approx(0.0, abs=0.1)  # of the profile, as recorded


def test_a_diagnosis_with_other_speeds_is_of_the_job_with_these_speeds(tmp_path):
    job = under(job_of(host_bound(tmp_path, 100.0)).job, "compute=5")
    facts = msgspec.to_builtins(job.diagnose())
    assert facts["iteration_us"] == job.predict(Plan()).iteration_us == pytest.approx(1000.0, rel=0.01)
    gains = {row["what_if"]: row["predicted_iteration_us"] for row in facts["gains"]}
    assert gains["compute=0.5"] == pytest.approx(500.0, rel=0.05)


@pytest.mark.parametrize(
    ("measured_us", "why"), [(50.0, "kernels alone take 200.0 us in the profile"), (900.0, "no profiler makes a step shorter")]
)
def test_a_step_of_another_job_is_refused(tmp_path, measured_us, why):
    job = job_of(host_bound(tmp_path, 100.0), PlanOptions())
    with pytest.raises(InputError, match=why):
        job.job.lower(Scenario(measured_us=measured_us))


def test_jobs_without_a_profiler_refuse_it(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["replay", "--set", "measured=3ms"])  # of the default sample, which Horovod's timeline recorded
    assert stopped.value.code == 2
    assert "no knob 'measured'" in capsys.readouterr().err
