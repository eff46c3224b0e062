"""Line searches along the ladders of the outer knobs: how a portfolio begins where nothing guides it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import ClassVar

import msgspec
import numpy as np

from dpro_search.search.samplers._base import Proposal, Sampler, price_us
from dpro_search.search.samplers._guide import Guide
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import RECORDED, Choice, PlanSpace

_PLACES = 4  # of a ladder that are looked at first
_FRESH_ATTEMPTS = 16
_FLAT = 3e-3  # a choice whose first places differ by less, relatively, is not worth steps

_Place = tuple[str, int]  # a way of a choice, and a rung of the way
_AS_RECORDED: _Place = (RECORDED, 0)


class LadderSampler(Sampler):
    """A pattern search over the choices of a space (Hooke and Jeeves 1961).

    Choices with few places come first: what they settle holds for all places of the others. Each choice in turn is tried once
    at a few places of all its ladders, the others being as in the best plan so far. Then with a step up and one down from the
    best plan, again and again until a round of all choices finds nothing better, first long steps, half as long each time;
    recorded values have their place between the rungs, and a choice whose first places hardly differ gets no steps. Then all
    that is left of the ladders of these choices through the best plan, from the last rung on, for large parts take little time
    to replay: hashes decide which server gets which part, so that single values may be lucky far from any other good one. When
    that does not help any more, there are shortest steps in two choices at once: where the best value of a choice depends on
    another, the way to a better plan leads past worse ones. Ladders of choices that hardly matter, and of other ways than the
    best plan's, come last. Lines are searched anew through the best plan if that is another one than before; else there is
    nothing new, until a better plan comes from elsewhere. While the prices of a line are on their way, neighbours of the best
    plan are asked for.
    """

    name: ClassVar[str] = "ladders"

    def __init__(self, space: PlanSpace, rng: np.random.Generator, guide: Guide | None = None) -> None:
        super().__init__(space, rng, guide)
        self._choices = sorted(space.choices, key=lambda choice: sum(map(len, choice.ways.values())))
        self._best, self._best_us = Plan(), math.inf
        self._known: set[Plan] = {Plan()}  # priced, or on their way
        self._prices_us: dict[Plan, float] = {}
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
        self._prices_us[plan] = price_us(prediction)
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
        steep = []
        for choice in self._choices:
            places = self._places(choice)
            yield places
            if not self._is_flat(places):
                steep.append(choice)
        longest = max((_stride(len(axis)) for choice in self._choices for axis in self._axes(choice)), default=1)
        shortest = longest.bit_length() - 1  # halvings of the longest step, after which all steps are from a place to the next
        for halvings in range(1, shortest + 1):
            yield from self._while_better(partial(self._single_steps, steep, halvings))
        yield from self._while_better(partial(self._whole_ladders, steep, own=True))
        yield from self._while_better(partial(self._double_steps, steep, shortest))
        begun = self._best
        for own in (True, False):
            yield from self._whole_ladders(self._choices, own=own)
            if self._best != begun:
                return

    def _while_better(self, lines: Callable[[], Iterator[list[Plan]]]) -> Iterator[list[Plan]]:
        """Lines again and again, until they find nothing better."""
        before_us = math.inf
        while self._best_us < before_us:
            before_us = self._best_us
            yield from lines()

    def _is_flat(self, places: list[Plan]) -> bool:
        """Whether it hardly matters where on its ladders a choice is, as far as prices are known."""
        found_us = [self._prices_us[plan] for plan in places if plan in self._prices_us]
        return len(found_us) > 1 and max(found_us) < (1 + _FLAT) * min(found_us)

    def _whole_ladders(self, choices: Sequence[Choice], *, own: bool) -> Iterator[list[Plan]]:
        """All places of the ladders through the best plan, or of the other ones."""
        for choice in choices:
            at = choice.nearest(self._best)
            axes = [axis for axis in self._axes(choice) if (at in axis) == own]
            yield self._legal([choice.put(self._best, *place) for axis in axes for place in reversed(axis)])

    def _single_steps(self, choices: Sequence[Choice], halvings: int) -> Iterator[list[Plan]]:
        for choice in choices:
            yield self._legal(self._beside(self._best, choice, halvings))

    def _double_steps(self, choices: Sequence[Choice], halvings: int) -> Iterator[list[Plan]]:
        """Steps in every two choices, and in one from what these have found."""
        for one, other in combinations(choices, 2):
            asides = self._beside(self._best, one, halvings)
            yield self._legal([plan for aside in asides for plan in self._beside(aside, other, halvings)])
        yield from self._single_steps(choices, halvings)

    def _places(self, choice: Choice) -> list[Plan]:
        """The best plan with some rungs of each way, evenly spread."""
        found = []
        for way, rungs in choice.ways.items():
            stride = _stride(len(rungs))
            found += [choice.put(self._best, way, rung) for rung in range((stride - 1) // 2, len(rungs), stride)]
        return self._legal(found)

    def _beside(self, plan: Plan, choice: Choice, halvings: int) -> list[Plan]:
        """A plan with the places below and above its own, legal or not.

        Where it keeps recorded values that a way cannot say, that way's nearest rung and those around it.
        """
        found = []
        own = choice.nearest(plan)
        for axis in self._axes(choice):
            step = max(_stride(len(axis)) >> halvings, 1)
            if own in axis:
                at = axis.index(own)
                places = [at - step, at + step]
            elif own == _AS_RECORDED and (near := self._near_recorded(choice, axis)) is not None:
                places = [near - step, near, near + step]
            else:
                continue
            found += [choice.put(plan, *axis[at]) for at in places if 0 <= at < len(axis)]
        return found

    def _axes(self, choice: Choice) -> list[list[_Place]]:
        """Of each way its rungs in their order, the recorded setting among them where it is one number away from all of them."""
        recorded = self.space.job.values
        found = []
        for way, rungs in choice.ways.items():
            if way == RECORDED:
                continue
            axis = [(way, number) for number in range(len(rungs))]
            differing = [name for name in rungs[0] if any(rung[name] != recorded.get(name) for rung in rungs)]
            if len(differing) == 1 and isinstance(value := recorded.get(differing[0]), int | float):
                below = [place for place, rung in zip(axis, rungs, strict=True) if rung[differing[0]] < value]
                above = [place for place, rung in zip(axis, rungs, strict=True) if rung[differing[0]] > value]
                axis = [*below, _AS_RECORDED, *above]
            found.append(axis)
        return found

    def _near_recorded(self, choice: Choice, axis: list[_Place]) -> int | None:
        """Where on an axis is the rung that is nearest to the recorded values; None: a value of its fields was not recorded."""
        values = {name: self.space.job.values.get(name) for name in choice.ways[axis[0][0]][0]}
        near = choice.nearest(msgspec.structs.replace(Plan(), **values))
        return axis.index(near) if near in axis else None

    def _legal(self, plans: list[Plan]) -> list[Plan]:
        return [self.space.simplest(plan) for plan in plans if self.space.refusal(plan) is None]


def _stride(rungs: int) -> int:
    """Rungs from one of a ladder's first places to the next."""
    return -(-rungs // _PLACES)
