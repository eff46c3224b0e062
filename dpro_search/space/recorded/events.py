"""Launches, enqueues, and where host threads start and stop, from the events of a trace with streams before they become ops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import DependencyKind, EventKind, Floats, Ints, Role, Trace
from dpro_search.graph.dataflow import OpKind

Bools = npt.NDArray[np.bool_]

DEVICE_KINDS = (EventKind.KERNEL, EventKind.COPY, EventKind.COLLECTIVE, EventKind.SERVER, EventKind.UNKNOWN)
CALL_KINDS = (EventKind.RUNTIME, EventKind.SYNC)
WAITS_OF_HOST = (DependencyKind.SYNC, DependencyKind.INFERRED)  # of host events on ops of a device
_KINDS = {
    EventKind.COLLECTIVE: OpKind.COMM,
    EventKind.COPY: OpKind.IO,
    EventKind.SERVER: OpKind.SERVER,
    EventKind.UNKNOWN: OpKind.UNKNOWN,
}

# What an op is to its event; also the order of points of one thread at one time.
RESUMES, ENDS, LAUNCHES, WAITS, RUNS, PAUSES, CLOSES = range(7)
MAIN_THREAD = -1  # stream of a rank's main thread


def steps_in_order(trace: Trace) -> tuple[int, ...]:
    """Numbers of the recorded steps by their beginnings: something asynchronous may end after the next step's end."""
    order = np.lexsort((trace.steps.end_us, trace.steps.start_us))
    return tuple(int(step) for step in dict.fromkeys(trace.steps.index[order].tolist()))


def sources_of(trace: Trace, *kinds: DependencyKind) -> dict[int, list[int]]:
    """The events that each event depends on, by dependencies of the given kinds."""
    needs = trace.dependencies
    of_kind = np.isin(needs.kind, kinds)
    sources: dict[int, list[int]] = defaultdict(list)
    for source, target in zip(needs.source[of_kind].tolist(), needs.target[of_kind].tolist(), strict=True):
        sources[target].append(source)
    return sources


def first_launched(trace: Trace) -> Ints:
    """The first op that each event launched, [events]; -1: none."""
    needs = trace.dependencies
    launches = np.flatnonzero(needs.kind == DependencyKind.LAUNCH)[::-1]
    launched = np.full(len(trace.events), -1, np.int64)
    launched[needs.source[launches]] = needs.target[launches]
    return launched


def launched_within(trace: Trace, chosen: Callable[[str], bool]) -> set[int]:
    """Device events that were launched within the spans of host threads whose names are chosen."""
    events, needs = trace.events, trace.dependencies
    launches = np.flatnonzero(needs.kind == DependencyKind.LAUNCH)
    call, launched = needs.source[launches], needs.target[launches]
    spans = np.flatnonzero(np.array([chosen(name) for name in trace.names] or [False])[events.name])
    within: set[int] = set()
    for rank, stream in sorted(set(zip(events.rank[spans].tolist(), events.stream[spans].tolist(), strict=True))):
        spans_of_stream = spans[(events.rank[spans] == rank) & (events.stream[spans] == stream)]
        spans_of_stream = spans_of_stream[np.argsort(events.start_us[spans_of_stream], kind="stable")]
        covered_us = np.maximum.accumulate(events.end_us[spans_of_stream])  # the end of what began so far
        on_stream = (events.rank[call] == rank) & (events.stream[call] == stream)
        before = np.searchsorted(events.start_us[spans_of_stream], events.start_us[call[on_stream]], side="right") - 1
        inside = (before >= 0) & (covered_us[np.maximum(before, 0)] >= events.start_us[call[on_stream]])
        within |= set(launched[on_stream][inside].tolist())
    return within


def last_enqueues(trace: Trace, in_step: Bools) -> Floats:
    """When the last rank enqueued, of each part of a collective that several ranks are seen to enqueue, [events]; else NaN."""
    events = trace.events
    enqueued_us = np.full(len(events), np.nan)
    parts = np.flatnonzero((events.collective >= 0) & (events.kind == EventKind.COLLECTIVE) & in_step)
    if not len(parts):
        return enqueued_us
    _, group, count = np.unique(events.collective[parts], return_inverse=True, return_counts=True)
    last_us = np.full(len(count), -np.inf)
    np.maximum.at(last_us, group, events.start_us[parts])
    shared = count[group] > 1
    enqueued_us[parts[shared]] = last_us[group[shared]]
    return enqueued_us


