"""The device ops of a rank by stream and by launch, and which events are the same in different steps: for wait inference."""

from __future__ import annotations

import re

import numpy as np

from dpro_search.collect.readers.kineto.rank import RankRecords
from dpro_search.collect.trace import EventKind, Ints

Pairs = list[tuple[int, int]]  # (what was waited for, what waited), events of a rank

LAUNCH_US = 12.0  # by which an idle device has usually begun what was launched
UNEXPLAINED_US = 3.0  # a start so much later than launch and stream allow has another cause


class DeviceOps:
    """Device ops by stream, in the order in which they ran.

    Attributes
    ----------
    streams
        Ops of each stream.
    launch_us
        When each event was launched; its start where that is unknown, [events].
    launches
        Of each stream, when its ops had been launched, in ascending order.
    by_end, ends_us
        All ops by their ends, and these.
    launches_us
        All launches in order; -inf for ops that were launched before the profiler's window.
    explained_us
        By when launch and stream alone had let each op start, [events]; inf for others.
    """

    def __init__(self, r: RankRecords) -> None:
        self.r = r
        ops = np.flatnonzero(r.on_device)
        self.launch_us = np.where(r.launch >= 0, r.start_us[np.maximum(r.launch, 0)], r.start_us)
        self.streams = {int(stream): ops[r.stream[ops] == stream] for stream in np.unique(r.stream[ops])}
        self.launches = {stream: np.maximum.accumulate(self.launch_us[mine]) for stream, mine in self.streams.items()}
        self.by_end = ops[np.argsort(r.end_us[ops], kind="stable")]
        self.ends_us = r.end_us[self.by_end]
        self._queued_us = self.launch_us.copy()  # When each event had been launched, at the latest.
        for mine in self.streams.values():
            self._queued_us[_launched_before(r, mine)] = -np.inf
        self.launches_us = np.sort(self._queued_us[ops])
        self.explained_us = np.full(len(r), np.inf)
        for mine in self.streams.values():
            free_us = np.concatenate(([-np.inf], np.maximum.accumulate(r.end_us[mine])[:-1]))
            self.explained_us[mine] = np.maximum(self.launch_us[mine] + LAUNCH_US, free_us + UNEXPLAINED_US)

    def last_launched(self, stream: int, before_us: float) -> int:
        """The op on a stream that was launched last before a time; -1: none."""
        at = int(np.searchsorted(self.launches[stream], before_us)) - 1
        return int(self.streams[stream][at]) if at >= 0 else -1

    def first_launched(self, stream: int, after_us: float) -> int:
        """The op on a stream that was launched first after a time; -1: none."""
        at = int(np.searchsorted(self.launches[stream], after_us))
        return int(self.streams[stream][at]) if at < len(self.streams[stream]) else -1

    def ended_between(self, since_us: float, until_us: float) -> Ints:
        """The ops that ended in an interval, the last first."""
        first, after = np.searchsorted(self.ends_us, since_us), np.searchsorted(self.ends_us, until_us, side="right")
        return self.by_end[first:after][::-1]

    def last_ended(self, since_us: float, until_us: float, launched_before_us: float) -> int:
        """The op that ended last in an interval, of those that had been launched; -1: none."""
        ended = self.ended_between(since_us, until_us)
        return next((op for op in ended.tolist() if self._queued_us[op] <= launched_before_us), -1)

    def last_of_thread(self, call: int) -> int:
        """The op that a call's thread launched last before it; -1: none."""
        r = self.r
        found = [self.last_launched(stream, float(r.start_us[call])) for stream in self.streams]
        mine = [op for op in found if op >= 0 and r.launch[op] >= 0 and r.stream[r.launch[op]] == r.stream[call]]
        return max(mine, key=lambda op: self.launch_us[op], default=-1)


def _launched_before(r: RankRecords, stream: Ints) -> Ints:
    """Ops of a stream that were queued when the recording began: without a launch in it, before the first that has one."""
    launched = r.launch[stream] >= 0
    return stream[: int(np.argmax(launched))] if launched.any() else stream[:0]


def calls_named(r: RankRecords, *patterns: re.Pattern[str]) -> Ints:
    """Calls of the runtime whose names match a pattern (`calls`)."""
    named = np.array([any(pattern.search(name) for pattern in patterns) for name in r.names] or [False])
    return np.flatnonzero(named[r.name] & np.isin(r.kind, (EventKind.RUNTIME, EventKind.SYNC)))


def places_in_step(r: RankRecords, events: Ints) -> Ints:
    """A number for each of some events, equal in different steps for the k-th of a name on a stream."""
    _, stream = np.unique(r.stream[events], return_inverse=True)
    kind = stream.reshape(-1) * len(r.names) + r.name[events]  # of one name on one stream
    order = np.lexsort((events, kind, r.step[events]))
    same = (np.diff(kind[order]) == 0) & (np.diff(r.step[events][order]) == 0)
    first = np.maximum.accumulate(np.where(np.append(False, same)[: len(events)], 0, np.arange(len(events))))  # of the same
    occurrence = np.empty(len(events), np.int64)
    occurrence[order] = np.arange(len(events)) - first
    _, place = np.unique(kind * (len(events) + 1) + occurrence, return_inverse=True)
    number: Ints = place.reshape(-1)
    return number
