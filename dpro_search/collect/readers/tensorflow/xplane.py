"""TensorFlow XPlane files of a rank: op events, all-reduce spans, step annotations and memory.

The file must come from `ProfilerOptions(host_tracer_level=3)`; lower levels leave out cheap ops and all asynchronous ones.
An op appears as "node:OpType" around its kernel's call. An asynchronous kernel returns at once, so an all-reduce's span runs
from "ExecutorState::ProcessAsync::Start" to "::Done", both of which name the node and the executor's step.

The best-fit allocator (TensorFlow's "BFC": of a GPU, or "mklcpu" of a CPU, which passes on pieces from 256 KiB) notes each piece
that it hands out and gets back, with its bytes in use afterwards and the op on whose behalf the piece was requested.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.collect.readers._bytes import read_whole
from dpro_search.collect.readers.protos import parse, text
from dpro_search.collect.readers.tensorflow.graphdef import ALLREDUCE_OPS
from dpro_search.collect.trace import Floats, Ints, TensorType
from dpro_search.errors import InputError, TraceFormatError

ALLOCATION, RELEASE = "MemoryAllocation", "MemoryDeallocation"
_LARGEST = 2**53
_DTYPES = {
    "float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16", "bool": "bool",
    "int8": "int8", "uint8": "uint8", "int16": "int16", "uint16": "uint16", "int32": "int32", "uint32": "uint32", "int64": "int64",
    "uint64": "uint64",
}  # fmt: skip  # DataTypeString of tensorflow/core/framework/types.cc
_OP = re.compile(r"([^:\s]+):([A-Z_]\w*)")
_ASYNC_START = "ExecutorState::ProcessAsync::Start"
_ASYNC_DONE = "ExecutorState::ProcessAsync::Done"
_EXECUTOR = "ExecutorState::Process"
_EAGER = "EagerKernelExecute"
_CALL = "tf_function_call"  # the stat of a call of a tf.function, whatever the function's name
_CLOCK_GRAIN_NS = 1_000
_STEP = "step_num"  # the stat of a step that the training script marked


@dataclass(frozen=True, kw_only=True)
class OpEvents:
    """n executions of ops, sorted by start."""

    node: Ints  # index into XPlaneRank.nodes
    start_us: Floats
    end_us: Floats
    line: Ints  # the thread's id in the file


@dataclass(frozen=True, kw_only=True)
class CommEvents:
    """m all-reduces as this rank saw them, sorted by start: from the enqueue to the completion callback."""

    node: Ints  # index into XPlaneRank.nodes
    start_us: Floats
    end_us: Floats


@dataclass(frozen=True, kw_only=True)
class Annotations:
    """Spans around steps, sorted by start: what the training script marked as a step, and every call of a tf.function."""

    name: tuple[str, ...]
    is_call: npt.NDArray[np.bool_]  # a call of a tf.function
    start_us: Floats
    end_us: Floats


@dataclass(frozen=True, kw_only=True)
class XPlaneRank:
    """One rank's profile. Times are microseconds since `origin_ns`."""

    # Nanoseconds since the Unix epoch at the start of the profile. None where the file does not have it (TensorFlow before 2.16);
    # `epoch_origin` then finds it from step times.
    origin_ns: int | None
    # nodes, op_types: Node names and their op types.
    nodes: tuple[str, ...]
    op_types: tuple[str, ...]
    # Types and shapes of each node's inputs as the tracer writes them, see `tensor_types`; "" where it did not.
    input_shapes: tuple[str, ...]
    ops: OpEvents
    comm: CommEvents
    memory: MemoryEvents  # Pieces that the framework's allocator handed out.
    annotations: Annotations
    # Events that look like ops but are none of the graph's executions, by reason: "eager" (run op by op, outside any graph),
    # "nested" (the same op again, inside its own event); "unpaired": starts and ends of all-reduces without the other; and "of
    # another allocator, or without numbers": allocations and releases.
    dropped: dict[str, int]


def read_xplane(path: Path) -> XPlaneRank:
    """Read one rank's XPlane file (gzip or not).

    Raises
    ------
    InputError
        The file cannot be read.
    TraceFormatError
        Not an XSpace, cut off, or without events of the host.
    """
    space = parse("XSpace", read_whole(path), path)
    host = next((plane for plane in space.planes if plane.name == "/host:CPU" and plane.lines), None)
    if host is None:
        planes = ", ".join(f"'{plane.name}'" for plane in space.planes) or "none"
        raise TraceFormatError(f"{path}: no '/host:CPU' plane with events (planes: {planes}); record with host_tracer_level=3")
    return _XPlaneReader(host).result(_profile_start_ns(space))


