"""Profiles as tests ask about them: the job of a trace, what it is lowered to, and the job in a scenario."""

from __future__ import annotations

from collections.abc import Sequence

from dpro_search.collect.trace import Trace
from dpro_search.graph.measured import ProfiledSteps
from dpro_search.kinds import Job, JobInScenario, PlanOptions
from dpro_search.kinds.imported.job import Imported
from dpro_search.kinds.recorded.job import ProfiledJob, recorded_replay
from dpro_search.kinds.recorded.replay import RecordedReplay
from dpro_search.replay.iterations import IterationTimes
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scale, Scenario


def profiled(trace: Trace) -> Imported:
    """The job of a trace, whatever it communicates."""
    return Imported.of(trace, PlanOptions())


def replay_of(job: ProfiledJob, *speeds: str, plan: Plan | None = None, steps: Sequence[int] | None = None) -> RecordedReplay:
    """The replay of a plan with changes of speed like "compute=0.5", of some steps or of all."""
    scenario = Scenario(plan=plan or Plan(), scales=tuple(map(Scale.parse, speeds)))
    chosen = None if steps is None else ProfiledSteps(replayed=tuple(steps))
    return recorded_replay(job.lower(scenario, steps=chosen))


def times_of(job: ProfiledJob, *speeds: str, plan: Plan | None = None) -> IterationTimes:
    """The iteration under a plan with changes of speed."""
    return replay_of(job, *speeds, plan=plan).iterations()


def iteration_us(job: ProfiledJob, *speeds: str) -> float:
    """The iteration time with changes of speed."""
    return times_of(job, *speeds).iteration_us


def under(job: Job, *changes: str, cluster: str | None = None) -> JobInScenario:
    """The job with changes like "compute=0.5" and "ranks=16", on another cluster."""
    return JobInScenario(job).under(job.scenario(changes, Scenario().on(cluster)))[0]
