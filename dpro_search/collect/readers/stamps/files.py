"""Reading the files that `CollectiveStamps` writes, whole or while they grow.

A file of a killed rank ends in zeros or in a part of a record; both are left out, and nothing else is lost.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dpro_search.collect.readers.stamps.records import RECORD, RankStamps, Records, StampedGroup
from dpro_search.errors import InputError, TraceFormatError

VERSION = 1
HEADER_BYTES = 4096
_MOST_GROUPS_BYTES = 1 << 26


@dataclass(kw_only=True)
class StampFile:
    """One rank's file, from the record on that was read last.

    Raises
    ------
    InputError
        The file cannot be read.
    TraceFormatError
        The file is none of stamps, or of a newer version.
    """

    path: Path
    header: dict[str, Any] = field(init=False)
    groups: dict[int, StampedGroup] = field(init=False, default_factory=dict)
    place: int = field(init=False, default=0)  # records that were taken

    def __post_init__(self) -> None:
        try:
            with self.path.open("rb") as file:
                head = file.read(HEADER_BYTES)
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror or error}") from error
        try:
            self.header = json.loads(head)
            known = self.header["dpro_search_stamps"] == VERSION and self.header["record_bytes"] == RECORD.itemsize
            numbers = (self.header["rank"], self.header["world"])
        except (ValueError, KeyError, TypeError) as error:
            raise TraceFormatError(f"{self.path}: no file of stamps; give the folder that CollectiveStamps wrote") from error
        if not known or not all(isinstance(number, int) and 0 <= number < 1 << 24 for number in numbers):
            raise TraceFormatError(f"{self.path}: stamps of another version; read them with the dpro-search that wrote them")

    def peek(self, most: int) -> Records:
        """The next records, at most so many; `take` moves on."""
        size = self.path.stat().st_size
        count = min((size - HEADER_BYTES) // RECORD.itemsize - self.place, most)
        if count <= 0:
            return np.empty(0, RECORD)
        records: Records = np.fromfile(self.path, RECORD, count, offset=HEADER_BYTES + self.place * RECORD.itemsize)
        blank = np.flatnonzero(records["enqueue_ns"] <= 0)
        return records[: blank[0]] if len(blank) else records

    def take(self, count: int) -> None:
        """Move on by so many records."""
        self.place += count

    def stamps(self, records: Records) -> RankStamps:
        """Records with what the header says of the rank."""
        header = self.header
        if len(records) and int(records["group"].max()) not in self.groups:
            self._read_groups()
        return RankStamps(
            rank=header["rank"],
            world=header["world"],
            host=str(header.get("host", "")),
            clock=str(header.get("boot", header.get("host", ""))),
            wall_less_clock_ns=int(header.get("wall_ns", 0)) - int(header.get("monotonic_ns", 0)),
            operations=tuple(map(str, header["operations"])),
            groups=self.groups,
            records=records,
        )

    def _read_groups(self) -> None:
        path = self.path.with_suffix(".groups")
        if not path.exists() or path.stat().st_size > _MOST_GROUPS_BYTES:
            return
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
                group = StampedGroup(
                    name=str(entry["name"]), ranks=tuple(map(int, entry["ranks"])), backend=str(entry.get("backend", ""))
                )
                self.groups[int(entry["group"])] = group
            except (ValueError, KeyError, TypeError):
                continue  # a half-written line of a killed rank


@dataclass(kw_only=True)
class StampFolder:
    """All ranks' files of a folder, in the order of ranks; `InputError` if it has none."""

    path: Path
    files: tuple[StampFile, ...] = field(init=False)

    def __post_init__(self) -> None:
        paths = sorted(self.path.glob("rank-*.stamps")) if self.path.is_dir() else []
        if not paths:
            raise InputError(
                f"{self.path}: no rank-*.stamps; run the job with DPRO_SEARCH_STAMPS={self.path}, or name another folder"
            )
        self.files = tuple(sorted((StampFile(path=path) for path in paths), key=lambda file: int(file.header["rank"])))

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of the job that have no file."""
        present = {file.header["rank"] for file in self.files}
        return tuple(rank for rank in range(self.files[0].header["world"]) if rank not in present)
