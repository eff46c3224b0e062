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


class Lateness(msgspec.Struct, frozen=True, kw_only=True):
    """One rank over the collectives that all their ranks were seen to enqueue.

    Attributes
    ----------
    last_pct
        Collectives for which this rank came last.
    cost_us
        Time that the others lost by it in a step: from the last but one enqueue to this rank's, where it was last.
    waited_us
        Time that this rank waited for others, per step.
    """

    rank: int
    last_pct: float
    cost_us: float
    waited_us: float


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


def lateness(trace: Trace) -> tuple[Lateness, ...]:
    """Every rank's punctuality; empty where no collective was matched across ranks."""
    events, ranks = trace.events, trace.meta.ranks
    parts = np.flatnonzero((events.kind == EventKind.COLLECTIVE) & (events.collective >= 0) & (events.step >= 0))
    if not len(parts):
        return ()
    _, row = np.unique(events.collective[parts], return_inverse=True)
    post_us = np.full((row.max() + 1, ranks), -np.inf)
    post_us[row, events.rank[parts]] = events.start_us[parts]
    present = np.isfinite(post_us)
    post_us, present = post_us[present.sum(axis=1) > 1], present[present.sum(axis=1) > 1]
    if not len(post_us):
        return ()
    steps = max(len(np.unique(events.step[parts])), 1)
    last = post_us.argmax(axis=1)
    two = np.partition(post_us, -2, axis=1)[:, -2:]
    cost_us = two[:, 1] - two[:, 0]
    waited_us = np.where(present, two[:, 1:] - np.where(present, post_us, 0.0), 0.0)
    return tuple(
        Lateness(
            rank=trace.meta.numbers[rank],
            last_pct=float((last == rank).sum() / max(present[:, rank].sum(), 1)) * 100,
            cost_us=float(cost_us[last == rank].sum()) / steps,
            waited_us=float(waited_us[:, rank].sum()) / steps,
        )
        for rank in range(ranks)
    )
