"""Stragglers: when each rank enqueued its part of the recorded collectives."""

from __future__ import annotations

import msgspec
import numpy as np

from dpro_search.collect.trace import EventKind, Trace


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's punctuality over the collectives of the profiled steps."""

    rank: int
    last_pct: float  # Collectives for which this rank came last.
    waited_us: float  # Time between this rank's enqueue and the last rank's, mean per collective: waiting that is not transfer.


def arrivals(trace: Trace) -> tuple[Arrival, ...]:
    """Punctuality of every rank, from the collectives that all ranks were seen to enqueue."""
    comm = trace.events.select((trace.events.kind == EventKind.COMM) & (trace.events.collective >= 0))
    numbers, row = np.unique(comm.collective, return_inverse=True)
    enqueue = np.full((len(numbers), trace.meta.ranks), -np.inf)
    np.maximum.at(enqueue, (row, comm.rank), comm.start_us)
    enqueue = enqueue[np.isfinite(enqueue).all(axis=1)]
    if not len(enqueue):
        return ()
    last = enqueue.max(axis=1)
    return tuple(
        Arrival(
            rank=rank,
            last_pct=float((enqueue.argmax(axis=1) == rank).mean()) * 100,
            waited_us=float((last - enqueue[:, rank]).mean()),
        )
        for rank in range(trace.meta.ranks)
    )
