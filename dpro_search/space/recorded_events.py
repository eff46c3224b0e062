"""Launches, enqueues, and where host threads start and stop, from the events of a trace with streams before they become ops."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import DependencyKind, EventKind, Floats, Ints, Role, Trace
from dpro_search.graph.dataflow import OpKind

Bools = npt.NDArray[np.bool_]

DEVICE_KINDS = (EventKind.KERNEL, EventKind.COPY, EventKind.COLLECTIVE, EventKind.SERVER)
CALL_KINDS = (EventKind.RUNTIME, EventKind.SYNC)

# What an op is to its event; also the order of points of one thread at one time.
RESUMES, ENDS, LAUNCHES, WAITS, RUNS, PAUSES = range(6)


def steps_in_order(trace: Trace) -> tuple[int, ...]:
    order = np.argsort(trace.steps.end_us, kind="stable")
    return tuple(int(step) for step in dict.fromkeys(trace.steps.index[order].tolist()))


def incoming(trace: Trace) -> dict[int, list[tuple[int, int]]]:
    """(source, kind) of the dependencies of each event."""
    needs = trace.dependencies
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for source, target, kind in zip(needs.source.tolist(), needs.target.tolist(), needs.kind.tolist(), strict=True):
        found[target].append((source, kind))
    return found


def launched(trace: Trace) -> dict[int, int]:
    """The first op that each call launched."""
    needs = trace.dependencies
    launches = np.flatnonzero(needs.kind == DependencyKind.LAUNCH)[::-1]
    return dict(zip(needs.source[launches].tolist(), needs.target[launches].tolist(), strict=True))


def last_enqueues(trace: Trace, in_step: Bools) -> dict[int, float]:
    """When the last rank enqueued, for each part of a collective that several ranks are seen to enqueue."""
    events = trace.events
    parts = np.flatnonzero((events.collective >= 0) & (events.kind == EventKind.COLLECTIVE) & in_step)
    if not len(parts):
        return {}
    _, group, count = np.unique(events.collective[parts], return_inverse=True, return_counts=True)
    last_us = np.full(len(count), -np.inf)
    np.maximum.at(last_us, group, events.start_us[parts])
    shared = count[group] > 1
    return dict(zip(parts[shared].tolist(), last_us[group[shared]].tolist(), strict=True))


def host_points(
    trace: Trace, sources: dict[int, list[tuple[int, int]]], host: Ints, in_step: Bools
) -> list[tuple[int, float, int, int]]:
    """(thread, time, what happens, event) where a rank's host threads launch, wait, or are waited for."""
    events, needs = trace.events, trace.dependencies
    mine = np.zeros(len(events), np.bool_)
    mine[host] = True
    points = []
    leaving = mine[needs.source] & in_step[needs.target]
    for kind, order in ((DependencyKind.LAUNCH, LAUNCHES), (DependencyKind.HOST, ENDS)):
        for event in np.unique(needs.source[leaving & (needs.kind == kind)]).tolist():
            time_us = events.start_us[event] if order == LAUNCHES else events.end_us[event]
            points.append((int(events.stream[event]), float(time_us), order, event))
    arriving = mine[needs.target] & in_step[needs.source]
    for kind, order in ((DependencyKind.SYNC, WAITS), (DependencyKind.HOST, RESUMES)):
        found = np.unique(needs.target[arriving & (needs.kind == kind)]).tolist()
        points += [(int(events.stream[event]), float(events.start_us[event]), order, event) for event in found]
    return points


def outermost(stream: Ints, start_us: Floats, end_us: Floats, rows: Ints) -> Ints:
    """Rows that no other of their stream contains."""
    order = rows[np.lexsort((-end_us[rows], start_us[rows], stream[rows]))]
    kept, current, reach = [], None, -np.inf
    for row in order.tolist():
        if stream[row] != current:
            current, reach = stream[row], -np.inf
        if end_us[row] > reach or start_us[row] >= reach:
            kept.append(row)
            reach = max(reach, float(end_us[row]))
    return np.array(sorted(kept), np.int64)


def compute_kinds(trace: Trace, ops: Ints, launch: dict[int, int]) -> dict[int, OpKind]:
    """Kind of each device op: what the autograd thread launched is backward, what an optimizer step launched is the update."""
    events = trace.events
    spans = np.flatnonzero((events.role == Role.UPDATE) & ~np.isin(events.kind, DEVICE_KINDS))
    spans = spans[np.argsort(events.start_us[spans], kind="stable")]
    kinds = {}
    for op in ops.tolist():
        kind, call = int(events.kind[op]), launch[op]
        if kind == EventKind.COLLECTIVE:
            kinds[op] = OpKind.COMM
        elif kind == EventKind.COPY:
            kinds[op] = OpKind.IO
        elif kind == EventKind.SERVER:
            kinds[op] = OpKind.SERVER
        elif call < 0:
            kinds[op] = OpKind.FORWARD
        else:
            at = int(np.searchsorted(events.start_us[spans], events.start_us[call], side="right")) - 1
            updates = at >= 0 and events.end_us[spans[at]] >= events.start_us[call] and events.rank[spans[at]] == events.rank[call]
            backward = events.stream[call] < -1
            kinds[op] = OpKind.UPDATE if updates else OpKind.BACKWARD if backward else OpKind.FORWARD
    return kinds
