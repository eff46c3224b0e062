"""`Flow`: the forward pass of a captured step as a dataflow graph, with the backward pass of each of its ops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dpro_search.collect.capture import CapturedGraph, CapturedOp, StepPhase
from dpro_search.collect.capture.graph_file import SavedTensor

ALLOCATIONS = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "resize_")
)
"""Ops that move nothing."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Ops of the forward pass by their place in the step, in its order.

    Attributes
    ----------
    sources
        For each op the ops whose results it reads; parameters and inputs of the model have none.
    readers
        The ops of the forward pass that read an op's results.
    backward
        Ops of the backward pass by the op whose they are.
    saved
        What autograd keeps of an op's results.
    parameter_tensors
        Storages of parameters and of what is computed from them alone.
    """

    ops: Mapping[int, CapturedOp]
    sources: Mapping[int, tuple[int, ...]]
    readers: Mapping[int, tuple[int, ...]]
    backward: Mapping[int, tuple[CapturedOp, ...]]
    saved: Mapping[int, tuple[SavedTensor, ...]]
    parameter_tensors: frozenset[int]

    def is_of_parameters(self, op: CapturedOp) -> bool:
        """Whether an op reads parameters alone, as a cast does."""
        return bool(op.inputs) and all(tensor.storage in self.parameter_tensors for tensor in op.inputs)


def flow_of(graph: CapturedGraph) -> Flow:
    """The data flow of the step on one device."""
    step = graph.plain
    parameters = frozenset(step.parameter_tensors)
    ops = {number: op for number, op in enumerate(step.ops) if op.phase is StepPhase.FORWARD and op.name not in ALLOCATIONS}
    writers: dict[int, list[int]] = defaultdict(list)
    sources: dict[int, tuple[int, ...]] = {}
    readers: dict[int, list[int]] = defaultdict(list)
    for number, op in ops.items():
        producers = dict.fromkeys(writers[tensor.storage][-1] for tensor in op.inputs if writers.get(tensor.storage))
        sources[number] = tuple(producers)
        for source in producers:
            readers[source].append(number)
        for tensor in op.outputs:
            writers[tensor.storage].append(number)
    last = max(ops, default=-1)
    backward: dict[int, list[CapturedOp]] = defaultdict(list)
    for op in step.ops:
        if op.phase is StepPhase.BACKWARD and op.name not in ALLOCATIONS:
            backward[_nearest(op.forward, ops, last)].append(op)
    saved: dict[int, list[SavedTensor]] = defaultdict(list)
    for each in step.saved:
        if each.storage not in parameters and writers.get(each.storage):
            saved[writers[each.storage][-1]].append(each)
    return Flow(
        ops=ops,
        sources=sources,
        readers={number: tuple(producers) for number, producers in readers.items()},
        backward={number: tuple(producers) for number, producers in backward.items()},
        saved={number: tuple(producers) for number, producers in saved.items()},
        parameter_tensors=parameters,
    )


def _nearest(number: int, ops: Mapping[int, CapturedOp], last: int) -> int:
    """The op itself, or the last one before it that is not an allocation."""
    if number < 0:
        return last
    while number > 0 and number not in ops:
        number -= 1
    return number if number in ops else last


def segments_of(flow: Flow, units: Sequence[str]) -> tuple[list[list[int]], str]:
    """Ops before the repeated modules, of each of them, and behind them; and why there are none, if so."""
    order = list(flow.ops)
    by_op = {number: _unit(flow.ops[number].module, units) for number in order}
    labelled = [number for number in order if by_op[number] is not None]
    if len({by_op[number] for number in labelled}) < 2:
        return _halves(order), "it has no modules that repeat"
    first, last = labelled[0], labelled[-1]
    segments: list[list[int]] = [[number for number in order if number < first]]
    seen: list[str | None] = []
    for number in (number for number in order if first <= number <= last):
        unit = by_op[number]
        if unit is not None and (not seen or unit != seen[-1]):
            if unit in seen:
                return _halves(order), f"module {unit} runs in parts, with others between"
            seen.append(unit)
            segments.append([])
        segments[-1].append(number)
    segments.append([number for number in order if number > last])
    if not segments[0]:
        segments = [segments[1], *segments[2:]]
    return segments, "" if len(segments) > 3 else "it has too few modules that repeat"


def _halves(order: list[int]) -> list[list[int]]:
    middle = max(len(order) // 2, 1)
    return [order[:middle], order[middle:]]


def _unit(module: str, units: Sequence[str]) -> str | None:
    return next((unit for unit in units if module == unit or module.startswith(f"{unit}.")), None)
