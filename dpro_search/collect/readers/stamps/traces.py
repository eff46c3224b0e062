"""Stamps of a trace: when each rank of any recorded job began and ended its collectives and messages, without what it computed.

A rank is taken to wait in a collective from its begin to its end: right for what was recorded on the stream that computes, and for
recordings of one operation at a time.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from dpro_search.collect.readers.stamps.records import RECEIVE, RECORD, SEND, STEP, RankStamps, StampedGroup
from dpro_search.collect.trace import CollectiveKind, EventKind, Trace
from dpro_search.errors import MissingCapabilityError

_FIRST = 4
_KINDS = tuple(CollectiveKind)
OPERATIONS = ("none", "step", "forward", "update", *(_name for _name in map(str.lower, (kind.name for kind in _KINDS))))
_OPERATIONS = tuple({"send": SEND, "recv": RECEIVE}.get(name, name) for name in OPERATIONS)


def stamps_of_trace(trace: Trace) -> list[RankStamps]:
    """One `RankStamps` a rank; `MissingCapabilityError` if no collective was matched over ranks or no steps are known."""
    events, numbers = trace.events, trace.meta.numbers
    rows = np.flatnonzero((events.kind == EventKind.COLLECTIVE) & (events.collective >= 0) & (events.step >= 0))
    if not len(rows) or not len(trace.steps.index):
        raise MissingCapabilityError("no collective was matched over ranks; record all ranks, or stamp the job")
    members: dict[int, set[int]] = defaultdict(set)
    for rank, number in zip(events.rank[rows].tolist(), events.collective[rows].tolist(), strict=True):
        members[number].add(rank)
    groups: dict[tuple[int, ...], int] = {}
    counts: dict[tuple[int, ...], int] = defaultdict(int)
    sequence: dict[int, tuple[int, int]] = {}  # (group, number within it, or within the pair of a message) of each collective
    for number in dict.fromkeys(events.collective[rows[np.argsort(events.start_us[rows], kind="stable")]].tolist()):
        ranks = tuple(sorted(members[number]))
        group = groups.setdefault(ranks, len(groups))
        sequence[number] = group, counts[ranks]
        counts[ranks] += 1
    origin_us = float(min(events.start_us[rows].min(), trace.steps.start_us.min()))
    table = {
        number: StampedGroup(name=str(number), ranks=tuple(numbers[rank] for rank in ranks)) for ranks, number in groups.items()
    }
    places = {number: ranks for ranks, number in groups.items()}
    records: list[list[tuple[object, ...]]] = [[] for _ in range(trace.meta.ranks)]
    for row in rows.tolist():
        rank, length_us = int(events.rank[row]), float(events.end_us[row] - events.start_us[row])
        group, number = sequence[int(events.collective[row])]
        operation = _FIRST + _KINDS.index(CollectiveKind(int(events.collective_kind[row])))
        is_message = _OPERATIONS[operation] in (SEND, RECEIVE)
        peer = next((place for place, other in enumerate(places[group]) if other != rank), -1) if is_message else -1
        at_ns = int((float(events.start_us[row]) - origin_us) * 1e3) + 1
        size_bytes = max(int(events.size_bytes[row]), 0)
        step = int(events.step[row])
        records[rank].append((at_ns, np.nan, length_us, 0.0, length_us, number, step, size_bytes, group, operation, 0, peer, 0))
    for rank, step, end_us in zip(trace.steps.rank.tolist(), trace.steps.index.tolist(), trace.steps.end_us.tolist(), strict=True):
        at_ns = int((end_us - origin_us) * 1e3) + 1
        records[rank].append((at_ns, *[np.nan] * 4, 0, step, 0, 0, STEP, 0, -1, 0))
    return [
        RankStamps(
            rank=numbers[rank],
            world=trace.meta.ranks,
            host=f"rank {numbers[rank]}",
            clock="one",
            wall_less_clock_ns=0,
            operations=_OPERATIONS,
            groups=table,
            records=np.sort(np.array(records[rank], RECORD), order=("step", "enqueue_ns"), kind="stable"),
        )
        for rank in range(trace.meta.ranks)
    ]
