"""Reports of NCCL's RAS (reliability, availability, serviceability): how many collectives each rank of a communicator has called.

``ncclras -f json -v > report.json`` asks the ranks of a running job (NCCL 2.28.7 or later; src/ras/client_support.cc). A report has
counts and no times. It tells where ranks part; it does not tell which rank is slow.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dpro_search.collect.readers._bytes import read_whole
from dpro_search.errors import TraceFormatError

_SIGN = b'"communicators"'
_HEAD_BYTES = 4096
_NO_COMMA = re.compile(rb'("nvml_dev":\s*-?\d+)(\s*"status")')  # NCCL 2.28.9 forgets one in a missing rank


class RasRank(msgspec.Struct, frozen=True):
    """A rank of a communicator that answered: calls of each collective so far."""

    rank: int
    host: str
    collective_counts: dict[str, int]


class _MissingRank(msgspec.Struct):
    rank: int


class RasCommunicator(msgspec.Struct, frozen=True):
    """A communicator: ranks that answered, and those that did not."""

    hash: str
    size: int
    ranks: list[RasRank]
    missing_ranks: list[_MissingRank] = []

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that did not answer."""
        return tuple(each.rank for each in self.missing_ranks)


class RasReport(msgspec.Struct, frozen=True):
    """One report."""

    timestamp: str
    communicators: list[RasCommunicator]


def recognise(source: Path) -> list[Path]:
    """The reports in a folder, or the file itself if it is one."""
    files = [path for path in sorted(source.iterdir()) if path.is_file()] if source.is_dir() else [source]
    return [path for path in files if path.is_file() and _is_report(path)]


def _is_report(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return head.lstrip()[:1] == b"{" and _SIGN in head


def read(paths: Sequence[Path]) -> list[RasReport]:
    """The reports, in the order of their times; raises `TraceFormatError` for a file that is none."""
    reports = []
    for path in paths:
        try:
            reports.append(msgspec.json.decode(_NO_COMMA.sub(rb"\1,\2", read_whole(path)), type=RasReport))
        except msgspec.MsgspecError as error:
            raise TraceFormatError(f"{path}: no report of ncclras -f json -v ({error})") from error
    return sorted(reports, key=lambda report: report.timestamp)
