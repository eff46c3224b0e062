"""Matches operator events to nodes of the symbol graph, and communication events to the parameters that they carry.

Events are named by operator type only. Within a step they are matched in time order: an event is the first node of its type in the
graph whose inputs are all there; a backward event is matched likewise on the reversed graph. So chains, shortcuts and parallel
branches are distinguished by type, path and order. (Serving first what was ready first would model the engine's queue, but
operators that share a scratch buffer run in the order of the graph, whatever was ready: the graph's order is the better guess.)
Gradients are sent when their node's backward has ended: in the order of these ends and, for one node, of the sorted parameter
names, which is the order of their keys and priorities. The engine of each process may send those of one node in an order of its
own: `identified_by_size` and `identified_by_order` return corrections, a communication and the parameter whose gradient it is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from dpro_search.collect.readers.mxnet.files import Span, Symbol
from dpro_search.collect.readers.mxnet.servers import Comm

_BACKWARD_TYPES = {
    "Flatten": ("_backward_copy", "_backward_Flatten"),
    "Reshape": ("_backward_copy", "_backward_reshape"),
    "elemwise_add": ("_backward_add",),
    "_plus": ("_backward_add",),
    "broadcast_add": ("_backward_broadcast_add",),
    "batch_dot": ("batch_dot", "_backward_batch_dot"),
    "transpose": ("transpose", "_backward_transpose"),
    "SliceChannel": ("_backward_SliceChannel", "Concat", "concat"),
}
SAME_TYPE = frozenset(("batch_dot", "transpose", "Concat", "concat"))  # types of both forward and backward events
_BACKWARD_EVENTS = {"batch_dot": 2}  # one for each of its inputs
_SAME_SIZE = 4  # sizes that differ by less are not distinguished by how long they are under way
_LEAST_SHARE = 0.01  # A smaller share of the operators' time changes no prediction noticeably.


def unmatched_warnings(unmatched_us: float, op_us: float) -> list[str]:
    """One line, if operators that are no node of the graph take a noticeable part of the operators' time."""
    share = unmatched_us / op_us if op_us else 0.0
    if share < _LEAST_SHARE:
        return []
    return [f"{share:.1%} of the operators' time is of no node of the network's graph: is symbol.json of the network that ran?"]


def match_forward(symbol: Symbol, ops: Sequence[Span]) -> list[int]:
    """Node of each event of one step, -1 for none; the events are sorted by start."""
    needs = [[i for i in row if symbol.ops[i] != "null"] for row in symbol.inputs]
    return _match(ops, [[op] if op != "null" else [] for op in symbol.ops], needs, range(len(symbol.ops)))


def match_backward(symbol: Symbol, ops: Sequence[Span]) -> list[int]:
    """Node whose backward each event of one step is, -1 for none; the events are sorted by start."""
    consumers: list[list[int]] = [[] for _ in symbol.ops]
    for node, row in enumerate(symbol.inputs):
        for source in row:
            consumers[source].append(node)
    types = [_backward_types(op) for op in symbol.ops]
    present = {op.name for op in ops}
    # A node whose backward leaves no event (an identity) must not hold up those before it.
    needs = [_visible(consumers, types, present, node) for node in range(len(symbol.ops))]
    count = [_BACKWARD_EVENTS.get(op, 1) for op in symbol.ops]
    return _match(ops, types, needs, range(len(symbol.ops) - 1, -1, -1), count)


def _backward_types(op: str) -> list[str]:
    """Types of the events that the backward of a node of a type leaves."""
    if op == "null":
        return []
    return list(_BACKWARD_TYPES.get(op, (f"_backward_{op}", f"_backward{op}")))


def match_gradients(symbol: Symbol, backward: Sequence[tuple[Span, int]], comm: Sequence[Span]) -> list[int]:
    """Parameter (a node of the graph) that each communication of one step carries; -1 for all if they do not fit.

    Parameters
    ----------
    backward
        Backward events and their nodes.
    comm
        Sorted by start.
    """
    ready = [
        (span.end_us, symbol.names[parameter], parameter)
        for span, node in backward
        if node >= 0
        for parameter in symbol.parameters[node]
    ]
    last: dict[int, tuple[float, str, int]] = {}
    for entry in sorted(ready):
        last[entry[2]] = entry  # a shared parameter's gradient is complete with its last part
    order = sorted(last.values())
    if len(order) != len(comm) or any(span.start_us < end_us for span, (end_us, _, _) in zip(comm, order, strict=True)):
        return [-1] * len(comm)
    return [parameter for _, _, parameter in order]


