"""Gain of a step if a rank were not late, in us: the events of all ranks are replayed with less time between them.

A rank's events are own times, enqueues and waits, in their order. A collective ends when its last rank has enqueued it and its
transfer is over; a wait ends with its collective. Own times and transfers are taken from the stamps, so that only the removed
lateness changes. The gain is the difference of two replays: with and without.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dpro_search.analysis.ranks.matching import Ints, groups_of
from dpro_search.analysis.ranks.steps import Floats
from dpro_search.collect.readers.stamps import RankStamps
from dpro_search.collect.readers.stamps.records import FIRST_COLLECTIVE, FORWARD, RECEIVE, SEND, STEP, UPDATE


@dataclass(frozen=True)
class _Event:
    """An event of a rank, in us from its begin on; `key` is the collective that it enqueues or waits for, None for a mark."""

    at_us: float
    until_us: float  # of a wait; else `at_us`
    key: Hashable
    waits: bool
    step: int
    mark: int
    transfer_from_us: float = 0.0  # of a wait: its end tells of the transfer from then on


def step_gain_us(stamps: Sequence[RankStamps], begins_ns: Ints, steps: Ints, less_us: Floats, *, is_input: bool) -> float | None:
    """Mean gain in a step, in us, over the steps in which anything is removed.

    Parameters
    ----------
    stamps, begins_ns, steps
        As for `steps.measured`.
    less_us
        Own time to remove of each rank in each step, [n, R].
    is_input
        Remove it before the first forward pass of a step, rather than from all own times in proportion.
    """
    rows = np.flatnonzero(less_us.any(axis=1))
    if not len(rows):
        return 0.0
    first, last = int(steps[rows[0]]), int(steps[rows[-1]])
    events = _events(stamps, begins_ns, first, last)
    transfers = _transfers(events)
    before = _ends(events, transfers, None, is_input)
    less = [{int(steps[row]): float(less_us[row, place]) for row in rows} for place in range(len(stamps))]
    after = _ends(events, transfers, less, is_input)
    if before is None or after is None:
        return None
    return float(np.max(before) - np.max(after)) / (last - first + 1)


def _events(stamps: Sequence[RankStamps], begins_ns: Ints, first: int, last: int) -> list[list[_Event]]:
    names = {(place, number): group.name for group, numbers in groups_of(stamps).items() for place, number in numbers.items()}
    origin_ns = begins_ns.astype(np.int64)
    events = []
    for place, each in enumerate(stamps):
        part = each.records[(each.records["step"] >= first) & (each.records["step"] <= last)]
        events.append(sorted(_of_rank(each, part, place, int(origin_ns[place]), names), key=lambda event: event.at_us))
    return events


def _of_rank(
    stamps: RankStamps, part: np.ndarray, place: int, origin_ns: int, names: dict[tuple[int, int], str]
) -> Iterator[_Event]:
    silent: list[tuple[float, float, Hashable]] = []  # enqueue, end and key of collectives for which nobody called `wait`
    for row in part:
        at_us, operation, step = (int(row["enqueue_ns"]) - origin_ns) / 1e3, int(row["operation"]), int(row["step"])
        if operation < FIRST_COLLECTIVE:
            if operation in (UPDATE, STEP) and silent:
                last_us = max(enqueue_us for enqueue_us, _, _ in silent)
                yield from (_Event(last_us, min(end_us, at_us), key, True, step, 0, -np.inf) for _, end_us, key in silent)
                silent = []
            yield _Event(at_us, at_us, None, False, step, operation)
            continue
        key = _key(stamps, row, names.get((place, int(row["group"]))))
        yield _Event(at_us, at_us, key, False, step, 0)
        if not np.isnan(row["resumed_us"]):
            wait_us = at_us + float(row["waiting_us"])
            yield _Event(wait_us, at_us + float(row["resumed_us"]), key, True, step, 0, wait_us)
        elif not np.isnan(row["ended_us"]):
            silent.append((at_us, at_us + float(row["ended_us"]), key))


def _key(stamps: RankStamps, row: np.void, name: str | None) -> Hashable:
    operation = stamps.operations[int(row["operation"])]
    if operation in (SEND, RECEIVE):
        group = stamps.groups.get(int(row["group"]))
        peer = group.ranks[int(row["peer"])] if group is not None and int(row["peer"]) < len(group.ranks) else -1
        ends = (stamps.rank, peer) if operation == SEND else (peer, stamps.rank)
        return "message", group.name if group is not None else "", *ends, int(row["sequence"])
    return "collective", name, int(row["sequence"])


def _transfers(events: Sequence[Sequence[_Event]]) -> dict[Hashable, float]:
    """Time from the last enqueue of each collective to the first end of a wait for it: a wait for several may end later."""
    enqueued: dict[Hashable, float] = {}
    for rank in events:
        for event in rank:
            if event.key is not None and not event.waits:
                enqueued[event.key] = max(enqueued.get(event.key, 0.0), event.at_us)
    transfers: dict[Hashable, float] = {}
    for rank in events:
        for event in rank:
            if event.waits and event.key in enqueued:
                transfer_us = max(event.until_us - max(enqueued[event.key], event.transfer_from_us), 0.0)
                transfers[event.key] = min(transfers.get(event.key, transfer_us), transfer_us)
    return transfers


def _ends(
    events: Sequence[Sequence[_Event]], transfers: dict[Hashable, float], less: Sequence[dict[int, float]] | None, is_input: bool
) -> list[float] | None:
    """End of each rank's last event; None if ranks wait for each other in a circle, which incomplete stamps cause."""
    members: dict[Hashable, int] = {}
    for rank in events:
        for event in rank:
            if event.key is not None and not event.waits:
                members[event.key] = members.get(event.key, 0) + 1
    own_us = [_own_us(rank, None if less is None else less[place], is_input) for place, rank in enumerate(events)]
    at = [0] * len(events)
    now = [rank[0].at_us if rank else 0.0 for rank in events]
    enqueued: dict[Hashable, list[float]] = {}
    moved = True
    while moved:
        moved = False
        for place, rank in enumerate(events):
            while at[place] < len(rank):
                event = rank[at[place]]
                if event.waits and len(enqueued.get(event.key, ())) < members.get(event.key, 0):
                    break
                now[place] += own_us[place][at[place]]
                if event.waits and event.key in enqueued:
                    now[place] = max(now[place], max(enqueued[event.key]) + transfers.get(event.key, 0.0))
                elif event.key is not None and not event.waits:
                    enqueued.setdefault(event.key, []).append(now[place])
                at[place] += 1
                moved = True
    return now if all(place == len(rank) for place, rank in zip(at, events, strict=True)) else None


def _own_us(events: Sequence[_Event], less: dict[int, float] | None, is_input: bool) -> list[float]:
    """Own time before each event of a rank, less what is removed in its step."""
    between_us, free_us, forward_seen = [], events[0].at_us if events else 0.0, set()
    marked = {event.step for event in events if event.mark == FORWARD}
    before_forward = []
    for event in events:
        between_us.append(max(event.at_us - free_us, 0.0))
        free_us = max(free_us, event.until_us)
        if event.mark == FORWARD:
            forward_seen.add(event.step)
        before_forward.append(event.step in marked and (event.step not in forward_seen or event.mark == FORWARD))
    if less is None:
        return between_us
    for step, us in less.items():
        places = [place for place, event in enumerate(events) if event.step == step and before_forward[place] == is_input]
        total = sum(between_us[place] for place in places)
        for place in places:
            between_us[place] *= max(1 - us / total, 0.0) if total > 0 else 1.0
    return between_us
