"""Memory that the buffers of a replayed graph take on each rank over time, and what is alive at the peak."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats, Ints
from dpro_search.replay.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of one rank; with b buffers in the graph, buffer j of iteration k has number ``k * b + j``."""

    rank: int
    # times_us, bytes: The curve, [points]: bytes taken from each time on; it begins at 0.
    times_us: Floats
    bytes: Floats
    # peak_bytes, peak_us: The most that is ever taken, and when it is first reached.
    peak_bytes: float
    peak_us: float
    # The op that allocates then (the largest buffer if several do): its number in `Timeline.times`; -1 without buffers.
    peak_op: int
    # alive, alive_bytes: Buffers alive at the peak, largest first, and their sizes, [alive].
    alive: Ints
    alive_bytes: Floats


def memory(timeline: Timeline) -> tuple[RankMemory, ...]:
    """Memory of every rank.

    A buffer is allocated when its op begins to work (``moved_us``) and freed when the last of its uses ends; at one instant,
    releases count before allocations. One whose uses have all ended by then takes nothing. Each iteration has its own buffers,
    but a buffer without uses is persistent: the first iteration's lives until the end.
    """
    buffers = _lifetimes(timeline)
    order = np.argsort(buffers.rank, kind="stable")
    limits = np.searchsorted(buffers.rank[order], np.arange(timeline.graph.ranks + 1))
    rows = (buffers.select(order[low:high]) for low, high in itertools.pairwise(limits))
    return tuple(_rank_memory(rank, of_rank) for rank, of_rank in enumerate(rows))


@dataclass(frozen=True)
class _ReplayedBuffers:
    """Buffers that take memory: number, op, rank, size and lifetime; [buffers] each."""

    number: Ints
    op: Ints
    rank: npt.NDArray[np.integer]
    size_bytes: Floats
    from_us: Floats
    to_us: Floats

    def select(self, rows: npt.NDArray[np.integer]) -> _ReplayedBuffers:
        columns = (self.number, self.op, self.rank, self.size_bytes, self.from_us, self.to_us)
        return _ReplayedBuffers(*(column[rows] for column in columns))


def _lifetimes(timeline: Timeline) -> _ReplayedBuffers:
    graph, times = timeline.graph, timeline.times
    count, iterations = len(graph.buffer_op), timeline.iterations
    first = np.arange(iterations)[:, None] * len(graph)
    op = (first + graph.buffer_op).ravel()
    to_us = np.full((iterations, count), np.inf)
    uses = np.diff(graph.buffer_ptr) if count else np.zeros(0, np.int64)
    used = uses > 0
    if used.any():
        ends = times.end_us[first + graph.buffer_use]
        to_us[:, used] = np.maximum.reduceat(ends, graph.buffer_ptr[:-1][used], axis=1)
    from_us = times.moved_us[op]
    counts = (used | (first == 0)).ravel() & (from_us < to_us.ravel())
    return _ReplayedBuffers(
        number=np.arange(iterations * count),
        op=op,
        rank=np.tile(graph.rank_of_op[graph.buffer_op], iterations),
        size_bytes=np.tile(graph.buffer_bytes, iterations),
        from_us=from_us,
        to_us=to_us.ravel(),
    ).select(np.flatnonzero(counts))


def _rank_memory(rank: int, buffers: _ReplayedBuffers) -> RankMemory:
    freed = np.isfinite(buffers.to_us)
    at_us = np.concatenate(([0.0], buffers.from_us, buffers.to_us[freed]))
    change = np.concatenate(([0.0], buffers.size_bytes, -buffers.size_bytes[freed]))
    times_us, number = np.unique(at_us, return_inverse=True)
    # What an instant adds up to is also the most within it, for releases come first.
    taken: Floats = np.cumsum(np.bincount(number, change, len(times_us)), dtype=np.float64)
    peak = int(taken.argmax())
    peak_us = float(times_us[peak])
    alive = np.flatnonzero((buffers.from_us <= peak_us) & (peak_us < buffers.to_us))
    alive = alive[np.argsort(-buffers.size_bytes[alive], kind="stable")]
    allocating = alive[buffers.from_us[alive] == peak_us]
    return RankMemory(
        rank=rank,
        times_us=times_us,
        bytes=taken,
        peak_bytes=float(taken[peak]),
        peak_us=peak_us,
        peak_op=int(buffers.op[allocating[0]]) if len(allocating) else -1,
        alive=buffers.number[alive],
        alive_bytes=buffers.size_bytes[alive],
    )
