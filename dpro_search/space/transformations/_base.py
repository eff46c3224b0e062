"""The base of all transformations: the facts they depend on, decisions with grids of values, the protocol, and `PlanSpace`.

A `PlanSpace` is all plans of a job that make sense, as transformations compose them.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from dpro_search.collect.trace import TensorInfo
from dpro_search.errors import InputError
from dpro_search.space.plan import Plan, refuse_unknown

RECORDED = "recorded"
_OTHER_GRID_SHARE = 0.3  # of the steps of a choice go to another of its grids
_SHORT_STEPS = 0.4  # parameter of the geometric distribution of a step's length
_ATTEMPTS = 8  # transformations that are tried for a move, as some have none for a plan


@dataclass(frozen=True, kw_only=True)
class PlanningFacts:
    """The facts about a job that decide which plans make sense."""

    name: str  # What its kind is called: "a Horovod job".
    tensors: tuple[TensorInfo, ...]  # The communicated tensors, in the order in which they become ready.
    # Recorded values of settings, of those that have one. A plan that repeats one changes nothing.
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A decision of a plan: one point of one of several grids of values."""

    name: str
    fields: tuple[str, ...]  # Settings of a plan that it makes; those that a grid point does not name stay as recorded.
    # By name, the points of each grid in their natural order. A point is the values of fields; that of `RECORDED` sets none.
    grids: Mapping[str, tuple[Mapping[str, Any], ...]]

    def put(self, plan: Plan, grid: str, index: int) -> Plan:
        """The plan with the values of a grid point."""
        return plan.changed(**(dict.fromkeys(self.fields) | dict(self.grids[grid][index])))

    def nearest(self, plan: Plan) -> tuple[str, int]:
        """Grid and index of the point nearest to a plan; `RECORDED` where no grid sets the same fields."""
        values_of_plan = {name: value for name in self.fields if (value := plan.get(name)) is not None}
        place = self._places.get(frozenset(values_of_plan.items()))
        if place is not None:
            return place
        nearest, least = (RECORDED, 0), math.inf
        for grid, points in self.grids.items():
            for index, point in enumerate(points):
                if point.keys() == values_of_plan.keys():
                    distance = sum(_distance(values_of_plan[name], point[name]) for name in values_of_plan)
                    if distance < least:
                        nearest, least = (grid, index), distance
        return nearest

    @cached_property
    def _places(self) -> dict[frozenset[tuple[str, Any]], tuple[str, int]]:
        """Grid and index of each point by its values, the first of equal ones."""
        places: dict[frozenset[tuple[str, Any]], tuple[str, int]] = {}
        for grid, points in self.grids.items():
            for index, point in enumerate(points):
                places.setdefault(frozenset(point.items()), (grid, index))
        return places

    def neighbour(self, plan: Plan, rng: np.random.Generator) -> Plan:
        """The plan some grid points up or down, more often few than many, or at a random point of another grid."""
        grid, index = self.nearest(plan)
        last = len(self.grids[grid]) - 1
        others = [other for other in self.grids if other != grid]
        if others and (not last or rng.random() < _OTHER_GRID_SHARE):
            grid = others[rng.integers(len(others))]
            return self.put(plan, grid, int(rng.integers(len(self.grids[grid]))))
        if not last:
            return plan
        up = index == 0 or (index < last and rng.random() < 0.5)
        length = int(rng.geometric(_SHORT_STEPS))
        return self.put(plan, grid, min(index + length, last) if up else max(index - length, 0))


