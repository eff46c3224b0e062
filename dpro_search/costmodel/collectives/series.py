"""Measured all-reduces as points to fit: from a table of the microbenchmark, from a recorded job, from published measurements."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dpro_search._regular_files import open_regular
from dpro_search.collect.assemble.kvstore_slices import Slicing
from dpro_search.collect.tables.all_reduces import LIBRARIES, AllReduceRow, CommTable
from dpro_search.collect.trace import CollectiveKind, EventKind, Events, Floats, Trace
from dpro_search.costmodel.collectives.counts import HIERARCHY, Algorithm, Points
from dpro_search.errors import InputError, TraceFormatError
from dpro_search.runtime.all_reduce.dpro_search_all_reduce.choice import OF_LIBRARY

# Algorithms that a backend may use, by the table's name. Open MPI composes a reduce and a broadcast of its choice; with no
# algorithm forced, and in NCCL, the library chooses.
_ANY = (Algorithm.RING, Algorithm.RECURSIVE_DOUBLING, Algorithm.HALVING_DOUBLING)
_ALGORITHMS: dict[tuple[str, str], tuple[Algorithm, ...]] = {
    ("mpi", "default"): _ANY,
    ("mpi", "nonoverlapping"): (Algorithm.TREE, Algorithm.CHAIN),
    ("mpi", "recursive-doubling"): (Algorithm.RECURSIVE_DOUBLING,),
    ("mpi", "ring"): (Algorithm.RING,),
    ("mpi", "segmented-ring"): (Algorithm.RING,),
    ("mpi", "rabenseifner"): (Algorithm.HALVING_DOUBLING,),
    ("mpi", "tree"): (Algorithm.TREE, Algorithm.CHAIN),
    ("mpi", HIERARCHY): (Algorithm.HIERARCHY,),
    ("mpi4py", "native"): _ANY,
    ("mpi4py", "gather"): (Algorithm.GATHER,),
    ("mpi4py", "direct"): (Algorithm.DIRECT,),
    ("mpi4py", "recursive-doubling"): (Algorithm.RECURSIVE_DOUBLING,),
    ("mpi4py", "halving-doubling"): (Algorithm.HALVING_DOUBLING,),
    ("mpi4py", "ring"): (Algorithm.RING,),
    ("mpi4py", "ring in segments"): (Algorithm.RING,),
    ("mpi4py", "ring in small segments"): (Algorithm.RING,),
    ("mpi4py", HIERARCHY): (Algorithm.HIERARCHY,),
    ("gloo", "ring"): (Algorithm.RING,),
    ("gloo", "default"): (Algorithm.RING,),
    ("nccl", "default"): (Algorithm.RING, Algorithm.TREE),
}
_STORES = {"kvstore", "byteps"}
_POLLING = {"mpi", *LIBRARIES, "byteps"}  # their ranks use a core while they wait, so that its time does not count
_MEETING = {"mpi", *LIBRARIES}  # their ranks meet before each timed call
_PARTITION_BYTES = 4_096_000  # BytePS' default
_ITEM_BYTES = 4  # of a float32
_NCCL_FILE = re.compile(r"AR_GPU(\d+)_\w+_LUT")


@dataclass(frozen=True, kw_only=True)
class Series:
    """Measured all-reduces of one backend and algorithm."""

    name: str
    algorithms: tuple[Algorithm, ...]  # Algorithms that it may use.
    # points, duration_us: [n] each.
    points: Points
    duration_us: Floats
    spread_pct: Floats  # Distance of repeated measurements of each duration, [n]; NaN: not known.
    # How long the busiest core was used in each, [n]; NaN: not known.
    busy_us: Floats = field(default_factory=lambda: np.array(np.nan))
    meets: bool = False  # Whether ranks met before each call, so that their links had rested.
    ranks_per_host: int = 1  # Ranks on each host, in all of them.

    def __post_init__(self) -> None:
        object.__setattr__(self, "busy_us", np.broadcast_to(self.busy_us, self.duration_us.shape))

    @staticmethod
    def joined(parts: Sequence[Series]) -> list[Series]:
        """One of each name, in the order in which the names come."""
        by_name: dict[str, list[Series]] = defaultdict(list)
        for part in parts:
            by_name[part.name].append(part)
        return [
            Series(
                name=name,
                algorithms=same[0].algorithms,
                points=Points.joined([part.points for part in same]),
                duration_us=np.concatenate([part.duration_us for part in same]),
                spread_pct=np.concatenate([part.spread_pct for part in same]),
                busy_us=np.concatenate([part.busy_us for part in same]),
                meets=same[0].meets,
                ranks_per_host=same[0].ranks_per_host,
            )
            for name, same in by_name.items()
        ]


def table_series(table: CommTable) -> list[Series]:
    """The series of a microbenchmark's table, by name."""
    by_name: dict[tuple[str, str, int], list[AllReduceRow]] = defaultdict(list)
    for row in table.rows:
        by_name[row.backend, row.algorithm, row.ranks_per_host].append(row)
    all_series = []
    for (backend, algorithm, ranks_per_host), rows in sorted(by_name.items()):
        rates = [np.inf if row.rate_bps is None else row.rate_bps / 8e6 for row in rows]
        servers = [_servers_used(backend, row.size_bytes, row.servers) for row in rows]
        all_series.append(
            Series(
                name=series_name(backend, algorithm, ranks_per_host),
                algorithms=algorithms_of(backend, algorithm),
                points=Points(
                    size_bytes=np.array([row.size_bytes for row in rows]),
                    ranks=np.array([row.ranks for row in rows]),
                    link_bytes_per_us=np.array(rates),
                    servers=np.array(servers),
                    cores=np.array(table.header.cores),
                ),
                duration_us=np.array([row.duration_us for row in rows]),
                spread_pct=np.array([row.spread_pct for row in rows]),
                busy_us=np.array([np.nan if backend in _POLLING else row.mean_busy_us for row in rows]),
                meets=backend in _MEETING,
                ranks_per_host=ranks_per_host,
            )
        )
    return all_series


