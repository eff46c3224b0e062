"""``difference(a, b)``: what explains the change of the iteration time between two recordings of a job, op by op."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from dpro_search.errors import InputError
from dpro_search.kinds import JobInScenario
from dpro_search.replay.path.parts import PathPart, path_parts
from dpro_search.space.plan import Plan

_KINDS = {
    "HOST": "host", "FORWARD": "compute", "BACKWARD": "compute", "UPDATE": "compute", "IO": "copies", "COMM": "communication",
    "SERVER": "servers",
}  # fmt: skip
_UNEXPLAINED = "not explained by the replay"
_QUANTILE = 1.645  # of the normal distribution: nine in ten differences between equal jobs are smaller


class CauseOfDifference(msgspec.Struct, frozen=True, kw_only=True):
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


class RankChange(msgspec.Struct, frozen=True, kw_only=True):
    """The change on one rank: `change_us` has the parts of an iteration, which add up to the change of the replayed iteration."""

    rank: int
    change_us: Mapping[str, float]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of the verb `diff`. Pairs are of the first and of the second recording.

    Attributes
    ----------
    iteration_us
        Measured where both recordings have a measurement (`measured`), else replayed.
    change_us, regression_pct
        The second iteration less the first, and that as a percentage of the first.
    noise_pct
        Nine in ten differences between equal jobs are smaller; None: not known.
    breakdown_us
        Parts of the replayed iterations.
    ranks
        Changes on the ranks that both recordings have, of jobs that are known by rank; the rank whose own work grew most first.
    causes
        They add up to `change_us`, the largest first.
    max_regression_pct, exceeded
        The allowed regression, None without one; whether the regression is larger than that and than the noise.
    """

    iteration_us: tuple[float, float]
    measured: bool
    replayed_iteration_us: tuple[float, float]
    change_us: float
    regression_pct: float
    noise_pct: float | None
    breakdown_us: tuple[Mapping[str, float], Mapping[str, float]]
    ranks: tuple[RankChange, ...]
    causes: tuple[CauseOfDifference, ...]
    warnings: tuple[str, ...]
    max_regression_pct: float | None
    exceeded: bool


def difference(before: JobInScenario, after: JobInScenario, max_regression_pct: float | None = None) -> Difference:
    """Explain the change of the iteration time between two recordings of a job.

    The causes are the time that ops of one name have on the critical path of the replayed iterations, and what the replays do not
    explain.

    Raises
    ------
    InputError
        The jobs are of different kinds.
    """
    if before.title != after.title:
        raise InputError(f"the traces are of {before.title} and of {after.title}: give two recordings of one job")
    first, second = before.replayed(Plan()), after.replayed(Plan())
    replayed_us = (first.iteration_us, second.iteration_us)
    measured_us = (before.measurement.median_us, after.measurement.median_us)
    shown_us, is_measured = replayed_us, False
    if measured_us[0] is not None and measured_us[1] is not None:
        shown_us, is_measured = (float(measured_us[0]), float(measured_us[1])), True
    change_us = shown_us[1] - shown_us[0]
    regression_pct = change_us / shown_us[0] * 100
    noise_us = _noise_us((before, after))
    noise_pct = None if noise_us is None else noise_us / shown_us[0] * 100
    return Difference(
        iteration_us=shown_us,
        measured=is_measured,
        replayed_iteration_us=replayed_us,
        change_us=change_us,
        regression_pct=regression_pct,
        noise_pct=noise_pct,
        breakdown_us=(first.breakdown_us, second.breakdown_us),
        ranks=_ranks(_rank_parts_us(before), _rank_parts_us(after)),
        causes=_causes(before, after, replayed_us, shown_us),
        warnings=_warnings((before, after)),
        max_regression_pct=max_regression_pct,
        exceeded=max_regression_pct is not None and regression_pct > max(max_regression_pct, noise_pct or 0.0),
    )


def _causes(
    before: JobInScenario, after: JobInScenario, replayed_us: tuple[float, float], shown_us: tuple[float, float]
) -> tuple[CauseOfDifference, ...]:
    """The causes of the change of the shown iterations, the largest first."""
    first, second = _parts(before, replayed_us[0]), _parts(after, replayed_us[1])
    causes = [_cause(part, first.get(part, 0.0), second.get(part, 0.0)) for part in {**first, **second}]
    unexplained_us = (shown_us[0] - replayed_us[0], shown_us[1] - replayed_us[1])
    if any(unexplained_us):
        causes.append(_cause(PathPart("", _UNEXPLAINED), *unexplained_us))
    return tuple(sorted(causes, key=lambda cause: -abs(cause.change_us)))


def _rank_parts_us(here: JobInScenario) -> Mapping[int, Mapping[str, float]]:
    return here.job.rank_parts_us(here.lowered(Plan()))


def _ranks(before: Mapping[int, Mapping[str, float]], after: Mapping[int, Mapping[str, float]]) -> tuple[RankChange, ...]:
    """The changes on each rank that both recordings have: the rank that others wait for does more work, the others wait more."""
    changes = (
        RankChange(rank=rank, change_us={part: us - before[rank].get(part, 0.0) for part, us in after[rank].items()})
        for rank in before.keys() & after.keys()
    )
    return tuple(sorted(changes, key=lambda change: (-_work_us(change.change_us), change.rank)))


def _work_us(change_us: Mapping[str, float]) -> float:
    return sum(us for part, us in change_us.items() if part != "waiting_for_ranks")


def _parts(here: JobInScenario, iteration_us: float) -> Mapping[PathPart, float]:
    """Parts that add up to the iteration time that `replay` predicts; it may lie between those of two recorded steps."""
    parts = path_parts(here.timeline(Plan()))
    scale = iteration_us / (sum(parts.values()) or 1.0)
    return {part: us * scale for part, us in parts.items()}


def _cause(part: PathPart, before_us: float, after_us: float) -> CauseOfDifference:
    kind = _KINDS.get(part.kind, "unexplained")
    return CauseOfDifference(part=kind, name=part.name, before_us=before_us, after_us=after_us, change_us=after_us - before_us)


def _noise_us(jobs: tuple[JobInScenario, JobInScenario]) -> float | None:
    """Bound for nine in ten differences between medians of equal jobs; None if a job has fewer than two measurements."""
    samples = [job.measurement.iterations_us for job in jobs]
    if any(len(values) < 2 for values in samples):
        return None
    # The variance of a median is about pi / 2 of that of a mean (Kendall and Stuart, The Advanced Theory of Statistics, 10.10).
    variance = sum(np.pi / 2 * float(np.var(values, ddof=1)) / len(values) for values in samples)
    return float(_QUANTILE * np.sqrt(variance))


def _warnings(jobs: tuple[JobInScenario, JobInScenario]) -> tuple[str, ...]:
    before, after = (msgspec.to_builtins(job.trace.meta) if job.trace else {} for job in jobs)
    return tuple(
        f"the recordings differ in {what}: {before[what]} and {after[what]}"
        for what in ("ranks", "framework", "comm", "format")
        if before.get(what) != after.get(what)
    )
