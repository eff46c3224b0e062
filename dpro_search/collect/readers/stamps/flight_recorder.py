"""Dumps of PyTorch's flight recorder: the last collectives of each rank, which it writes when a collective times out.

Format: PyTorch's tutorial "Flight Recorder for debugging stuck jobs" (recipes, flight recorder) and ``torch/csrc/distributed/c10d/
FlightRecorder.hpp``, versions 2.x. Only JSON is read. The default dump is a pickle, which can run code when it is opened; the error
for one names the command that converts it. A dump has the times at which a rank enqueued a collective and, if the watchdog noticed,
when it started and ended; it has no steps and no host. That tells where ranks part; it does not tell which rank is slow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dpro_search.collect.readers._bytes import read_whole
from dpro_search.collect.readers.stamps.records import RECEIVE, RECORD, SEND, RankStamps, StampedGroup
from dpro_search.errors import InputError, TraceFormatError

_PICKLE = b"\x80"
_TO_JSON = (
    "a pickle, which is not opened; if you trust it run python -c 'import json, pickle, sys; "
    'json.dump(pickle.load(open(sys.argv[1], "rb")), open(sys.argv[1] + ".json", "w"))\' FILE, and give the folder of the .json'
)
_ITEM_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2, "Char": 1, "Byte": 1, "Bool": 1}
_MARKS = ("none", "step", "forward", "update")


class _Entry(msgspec.Struct):
    process_group: tuple[str, str]
    collective_seq_id: int
    p2p_seq_id: int
    profiling_name: str
    time_created_ns: int
    is_p2p: bool
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    time_discovered_started_ns: int | None = None
    time_discovered_completed_ns: int | None = None


class _Dump(msgspec.Struct):
    version: str
    entries: list[_Entry]
    pg_config: dict[str, dict[str, str]]
    rank: int | None = None


def recognise(folder: Path) -> list[Path]:
    """The dumps in a folder: files with a rank's number at the end of their name that begin as JSON or as a pickle."""
    names = [path for path in sorted(folder.iterdir()) if path.is_file() and _rank_of(path) is not None] if folder.is_dir() else []
    return [path for path in names if path.open("rb").read(1) in (b"{", _PICKLE)]


def read(paths: list[Path]) -> list[RankStamps]:
    """Stamps of all ranks, sorted by rank.

    Raises
    ------
    InputError
        A file is a pickle, or cannot be read.
    TraceFormatError
        A file is no dump of the flight recorder.
    """
    return sorted((_stamps(path, len(paths)) for path in paths), key=lambda each: each.rank)


def _rank_of(path: Path) -> int | None:
    match = re.search(r"(\d+)(?:\.json)?$", path.name)
    return int(match[1]) if match else None


def _stamps(path: Path, world: int) -> RankStamps:
    data = read_whole(path)
    if data[:1] == _PICKLE:
        raise InputError(f"{path}: {_TO_JSON}")
    try:
        dump = msgspec.json.decode(data, type=_Dump)
    except msgspec.MsgspecError as error:
        raise TraceFormatError(f"{path}: no dump of PyTorch's flight recorder in JSON ({error})") from error
    groups, numbers = {}, {}
    for number, (name, config) in enumerate(dump.pg_config.items()):
        numbers[name] = number
        groups[number] = StampedGroup(name=name, ranks=_ranks(config, path), backend="nccl")
    operations, rows = list(_MARKS), []
    rank = _rank_of(path)
    for name, values in _entries(dump, numbers):
        if name not in operations:
            operations.append(name)
        rows.append((*values[:9], operations.index(name), 0, -1, 0))
    return RankStamps(
        rank=rank if rank is not None else 0,
        world=max(world, *(len(group.ranks) for group in groups.values()), 1),
        host="",
        clock=f"rank {rank}",
        wall_less_clock_ns=0,
        operations=tuple(operations),
        groups=groups,
        records=np.array(rows, RECORD),
    )


def _entries(dump: _Dump, numbers: dict[str, int]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Name and fields of each collective; messages are numbered by the two ranks together, and left out."""
    for entry in sorted(dump.entries, key=lambda each: each.time_created_ns):
        if entry.is_p2p or entry.process_group[0] not in numbers:
            continue
        name = entry.profiling_name.partition(":")[2].partition(" ")[0] or entry.profiling_name
        sizes = zip(entry.input_sizes, entry.input_dtypes, strict=False)
        size_bytes = sum(int(np.prod(size)) * _ITEM_BYTES.get(dtype, 0) for size, dtype in sizes)
        ends = (_after_us(entry, entry.time_discovered_started_ns), _after_us(entry, entry.time_discovered_completed_ns))
        fields = (entry.time_created_ns, *ends, np.nan, np.nan, entry.collective_seq_id, 0, size_bytes)
        yield {"send": SEND, "recv": RECEIVE}.get(name, name), (*fields, numbers[entry.process_group[0]])


def _after_us(entry: _Entry, at_ns: int | None) -> float:
    return np.nan if at_ns is None else (at_ns - entry.time_created_ns) / 1e3


def _ranks(config: dict[str, str], path: Path) -> tuple[int, ...]:
    try:
        return tuple(map(int, json.loads(config["ranks"])))
    except (KeyError, ValueError, TypeError) as error:
        raise TraceFormatError(f"{path}: a process group without its ranks; dump with a PyTorch of 2.5 or later") from error