def _visible(consumers: Sequence[Sequence[int]], types: Sequence[Sequence[str]], present: set[str], node: int) -> list[int]:
    """The nearest consumers whose backward leaves events."""
    visible, seen, stack = [], {node}, list(consumers[node])
    while stack:
        other = stack.pop()
        if other in seen:
            continue
        seen.add(other)
        if present.intersection(types[other]):
            visible.append(other)
        else:
            stack += consumers[other]
    return visible


def _match(
    ops: Sequence[Span],
    types: Sequence[Sequence[str]],
    needs: Sequence[Sequence[int]],
    order: Sequence[int],
    count: Sequence[int] | None = None,
) -> list[int]:
    """Node of each event, -1 for none; a node has `count` events, one if that is left out, and is there with its first."""
    of_type: dict[str, list[int]] = {}
    for node in order:
        for kind in types[node]:
            of_type.setdefault(kind, []).append(node)
    left = list(count) if count is not None else [1] * len(types)
    end_us: dict[int, float] = {}
    node_of_op = []
    for op in ops:
        best = -1
        for node in of_type.get(op.name, []):
            if not left[node]:
                continue
            ready = max((end_us.get(need, math.inf) for need in needs[node]), default=-math.inf)
            if ready <= op.start_us:
                best = node
                break
        if best >= 0:
            left[best] -= 1
            end_us[best] = max(op.end_us, end_us.get(best, -math.inf))
        node_of_op.append(best)
    return node_of_op


def identified_by_size(of_rank: Sequence[Comm], least_size: Callable[[int], int]) -> Iterator[tuple[Comm, int]]:
    """Identify gradients of one worker by how long they are under way on average: the larger one longer."""
    groups: dict[int, dict[int, list[Comm]]] = defaultdict(lambda: defaultdict(list))
    for comm in of_rank:
        if comm.node >= 0:
            groups[comm.node][comm.step].append(comm)
    for by_step in groups.values():
        rows = [sorted(row, key=lambda comm: comm.start_us) for row in by_step.values()]
        sent = [comm.parameter for comm in rows[0]]
        if len(sent) < 2 or any(sorted(comm.parameter for comm in row) != sorted(sent) for row in rows):
            continue
        ordered = sorted(sent, key=least_size)
        if not _far_apart([least_size(parameter) for parameter in ordered]):
            continue
        took_us = [sum(row[place].end_us - row[place].start_us for row in rows) for place in range(len(sent))]
        places = sorted(range(len(sent)), key=lambda place: took_us[place])
        for row in rows:
            for parameter, place in zip(ordered, places, strict=True):
                yield row[place], parameter


def identified_by_order(workers: Sequence[Sequence[Comm]], least_size: Callable[[int], int]) -> Iterator[tuple[Comm, int]]:
    """Identify gradients of about one size by the order in which they come back, which is the same on all workers."""
    groups: dict[tuple[int, int], list[list[Comm]]] = defaultdict(lambda: [[] for _ in workers])
    for rank, of_rank in enumerate(workers):
        for comm in of_rank:
            if comm.node >= 0:
                groups[comm.step, comm.node][rank].append(comm)
    for first, *others in groups.values():
        if len(first) > 1 and _far_apart(sorted(least_size(comm.parameter) for comm in first)):
            continue
        order = [comm.parameter for comm in sorted(first, key=lambda comm: comm.end_us)]
        for other in others:
            if len(other) == len(order):
                yield from zip(sorted(other, key=lambda comm: comm.end_us), order, strict=True)


def _far_apart(sizes: Sequence[int]) -> bool:
    return all(b >= a * _SAME_SIZE for a, b in pairwise(sizes))