class Transformation(abc.ABC):
    """One kind of change that a plan can make to a job; knows which values are legal for it, and good moves.

    Attributes
    ----------
    name, fields
        What it is called, and the settings of a plan that are its own.
    weight
        How often it is chosen for a move, relative to others.
    choice
        Its few outer knobs, for samplers that draw whole plans; None where it has only moves.
    """

    name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]
    weight: float = 1.0

    def __init__(self, job: PlanningFacts) -> None:
        self.job = job

    @abc.abstractmethod
    def legal(self, plan: Plan) -> str | None:
        """Why the job cannot follow this transformation's fields of a plan; None: it can."""

    @abc.abstractmethod
    def propose(self, plan: Plan, rng: np.random.Generator, hot: Mapping[str, float]) -> Plan:
        """A random neighbour of a legal plan, itself legal; unchanged where none exists.

        Parameters
        ----------
        hot
            By tensor, how much changing its communication can gain at most; empty: not known.
        """

    def simplest(self, plan: Plan) -> Plan:
        """The plan without fields of its own that repeat the recording or have no effect."""
        values_of_plan = {name: value for name in self.fields if (value := plan.get(name)) is not None}
        repeated = [name for name, value in values_of_plan.items() if value == self.job.values.get(name)]
        return plan.changed(**dict.fromkeys(repeated)) if repeated else plan

    def detailed(self, plan: Plan) -> Plan:
        """The plan with the values that its moves start from written out."""
        return plan

    def suggested(self, plan: Plan, delay_us: Mapping[str, float]) -> Plan | None:
        """A legal plan that its cost model alone predicts to be faster; None where it knows none.

        Parameters
        ----------
        delay_us
            By tensor, how much a later enqueue costs at most.
        """
        return None

    def start(self, plan: Plan, number: int, count: int) -> Plan:
        """The plan with the `number`-th of `count` starting points, spread over what is possible."""
        return plan

    @cached_property
    def choice(self) -> Choice | None:
        return None


