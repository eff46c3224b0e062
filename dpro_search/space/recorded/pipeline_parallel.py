"""`Trace` of a pipeline- and data-parallel job at operation level -> `ReplayGraph` of one step.

A rank works through its operations in the recorded order; those of one batch of messages run at once. Three quantities are taken
apart that a recorded operation holds together:

* *transfer*: a message or collective moves from the last part's start to the first part's end. What a part recorded before that
  is waiting for others, and follows from the replay.
* *tail*: what a rank still did in the operation after that (clipping gradients after their norm was all-reduced).
* *launch delay*: the pause between an operation's end and the next one's start on the same rank, when nothing was waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dpro_search.collect.trace import EventKind, Events, Floats, Ints, Role, Trace
from dpro_search.errors import GraphError, InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.replay_graph import OrderPolicy, ReplayGraph

_KINDS = {Role.FORWARD: OpKind.FORWARD, Role.BACKWARD: OpKind.BACKWARD, Role.UPDATE: OpKind.UPDATE}


@dataclass(frozen=True, kw_only=True)
class _StepTimes:
    """Durations of the n operations of one step in microseconds, in the order of rank and start."""

    work_us: Floats  # of an operation that is no part of a collective, its length; else its tail
    transfer_us: Floats  # of the collective that it is a part of; 0 for none
    delay_us: Floats  # launch delay before it and what was enqueued with it

    def at(self, place: Ints) -> _StepTimes:
        """The times in another order."""
        return _StepTimes(work_us=self.work_us[place], transfer_us=self.transfer_us[place], delay_us=self.delay_us[place])


class _Samples(NamedTuple):
    """One duration of each of the n operations of a step, in several recorded steps."""

    lengths_us: Floats  # [steps, n]
    median_us: list[float]  # [n]
    ever: list[bool]  # Whether it is above 0 in any step, [n].

    @classmethod
    def of(cls, lengths_us: Sequence[Floats]) -> _Samples:
        samples = np.array(lengths_us)
        ever = np.asarray(samples.any(axis=0), dtype=np.bool_)
        return cls(samples, np.median(samples, axis=0).tolist(), ever.tolist())


def pipeline_graph(trace: Trace, steps: Sequence[int], *, launch_delays: bool = True) -> ReplayGraph:
    """The graph of a step, with the median durations over some recorded ones.

    Parameters
    ----------
    steps
        Indices of recorded steps. One: the step with its own durations. Several: `samples_us` holds a row for each.
    launch_delays
        Whether the ranks pause between operations as they did when recorded.

    Raises
    ------
    InputError
        A step was not recorded, or none is requested.
    GraphError
        The steps do not consist of the same operations in the same order.
    """
    if not steps:
        raise InputError("no step to build a graph from; name at least one")
    recorded = [_operations(trace, step) for step in steps]
    layout = recorded[0]
    times = []
    for step, events in zip(steps, recorded, strict=True):
        place = _same_operations(layout, events)
        if place is None:
            raise GraphError(f"step {step} does not consist of the same operations as step {steps[0]}; replay it alone")
        times.append(_times(events, _batch_of(events)).at(place))
    return _step_graph(trace, layout, times, launch_delays)


def _operations(trace: Trace, step: int) -> Events:
    events = trace.events.select(trace.events.step == step)
    if not len(events):
        known = np.unique(trace.steps.index)
        raise InputError(f"step {step} was not recorded; there are {len(known)}, from {known.min()} to {known.max()}")
    return events.select(np.lexsort((events.stream, events.start_us, events.rank)))


def _same_operations(layout: Events, events: Events) -> Ints | None:
    """Index of each operation of `layout` among `events`, which may come in another order; None if the operations differ."""
    in_layout, in_events = np.lexsort((layout.name, layout.rank)), np.lexsort((events.name, events.rank))
    if not (
        np.array_equal(layout.name[in_layout], events.name[in_events])
        and np.array_equal(layout.rank[in_layout], events.rank[in_events])
    ):
        return None
    place = np.empty(len(layout), np.int64)
    place[in_layout] = in_events
    return place


def _batch_of(events: Events) -> Ints:
    """Number of the batch of each operation, ascending: operations of a rank on several streams that began together."""
    same = (np.diff(events.rank) == 0) & (np.diff(events.start_us) == 0) & (events.stream[1:] > 0) & (events.stream[:-1] > 0)
    return np.concatenate([[0], np.cumsum(~same)])


def _times(events: Events, batch: Ints) -> _StepTimes:
    length = events.end_us - events.start_us
    part = events.collective >= 0
    numbers, of = np.unique(events.collective, return_inverse=True)
    last_start, first_end = np.full(len(numbers), -np.inf), np.full(len(numbers), np.inf)
    np.maximum.at(last_start, of, events.start_us)
    np.minimum.at(first_end, of, events.end_us)
    transfer = np.where(part, np.maximum(first_end - last_start, 0.0)[of], 0.0)
    # A batch is recorded as ending with its last message, so that the end of each alone is not known: no tails.
    alone = np.bincount(batch)[batch] == 1
    tail = np.where(part & alone, np.maximum(events.end_us - last_start[of] - transfer, 0.0), 0.0)
    end = np.full(int(batch[-1]) + 1, -np.inf)
    np.maximum.at(end, batch, events.end_us)
    first = np.diff(batch, prepend=-1) > 0
    same_rank = np.diff(events.rank[first], prepend=-1) == 0
    before = np.where(same_rank, np.roll(end, 1), events.start_us.min())
    delay = np.maximum(events.start_us[first] - before, 0.0)
    return _StepTimes(work_us=np.where(part, tail, length), transfer_us=transfer, delay_us=delay[batch])


def _step_graph(trace: Trace, layout: Events, times: Sequence[_StepTimes], launch_delays: bool) -> ReplayGraph:
    """Ops in the order in which each rank's devices take them: launch delay, messages or work, tail."""
    batch = _batch_of(layout)
    builder = GraphBuilder()
    ranks = np.unique(layout.rank)
    streams = {int(r): builder.add_device(int(r), OrderPolicy.PROGRAM, f"rank {r}") for r in ranks}
    messages = {int(r): builder.add_device(int(r), OrderPolicy.UNBOUNDED, f"rank {r} messages") for r in ranks}
    rows: list[Floats] = []  # of each op, its duration in every step

    def add(device: int, name: str, kind: OpKind, samples: _Samples, i: int, after: Sequence[int], collective: int = -1) -> int:
        rows.append(samples.lengths_us[:, i])
        number = None if collective < 0 else collective
        return builder.add_op(device, samples.median_us[i], name=name, kind=kind, after=after, collective=number)

    work = _Samples.of([step.work_us for step in times])
    transfer = _Samples.of([step.transfer_us for step in times])
    delay = _Samples.of([step.delay_us for step in times])
    before: list[int] = []
    for first, last in zip(starts := np.flatnonzero(np.diff(batch, prepend=-1)), [*starts[1:], len(layout)], strict=True):
        rank = int(layout.rank[first])
        if first and layout.rank[first - 1] != rank:
            before = []
        if launch_delays and delay.ever[first]:
            before = [add(streams[rank], f"before {trace.names[layout.name[first]]}", OpKind.HOST, delay, int(first), before)]
        ends = []
        for i in range(first, last):
            name, number = trace.names[layout.name[i]], int(layout.collective[i])
            kind = OpKind.COMM if layout.kind[i] == EventKind.COLLECTIVE else _KINDS.get(Role(int(layout.role[i])), OpKind.HOST)
            if number < 0:
                ends.append(add(streams[rank], name, kind, work, i, before))
                continue
            device = messages[rank] if layout.stream[i] else streams[rank]
            ends.append(add(device, name, kind, transfer, i, before, number))
            if work.ever[i]:
                ends[-1] = add(streams[rank], f"tail of {name}", OpKind.UPDATE, work, i, [ends[-1]])
        before = ends
    graph = builder.build()
    return replace(graph, samples_us=np.array(rows, np.float32).T) if len(times) > 1 else graph
