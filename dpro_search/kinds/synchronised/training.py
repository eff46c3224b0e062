"""`Trainings`: when a job reaches a loss under a scheme, from its short runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from dpro_search.costmodel.convergence import Convergence, ShortRun, falling_levels, fit_convergence, reached_at
from dpro_search.errors import InputError
from dpro_search.kinds.synchronised.recording import RecordedRun, effective_steps, effective_weights
from dpro_search.replay.synchronisation import TimeToLoss, time_to_loss
from dpro_search.runtime.schemes import Diloco, Pace, Scheme

_PATIENCE = 20.0  # a training may last so many times the longest recorded one


@dataclass(frozen=True, kw_only=True)
class Trainings:
    """A job's workers and what its updates are worth.

    Attributes
    ----------
    step_s
        Of each worker, seconds of a local step.
    commit_s
        Of a commit to a parameter server, and of an all-reduce (`Scheme.collective`).
    delay_s
        What the link adds to each message.
    convergence, target_loss
        Fitted on the runs, for that loss.
    factors
        Of schemes with an outer momentum, by their text: effective steps of their updates over those of the same updates without.
    longest_s
        The longest recorded run.
    """

    step_s: tuple[float, ...]
    commit_s: Mapping[bool, float]
    delay_s: float = 0.0
    convergence: Convergence
    target_loss: float
    factors: Mapping[str, float]
    longest_s: float

    @classmethod
    def of(cls, runs: Sequence[RecordedRun], target_loss: float) -> Self:
        """The trainings of a job that runs today like the first of some runs.

        Raises `InputError` if no run reached the loss, or a worker's speed was not recorded.
        """
        convergence, factors = fitted(runs, target_loss)
        today = [run for run in runs if run.scheme == runs[0].scheme and run.workers == runs[0].workers]
        step_s = [_mean([run.step_s[worker] for run in today if worker in run.step_s]) for worker in range(runs[0].workers)]
        for worker, each in enumerate(step_s):
            if each is None:
                raise InputError(f"worker {worker} of {len(step_s)} left no line in any run: how fast it is was not recorded")
        commit_s = {way: _mean([run.commit_s for run in runs if run.scheme.collective is way]) for way in (False, True)}
        known = [each for each in commit_s.values() if each is not None]
        return cls(
            step_s=tuple(each for each in step_s if each is not None),
            commit_s={way: known[0] if each is None else each for way, each in commit_s.items()},
            convergence=convergence,
            target_loss=target_loss,
            factors=factors,
            longest_s=max(run.end_s for run in runs),
        )

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self.step_s)

    def paces(self, scheme: Scheme) -> tuple[Pace, ...]:
        """Paces of the workers under a scheme.

        A message goes to a server and back, or around a ring twice (Patarasuk and Yuan, 2009).
        """
        messages = 2 * (self.workers - 1) if scheme.collective else 2
        commit_s = self.commit_s[scheme.collective] + messages * self.delay_s
        return tuple(Pace(step_s=step_s, commit_s=commit_s) for step_s in self.step_s)

    def predicted(self, scheme: Scheme) -> TimeToLoss:
        """The training under a scheme."""
        limit_s = _PATIENCE * max(self.longest_s, max(self.step_s) + self.commit_s[scheme.collective])
        factor = self.factors.get(str(scheme), 1.0)
        return time_to_loss(scheme, self.paces(scheme), self.convergence, factor=factor, limit_s=limit_s)

    def with_speeds(self, speeds: Sequence[float]) -> Trainings:
        """With other workers, of which speed 1 is that of the slowest one now."""
        slowest = max(self.step_s)
        return replace(self, step_s=tuple(slowest / speed for speed in speeds))

    def with_workers(self, count: int) -> Trainings:
        """With another number of workers, which are like those of today in turn."""
        return replace(self, step_s=tuple(self.step_s[worker % self.workers] for worker in range(count)))


def fitted(runs: Sequence[RecordedRun], target_loss: float) -> tuple[Convergence, dict[str, float]]:
    """The convergence model of short runs, and the factors of schemes with an outer momentum.

    Raises `InputError` if no run, but for those with an outer momentum, reached the loss.
    """
    plain = [run for run in runs if not isinstance(run.scheme, Diloco)]
    if not plain:
        raise InputError(
            "all recorded runs have an outer momentum (diloco), whose effect is not modelled: record another scheme too"
        )
    start = float(np.mean([run.start_loss for run in plain]))
    levels = falling_levels(start, target_loss)
    convergence = fit_convergence(start, levels, [_short_run(run, levels) for run in plain])
    factors: dict[str, list[float]] = {}
    for run in runs:
        if isinstance(run.scheme, Diloco):
            (reached,) = reached_at(*run.curve, levels[-1:])
            made = sum(
                convergence.gain(steps, weight, behind)
                for time, steps, weight, behind in zip(run.time_s, run.steps, run.weights, run.behind_steps, strict=True)
                if time <= reached
            )
            if made:
                factors.setdefault(str(run.scheme), []).append(convergence.needed[-1] / made)
    return convergence, {scheme: float(np.exp(np.mean(np.log(each)))) for scheme, each in factors.items()}


def _short_run(run: RecordedRun, levels: Sequence[float]) -> ShortRun:
    return ShortRun(
        commit_s=run.time_s,
        steps=effective_steps(run),
        weights=effective_weights(run),
        behind_steps=run.behind_steps,
        reached_s=reached_at(*run.curve, levels),
        scheme=str(run.scheme),
    )


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
