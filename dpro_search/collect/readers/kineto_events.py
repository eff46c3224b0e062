"""The records of a Kineto file as columns, whatever the version of PyTorch that wrote it."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dpro_search.collect.readers.kineto_json import JsonRecords
from dpro_search.collect.readers.kineto_notes import COMMUNICATES, Note, RecordArgs, SpanRecord, first_dtype, note_of, shapes_of
from dpro_search.collect.trace import Floats, Ints, Shapes

_Entry = TypeVar("_Entry")

_NANOSECONDS = 1e16  # a time stamp beyond this is nanoseconds since the epoch: as microseconds it would be the year 2286


class Category(enum.IntEnum):
    """What a record is, whatever the version of PyTorch called it."""

    KERNEL = 0
    COPY = 1
    HOST_OP = 2
    RUNTIME = 3  # a call of the device's runtime or driver
    ANNOTATION = 4  # a span that the script or the framework marked on the host
    DEVICE_SYNC = 5  # CUPTI's record of a synchronisation, with what was waited for


_CATEGORY = {
    "kernel": Category.KERNEL,
    "gpu_memcpy": Category.COPY,
    "memcpy": Category.COPY,
    "gpu_memset": Category.COPY,
    "memset": Category.COPY,
    "cpu_op": Category.HOST_OP,
    "operator": Category.HOST_OP,
    "cpu": Category.HOST_OP,
    "cuda_runtime": Category.RUNTIME,
    "cuda_driver": Category.RUNTIME,
    "runtime": Category.RUNTIME,
    "xpu_runtime": Category.RUNTIME,
    "user_annotation": Category.ANNOTATION,
    "cuda_sync": Category.DEVICE_SYNC,
}
_DROPPED_CATEGORY = {
    "gpu_user_annotation": "device copies of annotations",
    "python_function": "Python frames",
    "overhead": "profiler overhead spans",
    "trace": "profiler window spans",
}
_NO_ARGS = RecordArgs()
_INTEGERS = {
    "correlation": attrgetter("correlation"),
    "stream": attrgetter("stream"),
    "device": attrgetter("device"),
    "size_bytes": attrgetter("bytes"),
    "wait_stream": attrgetter("wait_stream"),
    "wait_record": attrgetter("wait_record"),
}


@dataclass(frozen=True, kw_only=True)
class KinetoFile:
    """n records in the order of the file. Times are microseconds since `origin_ns`; -1 stands for an unknown number.

    Attributes
    ----------
    header
        Fields beside the records: distributedInfo, schemaVersion...
    origin_ns
        Nanoseconds of the recording host's clock (usually since the epoch).
    names, processes, threads
        What `name`, `process` and `thread` index. A device's stream is a thread of the device's process.
    shapes, dtype
        What `shape_table` and `dtypes` index: shapes of an op's inputs, and the element type of its first tensor.
    notes
        Of records that describe a collective, by their row.
    dropped
        Records that were left out, by reason.
    """

    header: dict[str, Any]
    origin_ns: int
    names: tuple[str, ...]
    processes: tuple[int | str, ...]
    threads: tuple[int | str, ...]
    category: npt.NDArray[np.int8]
    name: npt.NDArray[np.int32]
    process: npt.NDArray[np.int32]
    thread: npt.NDArray[np.int32]
    start_us: Floats
    duration_us: Floats
    correlation: Ints
    stream: Ints
    device: Ints
    size_bytes: Ints
    wait_stream: Ints
    wait_record: Ints
    shapes: npt.NDArray[np.int32]
    dtype: npt.NDArray[np.int32]
    shape_table: tuple[Shapes, ...]
    dtypes: tuple[str, ...]
    notes: dict[int, Note]
    dropped: dict[str, int]

    def __len__(self) -> int:
        return len(self.category)


def read_kineto_file(path: Path) -> KinetoFile:
    """Read one file.

    Raises
    ------
    InputError
        The file cannot be read.
    TraceFormatError
        It holds no list of records, or its compressed data are damaged before the first one.
    """
    columns = _Columns()
    records = JsonRecords(path, SpanRecord)
    for piece in records:
        columns.add(piece)
    return columns.as_file(records)


class _Interned(dict[Any, int]):
    """Numbers in order of first use."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


