"""Columns for trees from a compact AST and its loops; needs neither TVM nor PyTorch.

Leaves differ in number, columns do not: sums over leaves, and all of the leaf that works most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from experiments.tensor_programs.table import FEATURES, Programs

Floats = npt.NDArray[np.float64]
CACHES_BYTES = (32 * 1024, 1024 * 1024, 16 * 1024 * 1024)
LINE_BYTES, ELEMENT_BYTES = 64, 4
OPS, BYTES = slice(0, 7), [57 + 18 * buffer + 3 for buffer in range(5)]  # Places in a leaf's features.
# On a scale of log2(1 + x), where x adds up over leaves.
COUNTS = [*range(16), *(57 + 18 * buffer + place for buffer in range(5) for place in (3, 4, 5, 6))]
VECTORIZED = 2


def aggregated(programs: Programs) -> Floats:
    """What trees can use of leaves alone, [programs, columns]: sums, maxima, the heaviest leaf, and how many."""
    rows = []
    for leaves in programs.leaves:
        wide = leaves.astype(float)
        sums = np.log2(1 + np.sum(2.0 ** wide[:, COUNTS] - 1, axis=0))
        rows.append(np.concatenate([sums, wide.max(axis=0), wide[heaviest(wide)], [len(wide)]]))
    return np.array(rows)


def heaviest(leaves: Floats) -> int:
    """The leaf with most float operations and bytes."""
    work = np.sum(2.0 ** leaves[:, OPS] - 1, axis=1) + np.sum(2.0 ** leaves[:, BYTES] - 1, axis=1) / LINE_BYTES
    return int(np.argmax(work))


def of_loops(programs: Programs) -> Floats:
    """What loops tell beyond that: vectors, register tiles and traffic between caches, [programs, columns]."""
    rows = []
    for leaves, nests in zip(programs.leaves, programs.nests, strict=True):
        each = np.array([of_nest(nest) for nest in nests])
        most = heaviest(leaves.astype(float))
        rows.append(np.concatenate([each[most], np.log2(1 + np.sum(2.0 ** each[:, :TRAFFICS] - 1, axis=0)), each.max(axis=0)]))
    return np.array(rows)


TRAFFICS = 2 + len(CACHES_BYTES)  # Leading columns of a nest that add up over leaves.


def of_nest(nest: Sequence[Any]) -> list[float]:
    """Columns of one nest; the first `TRAFFICS` add up over leaves."""
    extents, kinds, unroll, strides = nest[:4]
    whole = float(np.prod(extents, dtype=float))
    vector = float(extents[-1]) if kinds and kinds[-1] == VECTORIZED else 1.0
    inner = [abs(access[-1]) if access else 0 for access in strides]
    steps = whole / vector  # Iterations that no vector saves.
    gathers = sum(stride > 1 for stride in inner) * (vector > 1)
    columns = [np.log2(1 + whole), np.log2(1 + steps), *(np.log2(1 + traffic(extents, strides, size)) for size in CACHES_BYTES)]
    columns += [vector, gathers, sum(stride == 1 for stride in inner), sum(stride == 0 for stride in inner), len(strides)]
    columns += [inner[0] if inner else 0, np.log2(1 + max(inner[1:], default=0)), unroll]
    # Registers hold what inner loops write, as long as these elements are few.
    kept, reads, sums = 1, 0, 1
    for extent, *along in reversed(list(zip(extents, *strides, strict=True))):
        if along[0] != 0:
            if kept * extent > 1024:
                break
            kept *= extent
        else:
            sums *= extent
        reads += sum(step != 0 for step in along[1:])
    columns += [np.log2(kept), np.log2(sums), reads, len(extents)]
    for place in range(1, 6):  # The innermost five loops.
        known = place <= len(extents)
        columns += [np.log2(extents[-place]) if known else -1, kinds[-place] if known else -1]
        columns += [min(abs(access[-place]), 65) if known else -1 for access in [*strides[:3], *([[0] * len(extents)] * 3)][:3]]
    return [float(one) for one in columns]


def traffic(extents: Sequence[int], strides: Sequence[Sequence[int]], size: int) -> float:
    """Bytes that move into a cache of `size` bytes: what inner loops touch while it fits, again if that changes."""
    moved = 0.0
    fits = len(extents)
    for place in range(len(extents) - 1, -1, -1):
        if sum(_touched(extents[place:], access[place:]) for access in strides) > size:
            break
        fits = place
    for access in strides:
        bytes_ = _touched(extents[fits:], access[fits:])
        outer = list(zip(extents[:fits], access[:fits], strict=True))
        while outer and outer[-1][1] == 0 and sum(_touched(extents[fits:], one[fits:]) for one in strides) <= size:
            outer.pop()  # It is still there in the next iteration.
        moved += bytes_ * float(np.prod([extent for extent, _ in outer], dtype=float))
    return moved


def _touched(extents: Sequence[int], steps: Sequence[int]) -> float:
    lines, densest = 1.0, min((abs(step) for step in steps if step), default=0)
    for extent, step in zip(extents, steps, strict=True):
        lines *= extent if step else 1
    return lines * min(LINE_BYTES, max(1, densest) * ELEMENT_BYTES)


def of_isas(isas: Sequence[str]) -> Floats:
    """Floats of a vector, whether multiply-add is one instruction, vector registers, [targets, 3]: facts of the x86-64 levels."""
    levels = {"x86-64-v2": (4, 0, 16), "x86-64-v3": (8, 1, 16), "x86-64-v4": (16, 1, 32)}
    return np.array([levels[isa] for isa in isas], dtype=float)


def operations(programs: Programs) -> Floats:
    """Float operations of each program."""
    return np.array([np.sum(2.0 ** one[:, OPS].astype(float) - 1) for one in programs.leaves])


def moved_bytes(programs: Programs) -> Floats:
    """Distinct bytes that the leaves of each program touch; of a lookup by index, whose distinct ones are not known, all."""
    touched, distinct = ([57 + 18 * buffer + place for buffer in range(5)] for place in (3, 4))
    return np.array([np.sum(2.0 ** np.minimum(one[:, touched], one[:, distinct]).astype(float) - 1) for one in programs.leaves])


def width_check(leaves: npt.NDArray[Any]) -> None:
    """Raises `ValueError` unless leaves have the features that all of this expects."""
    if leaves.ndim != 2 or leaves.shape[1] != FEATURES or not len(leaves):
        raise ValueError(f"a compact AST is an array [leaves, {FEATURES}] with at least one leaf, not {leaves.shape}")
