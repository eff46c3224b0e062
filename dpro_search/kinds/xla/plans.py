"""Plans of a compiled program: another mesh for the same devices, and other values of what its script declares in ``CHOICES``.

A plan names a `Point`: a mesh and a value of each choice. Each point is a program of its own (`compilations.py`), and `order.py`
has the order in which a search compiles them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from dpro_search.errors import InputError
from dpro_search.kinds.xla.capture import parse_chosen, parse_mesh
from dpro_search.kinds.xla.program import ProgramFacts
from dpro_search.space.plan import Plan
from dpro_search.space.schemes import SchemeSettings
from dpro_search.space.transformations import RECORDED, Choice, Knob, PlanningFacts
from dpro_search.space.transformations._base import grid

Mesh = Mapping[str, int]
Choices = Mapping[str, Sequence[str]]  # The texts of the values that each choice has.


class XlaSettings(SchemeSettings, tag="xla", frozen=True, kw_only=True):
    """Changes that plans of a compiled program make.

    Attributes
    ----------
    mesh
        Devices along each axis, "fsdp=64+tp=4", in the order of the program's mesh.
    choices
        Values of the script's choices, "remat=none+micro_batches=2"; those that are not named stay as they were captured.
    """

    mesh: str | None = None
    choices: str | None = None

    title = "compiled XLA programs"
    words: ClassVar[Mapping[str, Any]] = {
        "mesh": lambda value: f"mesh {value.replace('+', ', ')}",
        "choices": lambda value: value.replace("+", ", "),
    }


class Point(NamedTuple):
    """A mesh, and a value of each choice, as pairs of names and values in the order of the program."""

    mesh: tuple[tuple[str, int], ...]
    chosen: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def captured(facts: ProgramFacts) -> Point:
        """The point that a program was captured for."""
        return Point(tuple(facts.mesh.items()), tuple(facts.chosen.items()))

    def under(self, plan: Plan) -> Point:
        """The point of a legal plan for the program that was captured for this point."""
        settings = XlaSettings.of(plan)
        mesh = self.mesh if settings.mesh is None else tuple(parse_mesh(settings.mesh).items())
        return Point(mesh, tuple((dict(self.chosen) | parse_chosen(settings.choices or "")).items()))

    def plan(self, captured: Point) -> Plan:
        """The simplest plan that leads from the captured point to this one."""
        changed = dict(pair for pair in self.chosen if pair not in captured.chosen)
        return Plan.of(
            mesh=None if self.mesh == captured.mesh else pairs_text(dict(self.mesh)),
            choices=pairs_text(changed) or None,
        )

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in (*self.mesh, *self.chosen))


def pairs_text(pairs: Mapping[str, object]) -> str:
    """A mesh, or values of choices, as plans have them."""
    return "+".join(f"{name}={value}" for name, value in pairs.items())


def choices_of(facts: ProgramFacts) -> dict[str, tuple[str, ...]]:
    """The texts of the values that each choice of a program's script has."""
    return {name: tuple(values) for name, values in facts.choices.items()}


def meshes(mesh: Mesh) -> list[dict[str, int]]:
    """All meshes with the same axes and as many devices."""
    devices = math.prod(mesh.values())
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    sizes = itertools.product(divisors, repeat=max(len(mesh) - 1, 0))
    shapes = [(*some, devices // math.prod(some)) for some in sizes if devices % math.prod(some) == 0]
    return [dict(zip(mesh, shape, strict=True)) for shape in shapes]


def combinations(choices: Choices) -> list[tuple[tuple[str, str], ...]]:
    """All combinations of the choices' values; the only one without choices is the empty one."""
    return [tuple(zip(choices, texts, strict=True)) for texts in itertools.product(*choices.values())]


class MeshKnob(Knob):
    """The mesh: the same axes with other sizes."""

    name = "mesh"
    fields = ("mesh",)

    def __init__(self, job: PlanningFacts, mesh: Mesh) -> None:
        super().__init__(job)
        self._mesh = mesh

    def legal(self, plan: Plan) -> str | None:
        text = XlaSettings.of(plan).mesh
        if text is None:
            return None
        try:
            mesh = parse_mesh(text)
        except InputError as error:
            return str(error)
        devices = math.prod(self._mesh.values())
        if tuple(mesh) != tuple(self._mesh):
            return f"mesh={text}: the program's axes are {', '.join(self._mesh)}, in this order"
        if math.prod(mesh.values()) != devices:
            return f"mesh={text}: has {math.prod(mesh.values())} devices, and the program {devices}"
        return None

    @cached_property
    def choice(self) -> Choice:
        others = [pairs_text(mesh) for mesh in meshes(self._mesh) if mesh != dict(self._mesh)]
        return Choice(name=self.name, fields=self.fields, grids={RECORDED: ({},), "mesh": grid("mesh", others)})


class ChoiceKnob(Knob):
    """The values of what the script declares in ``CHOICES``."""

    name = "choices"
    fields = ("choices",)

    def __init__(self, job: PlanningFacts, choices: Choices, captured: Mapping[str, str]) -> None:
        super().__init__(job)
        self._choices, self._captured = choices, captured

    def legal(self, plan: Plan) -> str | None:
        text = XlaSettings.of(plan).choices
        if text is None:
            return None
        try:
            chosen = parse_chosen(text)
        except InputError as error:
            return str(error)
        for name, value in chosen.items():
            if name not in self._choices:
                declared = f"it has {', '.join(self._choices)}" if self._choices else "it has none"
                return f"choices={text}: the script's CHOICES has no {name}; {declared}"
            if value not in self._choices[name]:
                return f"choices={text}: {name} has the values {', '.join(self._choices[name])}"
        return None

    def simplest(self, plan: Plan) -> Plan:
        text = XlaSettings.of(plan).choices
        if text is None:
            return plan
        chosen = parse_chosen(text)
        changed = {name: chosen[name] for name, value in self._captured.items() if chosen.get(name, value) != value}
        return plan.changed(choices=pairs_text(changed) or None)

    @cached_property
    def choice(self) -> Choice:
        captured = tuple(self._captured.items())
        others = [
            pairs_text(dict(pair for pair in chosen if pair not in captured))
            for chosen in combinations(self._choices)
            if chosen != captured
        ]
        return self.offered(others)
