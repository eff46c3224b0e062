"""`Compilations`: the programs of one script for one cluster. Each is compiled when its turn comes, and kept.

A program is kept by a digest of its script, devices, mesh, choices and compiler, so that a search that is started again compiles
nothing twice.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from dpro_search.errors import InputError, JobError
from dpro_search.kinds.xla.capture import ProgramRequest, capture_program
from dpro_search.kinds.xla.plans import Point, pairs_text
from dpro_search.kinds.xla.program import ProgramFacts, XlaProgram, read_program


class Compilations:
    """Programs of one script for one cluster, by point.

    Parameters
    ----------
    say
        Called with what is done.
    """

    def __init__(self, base: XlaProgram, say: Callable[[str], None] = lambda what: None) -> None:
        self._base, self._say = base, say
        self._made: dict[Point, XlaProgram | str] = {Point.captured(base.facts): base}

    def program(self, point: Point) -> XlaProgram | str:
        """The program of a point, or in a line why there is none: the compiler's words, or the script's."""
        if point not in self._made:
            made = self._compiled(point)
            self._made[point] = made if isinstance(made, str) else self._other_work(made) or made
        return self._made[point]

    def is_made(self, point: Point) -> bool:
        """Whether a point was compiled, or refused, here or by another process."""
        return point in self._made or self._kept(kept_folder(self._base.facts, point)) is not None

    def equal_programs(self) -> list[tuple[Point, Point]]:
        """Pairs of points with one mesh and the same program, the one that was made first before the other."""
        firsts: dict[tuple[object, str], Point] = {}
        pairs = []
        for point, program in self._made.items():
            if isinstance(program, XlaProgram):
                first = firsts.setdefault((point.mesh, program.text_digest), point)
                if first != point:
                    pairs.append((first, point))
        return pairs

    def _other_work(self, program: XlaProgram) -> str:
        """Why a program is not another way to compute the same step; empty: it may be."""
        tokens, base_tokens = program.facts.tokens, self._base.facts.tokens
        if tokens is None or base_tokens is None or tokens == base_tokens:
            return ""
        return (
            f"the script makes a step of {tokens:,} tokens for this plan, and one of {base_tokens:,} for the program's: "
            "let the batch depend neither on the mesh nor on choices"
        )

    def _compiled(self, point: Point) -> XlaProgram | str:
        facts = self._base.facts
        script = Path(facts.script_path)
        if not script.is_file():
            raise InputError(f"{script}: the script that the program was captured from is not there; capture it again")
        folder = kept_folder(facts, point)
        if (made := self._kept(folder)) is not None:
            return made
        request = ProgramRequest(
            script=script,
            function=facts.script.rpartition(":")[2],
            on=facts.cluster,
            mesh=dict(point.mesh),
            chosen=dict(point.chosen),
            python=facts.python,
        )
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            return capture_program(request, folder, self._say)
        except (InputError, JobError) as error:
            if (made := self._kept(folder)) is not None:  # another process of the search was faster
                return made
            folder.with_suffix(".refused").write_text(str(error))
            return str(error)

    @staticmethod
    def _kept(folder: Path) -> XlaProgram | str | None:
        """A program that was made before, or why it was refused; None: neither."""
        refusal = folder.with_suffix(".refused")
        if refusal.is_file():
            return refusal.read_text()
        return read_program(folder) if folder.is_dir() else None


def kept_folder(facts: ProgramFacts, point: Point) -> Path:
    """The folder that keeps the program of a script for a point: another script, cluster, compiler or flags make another one.

    It is in ``~/.cache/dpro-search/programs``, or where ``DPRO_SEARCH_PROGRAMS`` says.
    """
    root = Path(os.environ.get("DPRO_SEARCH_PROGRAMS") or Path.home() / ".cache" / "dpro-search" / "programs")
    parts = [facts.script, facts.cluster, pairs_text(dict(point.mesh)), repr(sorted(facts.versions.items())), facts.flags]
    if point.chosen:
        parts.append(pairs_text(dict(point.chosen)))
    script = Path(facts.script_path).read_bytes()
    digest = hashlib.sha256(b"\0".join([script, *(part.encode() for part in parts)])).hexdigest()
    return root / digest[:24]
