"""What all transformations share: the facts they depend on, decisions with ladders of values, and the protocol."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import msgspec
import numpy as np

from dpro_search.collect.trace import TensorInfo
from dpro_search.space.plan import Plan

RECORDED = "recorded"
_OTHER_WAY_SHARE = 0.3  # of the steps on a choice's ladders go to another way of deciding
_SHORT_STEPS = 0.4  # parameter of the geometric distribution of a step's length


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What of a job decides which plans make sense.

    Attributes
    ----------
    name
        What its kind is called: "a Horovod job".
    tensors
        The communicated tensors, in the order in which they become ready.
    values
        Recorded values of plan fields, of those that have one. A plan that repeats one changes nothing.
    """

    name: str
    tensors: tuple[TensorInfo, ...]
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A decision that a plan makes in one of several ways, each with a ladder of values.

    Attributes
    ----------
    fields
        Plan fields that it sets; those that a rung does not name stay as recorded.
    ways
        Rungs of each way, in their natural order: values of fields. The way `RECORDED` sets none.
    """

    name: str
    fields: tuple[str, ...]
    ways: Mapping[str, tuple[Mapping[str, Any], ...]]

    def put(self, plan: Plan, way: str, rung: int) -> Plan:
        """A plan with this decision."""
        return msgspec.structs.replace(plan, **(dict.fromkeys(self.fields) | dict(self.ways[way][rung])))

    def nearest(self, plan: Plan) -> tuple[str, int]:
        """The way and rung that say what a plan says, or nearly; `RECORDED` where no way sets the same fields."""
        own = {name: getattr(plan, name) for name in self.fields if getattr(plan, name) is not None}
        found, least = (RECORDED, 0), math.inf
        for way, rungs in self.ways.items():
            for number, rung in enumerate(rungs):
                if rung.keys() == own.keys():
                    distance = sum(_distance(own[name], rung[name]) for name in own)
                    if distance < least:
                        found, least = (way, number), distance
        return found

    def neighbour(self, plan: Plan, rng: np.random.Generator) -> Plan:
        """Some rungs up or down, more often few than many, or another way."""
        way, rung = self.nearest(plan)
        last = len(self.ways[way]) - 1
        others = [other for other in self.ways if other != way]
        if others and (not last or rng.random() < _OTHER_WAY_SHARE):
            way = others[rng.integers(len(others))]
            return self.put(plan, way, int(rng.integers(len(self.ways[way]))))
        if not last:
            return plan
        up = rung == 0 or (rung < last and rng.random() < 0.5)
        length = int(rng.geometric(_SHORT_STEPS))
        return self.put(plan, way, min(rung + length, last) if up else max(rung - length, 0))


class Transformation(abc.ABC):
    """One kind of change that a plan can make to a job; knows which values are legal for it, and good moves.

    Attributes
    ----------
    name, fields
        What it is called, and the plan fields that are its own.
    weight
        How often it is chosen for a move, relative to others.
    choice
        Its few outer knobs, for samplers that draw whole plans; None where it has only moves.
    """

    name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]
    weight: ClassVar[float] = 1.0

    def __init__(self, job: JobFacts) -> None:
        self.job = job

    @abc.abstractmethod
    def legal(self, plan: Plan) -> str | None:
        """Why the job cannot follow what a plan says in this transformation's fields; None: it can."""

    @abc.abstractmethod
    def propose(self, plan: Plan, rng: np.random.Generator, hot: Mapping[str, float]) -> Plan:
        """A random neighbour of a legal plan, itself legal; unchanged where there is none.

        Parameters
        ----------
        hot
            How much is to be gained by changing what a tensor does, by name; empty: not known.
        """

    def simplest(self, plan: Plan) -> Plan:
        """The plan without fields of its own that repeat the recording or have no effect."""
        own = {name: value for name in self.fields if (value := getattr(plan, name)) is not None}
        repeated = [name for name, value in own.items() if value == self.job.values.get(name)]
        return msgspec.structs.replace(plan, **dict.fromkeys(repeated)) if repeated else plan

    def detailed(self, plan: Plan) -> Plan:
        """The plan with what its moves start from said in full."""
        return plan

    def suggested(self, plan: Plan, delay_us: Mapping[str, float]) -> Plan | None:
        """A legal plan that its cost model alone says is faster; None where it knows none.

        Parameters
        ----------
        delay_us
            What it costs at most that a tensor is posted later, by name.
        """
        return None

    def start(self, plan: Plan, number: int, count: int) -> Plan:
        """The plan with the `number`-th of `count` starting points, spread over what is possible."""
        return plan

    @cached_property
    def choice(self) -> Choice | None:
        return None


class Knob(Transformation):
    """A transformation whose moves are the steps on the ladders of its choice; none where the job leaves it no choice."""

    def propose(self, plan: Plan, rng: np.random.Generator, hot: Mapping[str, float]) -> Plan:
        return plan if self.choice is None else self.choice.neighbour(plan, rng)

    def start(self, plan: Plan, number: int, count: int) -> Plan:
        if self.choice is None:
            return plan
        ways = list(self.choice.ways)
        way = ways[number % len(ways)]
        return self.choice.put(plan, way, number * (len(self.choice.ways[way]) - 1) // max(count - 1, 1))


def ladder(name: str, values: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    """Rungs of one field."""
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
