"""Protobuf messages of damaged files: what can be decoded is kept, a wrong byte costs the message that it is in.

A message stands behind its length, so behind a damaged one the next is found where a length, a message that can be decoded and the
beginning of another follow each other. The work of that search is limited to a multiple of the file's size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.message import DecodeError

_MOST_WORK = 8  # times the bytes of a file
_LENGTH_DELIMITED = 2
_LENGTH_BYTES = 3  # of a message of up to 2 MiB
_WIDTHS = {1: 8, 5: 4}  # bytes of the fixed wire types

Frame = tuple[int, int]  # where a message's bytes begin and end
Decode = Callable[[bytes], Any]  # None: it is no such message


def varint(data: bytes, place: int, most_bits: int = 35) -> tuple[int, int] | None:
    """A varint and where it ends; None if none exists."""
    value = shift = 0
    while place < len(data) and shift < most_bits:
        value |= (data[place] & 0x7F) << shift
        place += 1
        if data[place - 1] < 0x80:
            return value, place
        shift += 7
    return None


class Frames:
    """Messages that follow each other in a file, each behind its length.

    Parameters
    ----------
    data
        The file.
    decode
        Decodes a message.
    first
        The bytes with which a message may begin.
    beginning
        What every message begins with: one that holds others has a wrong length.

    Attributes
    ----------
    lost
        When the iteration has ended: damaged places, each of at least one message.
    lost_bytes
        Bytes of those places.
    cut
        Whether the last message is not whole.
    """

    def __init__(self, data: bytes, decode: Decode, first: bytes, beginning: re.Pattern[bytes] | None = None) -> None:
        self._data, self._decode, self._first, self._beginning = data, decode, first, beginning
        self._firsts = {bytes([byte]) for byte in first}
        self._begins = re.compile(rb"[\x80-\xff]{0,4}[\x00-\x7f](?=[" + re.escape(first) + rb"])")
        self._work = _MOST_WORK * len(data)
        self.lost = self.lost_bytes = 0
        self.cut = False

    def __iter__(self) -> Iterator[Any]:
        place = 0
        while place < len(self._data):
            frame = self._frame(place)
            if frame and self._holds_others(self._data[slice(*frame)]):
                frame = None
            message = self._decode(self._data[slice(*frame)]) if frame else None
            if frame and message is not None:
                yield message
                place = frame[1]
                continue
            after = frame[1] if frame and self._begins_at(frame[1]) else self._next(place + 1)
            self.cut = after == len(self._data) and frame is None and self._overruns(place)
            self.lost += not self.cut
            self.lost_bytes += after - place
            place = after

    def _frame(self, place: int) -> Frame | None:
        length = varint(self._data, place)
        if length is None or not 0 < length[0] <= len(self._data) - length[1] or self._data[length[1]] not in self._first:
            return None
        return length[1], length[1] + length[0]

    def _holds_others(self, message: bytes) -> bool:
        """Whether a whole message behind its length is in it, and behind that the next or the end."""
        for begin in self._beginning.finditer(message, 1) if self._beginning else ():
            for width in range(1, min(begin.start(), _LENGTH_BYTES) + 1):
                length = varint(message, begin.start() - width)
                if length is None or length[1] != begin.start() or sum(length) > len(message):
                    continue
                after = varint(message, sum(length))
                follows = sum(length) == len(message) or (after is not None and message[after[1] : after[1] + 1] in self._firsts)
                if follows and self._decode(message[length[1] : sum(length)]) is not None:
                    return True
        return False

    def _overruns(self, place: int) -> bool:
        length = varint(self._data, place)
        return length is None or sum(length) > len(self._data)

    def _begins_at(self, place: int) -> bool:
        return place == len(self._data) or self._frame(place) is not None

    def _next(self, place: int) -> int:
        """The place where the next whole message begins, else the end."""
        for begin in self._begins.finditer(self._data, place):
            frame = self._frame(begin.start())
            if frame is None or not self._begins_at(frame[1]):
                continue
            self._work -= frame[1] - frame[0]
            if self._work < 0:
                break
            if self._decode(self._data[slice(*frame)]) is not None:
                return begin.start()
        return len(self._data)


def lenient(kind: Any, data: bytes) -> tuple[Any, int, int]:
    """A message without those of its parts that cannot be decoded.

    Returns
    -------
    tuple
        The message, how many places were left out, and their bytes.
    """
    reader = _Lenient(_MOST_WORK * len(data))
    message = reader.read(kind, data)
    return message, reader.lost, reader.lost_bytes


class _Lenient:
    def __init__(self, work: int) -> None:
        self._work = work
        self.lost = self.lost_bytes = 0

    def read(self, kind: Any, data: bytes) -> Any:
        try:
            return kind.FromString(data)
        except DecodeError:
            pass
        message = kind()
        parts = {field.number: field for field in kind.DESCRIPTOR.fields if field.message_type is not None}
        place = 0
        while place < len(data):
            bounds = _field(data, place)
            number, start, end = bounds or (0, 0, 0)
            part = parts.get(number) if bounds and start >= 0 else None
            if part is not None and (_is_whole(part, data[start:end]) or (_holds_parts(part) and _plausible(data, end))):
                inner = self.read(part.message_type._concrete_class, data[start:end])
                if part.is_repeated:
                    getattr(message, part.name).append(inner)
                else:
                    getattr(message, part.name).MergeFrom(inner)
                place = end
            elif bounds and part is None and _merged(message, data[place:end]):
                place = end
            else:
                after = end if part is not None and _plausible(data, end) else self._next(parts, data, place + 1)
                self.lost += 1
                self.lost_bytes += after - place
                place = after
        return message

    def _next(self, parts: dict[int, Any], data: bytes, place: int) -> int:
        """The place where the next whole part begins, else the end."""
        tags = bytes(number << 3 | _LENGTH_DELIMITED for number in parts if number < 16)
        for match in re.finditer(b"[" + re.escape(tags) + b"]", data[place:]) if tags else ():
            at = place + match.start()
            bounds = _field(data, at)
            if bounds is None or bounds[2] - bounds[1] < 2 or not _plausible(data, bounds[2]):
                continue
            self._work -= bounds[2] - bounds[1]
            if self._work < 0:
                break
            if _is_whole(parts[bounds[0]], data[bounds[1] : bounds[2]]):
                return at
        return len(data)


def _field(data: bytes, place: int) -> tuple[int, int, int] | None:
    """Number of the field that begins at a place, where its message begins (-1: it is none) and where it ends."""
    tag = varint(data, place)
    if tag is None or not tag[0] >> 3:
        return None
    number, wire, place = tag[0] >> 3, tag[0] & 7, tag[1]
    if wire == 0:
        value = varint(data, place, 70)
        return (number, -1, value[1]) if value else None
    if wire == _LENGTH_DELIMITED:
        length = varint(data, place)
        return (number, length[1], sum(length)) if length and sum(length) <= len(data) else None
    end = place + _WIDTHS.get(wire, len(data) + 1)
    return (number, -1, end) if end <= len(data) else None


def _plausible(data: bytes, place: int) -> bool:
    """Whether a field may begin at a place, or the message end."""
    return place == len(data) or _field(data, place) is not None


def _is_whole(part: Any, data: bytes) -> bool:
    try:
        part.message_type._concrete_class.FromString(data)
    except DecodeError:
        return False
    return True


def _holds_parts(part: Any) -> bool:
    return any(field.message_type is not None for field in part.message_type.fields)


def _merged(message: Any, data: bytes) -> bool:
    try:
        message.MergeFromString(data)
    except DecodeError:
        return False
    return True
