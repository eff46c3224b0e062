"""Line searches along the grids of the outer knobs: how a portfolio begins without a guide."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import ClassVar

import numpy as np

from dpro_search.search.samplers._base import Proposal, Sampler, cost_us
from dpro_search.search.samplers._guide import Guide
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import RECORDED, Choice, PlanSpace

_FIRST_POINTS = 4  # of a grid, evenly spread, that are tried first
_FRESH_ATTEMPTS = 16
_FLAT = 3e-3  # a choice whose first points differ by less (relative) gets no steps

_GridPoint = tuple[str, int]  # a grid of a choice, and the index of a point
_AS_RECORDED: _GridPoint = (RECORDED, 0)


class LineSearchSampler(Sampler):
    """A pattern search over the choices of a space (Hooke and Jeeves 1961).

    Choices with few grid points come first. The phases, each through the best plan so far:

    1. Each choice is tried at a few points of all its grids.
    2. Single steps: each choice one step up and one down, repeated until a round of all choices finds nothing better. The first
       steps are long; the length is halved each time. Recorded values are points of the grid, too. A choice whose first points
       hardly differ gets no steps.
    3. The remaining points of the grids of these choices, last point first, because large parts are fast to replay. A hash assigns
       parts to servers, so a single value may be good although its neighbours are not.
    4. Double steps: the shortest steps in two choices at once, for choices whose best values depend on each other.
    5. The grids of choices with little effect, and the grids that the best plan does not use.

    If the best plan has changed, the phases are repeated through it; else proposals repeat until a better plan is observed. While
    the predictions of a line are open, neighbours of the best plan are proposed.
    """

    name: ClassVar[str] = "ladders"  # stored with each trial: a search of an earlier version can be continued

    def __init__(self, space: PlanSpace, rng: np.random.Generator, guide: Guide | None = None) -> None:
        super().__init__(space, rng, guide)
        self._choices = sorted(space.choices, key=lambda choice: sum(map(len, choice.grids.values())))
        self._best, self._best_us = Plan(), math.inf
        self._known: set[Plan] = {Plan()}  # evaluated or proposed
        self._costs_us: dict[Plan, float] = {}
        self._open: deque[Plan] = deque()  # open asks, the oldest first
        self._line: deque[Plan] = deque()
        self._lines: Iterator[list[Plan]] = iter(())
        self._searched: Plan | None = None  # the best plan when lines were last begun anew

    def ask(self) -> Proposal:
        plan = self._next()
        self._known.add(plan)
        self._open.append(plan)
        return Proposal(plan, self.name)

    def tell(self, proposal: Proposal, prediction: Prediction) -> None:
        assert self._open, "tell without ask"
        self._note(self._open.popleft(), prediction)

    def observe(self, plan: Plan, prediction: Prediction) -> None:
        self._known.add(plan)
        self._note(plan, prediction)

    def _note(self, plan: Plan, prediction: Prediction) -> None:
        self._costs_us[plan] = cost_us(prediction)
        if cost_us(prediction) < self._best_us:
            self._best, self._best_us = plan, cost_us(prediction)

    def _next(self) -> Plan:
        while True:
            while self._line:
                plan = self._line.popleft()
                if plan not in self._known:
                    return plan
            if self._open:
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
            points = self._first_points(choice)
            yield points
            if not self._is_flat(points):
                steep.append(choice)
        longest = max((_stride(len(axis)) for choice in self._choices for axis in self._axes(choice)), default=1)
        shortest = longest.bit_length() - 1  # halvings of the longest step, after which all steps are from one point to the next
        for halvings in range(1, shortest + 1):
            yield from self._while_better(partial(self._single_steps, steep, halvings))
        yield from self._while_better(partial(self._complete_grids, steep, through_best=True))
        yield from self._while_better(partial(self._double_steps, steep, shortest))
        begun = self._best
        for through_best in (True, False):
            yield from self._complete_grids(self._choices, through_best=through_best)
            if self._best != begun:
                return

    def _while_better(self, lines: Callable[[], Iterator[list[Plan]]]) -> Iterator[list[Plan]]:
        """Lines again and again, until they find nothing better."""
        before_us = math.inf
        while self._best_us < before_us:
            before_us = self._best_us
            yield from lines()

    def _is_flat(self, points: list[Plan]) -> bool:
        """Whether the known predicted costs of a choice's first points hardly differ."""
        costs_us = [self._costs_us[plan] for plan in points if plan in self._costs_us]
        return len(costs_us) > 1 and max(costs_us) < (1 + _FLAT) * min(costs_us)

    def _complete_grids(self, choices: Sequence[Choice], *, through_best: bool) -> Iterator[list[Plan]]:
        """All points of the grids through the best plan, or of the other grids."""
        for choice in choices:
            at = choice.nearest(self._best)
            axes = [axis for axis in self._axes(choice) if (at in axis) == through_best]
            yield self._legal([choice.put(self._best, *point) for axis in axes for point in reversed(axis)])

    def _single_steps(self, choices: Sequence[Choice], halvings: int) -> Iterator[list[Plan]]:
        for choice in choices:
            yield self._legal(self._beside(self._best, choice, halvings))

    def _double_steps(self, choices: Sequence[Choice], halvings: int) -> Iterator[list[Plan]]:
        """Steps in every two choices, and in one from what these have found."""
        for one, other in combinations(choices, 2):
            asides = self._beside(self._best, one, halvings)
            yield self._legal([plan for aside in asides for plan in self._beside(aside, other, halvings)])
        yield from self._single_steps(choices, halvings)

    def _first_points(self, choice: Choice) -> list[Plan]:
        """The best plan with some points of each grid, evenly spread."""
        points_to_try = []
        for grid, points in choice.grids.items():
            stride = _stride(len(points))
            points_to_try += [choice.put(self._best, grid, index) for index in range((stride - 1) // 2, len(points), stride)]
        return self._legal(points_to_try)

    def _beside(self, plan: Plan, choice: Choice, halvings: int) -> list[Plan]:
        """A plan with the grid points below and above its own, legal or not.

        Where the plan keeps a recorded value that is not in a grid: the grid's nearest point and its two neighbours.
        """
        neighbours = []
        present = choice.nearest(plan)
        for axis in self._axes(choice):
            step = max(_stride(len(axis)) >> halvings, 1)
            if present in axis:
                at = axis.index(present)
                indices = [at - step, at + step]
            elif present == _AS_RECORDED and (near := self._near_recorded(choice, axis)) is not None:
                indices = [near - step, near, near + step]
            else:
                continue
            neighbours += [choice.put(plan, *axis[at]) for at in indices if 0 <= at < len(axis)]
        return neighbours

    def _axes(self, choice: Choice) -> list[list[_GridPoint]]:
        """The points of each grid in order, the recorded setting among them if it differs from all of them in one number only."""
        recorded = self.space.job.values
        axes = []
        for grid, points in choice.grids.items():
            if grid == RECORDED:
                continue
            axis = [(grid, index) for index in range(len(points))]
            differing = [name for name in points[0] if any(point[name] != recorded.get(name) for point in points)]
            if len(differing) == 1 and isinstance(value := recorded.get(differing[0]), int | float):
                below = [at for at, point in zip(axis, points, strict=True) if point[differing[0]] < value]
                above = [at for at, point in zip(axis, points, strict=True) if point[differing[0]] > value]
                axis = [*below, _AS_RECORDED, *above]
            axes.append(axis)
        return axes

    def _near_recorded(self, choice: Choice, axis: list[_GridPoint]) -> int | None:
        """Index on an axis of the point nearest to the recorded values; None: a value of its fields was not recorded."""
        values = {name: self.space.job.values.get(name) for name in choice.grids[axis[0][0]][0]}
        near = choice.nearest(Plan().changed(**values))
        return axis.index(near) if near in axis else None

    def _legal(self, plans: list[Plan]) -> list[Plan]:
        return [self.space.simplest(plan) for plan in plans if self.space.refusal(plan) is None]


def _stride(points: int) -> int:
    """Distance between the first points of a grid that has so many points."""
    return -(-points // _FIRST_POINTS)
