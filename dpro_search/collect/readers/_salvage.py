"""Records of a damaged list of JSON objects: a wrong byte costs the record that it is in, in time linear in the text.

The text is cut where one object ends and the next begins. A part that is a record alone is kept. What lies between two records is
tried as one record (its own lists of objects were cut), else searched for whole records, with a limit on the work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")

_MARK = re.compile(rb'"ph"\s*:')  # every record has one
_MOST_WORK = 8  # times the length of a damaged part
_SEPARATORS = b", \t\r\n"
_DECODE = json.JSONDecoder(strict=False).raw_decode


_LOSSES = (
    "damaged ",
    "records cut off ",
    "records after ",
    "spans that a lost ",
    "ranks without ",
    "copies of a rank",
    "calls for no ",
)


def shown(path: Path) -> str:
    """A file in a reason for a loss: its name and folder, for every rank may have a folder with the same names."""
    return "/".join(path.parts[-2:])


def damaged(path: Path) -> str:
    """The reason for the loss of records of a file."""
    return f"damaged records of {shown(path)}"


def cut_off(path: Path) -> str:
    """The reason for the loss of records at the end of a file."""
    return f"records cut off at the end of {shown(path)}"


def wrong_checksum(path: Path) -> str:
    """The reason for doubt about a compressed file that can be read to its end, but is not what was compressed."""
    return f"damaged checksum of {shown(path)}: any of its records may be wrong"


def loss_warnings(dropped: Mapping[str, int]) -> list[str]:
    """Warnings about losses that a person must know: from damage, and files that gave no rank. Other reasons give none."""
    return [f"left out: {number} {reason}" for reason, number in dropped.items() if number and reason.startswith(_LOSSES)]


class _HasPhase(Protocol):
    @property
    def ph(self) -> str: ...


Record = TypeVar("Record", bound=_HasPhase)
Decode = Callable[[bytes], list[Record] | None]


@dataclass
class Salvaged(Generic[Record]):
    """The records that could be read of a damaged text, and the losses."""

    records: list[Record] = field(default_factory=list)  # In the order of the text.
    lost: int = 0  # Number of records that were left out, as far as they can be counted: at least 1 for each damaged part.
    rest: bytes = b""  # Text behind the last whole record.


def salvage(text: bytes, decode: Decode[Record]) -> Salvaged[Record]:
    """The records of a list that is no JSON as a whole.

    Parameters
    ----------
    text
        From within the list; it may end anywhere.
    decode
        The records in a text, None if it is no list of records.
    """
    salvaged: Salvaged[Record] = Salvaged()
    start = damaged = 0
    for end in [*(match.start() + 1 for match in BETWEEN.finditer(text)), len(text)]:
        records = decode(text[start:end].strip(_SEPARATORS))
        if records and records[0].ph:
            if damaged < start:
                _add_damaged(salvaged, text[damaged:start], decode)
            salvaged.records += records
            damaged = end
        start = end
    salvaged.rest = text[damaged:].lstrip(_SEPARATORS)
    return salvaged


def whole_records(text: bytes, decode: Decode[Record]) -> Salvaged[Record]:
    """The whole records in a text that has anything between them."""
    salvaged: Salvaged[Record] = Salvaged()
    characters = text.decode("latin-1")  # as many as bytes
    work = _MOST_WORK * len(text)
    after = unread = 0  # where the last record ended; bytes before it that belong to none
    start = characters.find("{")
    while start >= 0 and work > 0:
        try:
            value, end = _DECODE(characters, start)
        except json.JSONDecodeError as error:
            work -= error.pos - start + 1
            start = characters.find("{", start + 1)
            continue
        except (ValueError, RecursionError):  # numbers or nesting without end
            break
        work -= end - start
        records = decode(text[start:end]) if isinstance(value, dict) and value.get("ph") else None
        if records:
            salvaged.records += records
            unread += len(text[after:start].strip(_SEPARATORS))
            after = end
            start = end - 1
        start = characters.find("{", start + 1)
    salvaged.lost = max(len(_MARK.findall(text, 0, after)) - len(salvaged.records), int(unread > 0))
    salvaged.rest = text[after:]
    return salvaged


def count_lost(text: bytes) -> int:
    """How many records a damaged text held: at least 1."""
    return max(len(_MARK.findall(text)), 1)


def _add_damaged(salvaged: Salvaged[Record], text: bytes, decode: Decode[Record]) -> None:
    """Add the records of a damaged text between two whole records."""
    text = text.strip(_SEPARATORS)
    records = decode(text)
    if records is None:
        part = whole_records(text, decode)
        records = part.records
        salvaged.lost += part.lost + (count_lost(part.rest) if part.rest.strip(_SEPARATORS) else 0)
    salvaged.records += records
