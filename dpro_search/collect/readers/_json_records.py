"""Reads the records of a large JSON trace in pieces, so that memory does not grow with the file; what is damaged costs itself only.

A file is an object with a list ``traceEvents`` or a bare list, gzip or not. It is cut into pieces of some megabytes between two
records, and each is decoded into typed structs, which leaves out all fields that are not needed. A piece that is no JSON is
repaired where profilers are known to err (NaN, unescaped backslashes, bytes that are no UTF-8), else read record by record.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic

import msgspec

from dpro_search.collect._files import DAMAGED
from dpro_search.collect.readers._bytes import GZIP_TRAILER_BYTES, Unpacked
from dpro_search.collect.readers._salvage import (
    BETWEEN,
    Record,
    count_lost,
    cut_off,
    damaged,
    salvage,
    shown,
    whole_records,
    wrong_checksum,
)
from dpro_search.errors import TraceFormatError

_PIECE = 4 << 20
_TRIES = 4  # places to cut a piece at before it is read record by record
_MOST_HEADER = 64 << 20
_LONGEST_RECORD = 1 << 20
_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_FIRST_RECORD = re.compile(rb'\[\s*(?=\{[^{}\[\]]{0,500}?"ph"\s*:)')
_LONGEST_MARK = 1000  # of what the two look for
_NOT_JSON_NUMBER = re.compile(rb"(?<=[:,\[\s])[-+]?(?:nan|NaN|NAN|inf|Infinity|INF)(?=[\s,\]}])")
_BACKSLASH = re.compile(rb'(\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))|\\')  # with the escape that it begins, if it is one
_CLOSED = re.compile(rb'\s*\]\s*(?:,\s*"|\}|$)')
_END_OF_LIST = re.compile(rb'\}\s*\]\s*(?:,\s*"|\}|$)')
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")


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
        unpacked = Unpacked(self._path, piece_bytes=_PIECE)
        pieces = iter(unpacked)
        read = 0
        for records in self._records(pieces):
            read += len(records)
            yield records
        if 0 < unpacked.unread_bytes <= GZIP_TRAILER_BYTES:
            self.dropped[wrong_checksum(self._path)] += 1
        elif unpacked.unread_bytes:
            lost = read * unpacked.unread_bytes // max(unpacked.read_bytes, 1)
            self.dropped[f"records after the damage of {shown(self._path)} (estimated)"] += max(lost, 1)
        elif unpacked.damage:
            self.dropped[cut_off(self._path)] += 1

    def _records(self, pieces: Iterator[bytes]) -> Iterator[list[Record]]:
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

    def _find_list(self, pieces: Iterator[bytes]) -> bytes:
        """Read up to the list of records; returns what was read of it."""
        text = bytearray()
        for piece in pieces:
            searched = max(len(text) - _LONGEST_MARK, 0)
            text += piece if text else piece.lstrip(b"\xef\xbb\xbf \t\r\n")
            if text.startswith(b"["):
                return bytes(text[1:])
            begin = _LIST.search(text, searched)
            if begin:
                self._read_fields(bytes(text[: begin.start()]).rstrip(b", \t\r\n") + b"}")
                return bytes(text[begin.end() :])
            begin = _FIRST_RECORD.search(text, searched)
            if begin:  # the list's name is damaged
                self._read_fields(bytes(text[: begin.start()]).rpartition(b",")[0] + b"}")
                return bytes(text[begin.end() :])
            if len(text) > _MOST_HEADER or (text and not text.startswith(b"{")):
                break
        raise TraceFormatError(
            f"{self._path}: not a Kineto profile (expected a JSON list of records, or an object with traceEvents)"
        )

    def _take(self, buffer: bytes, last: bool) -> tuple[list[Record], bytes, bool]:
        """The whole records of a buffer, the rest of it, and whether the list ended: the rest is then what follows it."""
        cuts = [match.start() + 1 for match in BETWEEN.finditer(buffer, max(0, len(buffer) - (1 << 16)))][::-1][:_TRIES]
        if last:
            cuts.insert(0, len(buffer))
        elif not cuts:
            if len(buffer) < 16 * _PIECE:
                return [], buffer, False
            cuts = [len(buffer)]
        for cut in cuts:
            try:
                records = self._decoder.decode(b"[" + buffer[:cut] + b"]")
            except DAMAGED as error:
                end = _TRAILING.search(str(error))
                if end:  # the list's own bracket came before the one that was added
                    at = int(end[1]) - 2  # msgspec counts one beyond, and the bracket before
                    whole = self._decoded(buffer[:at].rstrip().removesuffix(b"]"))
                    if whole is not None and _may_end(buffer[at:], last):
                        return whole, buffer[at:], True
                continue
            rest = buffer[cut:].lstrip(b", \t\r\n")
            if not (last and rest):
                return records, rest, False
            more, rest, ended = self._end(rest)
            return records + more, rest, ended
        return self._salvage(buffer, last)

    def _salvage(self, buffer: bytes, last: bool) -> tuple[list[Record], bytes, bool]:
        """Do as `_take`, record by record, after mending; records that cannot be decoded are counted.

        The last record may go on after the buffer.
        """
        salvaged = salvage(buffer, self._decoded)
        self._count(salvaged.lost)
        if not last and len(salvaged.rest) < _LONGEST_RECORD:
            return salvaged.records, salvaged.rest, False
        more, rest, ended = self._end(salvaged.rest, last)
        return salvaged.records + more, rest, ended

    def _end(self, text: bytes, last: bool = True) -> tuple[list[Record], bytes, bool]:
        """Do as `_take` with the text behind the last record that was whole with those around it."""
        records = self._decoded(text)
        if records is not None:
            return records, b"", False
        salvaged = whole_records(text, self._decoded)
        self._count(salvaged.lost)
        records, rest = salvaged.records, salvaged.rest
        if records and _CLOSED.match(rest):
            return records, rest.lstrip().removeprefix(b"]"), True
        closed = _before_bracket(rest)
        if closed is not None:
            self._count(count_lost(closed[0]))
            return records, closed[1], True
        if rest.strip(b", \t\r\n"):
            if last:
                self.dropped[cut_off(self._path)] += count_lost(rest)
            else:
                self._count(count_lost(rest))
        return records, b"", False

    def _count(self, lost: int) -> None:
        if lost:
            self.dropped[damaged(self._path)] += lost

    def _decoded(self, text: bytes) -> list[Record] | None:
        for candidate in (text, _mended(text)):
            try:
                return self._decoder.decode(b"[" + candidate + b"]")
            except DAMAGED:
                continue
        return None

    def _read_tail(self, buffer: bytes, pieces: Iterator[bytes]) -> None:
        """Fields that follow the list."""
        parts = [buffer]
        for piece in pieces:
            parts.append(piece)
            if sum(map(len, parts)) > _MOST_HEADER:
                return
        self._read_fields(b"{" + b"".join(parts).strip().lstrip(b"],").strip().removesuffix(b"}") + b"}")

    def _read_fields(self, text: bytes) -> None:
        """Fields beside the records: nothing depends on them alone."""
        for candidate in (text, _mended(text)):
            try:
                self.header |= msgspec.json.decode(candidate, type=dict[str, Any])
            except DAMAGED:
                continue
            return
        self.dropped[f"damaged fields beside the records of {shown(self._path)}"] += 1


def _mended(text: bytes) -> bytes:
    """Text of a profiler that writes what is not JSON."""
    text = text.decode("utf-8", "replace").encode()
    text = re.sub(rb"[\x01-\x1f]", b" ", text)  # no NUL: a block of zeros would join the records around it to one
    text = _BACKSLASH.sub(lambda match: match[1] or b"\\\\", text)
    return _NOT_JSON_NUMBER.sub(b"null", text)


def _may_end(rest: bytes, last: bool) -> bool:
    """Whether a list may end before a text: a damaged comma between two records looks like its bracket."""
    rest = rest.strip(b", \t\r\n")
    return not rest.startswith(b"{") if rest else last


def _before_bracket(text: bytes) -> tuple[bytes, bytes] | None:
    """The end of a list of records, and what follows the list's bracket: fields of the file, or nothing."""
    for end in itertools.islice(_END_OF_LIST.finditer(text), _TRIES):
        rest = text[end.start() + 1 :].lstrip().removeprefix(b"]")
        fields = rest.strip().removeprefix(b",")
        if fields in (b"", b"}") or _is_json(b"{" + fields):
            return text[: end.start() + 1], rest
    return None


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except DAMAGED:
        return False
    return True