def series_name(backend: str, algorithm: str, ranks_per_host: int = 1) -> str:
    """Name of a series, which has the ranks on a host: measurements with one number do not hold for others."""
    return f"{backend} {algorithm}" + (f", {ranks_per_host} ranks a host" if ranks_per_host > 1 else "")


def algorithms_of(backend: str, algorithm: str) -> tuple[Algorithm, ...]:
    """Algorithms that a backend may use under the table's name of an algorithm."""
    if backend in _STORES:
        return (Algorithm.PARAMETER_SERVER,)
    if backend in LIBRARIES:
        name = algorithm.removeprefix(LIBRARIES[backend]).removeprefix(OF_LIBRARY)
        backend, algorithm = "mpi4py" if name == algorithm else "mpi", name
    return _ALGORITHMS.get((backend, algorithm), _ANY)


def trace_series(trace: Trace) -> Series:
    """The all-reduces of a recorded job's profiled steps, from the last rank's enqueue to the end.

    Transfers that overlap share the link: together they are one point. They are as they are beside the job's computation.

    Raises
    ------
    InputError
        The trace has no all-reduce of known size that all of its ranks were seen in.
    """
    backend = _backend(trace)
    stores = backend in _STORES
    events = trace.events.select(trace.events.step >= 0)
    spans = _pushes(trace, events) if stores else _transfers(trace, events)
    if not len(spans):
        raise InputError(
            f"the trace ({trace.meta.format}) has no all-reduce of known size that all ranks were seen in: nothing to fit costs to"
        )
    size, duration = _periods(spans)
    workers = len(np.unique(events.rank[events.kind == EventKind.COMM])) if stores else trace.meta.ranks
    servers = max(trace.meta.ranks - workers, 1) if stores else 1
    cores = len({core for core in trace.meta.cores if core >= 0}) or np.inf
    ranks_per_host = 1 if stores else trace.meta.ranks_per_host or 1
    return Series(
        name=series_name(backend, "in a job", ranks_per_host),
        algorithms=algorithms_of(backend, "default"),
        points=Points.on(
            trace.meta.rate_bps,
            cores,
            size_bytes=size,
            ranks=max(workers, 1),
            servers=np.array([_servers_used(backend, int(each), servers, trace.meta.knobs) for each in size]),
        ),
        duration_us=duration,
        spread_pct=np.full(len(size), np.nan),
        ranks_per_host=ranks_per_host,
    )


def nccl_series(folder: Path) -> list[Series]:
    """Published measurements of NCCL's all-reduce on one host, as lookup tables of vTrain: a file for each number of GPUs.

    Raises
    ------
    InputError
        The folder has no such file.
    TraceFormatError
        A file is not what it should be.
    """
    size, ranks, duration, spread = [], [], [], []
    for path in sorted(folder.iterdir()):
        match = _NCCL_FILE.fullmatch(path.name)
        if match is None:
            continue
        with io.TextIOWrapper(open_regular(path), "utf-8-sig", "replace", newline="") as file:
            for number, row in enumerate(csv.reader(file), start=1):
                if number == 1:
                    continue
                try:
                    size_bytes, twice_us = float(row[0]), [float(row[3]) / 1e3, float(row[5]) / 1e3]
                except (ValueError, IndexError) as error:
                    raise TraceFormatError(f"{path}, line {number}: not a row of an all-reduce table ({error})") from error
                size.append(size_bytes)
                ranks.append(int(match[1]))
                duration.append(float(np.mean(twice_us)))  # out of place, in place
                spread.append(float(np.ptp(twice_us)) / 2 / duration[-1] * 100)
    if not size:
        raise InputError(f"{folder}: neither a trace nor published tables of NCCL (AR_GPU<n>_..._LUT)")
    return [
        Series(
            name="nccl default",
            algorithms=algorithms_of("nccl", "default"),
            points=Points(size_bytes=np.array(size), ranks=np.array(ranks)),
            duration_us=np.array(duration),
            spread_pct=np.array(spread),
        )
    ]


