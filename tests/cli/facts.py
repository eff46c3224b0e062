"""The facts of verbs on a trace, as the tests of `replay` and `diagnose` use them."""

from dpro_search.cli.diagnose import print_diagnosis
from dpro_search.collect.trace import Trace
from dpro_search.kinds import job_of
from dpro_search.kinds._replay_facts import ReplayRequest, replay_facts

# What every replay reports.
CONTRACT = frozenset(
    {
        "measured_iteration_us", "predicted_iteration_us", "error_pct", "interval_us", "breakdown_us", "peak_memory_bytes", "ops",
        "replay_seconds",
    }
)  # fmt: skip


def replayed(trace: Trace, **options) -> dict:
    """The facts of a replay."""
    return replay_facts(trace, ReplayRequest(**options))


def printed(trace: Trace) -> dict:
    """The facts of a diagnosis, which is printed for people."""
    job = job_of(trace)
    facts = job.diagnose()
    print_diagnosis(facts, job.tables(facts))
    return facts
