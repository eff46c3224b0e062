"""Reads the records of a large JSON trace in pieces, so that memory does not grow with the file; what is damaged costs itself only.

A file is an object with a list ``traceEvents`` or a bare list, gzip or not. It is cut into pieces of some megabytes between two
records, and each is decoded into typed structs, which leaves out all fields that are not needed. A piece that is no JSON is
repaired where profilers are known to err (NaN, unescaped backslashes, bytes that are no UTF-8), else read record by record.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

from dpro_search.errors import InputError, TraceFormatError

_PIECE = 4 << 20
_TRIES = 16  # places to cut a piece at before it is read record by record
_MOST_HEADER = 64 << 20
_LONGEST_RECORD = 1 << 20
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_NOT_JSON_NUMBER = re.compile(rb"(?<=[:,\[\s])[-+]?(?:nan|NaN|NAN|inf|Infinity|INF)(?=[\s,\]}])")
_BACKSLASH = re.compile(rb'(\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))|\\')  # with the escape that it begins, if it is one
_END_OF_LIST = re.compile(rb'\}\s*\]\s*(?:,\s*"|\}|$)')
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Record = TypeVar("Record", bound=msgspec.Struct)


class JsonRecords(Generic[Record]):
    """The records of a file, in lists as they are decoded; iterate over it once.

    Attributes
    ----------
    header
        Fields beside the records; whole when the iteration has ended.
    dropped
        What could not be read, by reason.

    Raises
    ------
    InputError
        While iterating: the file cannot be read.
    TraceFormatError
        While iterating: it holds no list of records, or its compressed data are damaged before the first one.
    """

    def __init__(self, path: Path, record: type[Record]) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(list[record], strict=False)  # type: ignore[valid-type]
        self.header: dict[str, Any] = {}
        self.dropped: Counter[str] = Counter()

    def __iter__(self) -> Iterator[list[Record]]:
        pieces = self._content()
        buffer = self._find_list(pieces)
        more = True
        while more:
            piece = next(pieces, None)
            more = piece is not None
            buffer += piece or b""
            if more and len(buffer) < _PIECE:
                continue
            records, buffer, ended = self._take(buffer, last=not more)
            yield records
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
                self.dropped["damaged end of the compressed file"] += 1
                return
            raw = stream.unconsumed_tail
            if stream.eof:
                raw = stream.unused_data or file.read(_PIECE)
                if not raw.startswith(b"\x1f\x8b"):
                    return  # the end, or padding
                stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
            raw = raw or file.read(_PIECE)
        self.dropped["missing end of the compressed file"] += 1

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
                self.header |= _fields(text[: found.start()].rstrip(b", \t\r\n") + b"}")
                return text[found.end() :]
            if len(buffer) > _MOST_HEADER or (text and not text.startswith(b"{")):
                break
        raise TraceFormatError(
            f"{self._path}: not a Kineto profile (expected a JSON list of records, or an object with traceEvents)"
        )

    def _take(self, buffer: bytes, last: bool) -> tuple[list[Record], bytes, bool]:
        """The whole records of a buffer, the rest of it, and whether the list ended: the rest is then what follows it."""
        cuts = [match.start() + 1 for match in _BETWEEN.finditer(buffer, max(0, len(buffer) - (1 << 16)))][::-1][:_TRIES]
        if last:
            cuts.insert(0, len(buffer))
        elif not cuts:
            if len(buffer) < 16 * _PIECE:
                return [], buffer, False
            cuts = [len(buffer)]
        for cut in cuts:
            try:
                records = self._decoder.decode(b"[" + buffer[:cut] + b"]")
            except _NOT_JSON as error:
                end = _TRAILING.search(str(error))
                if end:  # the list's own bracket came before the one that was added
                    at = int(end[1]) - 2  # msgspec counts one beyond, and the bracket before
                    whole = self._decoded(buffer[:at].rstrip().removesuffix(b"]"))
                    if whole is not None:
                        return whole, buffer[at:], True
                continue
            if last and cut != len(buffer):
                self.dropped["records cut off at the end of the file"] += 1
            return records, buffer[cut:].lstrip(b", \t\r\n"), False
        return self._salvage(buffer, last)

    def _salvage(self, buffer: bytes, last: bool) -> tuple[list[Record], bytes, bool]:
        """As `_take`, record by record, after mending; what cannot be decoded is counted. The last record may go on after it."""
        rest = b""
        if last:
            buffer, rest = _before_bracket(buffer)
        ends = [match.start() + 1 for match in _BETWEEN.finditer(buffer)]
        if not ends and not last:  # nothing like a record in all of it
            self.dropped["damaged records"] += 1
            return [], b"", False
        start = 0
        found: list[Record] = []
        for end in [*ends, len(buffer)] if last else ends:
            text = buffer[start:end].lstrip(b", \t\r\n")
            records = self._decoded(text)
            if records is None and end < len(buffer) and not _balanced(text) and end - start < _LONGEST_RECORD:
                continue  # the braces were inside a record
            start = end
            if records is not None:
                found += records
            elif text:
                self.dropped["damaged records"] += 1
        return found, rest if last else buffer[start:].lstrip(b", \t\r\n"), last

    def _decoded(self, text: bytes) -> list[Record] | None:
        for candidate in (text, _mended(text)):
            try:
                return self._decoder.decode(b"[" + candidate + b"]")
            except _NOT_JSON:
                continue
        return None

    def _read_tail(self, buffer: bytes, pieces: Iterator[bytes]) -> None:
        """Fields that follow the list."""
        for piece in pieces:
            buffer += piece
            if len(buffer) > _MOST_HEADER:
                return
        self.header |= _fields(b"{" + buffer.strip().lstrip(b"],").strip().removesuffix(b"}") + b"}")


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
    except _NOT_JSON:
        return False
    return True


def _fields(text: bytes) -> dict[str, Any]:
    """Header fields; none where they cannot be read, for nothing depends on them alone."""
    for candidate in (text, _mended(text)):
        try:
            return msgspec.json.decode(candidate, type=dict[str, Any])
        except _NOT_JSON:
            continue
    return {}
