"""The operators of a profiled MXNet + Horovod rank, divided into steps, and the graph of one step.

A step's forward pass needs every weight, each weight its update, each update the all-reduces of its gradients: so the k-th
all-reduce of a tensor and the k-th round of updates belong to the k-th step, whose forward pass begins after the last enqueue of
the step before.
Names: operators that the network's symbol has are named after their node (with " backward"), others after their type and count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpro_search.collect.readers.mxnet.files import COMM, Profile, Span, Symbol
from dpro_search.collect.readers.mxnet.node_matching import match_backward, match_forward
from dpro_search.collect.recorded_names import made_for_backward
from dpro_search.collect.trace import NodeGraph
from dpro_search.errors import InputError, TraceFormatError

_UPDATE = re.compile(r"_update(_|$)")


@dataclass(frozen=True)
class CarriedTensor:
    """One tensor's all-reduce: index of the tensor, and number of the fused collective that carried it."""

    tensor: int
    collective: int


@dataclass(frozen=True)
class StepOp:
    """An operator; `node` is the symbol's, -1 for none."""

    span: Span
    name: str
    node: int = -1


@dataclass(frozen=True)
class StepComm:
    """An all-reduce as its rank sees it: from the enqueue to the completion."""

    span: Span
    tensor: int
    collective: int


@dataclass(frozen=True)
class StepOps:
    """One step of one rank."""

    index: int  # Number of the step in the job.
    # start_us, end_us: Of its first operator, and the end of its last operator or all-reduce; epoch.
    start_us: float
    end_us: float
    compute: tuple[StepOp, ...]  # Operators that wait for no all-reduce of the step, sorted by start.
    comm: tuple[StepComm, ...]  # One for each tensor.
    updates: tuple[tuple[StepOp, tuple[int, ...]], ...]  # Operators that do wait, and the tensors that each waits for.


def comm_node(tensor: int) -> str:
    """Name of the node that all-reduces a tensor."""
    return f"horovod_allreduce#{tensor}"


def divide_into_steps(
    profile: Profile, carried: Sequence[CarriedTensor], steps: Sequence[int], tensors: int, symbol: Symbol | None
) -> list[StepOps]:
    """Divide a rank's profile into the given steps.

    Parameters
    ----------
    carried
        What each all-reduce of the profile carries, in the order of their completion, which is the same on all ranks.
    tensors
        How many tensors a step all-reduces.

    Raises
    ------
    InputError
        A step does not all-reduce each tensor once, or not all steps have the same number of updates.
    TraceFormatError
        The profile has not the all-reduces of the timeline.
    """
    reduced = sorted((op for op in profile.ops if COMM.search(op.name)), key=lambda op: op.end_us)
    if len(reduced) != len(carried):
        raise TraceFormatError(f"{profile.path}: {len(reduced)} all-reduces, rank 0 has {len(carried)} at the time; record again")
    seen: Counter[int] = Counter()
    comm: list[list[StepComm]] = [[] for _ in steps]
    for span, what in zip(reduced, carried, strict=True):
        if seen[what.tensor] == len(steps):
            break
        comm[seen[what.tensor]].append(StepComm(span, what.tensor, what.collective))
        seen[what.tensor] += 1
    if len(reduced) != tensors * len(steps) or any(len(divided) != tensors for divided in comm):
        raise InputError(
            f"{profile.path}: {len(reduced)} all-reduces of {tensors} gradients in {len(steps)} steps; "
            "a step must all-reduce each gradient once, with one call of the Trainer's step"
        )
    updates = [op for op in profile.ops if _UPDATE.search(op.name)]
    each = len(updates) // len(steps)
    if not updates or each * len(steps) != len(updates):
        raise InputError(
            f"{profile.path}: {len(updates)} updates in {len(steps)} profiled steps; each step must update the weights alike"
        )
    compute = [op for op in profile.ops if not COMM.search(op.name) and not _UPDATE.search(op.name)]
    if not compute:
        raise TraceFormatError(f"{profile.path}: no operator computes; record again")
    starts = _starts(compute, comm)
    divided = []
    for i, (index, start_us) in enumerate(zip(steps, starts, strict=True)):
        until_us = starts[i + 1] if i + 1 < len(starts) else np.inf
        inside = [op for op in compute if start_us <= op.start_us < until_us]
        step_updates = _updates(updates[i * each : (i + 1) * each], comm[i], tensors)
        ends = [span.end_us for span in (*inside, *(c.span for c in comm[i]), *(op.span for op, _ in step_updates))]
        divided.append(
            StepOps(
                index=index,
                start_us=start_us,
                end_us=max(ends),
                compute=_named(inside, symbol),
                comm=tuple(comm[i]),
                updates=step_updates,
            )
        )
    return divided


