"""``difference(a, b)``: what explains the change of the iteration time between two recordings of a job, op by op."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from dpro_search.errors import InputError
from dpro_search.kinds._job import Job
from dpro_search.replay.path_parts import Part, path_parts
from dpro_search.space.plan import Plan

_KINDS = {
    "HOST": "host", "FORWARD": "compute", "BACKWARD": "compute", "UPDATE": "compute", "IO": "copies", "COMM": "communication",
    "SERVER": "servers",
}  # fmt: skip
_UNEXPLAINED = "not explained by the replay"
_QUANTILE = 1.645  # of the normal distribution: nine in ten differences between equal jobs are smaller


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the change.

    Attributes
    ----------
    part
        "compute", "communication", "host", "copies", "servers" or "unexplained".
    name
        Of the ops, without their rank.
    before_us, after_us
        Their time on the critical path of an iteration.
    change_us
        The difference; of all causes together, the change of the iteration time.
    """

    part: str
    name: str
    before_us: float
    after_us: float
    change_us: float


def difference(before: Job, after: Job) -> dict[str, Any]:
    """The facts of the verb `diff`.

    ``iteration_us`` is measured where both recordings have a measurement, else replayed. ``causes`` add up to its change: the time
    that ops of one name have on the critical path of the replayed iteration, and what the replays do not explain. Raises
    `InputError` if the jobs are of different kinds. ``ranks`` says on which ranks it changed, of jobs that are known by rank.
    """
    if before.title != after.title:
        raise InputError(f"the traces are of {before.title} and of {after.title}: give two recordings of one job")
    jobs = (before, after)
    predictions = [job.replayed(Plan()) for job in jobs]
    replayed_us = [prediction.iteration_us for prediction in predictions]
    measured_us = [job.measured_iteration_us for job in jobs]
    is_measured = all(us is not None for us in measured_us)
    shown_us = [float(us) for us in measured_us if us is not None] if is_measured else replayed_us
    first, second = (_parts(job, us) for job, us in zip(jobs, replayed_us, strict=True))
    causes = [_cause(part, first.get(part, 0.0), second.get(part, 0.0)) for part in {**first, **second}]
    missing_us = [shown - replayed for shown, replayed in zip(shown_us, replayed_us, strict=True)]
    if any(missing_us):
        causes.append(_cause(Part("", _UNEXPLAINED), *missing_us))
    change_us = shown_us[1] - shown_us[0]
    noise_us = _noise_us(jobs)
    return {
        "iteration_us": shown_us,
        "measured": is_measured,
        "replayed_iteration_us": replayed_us,
        "change_us": change_us,
        "regression_pct": change_us / shown_us[0] * 100,
        "noise_pct": None if noise_us is None else noise_us / shown_us[0] * 100,
        "breakdown_us": [prediction.breakdown_us for prediction in predictions],
        "ranks": _ranks(before.rank_parts_us(), after.rank_parts_us()),
        "causes": [msgspec.to_builtins(cause) for cause in sorted(causes, key=lambda cause: -abs(cause.change_us))],
        "warnings": _warnings(jobs),
    }


def _ranks(before: Mapping[int, Mapping[str, float]], after: Mapping[int, Mapping[str, float]]) -> list[dict[str, Any]]:
    """What changed on each rank that both recordings have; the one whose own work grew most first.

    ``change_us`` has the parts of an iteration, which add up to the change of the replayed iteration on every rank: the rank that
    the others wait for does more of its own, the others wait more.
    """
    rows = [
        {"rank": rank, "change_us": {part: us - before[rank].get(part, 0.0) for part, us in after[rank].items()}}
        for rank in before.keys() & after.keys()
    ]
    return sorted(rows, key=lambda row: (-_own_us(row["change_us"]), row["rank"]))


def _own_us(change_us: Mapping[str, float]) -> float:
    return sum(us for part, us in change_us.items() if part != "waiting_for_ranks")


def _parts(job: Job, iteration_us: float) -> Mapping[Part, float]:
    """Parts that add up to the iteration time that `replay` predicts; it may lie between those of two recorded steps."""
    found = path_parts(job.timeline(Plan()))
    scale = iteration_us / (sum(found.values()) or 1.0)
    return {part: us * scale for part, us in found.items()}


def _cause(part: Part, before_us: float, after_us: float) -> Cause:
    kind = _KINDS.get(part.kind, "unexplained")
    return Cause(part=kind, name=part.name, before_us=before_us, after_us=after_us, change_us=after_us - before_us)


def _noise_us(jobs: tuple[Job, Job]) -> float | None:
    """What nine in ten differences between medians of equal jobs stay below; None where a job has fewer than two measurements."""
    samples = [job.measured_iterations_us() for job in jobs]
    if any(len(values) < 2 for values in samples):
        return None
    # The variance of a median is about pi / 2 of that of a mean (Kendall and Stuart, The Advanced Theory of Statistics, 10.10).
    variance = sum(np.pi / 2 * float(np.var(values, ddof=1)) / len(values) for values in samples)
    return float(_QUANTILE * np.sqrt(variance))


def _warnings(jobs: tuple[Job, Job]) -> list[str]:
    before, after = (msgspec.to_builtins(job.trace.meta) if job.trace else {} for job in jobs)
    return [
        f"the recordings differ in {what}: {before[what]} and {after[what]}"
        for what in ("ranks", "framework", "comm", "format")
        if before.get(what) != after.get(what)
    ]
