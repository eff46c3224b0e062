"""The predictions of a watched job: its recorded setting, plans, changed costs and other clusters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dpro_search.errors import DproSearchError
from dpro_search.kinds import JobInScenario, job_of
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import Scenario
from tests.drift.jobs import WatchedJob

STARTING_PLANS = 4  # the recorded setting is the first
Values = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One prediction of a job."""

    name: str
    plan: Plan = field(default_factory=Plan)
    cluster: str | None = None
    changes: tuple[str, ...] = ()


def predictions_of(watched: WatchedJob) -> dict[str, Values]:
    """The predictions of a job by the name of the case; for a job or case that is refused, the type of the error."""
    try:
        job = job_of(watched.open(), watched.options)
    except DproSearchError as error:
        if not watched.refusals:
            raise
        return {"as recorded": _refused(error)}
    return {case.name: _values(job, case) for case in _cases(watched, job)}


def _cases(watched: WatchedJob, job: JobInScenario) -> Iterator[Case]:
    yield Case(name="as recorded")
    if watched.plans:
        for number, plan in enumerate(job.space.starts(STARTING_PLANS)[1:], 1):
            yield Case(name=f"start {number}", plan=plan)
        for choice in job.space.choices:
            for grid, points in choice.grids.items():
                for index in sorted({0, len(points) - 1}):
                    if (plan := choice.put(Plan(), grid, index)) != Plan():
                        yield Case(name=f"{choice.name}, {grid}, {index}", plan=plan)
    for change in watched.changes:
        yield Case(name=change, changes=(change,))
    for cluster in watched.clusters:
        yield Case(name=f"on {cluster}", cluster=cluster)
    for change in watched.changes_on_clusters:
        yield Case(name=f"on {watched.clusters[0]}, {change}", cluster=watched.clusters[0], changes=(change,))


def _values(job: JobInScenario, case: Case) -> Values:
    try:
        return _numbers(_predicted(job, case), with_breakdown=not case.changes)
    except DproSearchError as error:
        return _refused(error)


def _predicted(job: JobInScenario, case: Case) -> Prediction:
    moved, plan = job.under(job.job.scenario(case.changes, Scenario(plan=case.plan).on(case.cluster)))
    return moved.predict(plan)


def _numbers(prediction: Prediction, *, with_breakdown: bool) -> Values:
    values: Values = {
        "iteration_us": prediction.iteration_us,
        "interval_us": list(prediction.interval_us),
    }
    if with_breakdown:
        values["breakdown_us"] = dict(prediction.breakdown_us)
    if prediction.peak_memory_bytes is not None:
        values["peak_memory_bytes"] = prediction.peak_memory_bytes
    if prediction.infeasible is not None:
        values["infeasible"] = True
    return values


def _refused(error: DproSearchError) -> Values:
    return {"refused": type(error).__name__}