class Knob(Transformation):
    """A transformation whose moves are steps on the grids of its choice; none where the job leaves it no choice."""

    def legal(self, plan: Plan) -> str | None:
        return None  # whatever a `Plan` takes

    def chosen_from(self, values: Sequence[Any]) -> Choice:
        """The choice among the recorded value and these of its one field."""
        return Choice(name=self.name, fields=self.fields, grids={RECORDED: ({},), "set": grid(self.fields[0], values)})

    def offered(self, values: Sequence[Any]) -> Choice:
        """The same; the recorded value alone where none exist."""
        return self.chosen_from(values) if values else Choice(name=self.name, fields=self.fields, grids={RECORDED: ({},)})

    def propose(self, plan: Plan, rng: np.random.Generator, hot: Mapping[str, float]) -> Plan:
        return plan if self.choice is None else self.choice.neighbour(plan, rng)

    def start(self, plan: Plan, number: int, count: int) -> Plan:
        if self.choice is None:
            return plan
        grids = list(self.choice.grids)
        name = grids[number % len(grids)]
        return self.choice.put(plan, name, number * (len(self.choice.grids[name]) - 1) // max(count - 1, 1))


class Switch(Knob):
    """A switch that a replay of a recording can only turn one way: the other is what was recorded, or is not known."""

    turned: ClassVar[bool]

    def __init__(self, job: PlanningFacts, *, possible: bool = True, refused: str | None = None, searched: bool = True) -> None:
        """A switch of one kind of job.

        Parameters
        ----------
        possible
            Whether turning it would change anything about the recorded job.
        refused
            Why it cannot be turned.
        searched
            Whether a search turns it; else only plans that name it do, and searches begun before the switch existed go on.
        """
        self._possible, self._refused, self._searched = possible and refused is None, refused, searched
        if not searched:
            self.weight = 0.0
        super().__init__(job)

    def legal(self, plan: Plan) -> str | None:
        name, value = self.fields[0], plan.get(self.fields[0])
        if value is None:
            return None
        if self._refused is not None:
            return f"{name}: {self._refused}"
        return (
            None if value is self.turned else f"{name}: only {int(self.turned)} can be replayed; leave it out for what was recorded"
        )

    @cached_property
    def choice(self) -> Choice | None:
        if not self._searched:
            return None
        grids: dict[str, tuple[dict[str, object], ...]] = {RECORDED: ({},)}
        if self._possible:
            grids["set"] = grid(self.fields[0], (self.turned,))
        return Choice(name=self.name, fields=self.fields, grids=grids)


def grid(name: str, values: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    """A grid of values of one field."""
    return tuple({name: value} for value in values)


def geometric(low: float, high: float, factor: float, *, multiple_of: int = 1) -> list[int]:
    """Whole numbers from `low` to `high`, each about `factor` times the one before."""
    count = max(math.ceil(math.log(max(high / low, 1.0)) / math.log(factor)), 0) + 1
    return sorted({max(round(low * factor**i / multiple_of), 1) * multiple_of for i in range(count)})


def _distance(one: Any, other: Any) -> float:
    """0 for equal values; numbers by their ratio, groupings by how many groups they have."""
    if one == other:
        return 0.0
    if isinstance(one, tuple):
        return 1e-6 + abs(math.log((len(one) + 1) / (len(other) + 1)))
    if isinstance(one, bool | str):
        return 1.0
    return abs(math.log((one + 1) / (other + 1)))


class PlanSpace:
    """The plans of one job.

    Attributes
    ----------
    job
        What of the job decides which plans make sense.
    transformations
        Those that its kind knows, each with fields of its own.
    fields
        Plan fields that the kind of job knows.
    defaults
        Plans that are worth a look before all others.
    questions
        Plans whose gains `diagnose` shows, which follow them.
    why_empty
        Why there are no plans, in a sentence, where the kind of job knows that; else empty.
    choices
        The outer knobs of all transformations.
    """

    def __init__(
        self,
        job: PlanningFacts,
        transformations: Sequence[Transformation],
        defaults: Sequence[Plan] = (),
        questions: Sequence[Plan] = (),
        *,
        why_empty: str = "",
    ) -> None:
        self.job, self.why_empty = job, why_empty
        self.transformations = tuple(transformations)
        self.defaults, self.questions = tuple(defaults), tuple(questions)
        self.fields = tuple(name for transformation in self.transformations for name in transformation.fields)
        assert len(set(self.fields)) == len(self.fields), "two transformations set one field"
        self._upto = np.cumsum([transformation.weight for transformation in self.transformations])

    def asking_first(self, questions: Sequence[Plan]) -> PlanSpace:
        """The same space with other questions, which are legal plans."""
        return PlanSpace(self.job, self.transformations, self.defaults, questions)

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """See above."""
        return tuple(t.choice for t in self.transformations if t.choice is not None)

    def refusal(self, plan: Plan) -> str | None:
        """Why the job cannot follow a plan; None: it can."""
        try:
            refuse_unknown(plan, self.fields, self.job.name)
        except InputError as error:
            return str(error).removeprefix("plan: ")
        return next((reason for t in self.transformations if (reason := t.legal(plan)) is not None), None)

    def check(self, plan: Plan) -> None:
        """Raise `InputError` if the job cannot follow a plan."""
        reason = self.refusal(plan)
        if reason is not None:
            raise InputError(f"plan: {reason}")

    def simplest(self, plan: Plan) -> Plan:
        """The simplest plan that means the same: fields that repeat the recording, or have no effect, are left out."""
        for transformation in self.transformations:
            plan = transformation.simplest(plan)
        return plan

    def detailed(self, plan: Plan) -> Plan:
        """The plan with every field that moves start from filled in."""
        for transformation in self.transformations:
            plan = transformation.detailed(plan)
        return plan

    def propose(self, plan: Plan, rng: np.random.Generator, hot: Mapping[str, float] | None = None) -> Plan:
        """A random neighbour of a legal plan, itself legal; the plan where none was found.

        Parameters
        ----------
        hot
            How much is to be gained by changing what a tensor does, by name; None: not known.
        """
        for _ in range(_ATTEMPTS):
            place = int(np.searchsorted(self._upto, rng.random() * self._upto[-1], side="right"))
            moved = self.transformations[min(place, len(self._upto) - 1)].propose(plan, rng, hot or {})
            if moved != plan:
                return moved
        return plan

    def starts(self, count: int) -> list[Plan]:
        """Plans to begin walks from, in full: the recorded setting, then `count` - 1 spread over the space."""
        plans = [self.detailed(Plan())]
        for number in range(count - 1):
            plan = Plan()
            for transformation in self.transformations:
                plan = transformation.start(plan, number, count - 1)
            plans.append(self.detailed(plan if self.refusal(plan) is None else Plan()))
        return plans