def _backend(trace: Trace) -> str:
    if trace.meta.comm == "horovod":
        return "mpi" if trace.meta.knobs.get("HOROVOD_CONTROLLER") == "mpi" else "gloo"
    return {"ddp": "gloo"}.get(trace.meta.comm, trace.meta.comm)


def _servers_used(backend: str, size_bytes: int, servers: int, knobs: Mapping[str, str] | None = None) -> float:
    """Servers that share a tensor: as many as if all had as much of it as the busiest one."""
    knobs = knobs or {}
    if backend not in _STORES or servers < 2:
        return 1
    if backend == "kvstore":
        elements = max(size_bytes // _ITEM_BYTES, 1)
        (parts,) = Slicing.of_knobs(knobs, servers).parts([0], [elements])
        load: Counter[int] = Counter()
        for server, part in parts:
            load[server] += part
        return elements / max(load.values())
    # Servers get whole parts, round-robin.
    text = knobs.get("BYTEPS_PARTITION_BYTES", "")
    part_bytes = (int(text) if text.isdecimal() else 0) or _PARTITION_BYTES
    whole, rest = divmod(size_bytes, part_bytes)
    most = -(-whole // servers) * part_bytes if whole % servers or not rest else whole // servers * part_bytes + rest
    return size_bytes / most


def _transfers(trace: Trace, events: Events) -> Floats:
    """Bytes, begin and end of every all-reduce that was seen on all its ranks, [n, 3]."""
    kind = EventKind.ALLREDUCE if (events.kind == EventKind.ALLREDUCE).any() else EventKind.COLLECTIVE
    parts = events.select((events.kind == kind) & (events.collective >= 0))
    whole: dict[int, dict[int, tuple[float, float, float]]] = defaultdict(dict)
    if kind == EventKind.COLLECTIVE:
        parts = parts.select(parts.collective_kind == CollectiveKind.ALL_REDUCE)
    for number, rank, size, start, end in _rows(parts):
        seen = whole[number]
        old = seen.get(rank, (0.0, np.inf, -np.inf))
        seen[rank] = old[0] + size, min(old[1], start), max(old[2], end)
    # Horovod's timeline shows when the last rank had enqueued; other traces hold each rank's wait.
    lone = kind == EventKind.ALLREDUCE
    spans = []
    for seen in whole.values():
        if not (lone or len(seen) == trace.meta.ranks > 1):
            continue
        sizes, starts, ends = zip(*seen.values(), strict=True)
        # The others may have noticed the end late.
        spans.append((max(sizes), max(starts), min(ends) if lone else max(ends)))
    return _sound(spans)


def _pushes(trace: Trace, events: Events) -> Floats:
    """Bytes, begin and end of every tensor's push and pull, over all workers, [n, 3]."""
    parts = events.select((events.kind == EventKind.COMM) & (events.tensor >= 0))
    whole: dict[tuple[int, int], tuple[float, float]] = {}
    for step, tensor, start, end in zip(
        parts.step.tolist(), parts.tensor.tolist(), parts.start_us.tolist(), parts.end_us.tolist(), strict=True
    ):
        old = whole.get((step, tensor), (-np.inf, -np.inf))
        whole[step, tensor] = max(old[0], start), max(old[1], end)
    return _sound([(float(trace.tensors[tensor].size_bytes), *span) for (_, tensor), span in whole.items()])


def _rows(events: Events) -> Iterable[tuple[int, int, int, float, float]]:
    columns = (events.collective, events.rank, events.size_bytes, events.start_us, events.end_us)
    return zip(*(column.tolist() for column in columns), strict=True)


def _sound(spans: Sequence[tuple[float, float, float]]) -> Floats:
    """Spans with bytes and a duration, by begin, [n, 3]."""
    rows = np.array(spans, dtype=np.float64).reshape(len(spans), 3)
    rows = rows[(rows[:, 0] > 0) & (rows[:, 2] > rows[:, 1])]
    return rows[np.argsort(rows[:, 1], kind="stable")]


def _periods(spans: Floats) -> tuple[Floats, Floats]:
    """Bytes and duration of every stretch of time in which some transfer was under way, [m] each."""
    size, start, end = spans.T
    latest = np.concatenate(([-np.inf], np.maximum.accumulate(end)[:-1]))
    group = np.cumsum(start >= latest) - 1
    total, last = np.zeros(group[-1] + 1), np.full(group[-1] + 1, -np.inf)
    np.add.at(total, group, size)
    np.maximum.at(last, group, end)
    first = start[np.searchsorted(group, np.arange(group[-1] + 1))]
    return total, last - first
