"""Which bursts of work a host thread was handed by another: the autograd thread works while the main thread pauses."""

from __future__ import annotations

import numpy as np

from dpro_search.collect.readers.kineto.device_ops import Pairs
from dpro_search.collect.readers.kineto.rank import RankRecords
from dpro_search.collect.trace import EventKind, Floats, Ints

_SHARE_OF_PAUSE = 0.5


def handed_over(r: RankRecords) -> Pairs:
    """Bursts of threads that launch work, inside pauses of the main thread."""
    host = np.flatnonzero(~r.on_device & ~r.annotation)
    main = host[r.stream[host] == r.main_stream]
    if len(main) < 2:
        return []
    moments = np.sort(np.concatenate((r.start_us[main], r.end_us[main])))
    starts_in_order = main  # events are sorted by start
    by_end = main[np.argsort(r.end_us[main], kind="stable")]
    launchers = set(np.unique(r.stream[r.launch[r.launch >= 0]]).tolist()) | set(
        np.unique(r.stream[r.kind == EventKind.SYNC]).tolist()
    )
    pairs = []
    for stream in sorted(launchers - {r.main_stream}, reverse=True):
        mine = host[r.stream[host] == stream]
        outer, until_us = _outermost(r, mine)
        pause = np.searchsorted(moments, r.start_us[outer], side="right")
        whole = pause == np.searchsorted(moments, until_us, side="left")
        for number in np.unique(pause[whole]).tolist():
            if not 0 < number < len(moments):
                continue
            burst = np.flatnonzero(whole & (pause == number))
            begin_us, end_us = float(r.start_us[outer[burst[0]]]), float(until_us[burst[-1]])
            from_us, to_us = float(moments[number - 1]), float(moments[number])
            if end_us - begin_us < _SHARE_OF_PAUSE * (to_us - from_us):
                continue
            before = int(by_end[np.searchsorted(r.end_us[by_end], from_us, side="right") - 1])
            after_at = int(np.searchsorted(r.start_us[starts_in_order], to_us, side="left"))
            inside = mine[(r.start_us[mine] >= begin_us) & (r.end_us[mine] <= end_us)]
            last = int(inside[np.argmax(r.end_us[inside])])
            if r.end_us[before] <= begin_us:
                pairs.append((before, int(outer[burst[0]])))
            if after_at < len(main) and r.start_us[main[after_at]] == to_us:
                pairs.append((last, int(main[after_at])))
    return pairs


def _outermost(r: RankRecords, events: Ints) -> tuple[Ints, Floats]:
    """Events of a thread that no other contains, and their ends."""
    if not len(events):
        return events, np.zeros(0)
    reach = np.maximum.accumulate(r.end_us[events])
    outer = np.ones(len(events), np.bool_)
    outer[1:] = r.start_us[events[1:]] >= reach[:-1]
    first = np.flatnonzero(outer)
    last = np.append(first[1:], len(events)) - 1
    return events[first], reach[last]
