"""Measured all-reduces, as a table on disk: one JSON object a line; the first states where the rows come from.

A table is small and written whole, so that there is never half a row; a stopped collection continues from the rows it has.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dpro_search.collect._files import DAMAGED, write_file
from dpro_search.collect.readers._bytes import MOST_TABLE_BYTES, read_whole
from dpro_search.collect.readers.importers import read_head
from dpro_search.collect.tables.json_lines import Head, as_lines, read_header, read_rows
from dpro_search.errors import TraceFormatError
from dpro_search.runtime.all_reduce.dpro_search_all_reduce.choice import OF_LIBRARY, SEGMENTS
from dpro_search.runtime.all_reduce.dpro_search_all_reduce.library import MPICH, OPEN_MPI

TABLE_VERSION = 2  # 1: single calls, each from links that had rested
KIND = "all-reduces"
_MOST_RANKS, _MOST_CALLS = 2**20, 2**31
_MOST_BYTES = 2**50  # a million gigabytes
_MOST_US, _MOST_BPS = 3e13, 1e18  # a year; a million times the fastest links
RowKey = tuple[str, str, int, int, float | None, int]

# What the algorithms of the MPI library itself are called beside those of `dpro_search_all_reduce`, by the backend that has both.
LIBRARIES = {"mpi4py": "open-mpi ", "mpi4py-mpich": "mpich "}
ALGORITHMS_OF_LIBRARY: dict[str, Collection[str]] = {"mpi4py": OPEN_MPI, "mpi4py-mpich": MPICH}
HIERARCHY = "hierarchy"  # of hosts with several ranks
_RINGS = tuple(f"ring{segments}" for segments in SEGMENTS)
_ALGORITHMS = ("native", "gather", "direct", "recursive-doubling", "halving-doubling", *_RINGS, HIERARCHY)


def all_reduces_over(backend: str) -> tuple[str, ...]:
    """Names of the all-reduces of `dpro_search_all_reduce` over one of `LIBRARIES`, those that the library sums in included."""
    return (*_ALGORITHMS, *(f"{OF_LIBRARY}{name}" for name in ALGORITHMS_OF_LIBRARY[backend] if name != "default"))


class CommHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Provenance of all rows of a table."""

    version: int = TABLE_VERSION
    kind: str = KIND
    machine: str
    cores: int  # which all ranks and servers of a job shared
    versions: dict[str, str]  # of each backend
    started_at: str


class AllReduceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One all-reduce: a backend's algorithm among so many ranks, behind links of one rate, of one size."""

    backend: str
    algorithm: str
    ranks: int
    servers: int = 0  # Of a parameter server; 0: none.
    ranks_per_host: int = 1  # That share a host's link, and its memory.
    rate_bps: float | None = None  # Of every host's link in each direction; None: not limited.
    size_bytes: int
    # Mean time of a call in each round: in a train of calls with nothing between them; of MPI's calls, before which ranks meet,
    # from when the last rank began to when the last had ended.
    rounds_us: tuple[float, ...]
    calls: int  # Timed calls in all rounds.
    sent_bytes: int  # What the busiest host sent in a call, headers included.
    # How long a core did anything in a call, its ranks, servers or the kernel, on the core where that was longest: in each round
    # that was measured. Those of backends whose ranks use their cores while they wait do not.
    busy_us: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.rounds_us or not all(0 < us < _MOST_US for us in self.rounds_us):
            raise ValueError("a measured duration is missing, not positive or longer than a year")
        if not (1 <= self.ranks <= _MOST_RANKS and 0 <= self.servers <= _MOST_RANKS and 1 <= self.size_bytes <= _MOST_BYTES):
            raise ValueError("ranks, servers or bytes are impossible")
        if not (0 <= self.sent_bytes <= _MOST_BYTES and 0 <= self.calls <= _MOST_CALLS):
            raise ValueError("sent bytes or calls are impossible")
        if self.rate_bps is not None and not 0 < self.rate_bps < _MOST_BPS:
            raise ValueError("the rate is impossible")
        if self.ranks_per_host < 1 or self.ranks % self.ranks_per_host:
            raise ValueError("ranks are not so many on each host")
        if not all(math.isfinite(us) for us in self.busy_us):
            raise ValueError("a processor's time is not finite")

    @property
    def key(self) -> RowKey:
        """The key that identifies a row of a table."""
        return self.backend, self.algorithm, self.ranks, self.ranks_per_host, self.rate_bps, self.size_bytes

    @property
    def duration_us(self) -> float:
        """Mean over the middle half of the rounds, which a disturbed round does not move."""
        return _middle_mean(self.rounds_us)

    @property
    def standard_error(self) -> float:
        """Relative standard error of the mean of the rounds; infinite after a single round."""
        if len(self.rounds_us) < 2:
            return math.inf
        return statistics.stdev(self.rounds_us) / math.sqrt(len(self.rounds_us)) / statistics.fmean(self.rounds_us)

    @property
    def mean_busy_us(self) -> float:
        """How long the busiest core did anything, over all rounds in which that was measured; NaN: in none."""
        return statistics.fmean(self.busy_us) if self.busy_us else math.nan

    @property
    def spread_pct(self) -> float:
        """Relative noise of the duration: half the difference between the odd and the even rounds; NaN after one round."""
        if len(self.rounds_us) < 2:
            return math.nan
        odd, even = (_middle_mean(self.rounds_us[first::2]) for first in (0, 1))
        return abs(odd - even) / 2 / self.duration_us * 100


@dataclass(frozen=True, kw_only=True)
class CommTable:
    """A table as read. `dropped`: lines that are no rows, by reason."""

    header: CommHeader
    rows: tuple[AllReduceRow, ...]
    dropped: dict[str, int]


def read_comm_table(path: Path) -> CommTable:
    """Read a table, compressed (``.gz``) or not.

    Damaged lines are left out and counted.

    Raises
    ------
    InputError
        The file cannot be read.
    TraceFormatError
        It does not begin as a table does, or is cut off.
    TraceVersionError
        It was written by another version.
    """
    head, *lines = read_whole(path, MOST_TABLE_BYTES).split(b"\n")
    kind = _kind_of(head)
    if kind not in (KIND, None):
        raise TraceFormatError(f"{path}, line 1: a table of {kind}, not of {KIND}")
    header = read_header(path, head, _AllReducesHead, CommHeader, (TABLE_VERSION,), KIND)
    rows, dropped = read_rows(lines, AllReduceRow)
    return CommTable(header=header, rows=tuple(rows), dropped=dict(dropped))


def write_comm_table(path: Path, table: CommTable) -> None:
    """Write the whole table, compressed if the name ends in ``.gz``; the same rows give the same bytes."""
    write_file(path, as_lines(table.header, sorted(table.rows, key=_order), compressed=path.suffix == ".gz"))


def is_comm_table(path: Path) -> bool:
    """Whether a file begins as such a table does; raises `InputError` if it cannot be read."""
    return _kind_of(read_head(path).split(b"\n", 1)[0]) == KIND


def _kind_of(line: bytes) -> str | None:
    """The contents of a table as its first line names them; None: it is no first line."""
    try:
        return msgspec.json.decode(line, type=_AllReducesHead).kind
    except DAMAGED:
        return None


def _middle_mean(rounds_us: Sequence[float]) -> float:
    cut = (len(rounds_us) + 1) // 4
    return statistics.fmean(sorted(rounds_us)[cut : len(rounds_us) - cut])


class _AllReducesHead(Head):
    kind: str


def _order(row: AllReduceRow) -> tuple[str, str, int, int, float, int]:
    return row.backend, row.algorithm, row.ranks, row.ranks_per_host, row.rate_bps or float("inf"), row.size_bytes
