"""`regions_of`: which ops of a block tensor parallel ranks split: those between a linear layer split by columns and one by rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dpro_search.collect.capture import CapturedOp
from dpro_search.parallel.captured.flow import Flow

MATMULS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm"))


class Regions(NamedTuple):
    """Ops whose results are split, and how the linear layers are."""

    split: frozenset[int]
    columns: frozenset[int]
    rows: frozenset[int]
    refused: str = ""  # Why nothing is split, although layouts are known.


def is_matmul(op: CapturedOp) -> bool:
    """Whether an op is a product of matrices."""
    return op.name in MATMULS


def least_inputs(op: CapturedOp) -> int:
    """How many tensors an op of its kind reads at least."""
    return 3 if "scaled_dot_product" in op.name else 2 if is_matmul(op) or op.name == "aten::convolution" else 0


def regions_of(flow: Flow, segment: Sequence[int], layouts: Mapping[str, str]) -> Regions:
    """The ops of one block that are split. If a split tensor meets one that is not, other than in a linear layer split by rows,
    nothing is split.
    """
    inside = set(segment)
    split: set[int] = set()
    columns: set[int] = set()
    rows: set[int] = set()
    casts: set[int] = set()  # of weights that are split
    for number in segment:
        op = flow.ops[number]
        layout = layouts.get(op.module) if is_matmul(op) else None
        read = [source for source in flow.sources[number] if not flow.is_of_parameters(flow.ops[source])]
        have = [source for source in read if source in split]
        if flow.is_of_parameters(op):
            casts.update([number] if op.module in layouts and len(op.inputs[0].shape) > 1 else [])
            continue
        if layout == "columns":
            if have:
                return _refused(op, "reads what is split already")
            columns.add(number)
            split.add(number)
        elif layout == "rows":
            if not have:
                return _refused(op, "is split by rows, and what it reads is not split")
            rows.add(number)
        elif have:
            if any(source not in split and _grows(flow.ops[source]) for source in read):
                return _refused(op, "mixes what tensor parallel ranks split with what they do not")
            split.add(number)
    for number in split:
        if any(reader not in inside for reader in flow.readers.get(number, ())):
            return _refused(flow.ops[number], "is split, and another block reads it")
    return Regions(frozenset(split | casts) if rows else frozenset(), frozenset(columns), frozenset(rows))


def _refused(op: CapturedOp, why: str) -> Regions:
    return Regions(frozenset(), frozenset(), frozenset(), f"{op.name} in {op.module or 'the model'} {why}")


def _grows(op: CapturedOp) -> bool:
    """Whether an op's results grow with the batch: constants such as masks and rotations are the same for all heads."""
    return any(tensor.powers[0] for tensor in op.outputs)