def complete_us(trace: Trace) -> Floats:
    """When each event had done what others waited for, [events]: its end, but of collectives that threads carry out.

    A thread of Gloo wakes what waits for a collective, and notes its end only when it gets a core again. No rank completes before
    all have sent what it needs. So a collective is complete at the first end that any rank notes, and before any thread that waited
    for it went on. What is left of a part is its rank's own time.
    """
    events, needs = trace.events, trace.dependencies
    completion_us: Floats = events.end_us.copy()
    computes = np.isin(events.kind, (EventKind.KERNEL, EventKind.COPY))
    on_threads = ~np.isin(events.rank, np.unique(events.rank[computes]))
    parts = np.flatnonzero((events.collective >= 0) & (events.kind == EventKind.COLLECTIVE) & on_threads)
    if not len(parts):
        return completion_us
    passed_us = events.end_us.copy()
    waits = np.flatnonzero(needs.kind == DependencyKind.SYNC)
    np.minimum.at(passed_us, needs.source[waits], events.end_us[needs.target[waits]])
    _, group = np.unique(events.collective[parts], return_inverse=True)
    first_us = np.full(int(group.max()) + 1, np.inf)
    np.minimum.at(first_us, group, passed_us[parts])
    completion_us[parts] = np.maximum(first_us[group], events.start_us[parts])
    return completion_us


def host_points(trace: Trace, host: Ints, in_step: Bools) -> tuple[Ints, Floats, Ints, Ints]:
    """Points where a rank's host threads launch, wait or are waited for: thread, time, action, event, [points] each, in order."""
    events, needs = trace.events, trace.dependencies
    on_host = np.zeros(len(events), np.bool_)
    on_host[host] = True
    leaving = on_host[needs.source] & in_step[needs.target]
    arriving = on_host[needs.target] & in_step[needs.source]
    point_columns = [
        (LAUNCHES, events.start_us, needs.source[leaving & (needs.kind == DependencyKind.LAUNCH)]),
        (ENDS, events.end_us, needs.source[leaving & (needs.kind == DependencyKind.HOST)]),
        (WAITS, events.start_us, needs.target[arriving & np.isin(needs.kind, WAITS_OF_HOST)]),
        (RESUMES, events.start_us, needs.target[arriving & (needs.kind == DependencyKind.HOST)]),
    ]
    parts = [(order, times_us, np.unique(at)) for order, times_us, at in point_columns]
    event = np.concatenate([at for _, _, at in parts])
    time_us = np.concatenate([times_us[at] for _, times_us, at in parts])
    order = np.concatenate([np.full(len(at), order) for order, _, at in parts])
    stream = events.stream[event]
    sequence = np.lexsort((event, order, time_us, stream))
    return stream[sequence], time_us[sequence], order[sequence], event[sequence]


class StepEnds(NamedTuple):
    """Ends of n steps of a rank's main thread."""

    time_us: Floats  # [n]
    event: Ints  # The last event of the thread that began in the step, [n].
    step: Ints  # [n]
    begin_us: float  # When the first of the steps began.


def step_ends(trace: Trace, rank: int, host: Ints) -> StepEnds:
    """Ends of the steps of a rank without a device, in order. Empty if a device worked, because then the steps end with its work.

    `host` holds the events of the rank's threads.
    """
    events, steps = trace.events, trace.steps
    main = host[events.stream[host] == MAIN_THREAD]
    worked = np.isin(events.kind[events.rank == rank], (EventKind.KERNEL, EventKind.COPY)).any()
    if worked or not len(main):
        return StepEnds(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64), 0.0)
    main = main[np.lexsort((events.start_us[main], events.step[main]))]
    number, first = np.unique(events.step[main], return_index=True)
    last = dict(zip(number.tolist(), main[np.append(first[1:], len(main)) - 1].tolist(), strict=True))
    rows = np.flatnonzero((steps.rank == rank) & np.isin(steps.index, number))
    rows = rows[np.argsort(steps.end_us[rows], kind="stable")]
    index = steps.index[rows]
    event = np.array([last[step] for step in index.tolist()], np.int64)
    return StepEnds(steps.end_us[rows], event, index, float(steps.start_us[rows].min()))


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


def compute_kinds(trace: Trace, ops: Ints, call: Ints) -> npt.NDArray[np.int8]:
    """Kind of each device op: what the autograd thread launched is backward, what an optimizer step launched is the update.

    `call` is the call that launched each op, -1 where none is known; all are [ops].
    """
    events = trace.events
    kinds = np.full(len(ops), int(OpKind.FORWARD), np.int8)
    launched = call >= 0
    kinds[launched & (events.stream[call] < MAIN_THREAD)] = int(OpKind.BACKWARD)
    spans = np.flatnonzero((events.role == Role.UPDATE) & ~np.isin(events.kind, DEVICE_KINDS))
    if len(spans):
        spans = spans[np.argsort(events.start_us[spans], kind="stable")]
        at = np.searchsorted(events.start_us[spans], events.start_us[call], side="right") - 1
        span = spans[np.maximum(at, 0)]
        inside = (at >= 0) & (events.end_us[span] >= events.start_us[call]) & (events.rank[span] == events.rank[call])
        kinds[launched & inside] = int(OpKind.UPDATE)
    for event_kind, kind in _KINDS.items():
        kinds[events.kind[ops] == event_kind] = int(kind)
    return kinds
