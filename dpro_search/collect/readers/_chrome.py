"""Events of Chrome trace files, typed; also of files that are cut off or damaged, as far as they can be read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from dpro_search.collect.readers._bytes import read_available
from dpro_search.errors import TraceFormatError

_Event = TypeVar("_Event")
_MOST_DAMAGES = 1000  # a file with more damaged places is given up


class _Object(msgspec.Struct, Generic[_Event]):
    traceEvents: list[_Event]  # noqa: N815 (the format's name)


def chrome_events(path: Path, kind: type[_Event]) -> tuple[list[_Event], Counter[str]]:
    """Events of a file (gzip or not): an object with ``traceEvents``, or a bare list.

    Parameters
    ----------
    kind
        A msgspec structure of the fields that the reader needs.

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
    data, cut = read_available(path)
    dropped: Counter[str] = Counter()
    if not cut:
        try:
            if data.lstrip()[:1] == b"[":
                return msgspec.json.decode(data, type=list[kind]), dropped  # type: ignore[valid-type]
            return msgspec.json.decode(data, type=_Object[kind]).traceEvents, dropped  # type: ignore[valid-type]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass  # read one by one below, so that one bad event does not cost the others
    text = data.decode("utf-8", "replace")
    key = text.find('"traceEvents"')
    first = text.find("[", max(key, 0))
    if first < 0 or (key < 0 and text[:first].strip()):
        raise TraceFormatError(f"{path}: no list of trace events in it; record or copy the file again")
    return _one_by_one(text, first + 1, kind, dropped), dropped


def _one_by_one(text: str, position: int, kind: type[_Event], dropped: Counter[str]) -> list[_Event]:
    decode = json.JSONDecoder().raw_decode
    events: list[_Event] = []
    while True:
        between = position
        while position < len(text) and text[position] in ", \t\r\n":
            position += 1
        if position == len(text):
            return events  # without a closing bracket, as files of killed jobs are
        if text[position] == "]":
            return events
        try:
            if text[position] != "{":
                raise ValueError("not an event")
            found, position = decode(text, position)
        except (ValueError, RecursionError):
            position = text.find("{", max(position, between) + 1)
            if position < 0:
                dropped["cut off"] += 1
                return events
            dropped["damaged"] += 1
            if dropped["damaged"] > _MOST_DAMAGES:
                return events
            continue
        try:
            events.append(msgspec.convert(found, kind))
        except (msgspec.MsgspecError, OverflowError):
            dropped["wrong type"] += 1
