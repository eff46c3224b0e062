"""Compact ASTs of GPU kernels: loop nests whose leaves are the statements that compute, load or store.

A tuned kernel is one source with parameters: block and tile sizes, vector widths, which data go through shared memory. The source
and the parameters together are a tensor program, as CDMPP (EuroSys 2024, arXiv 2311.09690) describes programs of a compiler: a
front end writes the loops and the accesses down, and what follows never sees the names of the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import prod


class LoopKind(IntEnum):
    """The way in which iterations of a loop run."""

    GRID = 0  # in blocks of their own
    THREAD = 1  # in threads of a block
    SERIAL = 2
    UNROLLED = 3
    VECTOR = 4  # in one load or store


class Memory(IntEnum):
    """The memory that an access reaches."""

    REGISTER = 0
    GLOBAL = 1
    READ_ONLY = 2  # global memory through the read-only (texture) cache
    SHARED = 3
    CONSTANT = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """A loop of a nest."""

    extent: int
    kind: LoopKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """A buffer that a leaf reads or writes.

    Attributes
    ----------
    strides
        Elements by which the address moves with each loop of the leaf, outermost first.
    """

    memory: Memory
    strides: tuple[int, ...]
    element_bytes: int = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """A statement in its loops.

    Attributes
    ----------
    loops
        Outermost first; of the loops over threads the last one runs along the lanes of a warp.
    accesses
        The store first.
    operations
        Arithmetic operations of one iteration.
    guarded
        A condition on indices decides whether an iteration does anything, because the loops cover more than the problem.
    """

    loops: tuple[Loop, ...]
    accesses: tuple[Access, ...]
    operations: float = 0.0
    guarded: bool = False

    def __post_init__(self) -> None:
        for access in self.accesses:
            if len(access.strides) != len(self.loops):
                raise ValueError(f"an access has {len(access.strides)} strides in a nest of {len(self.loops)} loops")

    def extent(self, *kinds: LoopKind) -> int:
        """Iterations of all loops of these kinds together."""
        return prod(loop.extent for loop in self.loops if loop.kind in kinds)

    @property
    def iterations(self) -> int:
        """Iterations of all loops together."""
        return prod(loop.extent for loop in self.loops)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelProgram:
    """A kernel with its parameters.

    Attributes
    ----------
    leaves
        Statements in the order in which they run.
    shared_bytes
        Shared memory of a block.
    needed
        Iterations of the heaviest leaf that the problem needs, over those that run: blocks may reach beyond the problem.
    variant
        Numbers that tell apart bodies of the same loops and accesses, as which of several formulas a kernel uses.
    """

    leaves: tuple[Leaf, ...]
    shared_bytes: int = 0
    needed: float = 1.0
    variant: tuple[float, ...] = ()

    @property
    def heaviest(self) -> Leaf:
        """The leaf that runs most operations and accesses."""
        return max(self.leaves, key=lambda leaf: leaf.iterations * (leaf.operations + len(leaf.accesses)))

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.heaviest.extent(LoopKind.THREAD)
