"""Line searches along the ladders of the outer knobs: how a portfolio begins where nothing guides it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import ClassVar

import msgspec
import numpy as np

from dpro_search.search.samplers._base import Proposal, Sampler, price_us
from dpro_search.search.samplers._guide import Guide
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import RECORDED, Choice, PlanSpace

_PLACES = 4  # of a ladder that are looked at first
_FRESH_ATTEMPTS = 16


class LadderSampler(Sampler):
    """A pattern search over the choices of a space (Hooke and Jeeves 1961).

    Each choice in turn is tried once at a few places of all its ladders, the others being as in the best plan so far. Then with a
    step up and one down from the best plan, again and again until a round of all choices finds nothing better, first long steps,
    half as long each time. When single steps do not help, lines are searched anew through the best plan if that is another one than
    before; else there is nothing new, until a better plan comes from elsewhere. While the prices of a line are on their way,
    neighbours of the best plan are asked for.
    """

    name: ClassVar[str] = "ladders"

    def __init__(self, space: PlanSpace, rng: np.random.Generator, guide: Guide | None = None) -> None:
        super().__init__(space, rng, guide)
        self._best, self._best_us = Plan(), math.inf
        self._known: set[Plan] = {Plan()}  # priced, or on their way
        self._asked: deque[Plan] = deque()  # open asks, the oldest first
        self._line: deque[Plan] = deque()
        self._lines: Iterator[list[Plan]] = iter(())
        self._searched: Plan | None = None  # the best plan when lines were last begun anew

    def ask(self) -> Proposal:
        plan = self._next()
        self._known.add(plan)
        self._asked.append(plan)
        return Proposal(plan, self.name)

    def tell(self, proposal: Proposal, prediction: Prediction) -> None:
        assert self._asked, "tell without ask"
        self._note(self._asked.popleft(), prediction)

    def observe(self, plan: Plan, prediction: Prediction) -> None:
        self._known.add(plan)
        self._note(plan, prediction)

    def _note(self, plan: Plan, prediction: Prediction) -> None:
        if price_us(prediction) < self._best_us:
            self._best, self._best_us = plan, price_us(prediction)

    def _next(self) -> Plan:
        while True:
            while self._line:
                plan = self._line.popleft()
                if plan not in self._known:
                    return plan
            if self._asked:
                return self._neighbour()
            line = next(self._lines, None)
            if line is not None:
                self._line.extend(line)
            elif self._searched != self._best:
                self._searched, self._lines = self._best, self._all_lines()
            else:
                return self._best

    def _neighbour(self) -> Plan:
        plan = self._best
        for _ in range(_FRESH_ATTEMPTS):
            plan = self.space.simplest(self.space.propose(self._best, self.rng))
            if plan not in self._known:
                break
        return plan

    def _all_lines(self) -> Iterator[list[Plan]]:
        for choice in self.space.choices:
            yield self._places(choice)
        longest = max((_stride(len(rungs)) for choice in self.space.choices for rungs in choice.ways.values()), default=0)
        for halvings in range(1, longest.bit_length()):
            before_us = math.inf
            while self._best_us < before_us:
                before_us = self._best_us
                for choice in self.space.choices:
                    yield self._steps(choice, halvings)

    def _places(self, choice: Choice) -> list[Plan]:
        """The best plan with some rungs of each way, evenly spread."""
        found = []
        for way, rungs in choice.ways.items():
            stride = _stride(len(rungs))
            found += [choice.put(self._best, way, rung) for rung in range((stride - 1) // 2, len(rungs), stride)]
        return self._legal(found)

    def _steps(self, choice: Choice, halvings: int) -> list[Plan]:
        """The best plan with rungs below and above its own; around the recorded values where it keeps those."""
        found = []
        way, rung = choice.nearest(self._best)
        around = self._near_recorded(choice) if way == RECORDED else [(way, rung)]
        for way, rung in around:
            last = len(choice.ways[way]) - 1
            step = max(_stride(last + 1) >> halvings, 1)
            found += [choice.put(self._best, way, at) for at in (rung - step, rung, rung + step) if 0 <= at <= last]
        return self._legal(found)

    def _near_recorded(self, choice: Choice) -> list[tuple[str, int]]:
        """Of each way, the rung that is nearest to the recorded values."""
        values = self.space.job.values
        found = []
        for rungs in choice.ways.values():
            known = {name: values.get(name) for name in rungs[0]}
            if known and None not in known.values():
                found.append(choice.nearest(msgspec.structs.replace(Plan(), **known)))
        return found

    def _legal(self, plans: list[Plan]) -> list[Plan]:
        return [self.space.simplest(plan) for plan in plans if self.space.refusal(plan) is None]


def _stride(rungs: int) -> int:
    """Rungs from one of a ladder's first places to the next."""
    return -(-rungs // _PLACES)
