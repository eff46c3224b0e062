"""Tables as lines of JSON: the first line states where the rows come from. A line that is damaged or cut off costs only itself."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dpro_search._text import listed
from dpro_search.collect._files import DAMAGED
from dpro_search.errors import TraceFormatError, TraceVersionError

_Header = TypeVar("_Header", bound=msgspec.Struct)
_Row = TypeVar("_Row", bound=msgspec.Struct)


class Head(msgspec.Struct):
    """The part of the first line that is the same in all versions of a table."""

    version: int


def read_header(path: Path, line: bytes, head: type[Head], header: type[_Header], versions: Sequence[int], what: str) -> _Header:
    """The first line of a table, which holds `what`.

    Raises
    ------
    TraceFormatError
        It is the first line of something else.
    TraceVersionError
        It was written by another version.
    """
    try:
        version = msgspec.json.decode(line, type=head).version
        if version not in versions:
            known = listed([str(one) for one in versions])
            raise TraceVersionError(f"{path}: table version {version}, this program reads {known}; collect it again")
        return msgspec.json.decode(line, type=header)
    except DAMAGED as error:
        raise TraceFormatError(f"{path}, line 1: not a table of {what} ({error})") from error


def read_rows(lines: Sequence[bytes], row: Any) -> tuple[list[Any], Counter[str]]:  # a union of structs has no type of its own
    """The other lines as structs of a type, or of one of several, and the lines that are none, by reason."""
    decoder = msgspec.json.Decoder(row)
    rows, dropped = [], Counter[str]()
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            rows.append(decoder.decode(line))
        except DAMAGED:
            dropped["cut off at the end" if number == len(lines) - 1 else "not a row"] += 1
    return rows, dropped


def as_lines(header: msgspec.Struct, rows: Iterable[_Row], *, compressed: bool) -> bytes:
    """The content of a table's file; the same rows give the same bytes."""
    data = b"".join(msgspec.json.encode(line) + b"\n" for line in (header, *rows))
    return gzip.compress(data, mtime=0) if compressed else data
