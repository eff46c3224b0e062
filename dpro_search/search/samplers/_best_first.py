"""Plans in the order of a bound on their time, until no other can be among the listed ones: a branch and bound over a list."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import ClassVar, cast

import numpy as np

from dpro_search.search.objective import BoundedPlan, Objective, Ranked, explaining_of
from dpro_search.search.samplers._base import NoPlanLeftError, Proposal, Sampler, cost_us
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import PlanSpace

TIE = 0.005  # Plans that could be faster than the best by no more than that are not evaluated: real runs differ by more.
NEAR = 0.01  # The same for the plans behind the best: a result calls plans that differ by less equal (`search.result.NEAR_TIE`).
LISTED = 10  # Plans of a result, each the best of its family.


class BestFirstSampler(Sampler):
    """Proposes the plans of a `Ranked` objective, the one with the least bound first.

    A plan is left out when its family has one that is as fast as its bound, but for `NEAR`. The sampler has no plan left when the
    next bound is above the time of the best plans of `LISTED` families, and less than `TIE` below the best time: no other family
    belongs into the list, and no plan is faster than the best. Nothing is random.
    """

    name: ClassVar[str] = "best-first"

    def __init__(self, space: PlanSpace, rng: np.random.Generator, ranked: Ranked) -> None:
        super().__init__(space, rng)
        self._ranked = ranked
        self._left: Iterator[BoundedPlan] | None = None
        self._known: set[Plan] = set()
        self._best_us = float("inf")
        explaining = explaining_of(cast("Objective", ranked))
        self._family: Callable[[Plan], Hashable] = (lambda plan: plan) if explaining is None else explaining.family
        self._family_us: dict[Hashable, float] = {}

    def ask(self) -> Proposal:
        if self._left is None:
            self._left = self._ranked.ranked(self._settled)
        for plan, least_us in self._left:
            if least_us > self._best_us * (1 - TIE) and least_us > self._listed_us() * (1 - NEAR):
                break
            if plan in self._known or self._settled(self._family(plan), least_us):
                continue
            self._known.add(plan)
            return Proposal(plan, self.name)
        self._left = iter(())
        raise NoPlanLeftError

    def tell(self, proposal: Proposal, prediction: Prediction) -> None:
        self.observe(proposal.plan, prediction)

    def observe(self, plan: Plan, prediction: Prediction) -> None:
        self._known.add(plan)
        if prediction.infeasible is None:
            plan_us, family = cost_us(prediction), self._family(plan)
            self._best_us = min(self._best_us, plan_us)
            self._family_us[family] = min(self._family_us.get(family, float("inf")), plan_us)

    def _settled(self, family: Hashable, least_us: float) -> bool:
        """Whether a plan with such a bound can be neither the best of all nor, by more than `NEAR`, the best of its family."""
        family_us = self._family_us.get(family, float("inf"))
        return least_us > self._best_us * (1 - TIE) and least_us > family_us * (1 - NEAR)

    def _listed_us(self) -> float:
        """Time of the last plan of a full list; infinite while there are fewer families."""
        times_us = heapq.nsmallest(LISTED, self._family_us.values())
        return times_us[-1] if len(times_us) == LISTED else float("inf")
