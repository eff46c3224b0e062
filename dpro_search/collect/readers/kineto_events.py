"""The records of a Kineto file as columns, decoded in pieces so that memory does not grow with the JSON.

A file is an object with a list ``traceEvents`` or a bare list, gzip or not. It is cut into pieces of some megabytes between two
records and each is decoded into typed structs, which leaves out all fields that nobody asks for. A piece that is no JSON is mended
where profilers are known to err (NaN, unescaped backslashes, bytes that are no UTF-8), else read record by record; what then still
cannot be read is counted.
"""

from __future__ import annotations

import enum
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats, Ints
from dpro_search.errors import InputError, TraceFormatError

_PIECE = 4 << 20
_TRIES = 16  # places to cut a piece at before it is read record by record
_MOST_HEADER = 64 << 20
_LONGEST_RECORD = 1 << 20
_NANOSECONDS = 1e16  # a time stamp beyond this is nanoseconds since the epoch: as microseconds it would be the year 2286
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_NOT_JSON_NUMBER = re.compile(rb"(?<=[:,\[\s])[-+]?(?:nan|NaN|NAN|inf|Infinity|INF)(?=[\s,\]}])")
_BACKSLASH = re.compile(rb'(\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))|\\')  # with the escape that it begins, if it is one
_END_OF_LIST = re.compile(rb'\}\s*\]\s*(?:,\s*"|\}|$)')
_COMMUNICATES = re.compile(r"nccl|mscclKernel|onecclKernel|^gloo:|^mpi:|^record_param_comms$", re.IGNORECASE)
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")


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


class _Args(msgspec.Struct, gc=False, frozen=True):
    correlation: int | None = -1
    stream: int | None = -1
    device: int | None = -1
    bytes: int | None = -1
    external_id: int | None = msgspec.field(name="External id", default=-1)
    collective_name: str | None = msgspec.field(name="Collective name", default=None)
    in_elements: int | None = msgspec.field(name="In msg nelems", default=None)
    out_elements: int | None = msgspec.field(name="Out msg nelems", default=None)
    dtype: str | None = None
    group_name: str | None = msgspec.field(name="Process Group Name", default=None)
    group_ranks: str | list[int] | None = msgspec.field(name="Process Group Ranks", default=None)
    group_size: int | None = msgspec.field(name="Group size", default=None)
    sequence: int | None = msgspec.field(name="Seq", default=None)
    input_dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw())
    input_types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw())
    sync_kind: str | None = msgspec.field(name="cuda_sync_kind", default=None)
    wait_stream: int | None = msgspec.field(name="wait_on_stream", default=-1)
    wait_record: int | None = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=-1)


_NO_ARGS = _Args()
_INTEGERS = {
    "correlation": attrgetter("correlation"),
    "stream": attrgetter("stream"),
    "device": attrgetter("device"),
    "size_bytes": attrgetter("bytes"),
    "external_id": attrgetter("external_id"),
    "wait_stream": attrgetter("wait_stream"),
    "wait_record": attrgetter("wait_record"),
}


class _Record(msgspec.Struct, gc=False, frozen=True):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: int | float | None = None  # nanoseconds since the epoch are exact as integers only
    dur: float | None = None
    args: _Args | None = None


@dataclass(frozen=True, kw_only=True)
class Note:
    """What a record says of the collective that it is part of; None where it does not."""

    collective: str | None
    elements: int | None
    dtype: str | None
    group: str | None
    group_ranks: tuple[int, ...] | None
    sequence: int | None


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
    notes
        Of records that tell about a collective, by their row.
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
    external_id: Ints
    wait_stream: Ints
    wait_record: Ints
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
    reader = _Reader(path)
    reader.read()
    return reader.result()


@dataclass
class _Columns:
    """Growing columns: a list of arrays each, one for a piece of the file."""

    parts: dict[str, list[npt.NDArray[Any]]] = field(default_factory=dict)

    def add(self, column: str, values: Any, dtype: Any) -> None:
        self.parts.setdefault(column, []).append(np.array(values, dtype=dtype))

    def joined(self, column: str, dtype: Any) -> npt.NDArray[Any]:
        return np.concatenate([np.zeros(0, dtype), *self.parts.pop(column, [])])


