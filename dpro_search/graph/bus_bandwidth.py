"""The bus bandwidth that the collectives of each group of ranks reached, which shows slow links.

Bus bandwidth is what each link carries, whatever the number of ranks: bytes a second times 2 (n - 1) / n for an all-reduce and
(n - 1) / n for the others that involve all ranks (NVIDIA, nccl-tests, PERFORMANCE.md). Only collectives count that all their ranks
were seen to enqueue, from the last enqueue on (a transfer has no other known beginning), and that are not small enough to be
latency.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np

from dpro_search.collect.trace import CollectiveKind, EventKind, Trace

_LEAST_BYTES = 256 << 10
_FAR_BELOW = 0.5  # of the median of the other groups


class GroupSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives of one kind among the same ranks."""

    collective: str  # Its kind: allreduce, alltoall...; where that is unknown, the name of its events.
    ranks: tuple[int, ...]  # Of the group as the job numbers them, in order.
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


_PARTS = frozenset(
    (
        CollectiveKind.ALL_GATHER,
        CollectiveKind.REDUCE_SCATTER,
        CollectiveKind.ALL_TO_ALL,
        CollectiveKind.GATHER,
        CollectiveKind.SCATTER,
    )
)


def _share_of_link(kind: CollectiveKind, ranks: int) -> float:
    """Bytes that each link carries for a byte of the collective."""
    if kind is CollectiveKind.ALL_REDUCE:
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if kind in _PARTS else 1.0
