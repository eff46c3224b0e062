"""The records of a Kineto file as columns, whatever the version of PyTorch that wrote it."""

from __future__ import annotations

import enum
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from dpro_search.collect.readers._json_records import JsonRecords
from dpro_search.collect.readers.kineto.records import Note, RecordArgs, SpanRecord, first_dtype, note_of, shapes_of
from dpro_search.collect.recorded_names import may_describe_collective
from dpro_search.collect.trace import Codes, Floats, Ints, Shapes

_Entry = TypeVar("_Entry")
Bools = npt.NDArray[np.bool_]

MODULE = "nn.Module: "  # before the class of a module and its number among those of the class
_LINE = re.compile(r"(?P<file>[^<(][^(]*\.py)\(\d+\): ")
_LIBRARY = re.compile(r"(?:^|/)(?:site-packages|dist-packages|lib/python[\d.]+)/")
_NOT_THE_USERS = sys.stdlib_module_names | {"torch"}

_LONGEST_SPAN_US = 3e13  # a year: a longer span is damage
_NANOSECONDS = 1e16  # a time stamp beyond this is nanoseconds since the epoch: as microseconds it would be the year 2286


class Category(enum.IntEnum):
    """Categories of records, whatever the version of PyTorch called them."""

    KERNEL = 0
    COPY = 1
    HOST_OP = 2
    RUNTIME = 3  # a call of the device's runtime or driver
    ANNOTATION = 4  # a span that the script or the framework marked on the host
    DEVICE_SYNC = 5  # CUPTI's record of a synchronisation, with what was waited for
    UNREAD = 6  # of no known category: a device's or not, which shows when the whole file is read; then there are none


_CATEGORY = {
    "kernel": Category.KERNEL,
    "memcpy": Category.COPY,
    "memset": Category.COPY,
    "cpu_op": Category.HOST_OP,
    "operator": Category.HOST_OP,
    "cpu": Category.HOST_OP,
    "runtime": Category.RUNTIME,
    "user_annotation": Category.ANNOTATION,
    "cuda_sync": Category.DEVICE_SYNC,
}
# Kineto names the categories of each vendor alike: cuda_runtime, xpu_runtime, mtia_runtime, privateuse1_driver, mlu_memcpy.
_CATEGORY_OF_VENDOR = {
    "_runtime": Category.RUNTIME,
    "_driver": Category.RUNTIME,
    "_memcpy": Category.COPY,
    "_memset": Category.COPY,
}
_DROPPED_CATEGORY = {
    "gpu_user_annotation": "device copies of annotations",
    "python_function": "Python frames that are neither a module's nor of the user's code",
    "overhead": "profiler overhead spans",
    "trace": "profiler window spans",
}
# Processes of a device, by what the profiler calls or labels them; and rows that only sum up what devices did, or repeat it.
_DEVICE_PROCESS = re.compile(r"\b(?:GPU|NPU|XPU|HPU|MLU|TPU|DCU|MUSA|GCU|Gaudi|Ascend Hardware)\b", re.IGNORECASE)
_SUMMARY_PROCESS = re.compile(r"Overlap Analysis|\b(?:HCCL|Communication|Freq|Utilization)\b", re.IGNORECASE)
_FRAMES = "python_function"
_MEMORY = "[memory]"
_CPU = 0  # of c10::DeviceType
_NO_ARGS = RecordArgs()
_INTEGERS = {
    "correlation": attrgetter("correlation"),
    "stream": attrgetter("stream"),
    "device": attrgetter("device"),
    "size_bytes": attrgetter("bytes"),
    "autograd": attrgetter("autograd"),
    "forward_thread": attrgetter("forward_thread"),
    "wait_stream": attrgetter("wait_stream"),
    "wait_record": attrgetter("wait_record"),
}


