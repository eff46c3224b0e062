"""Tables of the fastest all-reduce of `dpro_search_all_reduce` for each size: from measured ones, or from the cost model.

Both give the table that its `Choice` reads: by ranks and ranks on a host, ranges of sizes with an algorithm each. A wrong choice
from measurements must be cheap, so algorithms are compared by their slow rounds, in the slowest of several sessions of measurement;
the library's own default is chosen wherever it is as fast as the best within `_TIE`, and wherever nothing was measured. Algorithms
that are close to the chosen one are listed beside it: a job times them in its first steps (`dpro_search_all_reduce.check`).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from dpro_search.collect.tables.all_reduces import LIBRARIES, AllReduceRow, CommTable, all_reduces_over
from dpro_search.collect.trace import Floats
from dpro_search.costmodel.collectives.counts import Points
from dpro_search.costmodel.collectives.model_file import CommunicationModel
from dpro_search.costmodel.collectives.series import series_name
from dpro_search.errors import InputError
from dpro_search.runtime.all_reduce.dpro_search_all_reduce.choice import NATIVE, OF_LIBRARY, parted

OF_LIBRARIES = tuple(LIBRARIES.values())  # how the algorithms of an MPI library itself begin
_STEPS = 8  # into which the interval from a size to the next is divided
_VERSION = 1
_SLOW = 0.75  # quantile of a session's rounds by which algorithms are compared
_TIE = 0.03  # relative gain over the default that is no reason to leave it: rounds of one algorithm differ by as much
_CLOSE = 1.5  # times the chosen algorithm's duration, up to which another one is listed as an alternative
_ALTERNATIVES = 2
_OPEN_MPI = "mpi4py"
Rules = tuple[tuple[int, str], ...]
# Algorithms of Open MPI's own choice for operations that commute, for fewer ranks than the number: (from bytes, algorithm). Source:
# Open MPI 4.1, ompi/mca/coll/tuned/coll_tuned_decision_fixed.c. They are averages over its developers' clusters, and change to and
# fro: 4 to 8 KiB between two ranks go around a ring, sizes below and above do not.
_OPEN_MPI_RULES: Mapping[int, Rules] = {
    4: (
        (0, "ring"),
        (8, "recursive-doubling"),
        (4096, "ring"),
        (8192, "recursive-doubling"),
        (16384, "ring"),
        (65536, "segmented-ring"),
        (262144, "rabenseifner"),
    ),
    8: ((0, "ring"), (16, "recursive-doubling"), (8192, "rabenseifner")),
    16: ((0, "recursive-doubling"), (8192, "rabenseifner")),
    32: ((0, "segmented-ring"), (64, "recursive-doubling"), (4096, "rabenseifner")),
    64: ((0, "segmented-ring"), (128, "rabenseifner")),
    128: ((0, "recursive-doubling"), (262144, "rabenseifner")),
}
BySize = Sequence[tuple[float, Mapping[str, float]]]


class Range(NamedTuple):
    """The choice for all-reduces of at least `from_bytes`, and other algorithms that may be as fast there, best first."""

    from_bytes: int
    algorithm: str
    alternatives: tuple[str, ...] = ()


def choices(tables: Sequence[CommTable]) -> dict[float | None, dict[str, Any]]:
    """The table of the fastest measured algorithms, by the rate of the links; empty: none of `LIBRARIES` was measured.

    Between two sizes durations are interpolated, both as logarithms; that of Open MPI's default is then that of the algorithm which
    it uses there. Below the smallest and above the largest size that was measured, the library chooses. Where several MPI libraries
    were measured, the first of `LIBRARIES` counts.

    Parameters
    ----------
    tables
        One for each session of measurement: the slowest session of an algorithm counts.
    """
    all_rows = [row for table in tables for row in table.rows]
    backend = next((name for name in LIBRARIES if any(row.backend == name for row in all_rows)), None)
    rows: dict[float | None, dict[tuple[int, int], list[AllReduceRow]]] = defaultdict(lambda: defaultdict(list))
    for row in all_rows:
        if row.backend == backend and not row.algorithm.startswith(OF_LIBRARIES):
            rows[row.rate_bps][row.ranks, row.ranks_per_host].append(row)
    sessions = [f"{table.header.machine}, {table.header.started_at[:10]}" for table in tables]
    origin = f"measured on {'; '.join(dict.fromkeys(sessions))}"
    return {
        rate_bps: _as_table(
            origin, {layout: _safest(_slow_by_size(some), _rules(layout[0], backend)) for layout, some in sorted(by_layout.items())}
        )
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
    predicted = {name: model.predict(one, points).us for name, one in known_series.items()}
    rules = _rules(ranks, backend)
    if NATIVE in predicted and rules and all(name in predicted for _, name in rules):
        predicted[NATIVE] = np.array([predicted[_default_at(rules, size)][i] for i, size in enumerate(sizes_bytes)])
    return predicted


def _rules(ranks: int, backend: str | None) -> Rules:
    """The library's own choice among so many ranks: (from bytes, algorithm); empty: not known."""
    if backend != _OPEN_MPI:
        return ()
    rules = next((rules for fewer_than, rules in _OPEN_MPI_RULES.items() if ranks < fewer_than), ())
    return tuple((start, OF_LIBRARY + name) for start, name in rules)


