"""`Trainings`: when a job reaches a loss under a scheme, from its short runs; `WhichScheme`: the schemes that plans choose from."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from dpro_search.costmodel.convergence import Convergence, FittedRun, falling_levels, fit_convergence, reached_at
from dpro_search.errors import InputError
from dpro_search.kinds.synchronised.recording import RecordedRun, effective_steps, effective_weights
from dpro_search.replay.synchronisation import TimeToLoss, time_to_loss
from dpro_search.runtime.schemes import (
    Accumulation,
    Adacomm,
    Adsp,
    Asp,
    Bsp,
    Diloco,
    FixedAdacomm,
    LocalSgd,
    Pace,
    Scheme,
    Ssp,
    parse_scheme,
)
from dpro_search.space.plan import Plan
from dpro_search.space.transformations import PlanningFacts
from dpro_search.space.transformations._base import RECORDED, Choice, Knob, grid

_STALENESS = (1, 2, 3, 4, 8, 16)
_STEPS = (2, 4, 8, 16, 32, 64)
_ADAPTATIONS = 8  # of ADACOMM's steps in a training as long as the longest recorded one
_MICRO_BATCHES = (2, 4, 8)  # of each worker, mean
_PATIENCE = 20.0  # a training may last so many times the longest recorded one


@dataclass(frozen=True, kw_only=True)
class Trainings:
    """A job's workers and what its updates are worth.

    Attributes
    ----------
    step_s
        Seconds of a local step, for each worker.
    commit_s
        Seconds of a commit: to a parameter server (False), and of an all-reduce (True: `Scheme.collective`).
    delay_s
        Seconds that the link adds to each message.
    convergence, target_loss
        The convergence model, which was fitted to the runs, and the loss that it reaches.
    factors
        Effective steps of updates with an outer momentum over those of the same updates without, by the text of the scheme.
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
        """Number of workers."""
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


def _short_run(run: RecordedRun, levels: Sequence[float]) -> FittedRun:
    return FittedRun(
        commit_s=run.time_s,
        steps=effective_steps(run),
        weights=effective_weights(run),
        behind_steps=run.behind_steps,
        reached_s=reached_at(*run.curve, levels),
        scheme=str(run.scheme),
    )


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


class WhichScheme(Knob):
    """All schemes; those with an outer momentum as they were recorded."""

    name = "synchronisation"
    fields = ("synchronisation",)

    def __init__(
        self, job: PlanningFacts, *, workers: int, longest_s: float, momentum: Collection[str], collectives: bool = True
    ) -> None:
        """The schemes of a job.

        Parameters
        ----------
        momentum
            Texts of recorded schemes with an outer momentum.
        collectives
            Whether an engine runs schemes without a parameter server.
        """
        super().__init__(job)
        self._collectives = collectives
        self._workers, self._longest_s, self._momentum = workers, longest_s, momentum

    def legal(self, plan: Plan) -> str | None:
        scheme = parse_scheme(plan.synchronisation or str(self.job.values["synchronisation"]))
        if scheme.collective and not self._collectives:
            return f"synchronisation: {scheme.name} uses all-reduces, which MXNet's KVStore has not"
        if isinstance(scheme, Diloco) and str(scheme) not in self._momentum:
            return f"synchronisation: what the outer momentum of {scheme} does to the job is not known: record a short run of it"
        return None

    @cached_property
    def choice(self) -> Choice:
        families: dict[str, list[str]] = {}
        for scheme in self.schemes():
            families.setdefault(scheme.name, []).append(str(scheme))
        recorded: Mapping[str, tuple[Mapping[str, Any], ...]] = {RECORDED: ({},)}
        grids = {**recorded, **{name: grid("synchronisation", texts) for name, texts in families.items()}}
        return Choice(name=self.name, fields=self.fields, grids=grids)

    def schemes(self) -> Iterator[Scheme]:
        """All that a search tries, family by family."""
        yield from (Bsp(), Asp(), Adsp(), *(Adsp(commits=n) for n in (1, 2, 4, 8, 16)))
        yield from (Ssp(staleness=n) for n in _STALENESS)
        yield from (FixedAdacomm(steps=n) for n in _STEPS)
        adapt_s = float(f"{self._longest_s / _ADAPTATIONS:.2g}")
        yield from (Adacomm(steps=n, adapt_s=adapt_s) for n in _STEPS)
        if not self._collectives:
            return
        yield from (LocalSgd(steps=n) for n in _STEPS)
        yield from (Accumulation(batches=n * self._workers) for n in _MICRO_BATCHES)
        yield from (parse_scheme(text) for text in sorted(self._momentum))
