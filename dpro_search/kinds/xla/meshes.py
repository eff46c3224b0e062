"""Plans of a compiled program: other meshes for the same devices, each compiled when its turn comes, and kept.

`Compilations` compiles the script that the program was captured from. What it made is kept by a digest of script, devices and mesh,
so that a search that is started again compiles nothing twice. `in_order` gives the meshes that are worth a compilation: the one
with the least estimate first, which follows from those that were compiled before.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from dpro_search.errors import InputError, JobError
from dpro_search.kinds.xla.capture import ProgramRequest, capture_program, parse_mesh
from dpro_search.kinds.xla.program import ProgramFacts, XlaProgram, read_program
from dpro_search.space.plan import Plan
from dpro_search.space.schemes import SchemeSettings
from dpro_search.space.transformations import RECORDED, Choice, JobFacts, Knob
from dpro_search.space.transformations._base import grid

MOST_COMPILED = 10  # meshes that a search compiles
_SETTLED = 1.3
"""Meshes whose estimate is that many times the best step are not compiled any more: estimates are off by less (assumed)."""

Mesh = Mapping[str, int]
StepParts = tuple[float, Mapping[str, float]]  # A step without its collectives, and the collectives of each axis, in us.


class MeshSettings(SchemeSettings, tag="xla", frozen=True, kw_only=True):
    """Changes that plans of a compiled program make.

    Attributes
    ----------
    mesh
        Devices along each axis, "fsdp=64+tp=4", in the order of the program's mesh.
    """

    mesh: str | None = None

    title = "compiled XLA programs"
    words: ClassVar[Mapping[str, Any]] = {"mesh": lambda value: f"mesh {value.replace('+', ', ')}"}


def mesh_text(mesh: Mesh) -> str:
    """A mesh as plans have it."""
    return "+".join(f"{axis}={size}" for axis, size in mesh.items())


class MeshKnob(Knob):
    """The mesh: the same axes with other sizes."""

    name = "mesh"
    fields = ("mesh",)

    def __init__(self, job: JobFacts, mesh: Mesh) -> None:
        super().__init__(job)
        self._mesh = mesh

    def legal(self, plan: Plan) -> str | None:
        text = MeshSettings.of(plan).mesh
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
        others = [mesh_text(mesh) for mesh in meshes(self._mesh) if mesh != dict(self._mesh)]
        return Choice(name=self.name, fields=self.fields, grids={RECORDED: ({},), "mesh": grid("mesh", others)})


def meshes(mesh: Mesh) -> list[dict[str, int]]:
    """All meshes with the same axes and as many devices."""
    devices = math.prod(mesh.values())
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    sizes = itertools.product(divisors, repeat=max(len(mesh) - 1, 0))
    shapes = [(*some, devices // math.prod(some)) for some in sizes if devices % math.prod(some) == 0]
    return [dict(zip(mesh, shape, strict=True)) for shape in shapes]


def estimated_us(mesh: Mesh, known: Sequence[tuple[Mesh, StepParts]]) -> float:
    """The step under a mesh, from those under other meshes; 0 without any.

    Computation is that of the nearest mesh. What the devices of an axis exchange is what the other axes have not split: its bytes
    grow as these shrink (parameters that tensor parallel ranks share, activations that replicas do not have). A ring of n moves
    (n - 1) / n of them. Each known mesh gives an estimate for an axis that it splits, and the least counts, because more of the
    same exchange may be hidden elsewhere; an axis that no known mesh splits counts nothing. So a mesh that may be fast is tried
    early.
    """
    if not known:
        return 0.0
    total_us, _ = min(known, key=lambda each: _distance(mesh, each[0]))[1]
    for axis, size in mesh.items():
        estimates_us = [
            axes_us.get(axis, 0.0)
            * math.prod(base[other] / mesh[other] for other in mesh if other != axis)
            * ((1 - 1 / size) / (1 - 1 / base[axis]))
            for base, (_, axes_us) in known
            if base[axis] > 1
        ]
        total_us += min(estimates_us, default=0.0)
    return total_us


def in_order(base: Mesh, parts_of: Callable[[Mesh], StepParts | None]) -> Iterator[dict[str, int]]:
    """Meshes that are worth a compilation, `MOST_COMPILED` at most.

    Parameters
    ----------
    parts_of
        Compiles a mesh, and gives the parts of its step; None: it does not run. Asked of each mesh after it was given.
    """
    known: list[tuple[Mesh, StepParts]] = []
    left = meshes(base)
    chosen: dict[str, int] = dict(base)
    for number in range(MOST_COMPILED):
        left.remove(chosen)
        if number:
            yield chosen
        parts = parts_of(chosen)
        if parts is not None:
            known.append((chosen, parts))
        if not left:
            return
        chosen = min(left, key=lambda mesh: (estimated_us(mesh, known), _distance(mesh, base)))
        best_us = min((us + sum(axes.values()) for _, (us, axes) in known), default=math.inf)
        if estimated_us(chosen, known) > _SETTLED * best_us:
            return


def _distance(mesh: Mesh, other: Mesh) -> float:
    """Doublings and halvings between two meshes."""
    return sum(abs(math.log2(mesh[axis] / other[axis])) for axis in mesh)


class Compilations:
    """Programs of one script for one cluster, by mesh.

    Parameters
    ----------
    say
        Called with what is done.
    """

    def __init__(self, base: XlaProgram, say: Callable[[str], None] = lambda what: None) -> None:
        self._base, self._say = base, say
        self._made: dict[str, XlaProgram | str] = {mesh_text(base.facts.mesh): base}

    def program(self, mesh: Mesh) -> XlaProgram | str:
        """The program for a mesh, or in a line why there is none: the compiler's words, or the script's."""
        text = mesh_text(mesh)
        if text not in self._made:
            made = self._compiled(mesh)
            self._made[text] = made if isinstance(made, str) else self._other_work(made) or made
        return self._made[text]

    def _other_work(self, program: XlaProgram) -> str:
        """Why a program is not another way to compute the same step; empty: it may be."""
        tokens, base_tokens = program.facts.tokens, self._base.facts.tokens
        if tokens is None or base_tokens is None or tokens == base_tokens:
            return ""
        return (
            f"the script makes a step of {tokens:,} tokens for this mesh, and one of {base_tokens:,} for the program's: "
            "let the batch not depend on the mesh"
        )

    def _compiled(self, mesh: Mesh) -> XlaProgram | str:
        facts = self._base.facts
        script = Path(facts.script_path)
        if not script.is_file():
            raise InputError(f"{script}: the script that the program was captured from is not there; capture it again")
        folder = kept_folder(facts, mesh)
        refusal = folder.with_suffix(".refused")
        if refusal.is_file():
            return refusal.read_text()
        if folder.is_dir():
            kept = read_program(folder)
            if kept is not None:
                return kept
        function = facts.script.rpartition(":")[2]
        request = ProgramRequest(script=script, function=function, on=facts.cluster, mesh=mesh, python=facts.python)
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            return capture_program(request, folder, self._say)
        except (InputError, JobError) as error:
            refusal.write_text(str(error))
            return str(error)


def kept_folder(facts: ProgramFacts, mesh: Mesh) -> Path:
    """The folder that keeps the program of a script for a mesh: another script, cluster, compiler or flags make another one.

    It is in ``~/.cache/dpro-search/programs``, or where ``DPRO_SEARCH_PROGRAMS`` says.
    """
    root = Path(os.environ.get("DPRO_SEARCH_PROGRAMS") or Path.home() / ".cache" / "dpro-search" / "programs")
    parts = (facts.script, facts.cluster, mesh_text(mesh), repr(sorted(facts.versions.items())), facts.flags)
    script = Path(facts.script_path).read_bytes()
    digest = hashlib.sha256(b"\0".join([script, *(part.encode() for part in parts)])).hexdigest()
    return root / digest[:24]
