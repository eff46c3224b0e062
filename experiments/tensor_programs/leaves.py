"""Columns of single leaves on one target: loops, strides, and an estimate of cycles; needs neither TVM nor PyTorch.

The estimate follows from the loop nest: instructions of the innermost body for vectors of the target, loads (a gather loads each
number), dependent sums that wait for each other, and bytes that move into each cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from experiments.tensor_programs.features import CACHES_BYTES, ELEMENT_BYTES, LINE_BYTES, VECTORIZED, of_isas, of_nest, traffic
from experiments.tensor_programs.table import FEATURES, Programs

Floats = npt.NDArray[np.float64]
FMA_LATENCY_CYCLES = 4  # A multiply-add on x86-64 processors since 2015 (Fog, instruction tables).
FUNCTION_CYCLES, CONFLICT_CYCLES = 12.0, 4.0  # exp and the like, and a load that misses L1: starting values, as below.
L1_SETS, L1_WAYS = 64, 12  # 48 kB: Golden Cove; 8 ways on Zen.
CACHE_BYTES_PER_CYCLE = (32.0, 16.0, 4.0)  # Into L1, L2 and L3, of one core: starting values that the fit corrects.


@dataclass(frozen=True, kw_only=True)
class LeafRows:
    """All leaves of some programs on one target after the other: [targets * leaves, columns]."""

    columns: Floats
    base: Floats  # log(estimated us), [targets * leaves].
    program: npt.NDArray[np.int64]  # Which of targets * programs a leaf belongs to; leaves of one stand together.

    @staticmethod
    def of(programs: Programs) -> LeafRows:
        """Rows of a table, in the order of its targets."""
        leaf_counts = programs.leaf_counts
        stored = np.concatenate(programs.leaves).astype(float)
        nests = [nest for program in programs.nests for nest in program]
        counts = 2.0 ** stored[:, :6] - 1
        general = np.array([of_nest(nest) for nest in nests])
        moved = np.array([[traffic(nest[0], nest[3], size) for size in CACHES_BYTES] for nest in nests])
        owner = np.repeat(np.arange(len(programs)), leaf_counts)
        columns, base, places = [], [], []
        for number, facts in enumerate(of_isas(programs.isas)):
            lanes, fused, registers = int(facts[0]), bool(facts[1]), int(facts[2])
            cycles = np.array([_cycles(nest, ops, lanes, fused, registers) for nest, ops in zip(nests, counts, strict=True)])
            transfers = moved / np.array(CACHE_BYTES_PER_CYCLE)
            # Arithmetic and conflicts are left to the trees: with them in the estimate, errors on other models were larger.
            estimate = np.maximum(cycles[:, 1:4].max(axis=1), transfers.max(axis=1)) + cycles[:, 5] + 20
            total = np.bincount(owner, estimate, len(programs))
            context = np.column_stack([np.log2(total)[owner], np.log2(estimate / total[owner]), leaf_counts[owner]])
            columns.append(
                np.concatenate(
                    [stored, general, np.log2(1 + cycles), np.log2(estimate)[:, None], context, np.tile(facts, (len(nests), 1))],
                    axis=1,
                )
            )
            base.append(np.log(estimate / 3000))  # Cycles at 3 GHz.
            places.append(owner + number * len(programs))
        return LeafRows(columns=np.concatenate(columns), base=np.concatenate(base), program=np.concatenate(places))


def _cycles(nest: Sequence[Any], counts: Floats, lanes: int, fused: bool, registers: int) -> list[float]:
    """Cycles of arithmetic, loads, stores, waiting for sums and conflicts in L1, then of loop overhead; and what they follow from.

    counts: float operations of the leaf by kind, in the order of `PerStoreFeature`: multiply-add, add, multiply, divide, compare,
    functions.
    """
    extents, kinds, _, strides = nest[:4]
    if not extents:
        return [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    last, inner = extents[-1], [abs(access[-1]) for access in strides]
    vector = kinds[-1] == VECTORIZED or (inner[0] == 1 and all(step <= 1 for step in inner[1:]))
    used = min(lanes, last) if vector else 1
    steps = math.prod(extents[:-1]) * (math.ceil(last / lanes) if vector else last)
    gathered = sum(used if step > 1 else 1 for step in inner[1:])
    sums = [place for place, step in enumerate(strides[0]) if step == 0]
    accumulators = 1.0
    if sums:
        below = math.prod(extents[sums[-1] + 1 :])
        accumulators = max(1.0, below / (used if sums[-1] < len(extents) - 1 else 1))
    waiting = min(1.0, 1 / accumulators) * steps * FMA_LATENCY_CYCLES if sums else 0.0
    simple, slow = counts[0] * (1 if fused else 2) + counts[1] + counts[2] + counts[4], counts[3] * 4 + counts[5] * FUNCTION_CYCLES
    inside = sums[-1] + 1 if sums else max(0, len(extents) - 2)
    near = max((_pressure(extents[inside:], access[inside:]) for access in strides), default=0.0)
    wider = max((_pressure(extents[max(0, inside - 1) :], access[max(0, inside - 1) :]) for access in strides), default=0.0)
    conflicts = steps * gathered * CONFLICT_CYCLES if near > 1 else 0.0
    overhead = steps / (last if kinds[-1] != VECTORIZED and nest[2] else 1.0)
    return [
        (simple / 2 + slow) / used, steps * gathered / 2, steps * (used if inner[0] > 1 else 1) / (4 if sums else 1), waiting,
        conflicts, overhead, accumulators, float(used), max(0.0, accumulators - registers), near, wider,
    ]  # fmt: skip


def _pressure(extents: Sequence[int], steps: Sequence[int]) -> float:
    """Lines that loops touch for each line that L1 can hold of them: strides of large powers of two reach few of its sets."""
    lines, finest = 1, L1_SETS * LINE_BYTES
    for extent, step in zip(extents, steps, strict=True):
        apart = abs(step) * ELEMENT_BYTES
        if apart >= LINE_BYTES:
            lines *= extent
            finest = min(finest, apart & -apart)
    return lines / (L1_WAYS * L1_SETS / max(1.0, finest / LINE_BYTES)) if lines > 1 else 0.0


def check(rows: LeafRows) -> None:
    """Raises `ValueError` if a column is no number: trees would take it as missing."""
    if not np.isfinite(rows.columns).all() or rows.columns.shape[1] <= FEATURES:
        raise ValueError("a column of a leaf is no number")
