"""Prediction and measurement in one file for https://ui.perfetto.dev (Chrome trace event format, JSON).

Two groups of processes: ``predicted rank R`` has a thread a device, and its memory as a counter; ``measured rank R`` has a thread a
stream. Arrows lead from an op to what it released. Waiting for the other ranks of a collective is a slice of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import EventKind, Events, Floats, Ints, Trace
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.executed import dependencies
from dpro_search.replay.memory import memory
from dpro_search.replay.timeline import Timeline

_PHASES = (EventKind.NEGOTIATE, EventKind.MEMCPY_IN, EventKind.ALLREDUCE, EventKind.MEMCPY_OUT)
_LABELS = {
    EventKind.COMM: "communication of {}",
    EventKind.NEGOTIATE: "negotiation of {}",
    EventKind.MEMCPY_IN: "copy in of {}",
    EventKind.ALLREDUCE: "all-reduce with {}",
    EventKind.MEMCPY_OUT: "copy out of {}",
}
_DECIMALS = 3  # the viewer counts nanoseconds
_PREDICTED_TID, _MEASURED_TID = 1_000_000, 2_000_000  # thread numbers are unique in the file, and above all process numbers


@dataclass(frozen=True, kw_only=True)
class MeasuredOps:
    """Slices of one recorded step, [slices] each; times in microseconds since the step began."""

    name: Sequence[str]
    rank: Ints
    stream: Ints
    start_us: Floats
    end_us: Floats


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


def perfetto_json(timeline: Timeline, *, measured: MeasuredOps | None = None, first_iteration: int = 0) -> bytes:
    """The file's content.

    Parameters
    ----------
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
    predicted = _Predicted(timeline, first_iteration)
    events: list[msgspec.Struct] = [*predicted.processes(), *predicted.slices(), *predicted.arrows(), *predicted.counters()]
    if measured is not None:
        events += _measured(measured, 1 + timeline.graph.ranks)
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


class _Slice(msgspec.Struct):
    name: str
    cat: str
    pid: int
    tid: int
    ts: float
    dur: float
    ph: str = "X"
    args: dict[str, int] = {}


class _ArrowEnd(msgspec.Struct):
    """The beginning ("s") or the head ("f") of an arrow: each belongs to the slice of its thread around its time."""

    ph: str
    id: int
    pid: int
    tid: int
    ts: float
    bp: str = "e"
    name: str = "dependency"
    cat: str = "dependency"


class _Counter(msgspec.Struct):
    pid: int
    ts: float
    args: dict[str, float]
    name: str = "memory"
    ph: str = "C"


class _Metadata(msgspec.Struct, omit_defaults=True):
    ph: str
    name: str
    pid: int
    args: dict[str, str | int]
    tid: int = 0


class _Predicted:
    """Events of the replay; ops are numbered from the first shown iteration on."""

    def __init__(self, timeline: Timeline, first_iteration: int) -> None:
        self.timeline, self.graph = timeline, timeline.graph
        self.first = first_iteration * len(self.graph)
        self.begin_us = float(timeline.times.start_us[self.first :].min())
        self.start, self.moved, self.end = (
            np.round(column[self.first :] - self.begin_us, _DECIMALS) for column in timeline.times[1:4]
        )
        self.device = np.tile(self.graph.device, timeline.iterations - first_iteration)
        self.rank = self.graph.rank_of_device[self.device]
        overlap = self.graph.serves_in_no_line[self.device]
        thread, self.threads = _threads(self.device, overlap, self.start, self.end)
        self.tid = thread + _PREDICTED_TID

    def processes(self) -> Iterator[_Metadata]:
        for rank in range(self.graph.ranks):
            yield from _process(_predicted_pid(rank), f"predicted rank {rank}")
        for number, (device, lane) in enumerate(self.threads):
            pid = _predicted_pid(int(self.graph.rank_of_device[device]))
            yield from _thread(pid, _PREDICTED_TID + number, _text(self.graph.device_name(device)), lane)

    def slices(self) -> Iterator[_Slice]:
        names = [_text(self.graph.name(op)) for op in range(len(self.graph))]
        kinds = [OpKind(kind).name for kind in self.graph.op_kind.tolist()]
        columns = (self.rank, self.tid, self.start, self.moved, self.end)
        for number, (rank, tid, start, moved, end) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            op, iteration = number % len(self.graph), (self.first + number) // len(self.graph)
            pid, args = _predicted_pid(rank), {"op": op, "iteration": iteration}
            if moved > start:
                yield _Slice(f"waits for other ranks: {names[op]}", "wait", pid, tid, start, _length(start, moved), args=args)
            yield _Slice(names[op], kinds[op], pid, tid, moved, _length(moved, end), args=args)

    def arrows(self) -> Iterator[_ArrowEnd]:
        """From the work of an op to the start of what needs it."""
        source, destination = (column - self.first for column in dependencies(self.timeline))
        shown = source >= 0
        pairs = zip(source[shown].tolist(), destination[shown].tolist(), strict=True)
        rank, tid, moved, start = (column.tolist() for column in (self.rank, self.tid, self.moved, self.start))
        for number, (cause, effect) in enumerate(pairs):
            yield _ArrowEnd("s", number, _predicted_pid(rank[cause]), tid[cause], moved[cause])
            yield _ArrowEnd("f", number, _predicted_pid(rank[effect]), tid[effect], start[effect])

    def counters(self) -> Iterator[_Counter]:
        if not len(self.graph.buffer_op):
            return
        for curve in memory(self.timeline):
            at_us = np.round(curve.times_us - self.begin_us, _DECIMALS)
            first = max(int(np.searchsorted(at_us, 0.0, side="right")) - 1, 0)
            for time_us, taken in zip(np.maximum(at_us[first:], 0.0).tolist(), curve.bytes[first:].tolist(), strict=True):
                yield _Counter(_predicted_pid(curve.rank), time_us, {"bytes": taken})


