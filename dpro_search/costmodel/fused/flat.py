"""Clusters of ops as arrays, for compiled passes that look at many at a time; made by `flatten.py`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats, Ints

Records = npt.NDArray[np.void]

# Fields of a distinct op. Places in tuples of names are -1 where the op is in none of them.
OP = np.dtype(
    [
        ("way", "i8"),  # how it computes, one of the constants of `op_parts`
        *((name, "i8") for name in ("kind", "class_", "refined", "heavy")),  # in KINDS, CLASSES, REFINED, HEAVY
        ("part", "i8"),  # in PART_CLASSES
        ("flops", "f8"),
        *((name, "i8") for name in ("leads", "follows", "strided_grad", "multiplies")),  # 1: yes
        *((name, "f8") for name in ("batches", "rows", "depth", "columns", "pixels", "holes", "swapped", "pairs")),
        *((name, "f8") for name in ("strided", "near_misses", "far_misses")),  # of the product's operands
    ]
)
# Fields of a distinct tensor; its shape is a piece of all lengths.
TENSOR = np.dtype([("bytes", "f8"), ("start", "i8"), ("end", "i8"), ("narrow", "i8")])


class FlatClusters(NamedTuple):
    """n clusters with k ops and m tensors in all."""

    op_ptr: Ints  # Begin of the ops of each cluster, [n + 1].
    # op, us: Of each op: its place in `ops`, and its time by itself, [k].
    op: Ints
    us: Floats
    # input_ptr, inputs, output_ptr, outputs: Tensors of each op, by their numbers within its cluster.
    input_ptr: Ints
    inputs: Ints
    output_ptr: Ints
    outputs: Ints
    tensor_ptr: Ints  # Begin of the tensors of each cluster, [n + 1].
    # tensor, role: Of each tensor: its place in `types`, and its role as a place in `ROLES`, [m].
    tensor: Ints
    role: Ints
    # ops, types: What is known of the distinct ops, `OP`, and of the distinct types of tensors, `TENSOR`.
    ops: Records
    types: Records
    lengths: Ints  # Lengths of the axes of `types`.


def pointers(counts: Iterable[int]) -> Ints:
    """Begin of each of some rows that lie end to end, [rows + 1]."""
    return np.array([0, *accumulate(counts)], dtype=np.int64)
