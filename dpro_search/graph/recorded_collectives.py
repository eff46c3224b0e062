"""Facts that the recorded collectives of all ranks tell: stragglers, slow groups of ranks, and pipelines.

A straggler enqueues its part of collectives late. A slow group of ranks shows in its bus bandwidth, which is what each link
carries, whatever the number of ranks: bytes a second times 2 (n - 1) / n for an all-reduce and (n - 1) / n for the others that
involve all ranks (NVIDIA, nccl-tests, PERFORMANCE.md). Only collectives count there that all their ranks were seen to enqueue, from
the last enqueue on (a transfer has no other known beginning), and that are not small enough to be latency. A pipeline is the ranks
that pass activations and gradients to each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np

from dpro_search.collect.trace import CollectiveKind, EventKind, Trace

_LEAST_BYTES = 256 << 10
_FAR_BELOW = 0.5  # of the median of the other groups
_PARTS = frozenset(
    (
        CollectiveKind.ALL_GATHER,
        CollectiveKind.REDUCE_SCATTER,
        CollectiveKind.ALL_TO_ALL,
        CollectiveKind.GATHER,
        CollectiveKind.SCATTER,
    )
)


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


class GroupSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives of one kind among the same ranks."""

    collective: str  # Its kind: allreduce, alltoall...; where that is unknown, the name of its events.
    ranks: tuple[int, ...]  # Ranks of the group as the job numbers them, in order.
    # count, bytes_per_step, time_us: Collectives in all steps; bytes and transfer time per step.
    count: int
    bytes_per_step: float
    time_us: float
    bus_bps: float  # Bus bandwidth, bits a second, all transfers together.


def group_speeds(trace: Trace) -> tuple[GroupSpeed, ...]:
    """Every group's speed, the slowest first; empty where no collective of known size was matched across ranks."""
    events = trace.events
    parts = np.flatnonzero((events.kind == EventKind.COLLECTIVE) & (events.collective >= 0) & (events.step >= 0))
    of_collective: dict[int, list[int]] = defaultdict(list)
    for part, number in zip(parts.tolist(), events.collective[parts].tolist(), strict=True):
        of_collective[number].append(part)
    rows_of_group: dict[tuple[str, tuple[int, ...]], list[tuple[float, float, float]]] = defaultdict(list)
    for members in of_collective.values():
        ranks = tuple(sorted(trace.meta.numbers[rank] for rank in set(events.rank[members].tolist())))
        size_bytes = float(events.size_bytes[members].max())
        time_us = float(events.end_us[members].max() - events.start_us[members].max())
        if len(ranks) > 1 and size_bytes >= _LEAST_BYTES and time_us > 0:
            kind = CollectiveKind(int(events.collective_kind[members[0]]))
            title = trace.names[events.name[members[0]]].lower() if kind is CollectiveKind.UNKNOWN else kind.label
            rows_of_group[title, ranks].append((size_bytes, size_bytes * _share_of_link(kind, len(ranks)), time_us))
    steps = max(len(np.unique(events.step[parts])), 1)
    speeds = []
    for (title, ranks), rows in rows_of_group.items():
        size_bytes, carried_bytes, time_us = np.array(rows).sum(axis=0).tolist()
        speeds.append(
            GroupSpeed(
                collective=title,
                ranks=ranks,
                count=len(rows),
                bytes_per_step=size_bytes / steps,
                time_us=time_us / steps,
                bus_bps=carried_bytes * 8e6 / time_us,
            )
        )
    return tuple(sorted(speeds, key=lambda speed: speed.bus_bps))


def slow_groups(speeds: Sequence[GroupSpeed]) -> list[tuple[GroupSpeed, float]]:
    """Groups far below the others that do the same among as many ranks, with the median bus bandwidth of those."""
    slow = []
    for speed in speeds:
        others = [
            o.bus_bps for o in speeds if o is not speed and o.collective == speed.collective and len(o.ranks) == len(speed.ranks)
        ]
        if others and speed.bus_bps < _FAR_BELOW * (usual_bps := float(np.median(others))):
            slow.append((speed, usual_bps))
    return slow


def _share_of_link(kind: CollectiveKind, ranks: int) -> float:
    """Bytes that each link carries for a byte of the collective."""
    if kind is CollectiveKind.ALL_REDUCE:
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if kind in _PARTS else 1.0


def pipelines_of(trace: Trace) -> tuple[tuple[int, ...], ...]:
    """Places of the ranks of each pipeline; empty where no messages between two recorded ranks were matched.

    Ranks belong together if a message joins them, directly or over others: one rank of each stage.
    """
    events = trace.events
    is_message = np.isin(events.collective_kind, (CollectiveKind.SEND, CollectiveKind.RECV))
    parts = np.flatnonzero((events.kind == EventKind.COLLECTIVE) & (events.collective >= 0) & is_message)
    ends = np.unique(np.stack((events.collective[parts], events.rank[parts])), axis=1)
    same = np.flatnonzero(ends[0][:-1] == ends[0][1:])
    pairs = np.unique(np.stack((ends[1][same], ends[1][same + 1])), axis=1)
    pipeline = np.arange(trace.meta.ranks)
    for first, second in pairs.T.tolist():
        pipeline[pipeline == pipeline[second]] = pipeline[first]
    members = [tuple(np.flatnonzero(pipeline == number).tolist()) for number in np.unique(pipeline)]
    return tuple(ranks for ranks in members if len(ranks) > 1)