def _measured(ops: MeasuredOps, first_pid: int) -> Iterator[_Metadata | _Slice]:
    ranks, streams = int(ops.rank.max(initial=-1)) + 1, int(ops.stream.max(initial=-1)) + 1
    start, end = np.round(ops.start_us, _DECIMALS), np.round(ops.end_us, _DECIMALS)
    thread, threads = _threads(ops.rank * streams + ops.stream, np.ones(len(start), np.bool_), start, end)
    for rank in range(ranks):
        yield from _process(first_pid + rank, f"measured rank {rank}")
    for number, (on, lane) in enumerate(threads):
        yield from _thread(first_pid + on // streams, _MEASURED_TID + number, f"stream {on % streams}", lane)
    columns = (ops.rank, thread + _MEASURED_TID, start, end)
    for name, rank, tid, begins, ends in zip(ops.name, *(column.tolist() for column in columns), strict=True):
        yield _Slice(_text(name), "measured", first_pid + rank, tid, begins, _length(begins, ends))


def _threads(
    on: npt.NDArray[np.integer], overlap: npt.NDArray[np.bool_], start: Floats, end: Floats
) -> tuple[Ints, list[tuple[int, int]]]:
    """Slices that overlap must be on several threads, for the viewer takes slices of one thread as nested calls.

    Returns the number of each slice's thread, and each thread's device or stream (`on`) and lane.
    """
    lane = np.zeros(len(on), np.int64)
    order = np.lexsort((end, start, on))
    order = order[overlap[order]]
    for rows in np.split(order, np.flatnonzero(np.diff(on[order])) + 1):
        lane[rows] = _lanes(start[rows].tolist(), end[rows].tolist())
    pairs, number = np.unique(np.stack((on, lane), axis=1), axis=0, return_inverse=True)
    return number.reshape(-1), [(on, lane) for on, lane in pairs.tolist()]


def _lanes(start: Sequence[float], end: Sequence[float]) -> list[int]:
    """The lowest free lane of each interval, in order of their starts."""
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    found = []
    for begins, ends in zip(start, end, strict=True):
        while busy and busy[0][0] <= begins:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (ends, lane))
        found.append(lane)
    return found


def _process(pid: int, name: str) -> Iterator[_Metadata]:
    yield _Metadata("M", "process_name", pid, {"name": name})
    yield _Metadata("M", "process_sort_index", pid, {"sort_index": pid})


def _thread(pid: int, tid: int, name: str, lane: int) -> Iterator[_Metadata]:
    yield _Metadata("M", "thread_name", pid, {"name": f"{name} ({lane + 1})" if lane else name}, tid)
    yield _Metadata("M", "thread_sort_index", pid, {"sort_index": tid}, tid)


def _predicted_pid(rank: int) -> int:
    return 1 + rank


def _length(start: float, end: float) -> float:
    return round(end - start, _DECIMALS)


def _text(name: str) -> str:
    """A name that UTF-8 can hold: one from a damaged file may have lone surrogates."""
    return name.encode("utf-8", "backslashreplace").decode()