def _default_at(rules: Rules, size_bytes: float) -> str:
    return next(name for start, name in reversed(rules) if start <= size_bytes)


def _slow_by_size(rows: Sequence[AllReduceRow]) -> list[tuple[float, Mapping[str, float]]]:
    """(bytes, duration in a slow round of the slowest session by algorithm, us), ascending."""
    slow_us: dict[int, dict[str, float]] = defaultdict(dict)
    for row in rows:
        us = float(np.quantile(row.rounds_us, _SLOW))
        slow_us[row.size_bytes][row.algorithm] = max(us, slow_us[row.size_bytes].get(row.algorithm, 0.0))
    return [(float(size), slow_us[size]) for size in sorted(slow_us)]


def _safest(by_size: BySize, rules: Rules) -> list[Range]:
    """The fastest algorithm between two measured sizes each, or the library's default if it is as fast or was not measured."""
    ranges = [Range(0, NATIVE), *map(_safe, _interpolated(by_size, rules)), Range(int(by_size[-1][0]) + 1, NATIVE)]
    return [one for i, one in enumerate(ranges) if i == 0 or one[1:] != ranges[i - 1][1:]]


def _safe(point: tuple[int, Mapping[str, float]]) -> Range:
    start, taken_us = point
    default_us = taken_us.get(NATIVE)
    if default_us is None:
        return Range(start, NATIVE)
    ranked = sorted(taken_us, key=taken_us.__getitem__)
    chosen = NATIVE if default_us <= taken_us[ranked[0]] * (1 + _TIE) else ranked[0]
    close = (name for name in ranked if name not in (chosen, NATIVE) and taken_us[name] <= taken_us[chosen] * _CLOSE)
    return Range(start, chosen, tuple(itertools.islice(close, _ALTERNATIVES)))


def _fastest(by_size: BySize) -> list[Range]:
    """The algorithm with the shortest predicted duration, from 0 bytes to any size."""
    ranges = [Range(start, min(taken_us, key=taken_us.__getitem__)) for start, taken_us in _interpolated(by_size)]
    ranges[0] = ranges[0]._replace(from_bytes=0)
    return [one for i, one in enumerate(ranges) if i == 0 or one.algorithm != ranges[i - 1].algorithm]


def _interpolated(by_size: BySize, rules: Rules = ()) -> Iterator[tuple[int, Mapping[str, float]]]:
    """(from bytes, duration by algorithm, us): at the given sizes, and between two of them by the logarithms of both.

    Between two sizes only algorithms that are known at both of them take part; the default takes what the algorithm takes that it
    uses there by `rules`.
    """
    points = [by_size[0]]
    for (low, at_low), (high, at_high) in pairwise(by_size):
        sizes = np.geomspace(low, high, _STEPS + 1)
        between = {name: np.geomspace(at_low[name], at_high[name], _STEPS + 1) for name in at_low if name in at_high}
        for i in range(1, _STEPS) if between else ():
            interpolated_us = {name: float(us[i]) for name, us in between.items()}
            default = _default_at(rules, sizes[i]) if rules else NATIVE
            if NATIVE in interpolated_us and default in interpolated_us:
                interpolated_us[NATIVE] = interpolated_us[default]
            points.append((float(sizes[i]), interpolated_us))
        points.append((high, at_high))
    yield int(by_size[0][0]), by_size[0][1]
    for (low, _), (high, taken_us) in pairwise(points):
        yield math.ceil(math.sqrt(low * high)), taken_us


def _as_table(origin: str, by_layout: Mapping[tuple[int, int], Sequence[Range]]) -> dict[str, Any]:
    tables = [
        {"ranks": ranks, "ranks_per_host": ranks_per_host, "ranges": [_range_as_json(one) for one in ranges]}
        for (ranks, ranks_per_host), ranges in by_layout.items()
    ]
    return {"version": _VERSION, "origin": origin, "tables": tables}


def _range_as_json(one: Range) -> dict[str, Any]:
    algorithm, segment_bytes = parted(one.algorithm)
    row: dict[str, Any] = {"from_bytes": one.from_bytes, "algorithm": algorithm, "segment_bytes": segment_bytes}
    return row | ({"alternatives": list(one.alternatives)} if one.alternatives else {})
