"""Tables of the fastest all-reduce of `dpro_search_all_reduce` for each size: from measured ones, or from the cost model.

Both give the table that its `Choice` reads: by ranks and ranks on a host, ranges of sizes with an algorithm each.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from dpro_search.collect.tables.all_reduces import LIBRARIES, AllReduceRow, CommTable, all_reduces_over
from dpro_search.collect.trace import Floats
from dpro_search.costmodel.collectives.counts import Points
from dpro_search.costmodel.collectives.model_file import CommunicationModel
from dpro_search.costmodel.collectives.series import series_name
from dpro_search.errors import InputError
from dpro_search.runtime.all_reduce.dpro_search_all_reduce.choice import parted

OF_LIBRARIES = tuple(LIBRARIES.values())  # how the algorithms of an MPI library itself begin
_STEPS = 8  # into which the way from a size to the next is divided
_VERSION = 1


def choices(table: CommTable) -> dict[float | None, dict[str, Any]]:
    """The table of the fastest measured algorithms, by the rate of the links; empty: none of `LIBRARIES` was measured.

    Between two sizes times are interpolated, both as logarithms. Where several MPI libraries were measured, the first of
    `LIBRARIES` counts.
    """
    backend = next((name for name in LIBRARIES if any(row.backend == name for row in table.rows)), None)
    rows: dict[float | None, dict[tuple[int, int], list[AllReduceRow]]] = defaultdict(lambda: defaultdict(list))
    for row in table.rows:
        if row.backend == backend and not row.algorithm.startswith(OF_LIBRARIES):
            rows[row.rate_bps][row.ranks, row.ranks_per_host].append(row)
    origin = f"measured on {table.header.machine}, {table.header.started_at[:10]}"
    return {
        rate_bps: _as_table(origin, {layout: _fastest(_by_size(some)) for layout, some in sorted(by_layout.items())})
        for rate_bps, by_layout in rows.items()
    }


def predicted_choice(
    model: CommunicationModel,
    layouts: Iterable[tuple[int, int]],
    rate_bps: float | None,
    cores: int,
    sizes_bytes: Floats,
    backend: str = "mpi4py",
) -> dict[str, Any]:
    """The table of the algorithms that a cost model predicts to be the fastest.

    Parameters
    ----------
    layouts
        Numbers of ranks, and of those on a host.
    sizes_bytes
        [sizes], ascending.
    backend
        One of `LIBRARIES`: with which MPI library.

    Raises
    ------
    InputError
        The model has no series of the backend for a layout.
    """
    ranges_by_layout = {}
    for ranks, ranks_per_host in layouts:
        predicted = predicted_us(model, ranks, ranks_per_host, rate_bps, cores, sizes_bytes, backend)
        by_size = [(float(size), {name: float(us[i]) for name, us in predicted.items()}) for i, size in enumerate(sizes_bytes)]
        ranges_by_layout[ranks, ranks_per_host] = _fastest(by_size)
    return _as_table("predicted from measured all-reduces", ranges_by_layout)


def predicted_us(
    model: CommunicationModel,
    ranks: int,
    ranks_per_host: int,
    rate_bps: float | None,
    cores: int,
    sizes_bytes: Floats,
    backend: str = "mpi4py",
) -> dict[str, Floats]:
    """Duration of each algorithm by a cost model, us, [sizes] each; raises `InputError` where it has none."""
    points = Points.on(rate_bps, cores, size_bytes=sizes_bytes, ranks=ranks)
    series = {name: series_name(backend, name, ranks_per_host) for name in all_reduces_over(backend)}
    known_series = {name: one for name, one in series.items() if one in model.costs}
    if not known_series:
        raise InputError(
            f"the model has {'; '.join(model.costs)}, and no all-reduce of {backend} with {ranks_per_host} ranks on a host;"
            f" measure them with 'dpro-search fit --collect comm --backends {backend}'"
        )
    return {name: model.predict(one, points).us for name, one in known_series.items()}


def _by_size(rows: Sequence[AllReduceRow]) -> list[tuple[float, Mapping[str, float]]]:
    duration_us: dict[int, dict[str, float]] = defaultdict(dict)
    for row in rows:
        duration_us[row.size_bytes][row.algorithm] = row.duration_us
    return [(float(size), duration_us[size]) for size in sorted(duration_us)]


def _fastest(by_size: Sequence[tuple[float, Mapping[str, float]]]) -> list[tuple[int, str]]:
    """(from bytes, algorithm): the fastest at each size, and between two by the logarithms of both; neighbours are joined."""
    points = [by_size[0]]
    for (low, at_low), (high, at_high) in pairwise(by_size):
        sizes = np.geomspace(low, high, _STEPS + 1)[1:-1]
        known = at_low.keys() & at_high.keys()
        between = {name: np.geomspace(at_low[name], at_high[name], _STEPS + 1)[1:-1] for name in sorted(known)}
        for i, size in enumerate(sizes):
            near = at_low if i < len(sizes) // 2 else at_high
            alone = {name: us for name, us in near.items() if name not in known and us == min(near.values())}
            points.append((float(size), alone or {name: float(us[i]) for name, us in between.items()} or near))
        points.append((high, at_high))
    edges = [0, *(math.ceil(math.sqrt(low * high)) for (low, _), (high, _) in pairwise(points))]
    ranges: list[tuple[int, str]] = []
    for start, (_, taken_us) in zip(edges, points, strict=True):
        best = min(taken_us, key=taken_us.__getitem__)
        if not ranges or (ranges[-1][1] != best and ranges[-1][0] != start):
            ranges.append((start, best))
    return ranges


def _as_table(origin: str, by_layout: Mapping[tuple[int, int], Sequence[tuple[int, str]]]) -> dict[str, Any]:
    tables = [
        {"ranks": ranks, "ranks_per_host": ranks_per_host, "ranges": [_range(start, name) for start, name in ranges]}
        for (ranks, ranks_per_host), ranges in by_layout.items()
    ]
    return {"version": _VERSION, "origin": origin, "tables": tables}


def _range(start: int, name: str) -> dict[str, Any]:
    algorithm, segment_bytes = parted(name)
    return {"from_bytes": start, "algorithm": algorithm, "segment_bytes": segment_bytes}