class _Interned(dict[Any, int]):
    """Numbers in order of first use."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(list[_Record], strict=False)
        self._columns = _Columns()
        self._names, self._processes, self._threads = _Interned(), _Interned(), _Interned()
        self._categories: dict[str, int] = {}
        self._notes: dict[int, Note] = {}
        self._noting: list[bool] = []  # of each name
        self._dropped: dict[str, int] = {}
        self._header: dict[str, Any] = {}
        self._rows = 0
        self._origin_us: int | None = None

    def read(self) -> None:
        pieces = self._content()
        buffer = self._find_list(pieces)
        more = True
        while more:
            piece = next(pieces, None)
            more = piece is not None
            buffer += piece or b""
            if more and len(buffer) < _PIECE:
                continue
            buffer, ended = self._take(buffer, last=not more)
            if ended:
                self._read_tail(buffer, pieces)
                return

    def _content(self) -> Iterator[bytes]:
        """The file's bytes, decompressed, as far as they can be read."""
        try:
            with self._path.open("rb") as file:
                raw = file.read(_PIECE)
                if raw.startswith(b"\x1f\x8b"):
                    yield from self._decompressed(raw, file)
                    return
                while raw:
                    yield raw
                    raw = file.read(_PIECE)
        except OSError as error:
            raise InputError(f"{self._path}: cannot be read ({error.strerror or error})") from error

    def _decompressed(self, raw: bytes, file: BinaryIO) -> Iterator[bytes]:
        """Pieces of limited size, however well a file is compressed; gzip files may be concatenated."""
        stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        while raw:
            try:
                yield stream.decompress(raw, _PIECE)
            except zlib.error:
                self._count("damaged end of the compressed file")
                return
            raw = stream.unconsumed_tail
            if stream.eof:
                raw = stream.unused_data or file.read(_PIECE)
                if not raw.startswith(b"\x1f\x8b"):
                    return  # the end, or padding
                stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
            raw = raw or file.read(_PIECE)
        self._count("missing end of the compressed file")

    def _find_list(self, pieces: Iterator[bytes]) -> bytes:
        """Read up to the list of records; returns what was read of it."""
        buffer = b""
        for piece in pieces:
            buffer += piece
            text = buffer.lstrip(b"\xef\xbb\xbf \t\r\n")
            if text.startswith(b"["):
                return text[1:]
            found = _LIST.search(text)
            if found:
                self._header |= _fields(text[: found.start()].rstrip(b", \t\r\n") + b"}")
                return text[found.end() :]
            if len(buffer) > _MOST_HEADER or (text and not text.startswith(b"{")):
                break
        raise TraceFormatError(
            f"{self._path}: not a Kineto profile (expected a JSON list of records, or an object with traceEvents)"
        )

    def _take(self, buffer: bytes, last: bool) -> tuple[bytes, bool]:
        """Decode the whole records of a buffer; returns the rest, and whether the list ended: the rest is then what follows it."""
        cuts = [match.start() + 1 for match in _BETWEEN.finditer(buffer, max(0, len(buffer) - (1 << 16)))][::-1][:_TRIES]
        if last:
            cuts.insert(0, len(buffer))
        elif not cuts:
            if len(buffer) < 16 * _PIECE:
                return buffer, False
            cuts = [len(buffer)]
        for cut in cuts:
            text = buffer[:cut]
            try:
                self._add(self._decoder.decode(b"[" + text + b"]"))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                end = _TRAILING.search(str(error))
                if end:  # the list's own bracket came before the one that was added
                    at = int(end[1]) - 2  # msgspec counts one beyond, and the bracket before
                    if self._add_if_whole(buffer[:at].rstrip().removesuffix(b"]")):
                        return buffer[at:], True
                continue
            if last and cut != len(buffer):
                self._count("records cut off at the end of the file")
            return buffer[cut:].lstrip(b", \t\r\n"), False
        return self._salvage(buffer, last)

    def _add_if_whole(self, text: bytes) -> bool:
        for candidate in (text, _mended(text)):
            try:
                self._add(self._decoder.decode(b"[" + candidate + b"]"))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            return True
        return False

    def _salvage(self, buffer: bytes, last: bool) -> tuple[bytes, bool]:
        """Decode record by record, after mending; what cannot be decoded is counted. The last record may go on after the buffer."""
        rest = b""
        if last:
            buffer, rest = _before_bracket(buffer)
        ends = [match.start() + 1 for match in _BETWEEN.finditer(buffer)]
        if not ends and not last:  # nothing like a record in all of it
            self._count("damaged records")
            return b"", False
        start, damaged = 0, 0
        found: list[_Record] = []
        for end in [*ends, len(buffer)] if last else ends:
            text = buffer[start:end].lstrip(b", \t\r\n")
            records = self._decoded(text)
            if records is None and end < len(buffer) and not _balanced(text) and end - start < _LONGEST_RECORD:
                continue  # the braces were inside a record
            start = end
            if records is not None:
                found += records
            elif text:
                damaged += 1
        self._add(found)
        if damaged:
            self._count("damaged records", damaged)
        return (rest, True) if last else (buffer[start:].lstrip(b", \t\r\n"), False)

    def _decoded(self, text: bytes) -> list[_Record] | None:
        for candidate in (text, _mended(text)):
            try:
                return self._decoder.decode(b"[" + candidate + b"]")
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
        return None

    def _read_tail(self, buffer: bytes, pieces: Iterator[bytes]) -> None:
        """Fields that follow the list."""
        for piece in pieces:
            buffer += piece
            if len(buffer) > _MOST_HEADER:
                return
        self._header |= _fields(b"{" + buffer.strip().lstrip(b"],").strip().removesuffix(b"}") + b"}")

    def _add(self, records: list[_Record]) -> None:
        """Append the records that are spans of a known category."""
        spans = [r for r in records if r.ph == "X"]
        if len(spans) < len(records):
            self._count_others(records)
        categories = self._categories
        kept = []
        for r in spans:
            code = categories.get(r.cat)
            if code is None:
                code = categories[r.cat] = _CATEGORY.get(r.cat.lower(), -1)
            if code < 0:
                self._count(_DROPPED_CATEGORY.get(r.cat.lower(), f"spans of category '{r.cat}'"))
            elif r.ts is None or r.dur is None:
                self._count("spans without a start or a duration")
            elif r.dur < 0 or not -1e19 < r.ts < 1e19:
                self._count("spans with an impossible start or duration")
            else:
                kept.append(r)
        if kept:
            self._append(kept)

    def _append(self, kept: list[_Record]) -> None:
        times = [r.ts for r in kept if r.ts is not None]
        if self._origin_us is None:
            self._origin_us = int(times[0] // 1000 if abs(times[0]) > _NANOSECONDS else times[0])
        origin_us, origin_ns = self._origin_us, self._origin_us * 1000
        in_ns = np.abs(np.array(times, np.float64)) > _NANOSECONDS
        start = np.array([(t - origin_ns) / 1000 if abs(t) > _NANOSECONDS else t - origin_us for t in times], np.float64)
        scale = np.where(in_ns, 1e-3, 1.0)
        args = [r.args or _NO_ARGS for r in kept]
        names, processes, threads, categories = self._names, self._processes, self._threads, self._categories
        add = self._columns.add
        add("start_us", start, np.float64)
        add("duration_us", np.array([r.dur for r in kept], np.float64) * scale, np.float64)
        add("category", [categories[r.cat] for r in kept], np.int8)
        add("name", [names[r.name] for r in kept], np.int32)
        add("process", [processes[r.pid] for r in kept], np.int32)
        add("thread", [threads[r.tid] for r in kept], np.int32)
        for column, value in _INTEGERS.items():
            add(column, _integers(list(map(value, args))), np.int64)
        for row in np.flatnonzero(self._may_note(self._columns.parts["name"][-1])).tolist():
            note = _note(args[row], kept[row].name)
            if note is not None:
                self._notes[self._rows + row] = note
        self._rows += len(kept)

    def _may_note(self, name: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Rows whose name is that of a collective, or of a span around one."""
        self._noting += [bool(_COMMUNICATES.search(text)) for text in list(self._names)[len(self._noting) :]]
        found: npt.NDArray[np.bool_] = np.array(self._noting)[name]
        return found

    def _count_others(self, records: list[_Record]) -> None:
        phases = Counter([r.ph for r in records])
        arrows = sum(phases.pop(phase, 0) for phase in "stf")
        if arrows:
            self._count("flow arrows", arrows)
        for phase in phases.keys() - {"X", "M", "i", "I"}:
            self._count(f"records of phase '{phase}'", phases[phase])

    def _count(self, reason: str, number: int = 1) -> None:
        self._dropped[reason] = self._dropped.get(reason, 0) + number

    def result(self) -> KinetoFile:
        origin_us = self._origin_us or 0
        base = self._header.get("baseTimeNanoseconds")
        base_ns = base if isinstance(base, int) and abs(base) < 2**62 else 0
        joined = self._columns.joined
        return KinetoFile(
            header=self._header,
            origin_ns=origin_us * 1000 + base_ns,
            names=tuple(self._names),
            processes=tuple(self._processes),
            threads=tuple(self._threads),
            category=joined("category", np.int8),
            name=joined("name", np.int32),
            process=joined("process", np.int32),
            thread=joined("thread", np.int32),
            start_us=joined("start_us", np.float64),
            duration_us=joined("duration_us", np.float64),
            correlation=joined("correlation", np.int64),
            stream=joined("stream", np.int64),
            device=joined("device", np.int64),
            size_bytes=joined("size_bytes", np.int64),
            external_id=joined("external_id", np.int64),
            wait_stream=joined("wait_stream", np.int64),
            wait_record=joined("wait_record", np.int64),
            notes=self._notes,
            dropped=self._dropped,
        )


def _mended(text: bytes) -> bytes:
    """Text of a profiler that writes what is not JSON."""
    text = text.decode("utf-8", "replace").encode()
    text = re.sub(rb"[\x00-\x1f]", b" ", text)
    text = _BACKSLASH.sub(lambda match: match[1] or b"\\\\", text)
    return _NOT_JSON_NUMBER.sub(b"null", text)


def _balanced(text: bytes) -> bool:
    return text.count(b"{") == text.count(b"}")


def _before_bracket(text: bytes) -> tuple[bytes, bytes]:
    """The end of a list of records, and what follows the list's bracket: fields of the file, or nothing."""
    for end in _END_OF_LIST.finditer(text):
        rest = text[end.start() + 1 :].lstrip().removeprefix(b"]")
        fields = rest.strip().removeprefix(b",")
        if fields in (b"", b"}") or _is_json(b"{" + fields):
            return text[: end.start() + 1], rest
    return text.strip().removesuffix(b"]"), b""


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _fields(text: bytes) -> dict[str, Any]:
    """Header fields; none where they cannot be read, for nothing depends on them alone."""
    for candidate in (text, _mended(text)):
        try:
            return msgspec.json.decode(candidate, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    return {}


def _integers(values: list[Any]) -> Ints:
    """As a column; -1 for null and for what does not fit."""
    try:
        return np.array(values, np.int64)
    except (TypeError, OverflowError):
        return np.array([v if isinstance(v, int) and abs(v) < 2**62 else -1 for v in values], np.int64)


def _note(args: _Args, name: str) -> Note | None:
    """What a record says of a collective; None: nothing."""
    if args.collective_name is None and args.sequence is None and args.group_name is None:
        around = name.startswith(("nccl:", "gloo:")) or name == "record_param_comms"
        return _note_of_inputs(args) if around and len(args.input_dims) else None
    elements = max(args.in_elements or 0, args.out_elements or 0)
    return Note(
        collective=args.collective_name,
        elements=elements or None,
        dtype=args.dtype,
        group=args.group_name,
        group_ranks=_ranks(args.group_ranks),
        sequence=args.sequence,
    )


def _ranks(value: str | list[int] | None) -> tuple[int, ...] | None:
    """Ranks of a process group; None where the list is missing or abridged ("[0, 1, ..., 31]")."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value, type=list[int])
        except msgspec.DecodeError:
            return None
    return tuple(value) if value else None


def _note_of_inputs(args: _Args) -> Note:
    """The elements of a collective's first tensor: what older versions record instead."""
    try:
        dims = msgspec.json.decode(args.input_dims, type=list[Any])
        types = msgspec.json.decode(args.input_types, type=list[Any]) if len(args.input_types) else []
    except msgspec.DecodeError:
        dims, types = [], []
    shape = dims[0] if dims else None
    while isinstance(shape, list) and shape and isinstance(shape[0], list):
        shape = shape[0]
    known = isinstance(shape, list) and shape and all(isinstance(n, int) and 0 <= n < 2**40 for n in shape)
    dtype = types[0] if types and isinstance(types[0], str) and types[0] else None
    elements = math.prod(shape) if known and isinstance(shape, list) else None
    return Note(collective=None, elements=elements, dtype=dtype, group=None, group_ranks=None, sequence=None)
