"""FLOPs of recorded ops from the shapes of their inputs: matrix products, convolutions and attention, nearly all of a step.

A multiplication and an addition are two. The formulas are those of ``torch.utils.flop_counter``. A convolution's output has the
shape of the gradient that its backward op reads, so convolutions count where their backward pass was recorded: once forward, twice
backward.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from dpro_search.collect.trace import EventKind, Events, Ints, Shapes, Trace

_TENSOR_FLOAT = re.compile(r"tf32|tensorop_s1688|tensorop_s16816|s1688gemm|s16816gemm")
_PRECISIONS = {"float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16"}
_FORWARD_CONVOLUTIONS = ("aten::convolution", "aten::convolution_overrideable")


class StepFlops(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs of one rank in one step, mean over ranks of the median step."""

    flops: float
    precision: str  # Of most of them, as `cluster.device.Precision` has it; empty where it is not known.
    left_out: str = ""  # What is not in it, for people; empty: nothing that is known of.


def step_flops(trace: Trace) -> StepFlops | None:
    """FLOPs of a step; None where no shapes of such ops were recorded."""
    events = trace.events
    rows = np.flatnonzero((events.kind == EventKind.OP) & (events.shapes >= 0) & (events.step >= 0))
    named = np.unique(events.name[rows]).tolist()
    formula = {name: formula_of_op for name in named if (formula_of_op := _FORMULAS.get(trace.names[name])) is not None}
    counted = _outermost(events, rows[np.isin(events.name[rows], list(formula))])
    flops = np.array(
        [
            _safely(formula[name], trace.shapes[shapes])
            for name, shapes in zip(events.name[counted].tolist(), events.shapes[counted].tolist(), strict=True)
        ]
    )
    if not flops.any():
        return None
    pairs, place = np.unique(np.stack((events.step[counted], events.rank[counted])), axis=1, return_inverse=True)
    of_step = np.bincount(place.reshape(-1), flops, pairs.shape[1])
    ranks = [float(np.median(of_step[pairs[1] == rank])) for rank in np.unique(pairs[1]).tolist()]
    most: Counter[str] = Counter()
    for dtype, number in zip(events.dtype[counted].tolist(), flops.tolist(), strict=True):
        most[trace.dtypes[dtype] if dtype >= 0 else ""] += number
    return StepFlops(flops=float(np.mean(ranks)), precision=_precision(trace, most.most_common(1)[0][0]), left_out=_left_out(trace))


def _outermost(events: Events, rows: Ints) -> Ints:
    """Without ops within others, as old profiles have each op again for each layer of the dispatcher."""
    order = rows[np.lexsort((-events.end_us[rows], events.start_us[rows], events.stream[rows], events.rank[rows]))]
    kept, thread, until_us = [], (-1, -1), -np.inf
    columns = (order, events.rank[order], events.stream[order], events.start_us[order], events.end_us[order])
    for row, rank, stream, start_us, end_us in zip(*(column.tolist() for column in columns), strict=True):
        if (rank, stream) != thread:
            thread, until_us = (rank, stream), -np.inf
        if start_us >= until_us:
            kept.append(row)
            until_us = end_us
    return np.array(kept, np.int64)


def _precision(trace: Trace, dtype: str) -> str:
    """The precision of products of an element type. Single precision is TF32 if kernels of TF32 were recorded."""
    if dtype == "float32":
        kernels = np.unique(trace.events.name[trace.events.kind == EventKind.KERNEL]).tolist()
        if any(_TENSOR_FLOAT.search(trace.names[name]) for name in kernels):
            return "tf32"
    return _PRECISIONS.get(dtype, "")


def _left_out(trace: Trace) -> str:
    events = trace.events

    def count(names: Iterable[str]) -> int:
        of = [number for number, name in enumerate(trace.names) if name in names]
        return len(_outermost(events, np.flatnonzero((events.kind == EventKind.OP) & np.isin(events.name, of))))

    forward = count(_FORWARD_CONVOLUTIONS)
    missing = forward - count(_BACKWARD_CONVOLUTIONS)
    return f"{missing} of {forward} convolutions, whose outputs' sizes were not recorded" if missing > 0 else ""


def _safely(formula: Callable[[Shapes], float], shapes: Shapes) -> float:
    try:
        return formula(shapes)
    except (IndexError, ValueError):
        return 0.0  # an overload with other inputs


def _product(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    *_, rows, inner = a
    *batch, _, columns = b
    return 2.0 * math.prod(batch) * rows * inner * columns


def _attention(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> float:
    batch, heads, rows, inner = query
    return 2.0 * batch * heads * rows * key[2] * (inner + value[3])


def _convolution(gradient: tuple[int, ...], weight: tuple[int, ...]) -> float:
    """Forward and backward."""
    if len(gradient) != len(weight) or len(weight) < 3:
        raise ValueError
    return 3 * 2.0 * math.prod(gradient) * math.prod(weight[1:])


_BACKWARD_CONVOLUTIONS: dict[str, Callable[[Shapes], float]] = {
    "aten::convolution_backward": lambda shapes: _convolution(shapes[0], shapes[2]),
    "aten::convolution_backward_overrideable": lambda shapes: _convolution(shapes[0], shapes[2]),
    "aten::cudnn_convolution_backward": lambda shapes: _convolution(shapes[1], shapes[2]),  # to PyTorch 1.10
}
_FORMULAS: dict[str, Callable[[Shapes], float]] = {
    "aten::mm": lambda shapes: _product(shapes[0], shapes[1]),
    "aten::bmm": lambda shapes: _product(shapes[0], shapes[1]),
    "aten::addmm": lambda shapes: _product(shapes[1], shapes[2]),
    "aten::baddbmm": lambda shapes: _product(shapes[1], shapes[2]),
    "aten::_scaled_mm": lambda shapes: _product(shapes[0], shapes[1]),
    **_BACKWARD_CONVOLUTIONS,
}
for _kind in ("flash", "efficient", "cudnn"):
    _op = f"aten::_scaled_dot_product_{_kind}_attention"
    _FORMULAS[_op] = lambda shapes: _attention(shapes[0], shapes[1], shapes[2])
    _FORMULAS[f"{_op}_backward"] = lambda shapes: 2.5 * _attention(shapes[1], shapes[2], shapes[3])
