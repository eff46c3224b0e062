"""Optuna over the outer knobs: a tree-structured Parzen estimator for the time, NSGA-II for time against memory."""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import Any, ClassVar

import numpy as np
import optuna

from dpro_search.search.samplers._base import Proposal, Sampler, price_us
from dpro_search.search.samplers._guide import Guide
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import Choice, PlanSpace

_FRESH_ATTEMPTS = 2  # at a plan that was not priced, of the estimator and at random: each of the first takes milliseconds
_FEW = 4096  # combinations of knobs that are gone through one by one once the estimator repeats itself


class OptunaSampler(Sampler):
    """TPE over the choices of a space, each of which may stay as recorded.

    A choice is a way (a categorical) and a place on the way's ladder of values (a whole number, drawn only where it matters: a
    conditional space). Where TPE keeps to plans that were priced before, one is drawn at random instead, or, of few, among those
    that are left. Plans on their way count as bad until their price is known (Optuna's constant liar, its default since version 5).
    """

    name: ClassVar[str] = "optuna"
    _objectives: ClassVar[int] = 1

    def __init__(self, space: PlanSpace, rng: np.random.Generator, guide: Guide | None = None) -> None:
        super().__init__(space, rng, guide)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._chooser = self._made(int(rng.integers(2**31)))
        self._random = optuna.samplers.RandomSampler(seed=int(rng.integers(2**31)))
        self._study = optuna.create_study(sampler=self._chooser, directions=["minimize"] * self._objectives)
        self._asked: deque[optuna.Trial | None] = deque()  # open asks, the oldest first; None: of a plan that was known
        self._known: set[Plan] = set()  # priced, or on their way
        self._left: list[dict[str, Any]] | None = None  # combinations that may be unknown; None: not gone through yet
        self._distributions: dict[str, optuna.distributions.BaseDistribution] = {}
        for choice in space.choices:
            self._distributions[choice.name] = optuna.distributions.CategoricalDistribution(list(choice.ways))
            for way, rungs in choice.ways.items():
                if len(rungs) > 1:
                    self._distributions[f"{choice.name}.{way}"] = optuna.distributions.IntDistribution(0, len(rungs) - 1)

    def ask(self) -> Proposal:
        trial, plan = self._fresh()
        self._asked.append(trial)
        self._known.add(plan)
        return Proposal(plan, self.name)

    def tell(self, proposal: Proposal, prediction: Prediction) -> None:
        assert self._asked, "tell without ask"
        trial = self._asked.popleft()
        if trial is not None:
            self._study.tell(trial, self._values(prediction))

    def observe(self, plan: Plan, prediction: Prediction) -> None:
        """A plan that the knobs can say is learnt; of any other, the nearest that they can say is asked for next."""
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
        return [price_us(prediction)]

    def _fresh(self) -> tuple[optuna.Trial | None, Plan]:
        """A legal plan that is not known, as long as there is one: by the estimator, else at random or of those that are left."""
        few = math.prod(sum(map(len, choice.ways.values())) for choice in self.space.choices) <= _FEW
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
            params[choice.name] = trial.suggest_categorical(choice.name, list(choice.ways))
            name = f"{choice.name}.{params[choice.name]}"
            if name in self._distributions:
                params[name] = trial.suggest_int(name, 0, len(choice.ways[params[choice.name]]) - 1)
        return trial, self._plan_of(params)

    def _plan_of(self, params: dict[str, Any]) -> Plan:
        plan = Plan()
        for choice in self.space.choices:
            way = params[choice.name]
            plan = choice.put(plan, way, params.get(f"{choice.name}.{way}", 0))
        return self.space.simplest(plan)

    def _nearest_params(self, plan: Plan) -> dict[str, Any]:
        params: dict[str, Any] = {}
        for choice in self.space.choices:
            way, rung = choice.nearest(plan)
            params[choice.name] = way
            if f"{choice.name}.{way}" in self._distributions:
                params[f"{choice.name}.{way}"] = rung
        return params


class Nsga2Sampler(OptunaSampler):
    """The same knobs, for the front of plans that are fast and of plans that need little memory (Deb et al. 2002)."""

    name: ClassVar[str] = "nsga2"
    _objectives: ClassVar[int] = 2

    def _made(self, seed: int) -> optuna.samplers.BaseSampler:
        return optuna.samplers.NSGAIISampler(seed=seed)

    def _values(self, prediction: Prediction) -> list[float]:
        return [price_us(prediction), float(prediction.peak_memory_bytes or 0)]


def _params(choice: Choice) -> list[list[tuple[str, Any]]]:
    """All that can be drawn of a choice: names and values of parameters."""
    return [
        [(choice.name, way), *([(f"{choice.name}.{way}", rung)] if len(rungs) > 1 else [])]
        for way, rungs in choice.ways.items()
        for rung in range(len(rungs))
    ]
