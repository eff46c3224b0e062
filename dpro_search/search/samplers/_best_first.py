"""Plans in the order of a bound on their time, until no other can be the best: a branch and bound over a list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from dpro_search.search.objective import BoundedPlan, Ranked
from dpro_search.search.samplers._base import NoPlanLeftError, Proposal, Sampler, cost_us
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import PlanSpace

TIE = 0.005  # Plans that could be faster than the best by no more than that are not evaluated: real runs differ by more.
LEAST_PLANS = 6  # so many are evaluated in any case: the list shows what comes behind the best


class BestFirstSampler(Sampler):
    """Proposes the plans of a `Ranked` objective, the one with the least bound first.

    It has no plan left when `LEAST_PLANS` were proposed and the next bound is less than `TIE` below the best time: no plan that was
    not evaluated is faster than the best by more than that. Nothing is random.
    """

    name: ClassVar[str] = "best-first"

    def __init__(self, space: PlanSpace, rng: np.random.Generator, ranked: Ranked) -> None:
        super().__init__(space, rng)
        self._ranked = ranked
        self._left: Iterator[BoundedPlan] | None = None
        self._known: set[Plan] = set()
        self._best_us = float("inf")
        self._proposed = 0

    def ask(self) -> Proposal:
        if self._left is None:
            self._left = self._ranked.ranked()
        for plan, least_us in self._left:
            if self._proposed >= LEAST_PLANS and least_us > self._best_us * (1 - TIE):
                break
            if plan not in self._known:
                self._known.add(plan)
                self._proposed += 1
                return Proposal(plan, self.name)
        self._left = iter(())
        raise NoPlanLeftError

    def tell(self, proposal: Proposal, prediction: Prediction) -> None:
        self.observe(proposal.plan, prediction)

    def observe(self, plan: Plan, prediction: Prediction) -> None:
        self._known.add(plan)
        if prediction.infeasible is None:
            self._best_us = min(self._best_us, cost_us(prediction))