@dataclass(frozen=True, kw_only=True)
class PythonCalls:
    """n calls, [n] each; `name` and `thread` index the tables of the file."""

    name: npt.NDArray[np.int32]
    thread: npt.NDArray[np.int32]
    start_us: Floats
    end_us: Floats

    def __len__(self) -> int:
        return len(self.name)

    def select(self, chosen: Bools) -> PythonCalls:
        """The calls that are marked, [n]."""
        return PythonCalls(**{name: column[chosen] for name, column in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class MemoryCounts:
    """Bytes that an allocator had handed out after each of n calls, [n] each; `thread` indexes the table of the file."""

    thread: npt.NDArray[np.int32]
    time_us: Floats
    allocated_bytes: Ints
    on_device: Bools  # Not the host's allocator.


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
    external
        What a record of a launch or of a device has in common with the op that caused it.
    autograd, forward_thread
        Number of an op in the order of autograd's forward pass, and the thread of that pass: above 0 for ops of the backward pass.
    notes
        Of records that describe a collective, by their row.
    frames
        Calls of modules and of the user's functions.
    memory
        What the allocators had handed out.
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
    external: Ints
    autograd: Ints
    forward_thread: Ints
    shapes: npt.NDArray[np.int32]
    dtype: npt.NDArray[np.int32]
    shape_table: tuple[Shapes, ...]
    dtypes: tuple[str, ...]
    notes: dict[int, Note]
    frames: PythonCalls
    memory: MemoryCounts
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
    cats: _Interned = field(default_factory=_Interned)  # as the profile has them, of records of no known category
    devices: dict[int | str, bool] = field(default_factory=dict)  # whether a described process is a device
    rows: int = 0
    origin_us: int | None = None

    def add(self, records: list[SpanRecord]) -> None:
        """Append the records that are spans of a known category."""
        spans = [r for r in records if r.ph == "X"]
        if len(spans) < len(records):
            self._count_others(records)
            self._describe_processes([r for r in records if r.ph == "M"])
            self._append_memory([r for r in records if r.ph == "i" and r.name == _MEMORY])
        categories = self.categories
        kept, frames = [], []
        for r in spans:
            code = categories.get(r.cat)
            if code is None:
                code = categories[r.cat] = _category(r.cat.lower())
            if code < 0 and r.cat.lower() in _DROPPED_CATEGORY:
                if r.cat == _FRAMES and _is_possible(r) and tells_where(r.name):
                    frames.append(r)
                else:
                    self.dropped[_DROPPED_CATEGORY[r.cat.lower()]] += 1
            elif r.ts is None or r.dur is None:
                self.dropped["spans without a start or a duration"] += 1
            elif not _is_possible(r):
                self.dropped["spans with an impossible start or duration"] += 1
            else:
                kept.append(r)
        if kept:
            self._append(kept)
        if frames:
            self._append_frames(frames)

    def as_file(self, records: JsonRecords[SpanRecord]) -> KinetoFile:
        """All that was appended, with the fields that stood beside the records."""
        self._read_devices()
        self._drop_copies()
        base = records.header.get("baseTimeNanoseconds")
        base_ns = base if isinstance(base, int) and abs(base) < 2**62 else 0
        inputs = self._joined("inputs", np.int32)
        shapes, shape_table = _table([shapes_of(dims) for dims, _ in self.inputs])
        dtype, dtypes = _table([first_dtype(types) for _, types in self.inputs])
        integers = {column: self._joined(column, np.int64) for column in (*_INTEGERS, "external")}
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
            frames=PythonCalls(
                name=self._joined("frames.name", np.int32),
                thread=self._joined("frames.thread", np.int32),
                start_us=self._joined("frames.start_us", np.float64),
                end_us=self._joined("frames.end_us", np.float64),
            ),
            memory=MemoryCounts(
                thread=self._joined("memory.thread", np.int32),
                time_us=self._joined("memory.time_us", np.float64),
                allocated_bytes=self._joined("memory.allocated_bytes", np.int64),
                on_device=self._joined("memory.on_device", np.bool_),
            ),
            dropped=dict(self.dropped + records.dropped),
            **integers,
        )

    def _drop_copies(self) -> None:
        """Leave out records that stand in the file twice, with the same times, names and ids: their time would count twice."""
        kept = self._distinct("")
        if not kept.all():
            row = np.cumsum(kept) - 1
            self.notes = {int(row[number]): note for number, note in self.notes.items() if kept[number]}
            self.rows = int(kept.sum())
        self._distinct("frames.")

    def _distinct(self, prefix: str) -> Bools:
        """Keeps the first of equal rows of the columns whose names begin so (those without a dot for ""), and counts the others."""
        names = [name for name in self.parts if name.rpartition(".")[0] == prefix.rstrip(".")]
        columns = [np.concatenate(self.parts[name]) for name in names]
        kept = first_of_equal_rows(columns)
        if not kept.all():
            self.dropped["records that stand twice"] += int((~kept).sum())
            columns = [column[kept] for column in columns]
        self.parts |= {name: [column] for name, column in zip(names, columns, strict=True)}
        return kept

    def _append(self, kept: list[SpanRecord]) -> None:
        start, duration = self._times(kept)
        args = [r.args or _NO_ARGS for r in kept]
        names, processes, threads, categories = self.names, self.processes, self.threads, self.categories
        inputs = self.inputs
        piece: dict[str, npt.NDArray[Any]] = {
            "start_us": start,
            "duration_us": duration,
            "category": np.array([categories[r.cat] if categories[r.cat] >= 0 else Category.UNREAD for r in kept], np.int8),
            "cats": np.array([-1 if categories[r.cat] >= 0 else self.cats[r.cat] for r in kept], np.int32),
            "name": np.array([names[r.name] for r in kept], np.int32),
            "process": np.array([processes[r.pid] for r in kept], np.int32),
            "thread": np.array([threads[r.tid] for r in kept], np.int32),
            "inputs": np.array(
                [inputs[bytes(d), bytes(a.input_types)] if (d := a.input_dims or a.old_input_dims) else -1 for a in args], np.int32
            ),
        }
        piece |= {column: _integers(list(map(value, args))) for column, value in _INTEGERS.items()}
        piece["external"] = np.maximum(*(_integers([getattr(a, key) for a in args]) for key in ("external", "old_external")))
        self._add_columns(piece)
        for row in np.flatnonzero(self._may_note(piece["name"])).tolist():
            note = note_of(args[row], kept[row].name)
            if note is not None:
                self.notes[self.rows + row] = note
        self.rows += len(kept)

    def _describe_processes(self, records: list[SpanRecord]) -> None:
        """Notes which processes are devices, from their names and labels."""
        for r in records:
            if r.args is None or r.name not in ("process_name", "process_labels"):
                continue
            text = bytes(r.args.described if r.name == "process_name" else r.args.labels).decode(errors="replace")
            if _SUMMARY_PROCESS.search(text):
                self.devices[r.pid] = False
            elif _DEVICE_PROCESS.search(text):
                self.devices.setdefault(r.pid, True)

    def _read_devices(self) -> None:
        """Records of no known category become kernels if they are of a device, else are left out.

        They are of a device if their process is described as one, or if they have a stream and the correlation id of a call.
        """
        category, cats = self._joined("category", np.int8), self._joined("cats", np.int32)
        unread = category == Category.UNREAD
        self.parts["category"] = [category]
        if not unread.any():
            return
        process, stream, correlation = (np.concatenate(self.parts[name]) for name in ("process", "stream", "correlation"))
        described = np.array([self.devices.get(pid, False) for pid in self.processes])
        not_a_summary = np.array([self.devices.get(pid, True) for pid in self.processes])
        called = (correlation > 0) & np.isin(correlation, correlation[category == Category.RUNTIME])
        launched = called & (stream >= 0) & not_a_summary[process]
        annotates = np.array(["annotation" in cat.lower() for cat in self.cats])[np.maximum(cats, 0)]
        on_device = unread & (described[process] | launched) & ~annotates
        category[on_device] = Category.KERNEL
        kept = ~unread | on_device
        texts = list(self.cats)
        for number, count in zip(*np.unique(cats[~kept], return_counts=True), strict=True):
            self.dropped[f"spans of category '{texts[number]}'"] += int(count)
        for name, pieces in self.parts.items():
            if not name.startswith(("frames.", "memory.")):
                self.parts[name] = [np.concatenate(pieces)[kept]]
        place = np.cumsum(kept) - 1
        self.notes = {int(place[row]): note for row, note in self.notes.items() if kept[row]}

    def _times(self, kept: list[SpanRecord]) -> tuple[Floats, Floats]:
        """Start and duration of each span in us; the first span of all decides from when on starts count."""
        times = [r.ts for r in kept if r.ts is not None]
        if self.origin_us is None:
            self.origin_us = int(times[0] // 1000 if abs(times[0]) > _NANOSECONDS else times[0])
        origin_us, origin_ns = self.origin_us, self.origin_us * 1000
        in_ns = np.abs(np.array(times, np.float64)) > _NANOSECONDS
        start = np.array([(t - origin_ns) / 1000 if abs(t) > _NANOSECONDS else t - origin_us for t in times], np.float64)
        return start, np.array([r.dur for r in kept], np.float64) * np.where(in_ns, 1e-3, 1.0)

    def _append_frames(self, frames: list[SpanRecord]) -> None:
        start, duration = self._times(frames)
        self._add_columns(
            {
                "frames.name": np.array([self.names[r.name] for r in frames], np.int32),
                "frames.thread": np.array([self.threads[r.tid] for r in frames], np.int32),
                "frames.start_us": start,
                "frames.end_us": start + duration,
            }
        )

    def _append_memory(self, records: list[SpanRecord]) -> None:
        instants = [(msgspec.structs.replace(r, dur=0.0), r.args) for r in records if r.args is not None]
        counts = [(r, args) for r, args in instants if _is_possible(r) and args.allocated is not None and args.allocated >= 0]
        if not counts:
            return
        start, _ = self._times([r for r, _ in counts])
        self._add_columns(
            {
                "memory.thread": np.array([self.threads[r.tid] for r, _ in counts], np.int32),
                "memory.time_us": start,
                "memory.allocated_bytes": _integers([args.allocated for _, args in counts]),
                "memory.on_device": np.array([args.device_type != _CPU for _, args in counts], np.bool_),
            }
        )

    def _add_columns(self, piece: dict[str, npt.NDArray[Any]]) -> None:
        for column, values in piece.items():
            self.parts.setdefault(column, []).append(values)

    def _may_note(self, name: npt.NDArray[np.int32]) -> Bools:
        """Rows whose name is that of a collective, or of a span around one."""
        self.noting += [may_describe_collective(text) for text in list(self.names)[len(self.noting) :]]
        may_note: Bools = np.array(self.noting)[name]
        return may_note

    def _count_others(self, records: list[SpanRecord]) -> None:
        phases = Counter(r.ph for r in records)
        self.dropped["flow arrows"] += sum(phases.pop(phase, 0) for phase in "stf")
        for phase in phases.keys() - {"X", "M", "i", "I"}:
            self.dropped[f"records of phase '{phase}'"] += phases[phase]

    def _joined(self, column: str, dtype: Any) -> npt.NDArray[Any]:
        return np.concatenate([np.zeros(0, dtype), *self.parts.pop(column, [])])


def rows_named(names: Sequence[str], column: Codes | Ints, accepts: Callable[[str], object]) -> Bools:
    """Rows of a column that indexes a table of names whose name is accepted, [n]."""
    accepted: Bools = np.array([bool(accepts(name)) for name in names] or [False])
    return accepted[column]


@lru_cache(maxsize=1 << 16)  # a profile has millions of frames of some thousand names
def tells_where(name: str) -> bool:
    """Whether a frame is a module's call, or a function in a file that is neither Python's own nor PyTorch's nor installed."""
    if name.startswith(MODULE):
        return True
    line = _LINE.match(name)
    if line is None or _LIBRARY.search(line["file"]):
        return False
    return line["file"].partition("/")[0].removesuffix(".py") not in _NOT_THE_USERS


def first_of_equal_rows(columns: Sequence[npt.NDArray[Any]]) -> Bools:
    """Whether each row differs from all rows before it, [n]; columns are [n] each, of 8 bytes an entry or less."""
    if not columns or not len(columns[0]):
        return np.ones(len(columns[0]) if columns else 0, np.bool_)
    digest = np.zeros(len(columns[0]), np.uint64)
    for column in columns:  # a multiplicative hash of each row (Knuth, The Art of Computer Programming, volume 3, section 6.4)
        bits = column.view(np.uint64) if column.dtype.itemsize == 8 else column.astype(np.int64).view(np.uint64)
        digest = (digest ^ bits) * np.uint64(0x9E3779B97F4A7C15)
        digest ^= digest >> np.uint64(29)
    order = np.argsort(digest, kind="stable")
    same = np.flatnonzero(digest[order[1:]] == digest[order[:-1]])
    kept = np.ones(len(digest), np.bool_)
    pairs = order[same + 1], order[same]
    equal = np.all([column[pairs[0]] == column[pairs[1]] for column in columns], axis=0)
    kept[pairs[0][equal]] = False
    return kept


def _category(name: str) -> int:
    """The `Category` that a profile's own name of a category, in lower case, stands for; -1: none."""
    of_vendor = (category for ending, category in _CATEGORY_OF_VENDOR.items() if name.endswith(ending))
    return _CATEGORY.get(name, next(of_vendor, -1))


def _is_possible(r: SpanRecord) -> bool:
    """Whether a span has a start and a duration that a profile can contain: none lasts for years."""
    if r.ts is None or r.dur is None or not -1e19 < r.ts < 1e19:
        return False
    return 0 <= r.dur < _LONGEST_SPAN_US * (1e3 if abs(r.ts) > _NANOSECONDS else 1)


def _table(entries: Sequence[_Entry]) -> tuple[npt.NDArray[np.int32], tuple[_Entry, ...]]:
    """Distinct entries, and the place of each among them, with a last one for -1; -1 also for those that are empty."""
    number = _Interned()
    places = [*(number[entry] if entry else -1 for entry in entries), -1]
    return np.array(places, np.int32), tuple(number)


def _integers(values: list[Any]) -> Ints:
    """A column of integers; -1 stands for null and for values that do not fit."""
    try:
        return np.array(values, np.int64)
    except (TypeError, OverflowError):
        return np.array([v if isinstance(v, int) and abs(v) < 2**62 else -1 for v in values], np.int64)
