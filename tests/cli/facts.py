"""The facts of verbs on a trace, as the tests of `replay` and `diagnose` use them."""

import msgspec

from dpro_search.analysis.predict import ReplayRequest, replay
from dpro_search.cli.diagnose import print_diagnosis
from dpro_search.collect.trace import Trace
from dpro_search.kinds import JobInScenario, job_of

# What every replay reports.
CONTRACT = frozenset(
    {
        "measured_iteration_us", "predicted_iteration_us", "error_pct", "interval_us", "breakdown_us", "peak_memory_bytes", "ops",
        "replay_seconds",
    }
)  # fmt: skip


def replayed(trace: Trace, **options) -> dict:
    """The facts of a replay."""
    return replayed_job(job_of(trace), **options)


def replayed_job(job: JobInScenario, **options) -> dict:
    """The facts of a replay of a job that was opened."""
    return msgspec.to_builtins(replay(job, ReplayRequest(**options)))


def printed(trace: Trace) -> dict:
    """The facts of a diagnosis, which is printed for people."""
    job = job_of(trace)
    diagnosis = job.diagnose()
    print_diagnosis(diagnosis)
    return msgspec.to_builtins(diagnosis)
