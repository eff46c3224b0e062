"""Horovod's timeline: the phases of every tensor's all-reduce, and which tensors travelled together.

A Chrome trace in which each tensor is a process. Per all-reduce it holds the pairs B/E of NEGOTIATE_ALLREDUCE (and in it, while
the request is not cached, an X named by the number of each rank that enqueues it), then
ALLREDUCE > [INIT_FUSION_BUFFER] > MEMCPY_IN_FUSION_BUFFER > {GLOO,MPI,NCCL}_ALLREDUCE > MEMCPY_OUT_FUSION_BUFFER; an E has no
name and closes the last B of its process. The E of ALLREDUCE has dtype and shape. A killed job leaves a file without its end.
"""

from __future__ import annotations

import enum
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dpro_search.collect.readers._bytes import read_available
from dpro_search.collect.readers._chrome import events_of_damaged, list_decoder
from dpro_search.collect.readers._salvage import cut_off, shown
from dpro_search.collect.trace import EventKind, Floats, Ints
from dpro_search.errors import TraceFormatError

_ITEM_BYTES = {
    "uint8": 1, "int8": 1, "bool": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "float32": 4, "int64": 8, "float64": 8,
}  # fmt: skip
_OUTERMOST = ("NEGOTIATE_ALLREDUCE", "ALLREDUCE")  # spans that lie in no other
_LARGEST_BYTES = 2**50
_RANK_DIGITS = 5  # longer numbers are damaged


class TimelinePhase(enum.IntEnum):
    """Phases of an all-reduce: each row of a timeline is of one."""

    NEGOTIATE = 0  # from the first rank that enqueued the tensor to the last
    QUEUE = 1  # from there to the first copy or transfer: waiting for earlier collectives and the fusion buffer
    MEMCPY_IN = 2
    TRANSFER = 3  # the all-reduce itself
    MEMCPY_OUT = 4
    WHOLE = 5  # the span ALLREDUCE: from the start of the collective's operation to the tensor's completion callback


KIND_OF_PHASE = {
    TimelinePhase.NEGOTIATE: EventKind.NEGOTIATE,
    TimelinePhase.QUEUE: EventKind.QUEUE,
    TimelinePhase.MEMCPY_IN: EventKind.MEMCPY_IN,
    TimelinePhase.TRANSFER: EventKind.ALLREDUCE,
    TimelinePhase.MEMCPY_OUT: EventKind.MEMCPY_OUT,
}


class TimelineTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that was all-reduced; dtype and shape are empty and the size -1 where no all-reduce of it was completed."""

    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    size_bytes: int = -1


@dataclass(frozen=True, kw_only=True)
class HorovodTimeline:
    """n phases in the order of their ends in the file; times are microseconds since `origin_ns`."""

    origin_ns: int  # Nanoseconds since the Unix epoch.
    tensors: tuple[TimelineTensor, ...]
    tensor: Ints  # Index into `tensors`, [n].
    phase: Ints  # `TimelinePhase`, [n].
    start_us: Floats
    end_us: Floats
    collective: Ints  # Phases of one number belong to one (fused) collective, [n]; -1: its transfer had not begun.
    cycle_us: Floats  # Instants at which the communication thread woke up (only with HOROVOD_TIMELINE_MARK_CYCLES=1).
    unfinished: int  # Phases that were begun but not ended in the file; they are not among the rows.
    # Number of spans of other operations (BROADCAST, INIT_FUSION_BUFFER...), by name; they are not among the rows.
    skipped: dict[str, int]
    # The file ends in the middle of a record, which was left out. One that only lacks its closing bracket is not truncated.
    truncated: bool
    # Records that were lost because the file is damaged, and spans that are not known without them, by reason.
    dropped: dict[str, int] = field(default_factory=dict)
    ranks: int = 0  # Ranks whose requests the coordinator noted: all of the job's in a whole file; 0 where it noted none.

    @property
    def size_bytes(self) -> Ints:
        """Size of each row's tensor, [n]; -1 where unknown."""
        return np.array([tensor.size_bytes for tensor in self.tensors], dtype=np.int64)[self.tensor]


def read_horovod_timeline(path: Path) -> HorovodTimeline:
    """Read a timeline (gzip or not), also of a job that was killed.

    Raises
    ------
    InputError
        The file cannot be read.
    TraceFormatError
        Not a timeline of Horovod.
    """
    data, damage = read_available(path)
    dropped: Counter[str] = Counter()
    records = _records(data, path, dropped)
    return _TimelineReader(path, dropped).read(records, truncated=bool(damage) or bool(dropped[cut_off(path)]))