@dataclass
class _Columns:
    """Growing columns: a list of arrays each, one for a piece of the file."""

    parts: dict[str, list[npt.NDArray[Any]]] = field(default_factory=dict)
    names: _Interned = field(default_factory=_Interned)
    processes: _Interned = field(default_factory=_Interned)
    threads: _Interned = field(default_factory=_Interned)
    inputs: _Interned = field(default_factory=_Interned)  # dimensions and types of an op's inputs, as they are spelled
    categories: dict[str, int] = field(default_factory=dict)
    notes: dict[int, Note] = field(default_factory=dict)
    noting: list[bool] = field(default_factory=list)  # of each name
    dropped: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    origin_us: int | None = None

    def add(self, records: list[SpanRecord]) -> None:
        """Append the records that are spans of a known category."""
        spans = [r for r in records if r.ph == "X"]
        if len(spans) < len(records):
            self._count_others(records)
        categories = self.categories
        kept = []
        for r in spans:
            code = categories.get(r.cat)
            if code is None:
                code = categories[r.cat] = _CATEGORY.get(r.cat.lower(), -1)
            if code < 0:
                self.dropped[_DROPPED_CATEGORY.get(r.cat.lower(), f"spans of category '{r.cat}'")] += 1
            elif r.ts is None or r.dur is None:
                self.dropped["spans without a start or a duration"] += 1
            elif not 0 <= r.dur < 1e19 or not -1e19 < r.ts < 1e19:
                self.dropped["spans with an impossible start or duration"] += 1
            else:
                kept.append(r)
        if kept:
            self._append(kept)

    def as_file(self, records: JsonRecords[SpanRecord]) -> KinetoFile:
        """All that was appended, with the fields that stood beside the records."""
        base = records.header.get("baseTimeNanoseconds")
        base_ns = base if isinstance(base, int) and abs(base) < 2**62 else 0
        inputs = self._joined("inputs", np.int32)
        shapes, shape_table = _table([shapes_of(dims) for dims, _ in self.inputs])
        dtype, dtypes = _table([first_dtype(types) for _, types in self.inputs])
        integers = {column: self._joined(column, np.int64) for column in _INTEGERS}
        return KinetoFile(
            header=records.header,
            origin_ns=(self.origin_us or 0) * 1000 + base_ns,
            names=tuple(self.names),
            processes=tuple(self.processes),
            threads=tuple(self.threads),
            category=self._joined("category", np.int8),
            name=self._joined("name", np.int32),
            process=self._joined("process", np.int32),
            thread=self._joined("thread", np.int32),
            start_us=self._joined("start_us", np.float64),
            duration_us=self._joined("duration_us", np.float64),
            shapes=shapes[inputs],
            dtype=dtype[inputs],
            shape_table=shape_table,
            dtypes=dtypes,
            notes=self.notes,
            dropped=dict(self.dropped + records.dropped),
            **integers,
        )

    def _append(self, kept: list[SpanRecord]) -> None:
        times = [r.ts for r in kept if r.ts is not None]
        if self.origin_us is None:
            self.origin_us = int(times[0] // 1000 if abs(times[0]) > _NANOSECONDS else times[0])
        origin_us, origin_ns = self.origin_us, self.origin_us * 1000
        in_ns = np.abs(np.array(times, np.float64)) > _NANOSECONDS
        start = np.array([(t - origin_ns) / 1000 if abs(t) > _NANOSECONDS else t - origin_us for t in times], np.float64)
        scale = np.where(in_ns, 1e-3, 1.0)
        args = [r.args or _NO_ARGS for r in kept]
        names, processes, threads, categories = self.names, self.processes, self.threads, self.categories
        inputs = self.inputs
        piece: dict[str, npt.NDArray[Any]] = {
            "start_us": start,
            "duration_us": np.array([r.dur for r in kept], np.float64) * scale,
            "category": np.array([categories[r.cat] for r in kept], np.int8),
            "name": np.array([names[r.name] for r in kept], np.int32),
            "process": np.array([processes[r.pid] for r in kept], np.int32),
            "thread": np.array([threads[r.tid] for r in kept], np.int32),
            "inputs": np.array(
                [inputs[bytes(d), bytes(a.input_types)] if (d := a.input_dims or a.old_input_dims) else -1 for a in args], np.int32
            ),
        }
        piece |= {column: _integers(list(map(value, args))) for column, value in _INTEGERS.items()}
        for column, values in piece.items():
            self.parts.setdefault(column, []).append(values)
        for row in np.flatnonzero(self._may_note(piece["name"])).tolist():
            note = note_of(args[row], kept[row].name)
            if note is not None:
                self.notes[self.rows + row] = note
        self.rows += len(kept)

    def _may_note(self, name: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Rows whose name is that of a collective, or of a span around one."""
        self.noting += [bool(COMMUNICATES.search(text)) for text in list(self.names)[len(self.noting) :]]
        found: npt.NDArray[np.bool_] = np.array(self.noting)[name]
        return found

    def _count_others(self, records: list[SpanRecord]) -> None:
        phases = Counter(r.ph for r in records)
        self.dropped["flow arrows"] += sum(phases.pop(phase, 0) for phase in "stf")
        for phase in phases.keys() - {"X", "M", "i", "I"}:
            self.dropped[f"records of phase '{phase}'"] += phases[phase]

    def _joined(self, column: str, dtype: Any) -> npt.NDArray[Any]:
        return np.concatenate([np.zeros(0, dtype), *self.parts.pop(column, [])])


def _table(entries: Sequence[_Entry]) -> tuple[npt.NDArray[np.int32], tuple[_Entry, ...]]:
    """Distinct entries, and the place of each among them, with a last one for -1; -1 also for those that are empty."""
    number = _Interned()
    places = [*(number[entry] if entry else -1 for entry in entries), -1]
    return np.array(places, np.int32), tuple(number)


def _integers(values: list[Any]) -> Ints:
    """As a column; -1 for null and for what does not fit."""
    try:
        return np.array(values, np.int64)
    except (TypeError, OverflowError):
        return np.array([v if isinstance(v, int) and abs(v) < 2**62 else -1 for v in values], np.int64)