def step_graph(reference: StepOps, steps: Sequence[StepOps], symbol: Symbol | None, parameters: Sequence[str]) -> NodeGraph:
    """Dependencies of operators in a step, as `reference` shows them. Operators that only other `steps` have get no edges.

    Parameters
    ----------
    parameters
        Names of the tensors' parameters.
    """
    op_of = {op.name: op.span.name for op in reference.compute}
    needs: dict[str, list[str]] = {op.name: [] for op in reference.compute}
    started = {op.name: op.span.start_us for op in reference.compute}
    matched = {(op.node, _is_backward(op.span)): op for op in reference.compute if op.node >= 0}
    before = ""
    for op in reference.compute:
        known = [other.name for key in _symbol_needs(symbol, op) if (other := matched.get(key)) is not None]
        known = [name for name in known if started[name] < op.span.start_us]
        needs[op.name] = known or ([before] if before else [])
        before = op.name
    producers = _producers(reference, symbol, parameters)
    for comm in reference.comm:
        name = comm_node(comm.tensor)
        op_of[name], needs[name] = "HorovodAllreduce", [producers[comm.tensor]]
    for op, tensors in reference.updates:
        op_of[op.name] = op.span.name
        needs[op.name] = [comm_node(tensor) for tensor in tensors]
    for step in steps:
        for op in (*step.compute, *(op for op, _ in step.updates)):
            if op.name not in op_of:
                op_of[op.name], needs[op.name] = op.span.name, []
    names = tuple(op_of)
    number = {name: i for i, name in enumerate(names)}
    ptr = np.cumsum([0, *(len(set(needs[name])) for name in names)])
    idx = [number[need] for name in names for need in sorted(set(needs[name]))]
    return NodeGraph(
        name=names,
        op=tuple(op_of.values()),
        input_ptr=ptr.astype(np.int64),
        input_idx=np.array(idx, np.int64),
        backward=np.array([made_for_backward(name, op) for name, op in op_of.items()], np.bool_),
    )


def _starts(compute: Sequence[Span], comm: Sequence[Sequence[StepComm]]) -> list[float]:
    """Start of each step: of the first operator like the profile's first after the last enqueue of the step before."""
    starts = [compute[0].start_us]
    for step_comm in comm[:-1]:
        enqueued_us = max(c.span.start_us for c in step_comm)
        later = [op for op in compute if op.start_us > enqueued_us]
        alike = next((op.start_us for op in later if op.name == compute[0].name), None)
        starts.append(alike if alike is not None else later[0].start_us if later else enqueued_us)
    return starts


def _named(ops: Sequence[Span], symbol: Symbol | None) -> tuple[StepOp, ...]:
    nodes = dict.fromkeys(range(len(ops)), -1)
    if symbol is not None:
        for match, is_backward in ((match_forward, False), (match_backward, True)):
            rows = [i for i, op in enumerate(ops) if _is_backward(op) is is_backward]
            nodes |= dict(zip(rows, match(symbol, [ops[i] for i in rows]), strict=True))
    unmatched: Counter[str] = Counter()
    named = []
    for i, op in enumerate(ops):
        if symbol is not None and nodes[i] >= 0:
            name = symbol.names[nodes[i]] + (" backward" if _is_backward(op) else "")
        else:
            name = f"{op.name}#{unmatched[op.name]}"
            unmatched[op.name] += 1
        named.append(StepOp(op, name, nodes[i]))
    return tuple(named)


def _updates(ops: Sequence[Span], comm: Sequence[StepComm], tensors: int) -> tuple[tuple[StepOp, tuple[int, ...]], ...]:
    """The updates of a step with the tensors that each needs.

    MXNet's updaters take the parameters in order, several at a time; the engine runs an update when the last of its gradients is
    back. Where the count does not fit that, an update is taken to need what had come back since the update before.
    """
    end_us = {c.tensor: c.span.end_us for c in comm}
    size = -(-tensors // len(ops))
    if -(-tensors // size) == len(ops):
        groups = [tuple(range(first, min(first + size, tensors))) for first in range(0, tensors, size)]
        order = sorted(range(len(groups)), key=lambda g: max(end_us[tensor] for tensor in groups[g]))
        return tuple((StepOp(op, f"{op.name}#{g}"), groups[g]) for op, g in zip(ops, order, strict=True))
    left = sorted(end_us, key=lambda tensor: end_us[tensor])
    updates = []
    for i, op in enumerate(ops):
        back = tuple(tensor for tensor in left if end_us[tensor] <= op.start_us or i + 1 == len(ops))
        left = [tensor for tensor in left if tensor not in back]
        updates.append((StepOp(op, f"{op.name}#{i}"), back))
    return tuple(updates)


def _producers(step: StepOps, symbol: Symbol | None, parameters: Sequence[str]) -> dict[int, str]:
    """Operator that makes each tensor's gradient: the last backward of a node with its parameter, else what ended last before."""
    backward: dict[str, StepOp] = {}
    if symbol is not None:
        for op in step.compute:
            if op.node >= 0 and _is_backward(op.span):
                for parameter in symbol.parameters[op.node]:
                    backward[symbol.names[parameter]] = op
    by_end = sorted(step.compute, key=lambda op: op.span.end_us)
    producer_of = {}
    for comm in step.comm:
        producer = backward.get(parameters[comm.tensor])
        if producer is None or producer.span.end_us > comm.span.start_us:
            producer = next((op for op in reversed(by_end) if op.span.end_us <= comm.span.start_us), by_end[0])
        producer_of[comm.tensor] = producer.name
    return producer_of


def _symbol_needs(symbol: Symbol | None, op: StepOp) -> list[tuple[int, bool]]:
    """Operators that an operator needs along the network's edges, forward and in reverse: (node, whether its backward)."""
    if symbol is None or op.node < 0:
        return []
    if not _is_backward(op.span):
        return [(source, False) for source in symbol.inputs[op.node]]
    users = [(node, True) for node, row in enumerate(symbol.inputs) if op.node in row]
    return [*users, (op.node, False)] if users else []


def _is_backward(op: Span) -> bool:
    return op.name.startswith("_backward_")