class _TimelineRecord(msgspec.Struct, gc=False):
    ph: str
    name: str = ""
    pid: int = 0
    ts: float = 0.0
    args: dict[str, str | int | float] | None = None


def _records(data: bytes, path: Path, dropped: Counter[str]) -> list[_TimelineRecord]:
    """All whole records; what is lost is added to `dropped`."""
    data = data.strip()
    if not data.startswith(b"["):
        raise TraceFormatError(f"{path}: not a Horovod timeline (expected a JSON list of events, beginning with '[')")
    decode = list_decoder(_TimelineRecord)
    records = decode(data[1:].rstrip(b"], \t\r\n"))
    return events_of_damaged(data[1:], decode, path, dropped) if records is None else records


class _TimelineReader:
    """Matches B and E of every process with a stack, and makes a row of each phase when it ends."""

    def __init__(self, path: Path, dropped: Counter[str]) -> None:
        self._path = path
        self._dropped = dropped
        self._names: dict[int, str] = {}
        self._index: dict[int, int] = {}  # process -> tensor, in the order of first rows
        self._shapes: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._rows: list[tuple[int, int, float, float]] = []
        self._collective: list[int] = []
        self._run: dict[int, _UnfinishedAllReduce] = {}  # the all-reduce under way of each process
        self._collectives = 0
        self._transfer_ended = True  # the next transfer opens a new collective
        self._cycles: list[float] = []
        self._ranks = 0
        self._skipped: dict[str, int] = {}

    def read(self, records: list[_TimelineRecord], truncated: bool) -> HorovodTimeline:
        origin_us = None
        stacks: dict[int, list[_TimelineRecord]] = {}
        for record in records:
            if record.ph == "B":
                stack = stacks.setdefault(record.pid, [])
                if stack and record.name in _OUTERMOST:  # an end before it was lost
                    self._lose(record.pid, stack)
                stack.append(record)
                self._begin(record, stack)
            elif record.ph == "E":
                stack = stacks.get(record.pid, [])
                if not self._fits(stack, record):
                    self._lose(record.pid, stack)
                    continue
                self._end(stack.pop(), record, stack)
            elif record.ph == "X" and len(record.name) <= _RANK_DIGITS and record.name.isdecimal():
                self._ranks = max(self._ranks, int(record.name) + 1)
            elif record.ph == "i" and record.name == "CYCLE_START":
                self._cycles.append(record.ts)
            elif record.ph == "M" and record.name == "process_name" and record.args is not None:
                origin_us = record.args.get("start_time_since_epoch_in_micros", origin_us)
                if "name" in record.args:
                    self._names[record.pid] = str(record.args["name"])
        if not isinstance(origin_us, int):
            raise TraceFormatError(
                f"{self._path}: not a Horovod timeline (no record with start_time_since_epoch_in_micros); "
                "expected the file that HOROVOD_TIMELINE names"
            )
        return self._result(origin_us * 1000, sum(map(len, stacks.values())), truncated)

    def _fits(self, stack: list[_TimelineRecord], record: _TimelineRecord) -> bool:
        """Whether an end closes the last beginning: only the end of the whole all-reduce has dtype and shape."""
        whole = record.args is not None and "dtype" in record.args
        if self._dropped and len(stack) == 1 and stack[0].name == "ALLREDUCE":
            return whole
        return bool(stack) and (not whole or len(stack) == 1)

    def _lose(self, pid: int, stack: list[_TimelineRecord]) -> None:
        """Give up the spans under way of a process one of whose records was lost."""
        self._dropped[f"spans that a lost record leaves open in {shown(self._path)}"] += max(len(stack), 1)
        stack.clear()
        self._run.pop(pid, None)

    def _begin(self, record: _TimelineRecord, stack: list[_TimelineRecord]) -> None:
        if len(stack) == 1 and record.name == "NEGOTIATE_ALLREDUCE":
            self._run[record.pid] = _UnfinishedAllReduce()
        elif len(stack) == 1 and record.name == "ALLREDUCE":
            run = self._run.setdefault(record.pid, _UnfinishedAllReduce())
            run.ready_us = record.ts if math.isnan(run.ready_us) else run.ready_us
        elif len(stack) == 2 and stack[0].name == "ALLREDUCE":
            phase = _phase(record.name)
            run = self._run[record.pid]
            if phase is not None and not run.queued:
                run.queued = True
                self._row(record.pid, TimelinePhase.QUEUE, run.ready_us, record.ts)
            if phase is TimelinePhase.TRANSFER:
                # One thread runs one collective at a time: it begins the transfer of all its tensors before it ends any.
                self._collectives += self._transfer_ended
                self._transfer_ended = False
                run.collective = self._collectives - 1
                for row in run.rows:
                    self._collective[row] = run.collective

    def _end(self, begun: _TimelineRecord, record: _TimelineRecord, stack: list[_TimelineRecord]) -> None:
        pid = record.pid
        if not stack and begun.name == "NEGOTIATE_ALLREDUCE":
            self._row(pid, TimelinePhase.NEGOTIATE, begun.ts, record.ts)
            self._run[pid].ready_us = record.ts
        elif not stack and begun.name == "ALLREDUCE":
            self._row(pid, TimelinePhase.WHOLE, begun.ts, record.ts)
            del self._run[pid]
            if record.args is not None:
                shape = tuple(int(number) for number in re.findall(r"\d{1,18}", str(record.args.get("shape", ""))))
                dtype = str(record.args.get("dtype", ""))
                if dtype in _ITEM_BYTES or pid not in self._shapes:
                    self._shapes[pid] = dtype, shape
        elif len(stack) == 1 and stack[0].name == "ALLREDUCE" and (phase := _phase(begun.name)) is not None:
            self._row(pid, phase, begun.ts, record.ts)
            self._transfer_ended |= phase is TimelinePhase.TRANSFER
        else:
            self._skipped[begun.name] = self._skipped.get(begun.name, 0) + 1

    def _row(self, pid: int, phase: TimelinePhase, start_us: float, end_us: float) -> None:
        run = self._run[pid]
        run.rows.append(len(self._rows))
        self._rows.append((self._index.setdefault(pid, len(self._index)), phase, start_us, end_us))
        self._collective.append(run.collective)

    def _result(self, origin_ns: int, unfinished: int, truncated: bool) -> HorovodTimeline:
        rows: Any = list(zip(*self._rows, strict=True)) or [()] * 4
        return HorovodTimeline(
            origin_ns=origin_ns,
            tensors=tuple(self._tensor(pid) for pid in self._index),
            tensor=np.array(rows[0], dtype=np.int64),
            phase=np.array(rows[1], dtype=np.int64),
            start_us=np.array(rows[2], dtype=np.float64),
            end_us=np.array(rows[3], dtype=np.float64),
            collective=np.array(self._collective, dtype=np.int64),
            cycle_us=np.array(self._cycles, dtype=np.float64),
            unfinished=unfinished,
            skipped=self._skipped,
            truncated=truncated,
            dropped=dict(self._dropped),
            ranks=self._ranks,
        )

    def _tensor(self, pid: int) -> TimelineTensor:
        name = self._names.get(pid)
        if name is None:
            self._dropped[f"damaged names of tensors in {shown(self._path)}"] += 1
            name = f"unnamed tensor of process {pid}"
        if pid not in self._shapes:
            return TimelineTensor(name=name)
        dtype, shape = self._shapes[pid]
        if dtype not in _ITEM_BYTES:
            raise TraceFormatError(f"{self._path}: tensor '{name}' has the unknown dtype '{dtype}'")
        size_bytes = math.prod(shape) * _ITEM_BYTES[dtype]
        return TimelineTensor(name=name, dtype=dtype, shape=shape, size_bytes=size_bytes if size_bytes < _LARGEST_BYTES else -1)


class _UnfinishedAllReduce:
    """One all-reduce of one tensor while it is read."""

    __slots__ = ("collective", "queued", "ready_us", "rows")

    def __init__(self) -> None:
        self.collective = -1
        self.queued = False
        self.ready_us = math.nan
        self.rows: list[int] = []


def _phase(name: str) -> TimelinePhase | None:
    if name == "MEMCPY_IN_FUSION_BUFFER":
        return TimelinePhase.MEMCPY_IN
    if name == "MEMCPY_OUT_FUSION_BUFFER":
        return TimelinePhase.MEMCPY_OUT
    return TimelinePhase.TRANSFER if name.endswith("_ALLREDUCE") else None