def epoch_origin(profile: XPlaneRank, step_ns: npt.NDArray[np.int64]) -> tuple[XPlaneRank, float]:
    """Place a profile on the epoch clock, from the times around the calls of the profiled steps.

    The tracer's span of a step lies inside the times that were taken around its call, so each step bounds the origin from both
    sides; the middle of the tightest bounds is taken.

    Parameters
    ----------
    profile
        With the span of one call of a tf.function per step; calls without an all-reduce are no steps.
    step_ns
        Start and end of the profiled steps, [steps, 2], ns since the epoch, in order.

    Returns
    -------
    tuple
        The profile with `origin_ns`, and the half-width of the interval in which the origin must lie, in us.

    Raises
    ------
    InputError
        The profile has another number of steps, or their times contradict.
    """
    spans, comm = profile.annotations, profile.comm
    reduces = np.searchsorted(comm.start_us, spans.end_us) > np.searchsorted(comm.start_us, spans.start_us)
    steps = spans.is_call & reduces
    if steps.sum() != len(step_ns):
        raise InputError(
            f"the profile has {steps.sum()} calls that all-reduce, but {len(step_ns)} were timed; record the job again"
        )
    if not len(step_ns):
        raise InputError("no profiled step: the profile cannot be placed in time; record at least one step")
    base_ns = int(step_ns[0, 0])  # differences stay exact in floats
    called = step_ns - base_ns
    lowest = int((called[:, 0] - spans.start_us[steps] * 1e3).max())
    highest = int((called[:, 1] - spans.end_us[steps] * 1e3).min())
    if lowest > highest + _CLOCK_GRAIN_NS:
        raise InputError(f"step times and profile disagree by {(lowest - highest) / 1e3:.0f} us; are they of one run?")
    return replace(profile, origin_ns=base_ns + (lowest + highest) // 2), abs(highest - lowest) / 2e3


def _profile_start_ns(space: Any) -> int | None:
    for plane in space.planes:
        names = {entry.key: text(entry.value.name) for entry in plane.stat_metadata}
        for stat in plane.stats:
            if names.get(stat.metadata_id) == "profile_start_time":
                return int(stat.uint64_value or stat.int64_value)
    return None


class _XPlaneReader:
    """Sorts a plane's events by their metadata; each kind becomes columns."""

    def __init__(self, plane: Any) -> None:
        self._plane = plane
        self._stat_names = {entry.key: text(entry.value.name) for entry in plane.stat_metadata}
        self._nodes: dict[str, int] = {}
        self._types: list[str] = []
        self._shapes: dict[int, str] = {}
        self._dropped: dict[str, int] = {}

    def result(self, origin_ns: int | None) -> XPlaneRank:
        names = {entry.key: text(entry.value.name) for entry in self._plane.event_metadata}
        op_of = {key: self._node(*match.groups()) for key, name in names.items() if (match := _OP.fullmatch(name))}
        role_of: dict[int, str] = {}
        annotations, comm_events, memory_rows, op_parts = [], [], [], []
        unseen = dict(op_of)
        for line in self._plane.lines:
            base_us = line.timestamp_ns / 1e3
            ops: list[tuple[float, float, int]] = []
            around: dict[str, list[tuple[float, float]]] = {_EXECUTOR: [], _EAGER: []}
            for event in line.events:
                key = event.metadata_id
                if key in op_of:
                    ops.append((event.offset_ps, event.duration_ps, op_of[key]))
                    if key in unseen:
                        self._shapes[unseen.pop(key)] = str(self._stats(event).get("shape", ""))
                    continue
                if key not in role_of:
                    role_of[key] = self._role(names.get(key, ""), event)
                role = role_of[key]
                if role in around:
                    around[role].append((event.offset_ps, event.duration_ps))
                elif role in (_ASYNC_START, _ASYNC_DONE):
                    comm_events.append((base_us + event.offset_ps / 1e6, role, self._stats(event)))
                elif role in (ALLOCATION, RELEASE):
                    memory_rows.append((base_us + event.offset_ps / 1e6, role == ALLOCATION, self._stats(event)))
                elif role in (_CALL, _STEP):
                    start_us = base_us + event.offset_ps / 1e6
                    annotations.append((start_us, start_us + event.duration_ps / 1e6, names[key], role == _CALL))
            op_parts.append(self._executed(ops, around, base_us, line.id))
        comm = self._comm(comm_events)
        memory, left_out = memory_events(memory_rows)
        self._count("of another allocator, or without numbers", left_out)
        columns = [np.concatenate(column) for column in zip(*op_parts, strict=True)]
        order = np.lexsort((columns[2], columns[1]))
        annotations.sort()
        return XPlaneRank(
            origin_ns=origin_ns,
            nodes=tuple(self._nodes),
            op_types=tuple(self._types),
            input_shapes=tuple(self._shapes.get(node, "") for node in range(len(self._nodes))),
            ops=OpEvents(node=columns[0][order], start_us=columns[1][order], end_us=columns[2][order], line=columns[3][order]),
            comm=comm,
            memory=memory,
            annotations=Annotations(
                name=tuple(name for _, _, name, _ in annotations),
                is_call=np.array([is_call for _, _, _, is_call in annotations], dtype=np.bool_),
                start_us=np.array([start for start, _, _, _ in annotations], dtype=np.float64),
                end_us=np.array([end for _, end, _, _ in annotations], dtype=np.float64),
            ),
            dropped=self._dropped,
        )

    def _node(self, name: str, op_type: str) -> int:
        index = self._nodes.setdefault(name, len(self._nodes))
        if index == len(self._types):
            self._types.append(op_type)
        return index

    def _role(self, name: str, event: Any) -> str:
        """The role of all events of one name for the reader; the tracer gives them the same stats, so the first one decides."""
        if name in (_ASYNC_START, _ASYNC_DONE, _EXECUTOR, _EAGER, ALLOCATION, RELEASE):
            return name
        stats = {self._stat_names.get(stat.metadata_id) for stat in event.stats}
        return next((stat for stat in (_CALL, _STEP) if stat in stats), "")

    def _stats(self, event: Any) -> dict[str, Any]:
        """An event's stats by name; a text is an index into the plane's table of names, or stands for itself."""
        stats: dict[str, Any] = {}
        for stat in event.stats:
            name = self._stat_names.get(stat.metadata_id, "")
            stats[name] = self._stat_names.get(stat.ref_value, "") if stat.ref_value else text(stat.str_value) or stat.int64_value
        return stats

    def _executed(
        self, ops: list[tuple[float, float, int]], around: dict[str, list[tuple[float, float]]], base_us: float, line: int
    ) -> tuple[Ints, Floats, Floats, Ints]:
        """Columns (node, start, end, line) of the ops of one thread that a graph's executor ran."""
        rows = np.array(ops, dtype=np.float64).reshape(-1, 3)
        rows = rows[np.lexsort((-rows[:, 1], rows[:, 0]))]  # an outer event sorts before those inside it
        start, node = rows[:, 0], rows[:, 2].astype(np.int64)
        end = start + rows[:, 1]
        eager = _inside(start, end, around[_EAGER]) & ~_inside(start, end, around[_EXECUTOR])
        nested = _inside_own(node, start, end)
        self._count("eager", int(eager.sum()))
        self._count("nested", int((nested & ~eager).sum()))
        keep = ~(eager | nested)
        start_us, end_us = base_us + start[keep] / 1e6, base_us + end[keep] / 1e6
        return node[keep], start_us, end_us, np.full(len(start_us), line, dtype=np.int64)

    def _comm(self, events: list[tuple[float, str, dict[str, Any]]]) -> CommEvents:
        """Pair starts and ends of one node in one executor step, in time order."""
        open_since: dict[tuple[Any, Any], list[float]] = defaultdict(list)
        spans: list[tuple[float, float, int]] = []
        unpaired = 0
        for time_us, role, stats in sorted(events, key=lambda event: event[0]):
            if stats.get("kernel_type") not in ALLREDUCE_OPS:
                continue
            key = stats.get("name"), stats.get("step_id")
            if role == _ASYNC_START:
                open_since[key].append(time_us)
            elif open_since[key]:
                spans.append((open_since[key].pop(0), time_us, self._node(str(key[0]), stats["kernel_type"])))
            else:
                unpaired += 1
        self._count("unpaired", unpaired + sum(map(len, open_since.values())))
        rows = np.array(sorted(spans), dtype=np.float64).reshape(-1, 3)
        return CommEvents(node=rows[:, 2].astype(np.int64), start_us=rows[:, 0], end_us=rows[:, 1])

    def _count(self, reason: str, number: int) -> None:
        if number:
            self._dropped[reason] = self._dropped.get(reason, 0) + number


def _inside(start: Floats, end: Floats, spans: list[tuple[float, float]]) -> npt.NDArray[np.bool_]:
    """Which events [start, end] lie inside one of the spans (start, duration); spans of a thread nest or are disjoint."""
    if not spans:
        return np.zeros(len(start), dtype=np.bool_)
    rows = np.array(sorted(spans), dtype=np.float64)
    reach = np.maximum.accumulate(rows[:, 0] + rows[:, 1])
    before = np.searchsorted(rows[:, 0], start, side="right") - 1
    inside: npt.NDArray[np.bool_] = (before >= 0) & (reach[np.maximum(before, 0)] >= end)
    return inside


def _inside_own(node: Ints, start: Floats, end: Floats) -> npt.NDArray[np.bool_]:
    """Which events lie inside an earlier one of the same node; the events are sorted by start, outer ones first."""
    order = np.argsort(node, kind="stable")
    same = np.r_[False, node[order][1:] == node[order][:-1]]
    inside = np.zeros(len(node), dtype=np.bool_)
    reach = -np.inf
    for position in np.flatnonzero(same | np.r_[same[1:], False]):
        i = order[position]
        reach = reach if same[position] else -np.inf
        inside[i] = end[i] <= reach
        reach = max(reach, end[i])
    return inside


@dataclass(frozen=True, kw_only=True)
class MemoryEvents:
    """m allocations and releases of one allocator, in the order of time."""

    allocator: str  # Its name; "" without events.
    time_us: Floats  # Microseconds since the profile's origin, [m].
    op: Ints  # Index into `ops` of the op in whose name it was done, [m].
    # is_allocation, address: [m].
    is_allocation: npt.NDArray[np.bool_]
    address: Ints
    # requested_bytes, taken_bytes: What was requested, and the size of the piece, [m].
    requested_bytes: Ints
    taken_bytes: Ints
    in_use_bytes: Ints  # All that the allocator had handed out then, after this event, [m].
    ops: tuple[str, ...]  # Names of ops; "" is none.

    def releases(self) -> Ints:
        """The event that gives back each allocation, [m]; -1: none does, or the event is no allocation."""
        release = np.full(len(self.time_us), -1, dtype=np.int64)
        held: dict[int, int] = {}
        for i, (address, allocates) in enumerate(zip(self.address.tolist(), self.is_allocation.tolist(), strict=True)):
            if allocates:
                held[address] = i
            elif address in held:
                release[held.pop(address)] = i
        return release


def memory_events(rows: Sequence[tuple[float, bool, Mapping[str, Any]]]) -> tuple[MemoryEvents, int]:
    """The events of the allocator that has the most, and how many were left out.

    Parameters
    ----------
    rows
        Of each event: time in us, whether it allocates, its stats.
    """
    whole = [(time_us, allocates, numbers, stats) for time_us, allocates, stats in rows if (numbers := _numbers(stats)) is not None]
    names = Counter(str(stats.get("allocator_name", "")) for _, _, _, stats in whole)
    allocator = names.most_common(1)[0][0] if names else ""
    its_rows = sorted((row for row in whole if str(row[3].get("allocator_name", "")) == allocator), key=lambda row: row[0])
    ops: dict[str, int] = {}
    op = [ops.setdefault(str(stats.get("tf_op") or ""), len(ops)) for _, _, _, stats in its_rows]
    columns = np.array([numbers for _, _, numbers, _ in its_rows], dtype=np.int64).reshape(-1, 4)
    events = MemoryEvents(
        allocator=allocator,
        time_us=np.array([time_us for time_us, _, _, _ in its_rows], dtype=np.float64),
        op=np.array(op, dtype=np.int64),
        is_allocation=np.array([allocates for _, allocates, _, _ in its_rows], dtype=np.bool_),
        address=columns[:, 0],
        requested_bytes=columns[:, 1],
        taken_bytes=columns[:, 2],
        in_use_bytes=columns[:, 3],
        ops=tuple(ops),
    )
    return events, len(rows) - len(its_rows)


def tensor_types(shapes: str) -> tuple[TensorType | None, ...]:
    """Types of an op's inputs as the tracer writes them, "(float[8,64];;int32[])" nothing for a handle; () for another text."""
    if not (shapes.startswith("(") and shapes.endswith(")")):
        return ()
    return tuple(_tensor_type(part) for part in shapes[1:-1].split(";"))


def _tensor_type(written: str) -> TensorType | None:
    name, bracket, rest = written.partition("[")
    sizes = rest[:-1].split(",") if rest[:-1] else []
    if not bracket or not rest.endswith("]") or not all(size.isdecimal() and len(size) < 12 for size in sizes):
        return None
    tensor_type = TensorType(_DTYPES.get(name, name), tuple(int(size) for size in sizes))
    return tensor_type if tensor_type.elements < _LARGEST else None


def _numbers(stats: Mapping[str, Any]) -> tuple[int, int, int, int] | None:
    """(address, requested, taken, in use); None if one is missing or impossible."""
    values = [stats.get(name) for name in ("addr", "requested_bytes", "allocation_bytes", "bytes_allocated")]
    numbers = [number for number in values if isinstance(number, int) and 0 <= number < 2**63]
    if len(numbers) < len(values) or max(numbers[1:]) >= _LARGEST:
        return None
    return numbers[0], numbers[1], numbers[2], numbers[3]
