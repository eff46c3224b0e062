"""``time_to_loss(...)``: when a job of given workers, link and scheme reaches a loss; ``ranked`` compares schemes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpro_search.costmodel.convergence import Convergence
from dpro_search.errors import InputError
from dpro_search.replay.synchronisation.progress import EffectiveSteps
from dpro_search.replay.synchronisation.simulate import Simulated, simulate
from dpro_search.runtime.schemes import (
    Accumulation,
    Adacomm,
    Adsp,
    Asp,
    Bsp,
    FixedAdacomm,
    LocalSgd,
    Pace,
    Scheme,
    Ssp,
)

_LOCAL_STEPS = (2, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class TimeToLoss:
    """A prediction; seconds.

    Attributes
    ----------
    time_s, interval_s
        To the last level of the convergence model; None and an open interval where it is not reached within the limit.
    steps, commits
        Of all workers until then.
    waiting_share
        Waiting as a share of all workers' time.
    simulated
        What happened, a little longer than until then.
    """

    scheme: Scheme
    time_s: float | None
    interval_s: tuple[float, float]
    steps: int
    commits: int
    waiting_share: float
    simulated: Simulated


def time_to_loss(
    scheme: Scheme,
    paces: Sequence[Pace],
    convergence: Convergence,
    *,
    factor: float = 1.0,
    server_s: float = 0.0,
    limit_s: float = 3600.0,
) -> TimeToLoss:
    """Predict the time to the last of `convergence.levels`; `factor`: see `EffectiveSteps`."""
    progress = EffectiveSteps(convergence, scheme, len(paces), factor)
    low, high = (factor * convergence.needed[-1] for factor in convergence.factor_interval)
    times: dict[str, float] = {}
    goals = {"low": low, "mean": convergence.needed[-1], "high": high}

    def stop(now: float) -> bool:
        for name, goal in goals.items():
            if progress.made >= goal:
                times.setdefault(name, now)
        return len(times) == len(goals)

    shortest = min(pace.step_s for pace in paces)
    training = simulate(scheme, paces, progress, stop=stop, server_s=server_s, check_s=shortest / 4, limit_s=limit_s)
    end = times.get("mean")
    until = [commit for commit in training.commits if end is None or commit.time_s <= end]
    return TimeToLoss(
        scheme=scheme,
        time_s=end,
        interval_s=(times.get("low", limit_s), times.get("high", float("inf"))),
        steps=sum(commit.steps for commit in until),
        commits=len(until),
        waiting_share=training.waiting_share,
        simulated=training,
    )


def candidates(workers: int) -> list[Scheme]:
    """Schemes with parameters that a search compares.

    DiLoCo is not among them: what its outer momentum does to a job is not known without a run of it.
    """
    if workers == 1:
        return [Asp(), FixedAdacomm(steps=4), FixedAdacomm(steps=16)]
    schemes: list[Scheme] = [Bsp(), *(Ssp(staleness=n) for n in (1, 3, 8)), Asp(), *(FixedAdacomm(steps=n) for n in _LOCAL_STEPS)]
    schemes += [*(Adacomm(steps=n) for n in (8, 16)), Adsp(), *(Adsp(commits=n) for n in (1, 2, 4, 8))]
    return [*schemes, *(LocalSgd(steps=n) for n in _LOCAL_STEPS), *(Accumulation(batches=n * workers) for n in (2, 4))]


def ranked(
    paces: Sequence[Pace],
    convergence: Convergence,
    *,
    schemes: Sequence[Scheme] | None = None,
    server_s: float = 0.0,
    limit_s: float = 3600.0,
) -> list[TimeToLoss]:
    """Predictions for schemes (default: `candidates`), the fastest first.

    Raises `InputError` if none reaches the loss within the limit.
    """
    if not paces:
        raise InputError("synchronisation: a job has at least one worker")
    times_to_loss = [
        time_to_loss(scheme, paces, convergence, server_s=server_s, limit_s=limit_s)
        for scheme in (candidates(len(paces)) if schemes is None else schemes)
    ]
    if all(each.time_s is None for each in times_to_loss):
        raise InputError(f"synchronisation: no scheme reaches a loss of {convergence.levels[-1]:g} within {limit_s:g} s")
    return sorted(times_to_loss, key=lambda each: float("inf") if each.time_s is None else each.time_s)
