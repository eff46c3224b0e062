"""Prediction and measurement in one file for https://ui.perfetto.dev (Chrome trace event format, JSON).

Two groups of processes: ``predicted rank R`` has a thread a device, ``measured rank R`` one a stream. Counters show memory and
what a rank's collectives move a second. Arrows lead from an op to what it released, and from the part of a collective that was
enqueued last to the parts of the other ranks. Waiting for these is a slice of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import EventKind, Events, Floats, Ints, Trace
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.kernels.executed import dependencies
from dpro_search.replay.memory import memory
from dpro_search.replay.outputs.perfetto_events import (
    DECIMALS,
    ArrowEnd,
    Counter,
    Metadata,
    Slice,
    length,
    number_of,
    process,
    text_of,
    thread,
    threads,
)
from dpro_search.replay.outputs.perfetto_links import collective_arrows, link_use
from dpro_search.replay.timeline import Timeline

_PHASES = (EventKind.NEGOTIATE, EventKind.MEMCPY_IN, EventKind.ALLREDUCE, EventKind.MEMCPY_OUT)
_LABELS = {
    EventKind.COMM: "communication of {}",
    EventKind.NEGOTIATE: "negotiation of {}",
    EventKind.MEMCPY_IN: "copy in of {}",
    EventKind.ALLREDUCE: "all-reduce with {}",
    EventKind.MEMCPY_OUT: "copy out of {}",
}
_PREDICTED_TID, _MEASURED_TID = 1_000_000, 2_000_000  # thread numbers are unique in the file, and above all process numbers


@dataclass(frozen=True, kw_only=True)
class MeasuredOps:
    """Slices of one recorded step, [slices] each; times in microseconds since the step began."""

    name: Sequence[str]
    rank: Ints
    stream: Ints
    start_us: Floats
    end_us: Floats
    # What is known of each slice beside that: where it comes from, its predicted time and the error.
    args: Sequence[Mapping[str, str | float]] = ()
    stream_names: Mapping[int, str] = field(default_factory=dict)  # Where they are not "stream N".
    collective: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # Parts of one have one number, -1: none.
    size_bytes: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # That collectives move, 0 where it is not known.
    # memory_rank, memory_us, memory_bytes: Counts of the allocator, [counts] each.
    memory_rank: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    memory_us: Floats = field(default_factory=lambda: np.zeros(0))
    memory_bytes: Ints = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True, kw_only=True)
class PredictedOps:
    """Facts about the ops of a replay that its graph does not have, [n] each; empty: none."""

    args: Sequence[Mapping[str, str | float]] = ()  # Where an op comes from, its measured time and the error.
    size_bytes: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # That collectives move, 0 where it is not known.


_NOTHING = PredictedOps()


def measured_ops(trace: Trace, step: int) -> MeasuredOps:
    """The ops, and the gradients' communication as their ranks saw it, of one step; it begins when the first rank begins it.

    Communication is on a stream of its own, after the rank's others, and so is each phase that Horovod's timeline tells.

    Raises
    ------
    InputError
        The trace has no such step, or it was not traced.
    """
    begins = trace.steps.start_us[trace.steps.index == step]
    traced = (EventKind.OP, EventKind.COMM, *_PHASES)
    events = trace.events.select((trace.events.step == step) & np.isin(trace.events.kind, traced))
    if not len(begins) or not (events.kind == EventKind.OP).any():
        steps = np.unique(trace.events.step[(trace.events.kind == EventKind.OP) & (trace.events.step >= 0)])
        known = f"steps {steps[0]} to {steps[-1]} were" if len(steps) else "none was"
        raise InputError(f"step {step} was not traced: {known}")
    events = events.select(_first_of_each_collective(events))
    after = trace.events.stream.max() + 1
    stream = events.stream.copy()
    for number, kind in enumerate((EventKind.COMM, *_PHASES)):
        stream[events.kind == kind] = after + number
    names = [
        _LABELS[EventKind(kind)].format(trace.tensors[tensor].name) if kind != EventKind.OP and tensor >= 0 else trace.names[name]
        for name, tensor, kind in zip(events.name.tolist(), events.tensor.tolist(), events.kind.tolist(), strict=True)
    ]
    begin_us = begins.min()
    return MeasuredOps(
        name=names, rank=events.rank, stream=stream, start_us=events.start_us - begin_us, end_us=events.end_us - begin_us
    )


def _first_of_each_collective(events: Events) -> npt.NDArray[np.bool_]:
    """Without the transfers of all tensors of a fused collective but the first: they are one transfer."""
    keep = np.ones(len(events), np.bool_)
    rows = np.flatnonzero((events.kind == EventKind.ALLREDUCE) & (events.collective >= 0))
    keep[rows] = False
    keep[rows[np.unique(events.collective[rows], return_index=True)[1]]] = True
    return keep


def perfetto_json(
    timeline: Timeline,
    *,
    measured: MeasuredOps | None = None,
    first_iteration: int = 0,
    about: PredictedOps = _NOTHING,
    numbers: Sequence[int] = (),
) -> bytes:
    """The file's content.

    Parameters
    ----------
    about
        What is known of the ops beside the timeline.
    numbers
        Of the ranks in the job; empty: 0, 1, 2...
    measured
        What was measured, for comparison (see `measured_ops`).
    first_iteration
        Iterations before this one are left out: they have not settled. The first start shown is time 0.

    Raises
    ------
    InputError
        The timeline has no such iteration.
    """
    if not 0 <= first_iteration < timeline.iterations:
        raise InputError(f"iteration {first_iteration} was not replayed: there are iterations 0 to {timeline.iterations - 1}")
    numbers = numbers or range(timeline.graph.ranks)
    predicted = _Predicted(timeline, first_iteration, about, numbers)
    events: list[msgspec.Struct] = [*predicted.processes(), *predicted.slices(), *predicted.arrows(), *predicted.counters()]
    if measured is not None:
        arrows = sum(isinstance(event, ArrowEnd) for event in events)
        events += _measured(measured, 1 + timeline.graph.ranks, numbers, arrows)
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


class _Predicted:
    """Events of the replay; ops are numbered from the first shown iteration on."""

    def __init__(self, timeline: Timeline, first_iteration: int, about: PredictedOps, numbers: Sequence[int]) -> None:
        self.timeline, self.graph = timeline, timeline.graph
        self.about, self.numbers = about, numbers
        self.first = first_iteration * len(self.graph)
        self.begin_us = float(timeline.times.start_us[self.first :].min())
        self.start, self.moved, self.end = (
            np.round(column[self.first :] - self.begin_us, DECIMALS) for column in timeline.times[1:4]
        )
        self.device = np.tile(self.graph.device, timeline.iterations - first_iteration)
        self.rank = self.graph.rank_of_device[self.device]
        overlap = self.graph.serves_in_no_line[self.device]
        thread, self.lanes = threads(self.device, overlap, self.start, self.end)
        self.tid = thread + _PREDICTED_TID

    def processes(self) -> Iterator[Metadata]:
        for rank in range(self.graph.ranks):
            yield from process(_predicted_pid(rank), f"predicted rank {number_of(self.numbers, rank)}")
        for number, (device, lane) in enumerate(self.lanes):
            pid = _predicted_pid(int(self.graph.rank_of_device[device]))
            yield from thread(pid, _PREDICTED_TID + number, text_of(self.graph.device_name(device)), lane)

    def slices(self) -> Iterator[Slice]:
        names = [text_of(self.graph.name(op)) for op in range(len(self.graph))]
        kinds = [OpKind(kind).name for kind in self.graph.op_kind.tolist()]
        columns = (self.rank, self.tid, self.start, self.moved, self.end)
        known = self.about.args or [{}] * len(self.graph)
        for number, (rank, tid, start, moved, end) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            op, iteration = number % len(self.graph), (self.first + number) // len(self.graph)
            pid, args = _predicted_pid(rank), {"op": op, "iteration": iteration, **known[op]}
            if moved > start:
                yield Slice(f"waits for other ranks: {names[op]}", "wait", pid, tid, start, length(start, moved), args=args)
            yield Slice(names[op], kinds[op], pid, tid, moved, length(moved, end), args=args)

    def arrows(self) -> Iterator[ArrowEnd]:
        """From the work of an op to the start of what needs it."""
        source, destination = (column - self.first for column in dependencies(self.timeline))
        shown = source >= 0
        pairs = zip(source[shown].tolist(), destination[shown].tolist(), strict=True)
        rank, tid, moved, start = (column.tolist() for column in (self.rank, self.tid, self.moved, self.start))
        for number, (cause, effect) in enumerate(pairs):
            yield ArrowEnd("s", number, _predicted_pid(rank[cause]), tid[cause], moved[cause])
            yield ArrowEnd("f", number, _predicted_pid(rank[effect]), tid[effect], start[effect])
        if not len(self.graph.collective):
            return
        iteration, op = np.divmod(np.arange(len(self.start)), len(self.graph))
        of_step = self.graph.collective[op].astype(np.int64)
        collective = np.where(of_step >= 0, of_step + iteration * (int(of_step.max()) + 1), -1)
        yield from collective_arrows(collective, self.start, self.moved, [*map(_predicted_pid, rank)], tid, int(shown.sum()))

    def counters(self) -> Iterator[Counter]:
        if len(self.about.size_bytes):
            size_bytes = np.tile(self.about.size_bytes, len(self.start) // len(self.graph))
            yield from link_use(_predicted_pid(0) + self.rank.astype(np.int64), self.moved, self.end, size_bytes)
        if not len(self.graph.buffer_op):
            return
        for curve in memory(self.timeline):
            at_us = np.round(curve.times_us - self.begin_us, DECIMALS)
            first = max(int(np.searchsorted(at_us, 0.0, side="right")) - 1, 0)
            for time_us, taken in zip(np.maximum(at_us[first:], 0.0).tolist(), curve.bytes[first:].tolist(), strict=True):
                yield Counter(_predicted_pid(curve.rank), time_us, {"bytes": taken})


def _measured(ops: MeasuredOps, first_pid: int, numbers: Sequence[int], first_arrow: int) -> Iterator[msgspec.Struct]:
    ranks = int(ops.rank.max(initial=-1)) + 1
    least, streams = int(ops.stream.min(initial=0)), int(ops.stream.max(initial=-1)) + 1 - int(ops.stream.min(initial=0))
    start, end = np.round(ops.start_us, DECIMALS), np.round(ops.end_us, DECIMALS)
    number, lanes = threads(ops.rank * streams + ops.stream - least, np.ones(len(start), np.bool_), start, end)
    tid = number + _MEASURED_TID
    for rank in range(ranks):
        yield from process(first_pid + rank, f"measured rank {number_of(numbers, rank)}")
    for row, (on, lane) in enumerate(lanes):
        stream = on % streams + least
        yield from thread(first_pid + on // streams, _MEASURED_TID + row, ops.stream_names.get(stream, f"stream {stream}"), lane)
    args: Sequence[Mapping[str, str | float]] = ops.args or [{}] * len(start)
    columns = (ops.rank, tid, start, end)
    for name, known, rank, on, begins, ends in zip(ops.name, args, *(column.tolist() for column in columns), strict=True):
        yield Slice(text_of(name), "measured", first_pid + rank, on, begins, length(begins, ends), args={**known})
    pid = ops.rank + first_pid
    if len(ops.collective):
        yield from collective_arrows(ops.collective, start, _moves(ops.collective, start), pid.tolist(), tid.tolist(), first_arrow)
    if len(ops.size_bytes):
        yield from link_use(pid, _moves(ops.collective, start), end, ops.size_bytes)
    counts = (ops.memory_rank.tolist(), np.round(ops.memory_us, DECIMALS).tolist(), ops.memory_bytes.tolist())
    for rank, time_us, taken in zip(*counts, strict=True):
        yield Counter(first_pid + rank, time_us, {"bytes": taken})


def _moves(collective: Ints, start: Floats) -> Floats:
    """When the data of each slice begin to move: of a collective, at the last part's start."""
    moves_us = start.copy()
    parts = np.flatnonzero(collective >= 0)
    if len(parts):
        _, of = np.unique(collective[parts], return_inverse=True)
        last = np.full(int(of.max()) + 1, -np.inf)
        np.maximum.at(last, of, start[parts])
        moves_us[parts] = last[of]
    return moves_us


def _predicted_pid(rank: int) -> int:
    return 1 + rank
