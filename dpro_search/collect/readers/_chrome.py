"""Events of Chrome trace files, typed; also of files that are cut off or damaged, as far as they can be read."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Generic

import msgspec

from dpro_search.collect._files import DAMAGED
from dpro_search.collect.readers._bytes import read_available
from dpro_search.collect.readers._salvage import (
    Decode,
    Record,
    count_lost,
    cut_off,
    damaged,
    salvage,
    whole_records,
    wrong_checksum,
)
from dpro_search.errors import TraceFormatError

_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_BRACKET_OR_STRING = re.compile(rb'[\[\]]|"(?:[^"\\]|\\.)*(?:"|\Z)', re.DOTALL)


class _Object(msgspec.Struct, Generic[Record]):
    traceEvents: list[Record]  # noqa: N815 (the format's name)


def chrome_events(path: Path, kind: type[Record]) -> tuple[list[Record], Counter[str]]:
    """Events of a file (gzip or not): an object with ``traceEvents``, or a bare list.

    Parameters
    ----------
    kind
        A msgspec structure of the fields that the reader needs, ``ph`` among them.

    Returns
    -------
    tuple
        The events in the order of the file, and what was left out, by reason.

    Raises
    ------
    InputError
        The file cannot be read.
    TraceFormatError
        It holds no list of events.
    """
    data, damage = read_available(path)
    dropped: Counter[str] = Counter()
    if not damage:
        try:
            if data.lstrip()[:1] == b"[":
                return msgspec.json.decode(data, type=list[kind]), dropped  # type: ignore[valid-type]
            return msgspec.json.decode(data, type=_Object[kind]).traceEvents, dropped  # type: ignore[valid-type]
        except DAMAGED:
            pass  # read one by one below, so that one bad event does not cost the others
    within = _LIST.search(data)
    first = within or re.match(rb"\s*\[", data)
    if first is None:
        raise TraceFormatError(f"{path}: no list of trace events in it; record or copy the file again")
    events = events_of_damaged(data[first.end() :], list_decoder(kind), path, dropped, ends=within is not None)
    if damage and not dropped:  # the text is whole, but it is not what was compressed
        dropped[wrong_checksum(path)] += 1
    return events, dropped


def list_decoder(kind: type[Record]) -> Decode[Record]:
    """Decodes the events in a text that stands in a list; None if it is no JSON of them."""
    decoder: msgspec.json.Decoder[list[Record]] = msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]

    def decode(text: bytes) -> list[Record] | None:
        try:
            return decoder.decode(b"[" + text + b"]")
        except DAMAGED:
            return None

    return decode


def events_of_damaged(
    text: bytes, decode: Decode[Record], path: Path, dropped: Counter[str], *, ends: bool = False
) -> list[Record]:
    """Events of a list from its bracket on; what is lost is added to `dropped`.

    A killed job's bare list has no end; one within an object `ends`: without a bracket it was cut off between two events.
    """
    salvaged = salvage(text, decode)
    tail = whole_records(salvaged.rest, decode)
    lost = salvaged.lost + tail.lost
    rest = tail.rest.strip(b", \t\r\n")
    closing = _end_of_list(rest)
    if closing >= 0 and b'"ph"' in rest[:closing]:
        lost += count_lost(rest[:closing])
    elif closing < 0 and (rest or ends):
        dropped[cut_off(path)] += count_lost(rest)
    if lost:
        dropped[damaged(path)] += lost
    return salvaged.records + tail.records


def _end_of_list(text: bytes) -> int:
    """Position of the bracket that ends the list in which a text begins; -1: none. Brackets in strings do not count."""
    depth = 0
    for match in _BRACKET_OR_STRING.finditer(text):
        depth += {b"[": 1, b"]": -1}.get(match[0], 0)
        if depth < 0:
            return match.start()
    return -1
