"""Optuna over the outer knobs: a tree-structured Parzen estimator for the time, NSGA-II for time against memory."""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import Any, ClassVar

import numpy as np
import optuna

from dpro_search.search.samplers._base import Proposal, Sampler, cost_us
from dpro_search.search.samplers._guide import Guide
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import Choice, PlanSpace

_FRESH_ATTEMPTS = 2  # to draw a new plan, by the estimator and at random: the estimator takes milliseconds for each
_FEW = 4096  # combinations of knobs that are enumerated once the estimator repeats itself


class OptunaSampler(Sampler):
    """TPE over the choices of a space, each of which may stay as recorded.

    A choice is a grid (a categorical) and a point of the grid (a whole number, drawn only if the grid has several points: a
    conditional space). If TPE repeats known plans, one is drawn at random instead; in a small space, one of the remaining ones.
    Open plans count as bad until their result is known (Optuna's constant liar, its default since version 5).
    """

    name: ClassVar[str] = "optuna"
    _objectives: ClassVar[int] = 1

    def __init__(self, space: PlanSpace, rng: np.random.Generator, guide: Guide | None = None) -> None:
        super().__init__(space, rng, guide)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._chooser = self._made(int(rng.integers(2**31)))
        self._random = optuna.samplers.RandomSampler(seed=int(rng.integers(2**31)))
        self._study = optuna.create_study(sampler=self._chooser, directions=["minimize"] * self._objectives)
        self._open: deque[optuna.Trial | None] = deque()  # open proposals, the oldest first; None: a known plan
        self._known: set[Plan] = set()  # evaluated or open
        self._left: list[dict[str, Any]] | None = None  # combinations that may be new; None: not enumerated yet
        self._distributions: dict[str, optuna.distributions.BaseDistribution] = {}
        for choice in space.choices:
            self._distributions[choice.name] = optuna.distributions.CategoricalDistribution(list(choice.grids))
            for grid, points in choice.grids.items():
                if len(points) > 1:
                    self._distributions[f"{choice.name}.{grid}"] = optuna.distributions.IntDistribution(0, len(points) - 1)

    def ask(self) -> Proposal:
        trial, plan = self._fresh()
        self._open.append(trial)
        self._known.add(plan)
        return Proposal(plan, self.name)

    def tell(self, proposal: Proposal, prediction: Prediction) -> None:
        assert self._open, "tell without ask"
        trial = self._open.popleft()
        if trial is not None:
            self._study.tell(trial, self._values(prediction))

    def observe(self, plan: Plan, prediction: Prediction) -> None:
        """Add a plan that the knobs can express to the study; for any other, enqueue the nearest plan that they can express."""
        self._known.add(plan)
        params = self._nearest_params(plan)
        if self._plan_of(params) == plan:
            distributions = {name: self._distributions[name] for name in params}
            self._study.add_trial(
                optuna.trial.create_trial(params=params, distributions=distributions, values=self._values(prediction))
            )
        else:
            self._study.enqueue_trial(params)

    def _made(self, seed: int) -> optuna.samplers.BaseSampler:
        return optuna.samplers.TPESampler(seed=seed)

    def _values(self, prediction: Prediction) -> list[float]:
        return [cost_us(prediction)]

    def _fresh(self) -> tuple[optuna.Trial | None, Plan]:
        """A legal new plan, as long as there is one: by the estimator, else at random or from the enumeration."""
        few = math.prod(sum(map(len, choice.grids.values())) for choice in self.space.choices) <= _FEW
        samplers = (self._chooser,) * _FRESH_ATTEMPTS + (() if few else (self._random,) * _FRESH_ATTEMPTS)
        for sampler in () if self._left == [] else samplers:
            self._study.sampler = sampler
            trial, plan = self._drawn()
            if plan not in self._known and self.space.refusal(plan) is None:
                return trial, plan
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        if few and self._left is None:
            self._left = [
                dict(itertools.chain.from_iterable(parts)) for parts in itertools.product(*map(_params, self.space.choices))
            ]
            self.rng.shuffle(self._left)
        while self._left:
            params = self._left.pop()
            plan = self._plan_of(params)
            if plan not in self._known and self.space.refusal(plan) is None:
                self._study.enqueue_trial(params)
                return self._drawn()
        return None, Plan()

    def _drawn(self) -> tuple[optuna.Trial, Plan]:
        trial = self._study.ask()
        params: dict[str, Any] = {}
        for choice in self.space.choices:
            params[choice.name] = trial.suggest_categorical(choice.name, list(choice.grids))
            name = f"{choice.name}.{params[choice.name]}"
            if name in self._distributions:
                params[name] = trial.suggest_int(name, 0, len(choice.grids[params[choice.name]]) - 1)
        return trial, self._plan_of(params)

    def _plan_of(self, params: dict[str, Any]) -> Plan:
        plan = Plan()
        for choice in self.space.choices:
            grid = params[choice.name]
            plan = choice.put(plan, grid, params.get(f"{choice.name}.{grid}", 0))
        return self.space.simplest(plan)

    def _nearest_params(self, plan: Plan) -> dict[str, Any]:
        params: dict[str, Any] = {}
        for choice in self.space.choices:
            grid, index = choice.nearest(plan)
            params[choice.name] = grid
            if f"{choice.name}.{grid}" in self._distributions:
                params[f"{choice.name}.{grid}"] = index
        return params


class Nsga2Sampler(OptunaSampler):
    """The same knobs, for the front of plans that are fast and of plans that need little memory (Deb et al. 2002)."""

    name: ClassVar[str] = "nsga2"
    _objectives: ClassVar[int] = 2

    def _made(self, seed: int) -> optuna.samplers.BaseSampler:
        return optuna.samplers.NSGAIISampler(seed=seed)

    def _values(self, prediction: Prediction) -> list[float]:
        return [cost_us(prediction), float(prediction.peak_memory_bytes or 0)]


def _params(choice: Choice) -> list[list[tuple[str, Any]]]:
    """All values that can be drawn for a choice: names and values of parameters."""
    return [
        [(choice.name, grid), *([(f"{choice.name}.{grid}", index)] if len(points) > 1 else [])]
        for grid, points in choice.grids.items()
        for index in range(len(points))
    ]
