"""From what coincided in single steps to waits that hold in all: a wait is believed if nearly all occurrences speak for it.

An event waits for the same op in every step: the one that has the same place in its step. Chance makes another op end at the right
moment in each step; a wait, always the same one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from dpro_search.collect.readers.kineto_device import DeviceOps, Pairs, places_in_step
from dpro_search.collect.readers.kineto_rank import RankRecords
from dpro_search.collect.trace import EventKind

_SHARE = 0.5  # of the occurrences that need an explanation, for which one of an event's waits must be one
_ENDED_US = 1.0  # by which an op may end after the start of what waited for it

_Wait = tuple[int, int, int]  # places of what was waited for and of what waited, and how many steps lie between


class Evidence:
    """Which events of a rank are the same in different steps, and when each could begin to wait."""

    def __init__(self, r: RankRecords, device: DeviceOps) -> None:
        self._r = r
        self._launch_us = device.launch_us
        self._number = {int(number): i for i, number in enumerate(r.step_number.tolist())}
        events = np.flatnonzero((r.on_device | (r.kind == EventKind.SYNC)) & np.isin(r.step, r.step_number))
        places = places_in_step(r, events).tolist()
        self._place = dict(zip(events.tolist(), places, strict=True))
        steps = [self._number[step] for step in r.step[events].tolist()]
        self._event = dict(zip(zip(places, steps, strict=True), events.tolist(), strict=True))

    def sites(self, events: Iterable[int]) -> list[list[int]]:
        """Events of the recorded steps, those together that are the same in different steps."""
        found: dict[int, list[int]] = defaultdict(list)
        for event in events:
            if event in self._place:
                found[self._place[event]].append(event)
        return list(found.values())

    def waits(self, candidates: Mapping[int, Sequence[int]]) -> Pairs:
        """Waits of some events, given the ops that each may have waited for, the likeliest first; none where it is unknown.

        Of the occurrences of an event, at least half must have the same candidate, and no step may contradict; then it holds in
        all steps. What an accepted wait does not explain may have a second one.
        """
        found: set[tuple[int, int]] = set()
        for site in self.sites(candidates):
            of_event = {event: self._waits_of(event, candidates[event]) for event in site}
            votes = Counter(wait for waits in of_event.values() for wait in waits)
            places = Counter[_Wait]()
            for waits in of_event.values():
                places.update({wait: rank for rank, wait in enumerate(waits)})
            left = {event for event, waits in of_event.items() if waits}
            for wait in sorted(votes, key=lambda wait: (-votes[wait], places[wait] / votes[wait], wait)):
                explained = {event for event in left if wait in of_event[event]}
                if explained and votes[wait] >= _SHARE * len(site) and (pairs := self._in_all_steps(wait)):
                    found.update(pairs)
                    left -= explained
        return sorted(found)

    def _waits_of(self, event: int, sources: Sequence[int]) -> list[_Wait]:
        place, number, step = self._place, self._number, self._r.step
        return [
            (place[source], place[event], number[int(step[event])] - number[int(step[source])])
            for source in sources
            if source in place
        ]

    def _in_all_steps(self, wait: _Wait) -> Pairs:
        """The wait in each step that has both its ops; none if one step contradicts."""
        r = self._r
        source_place, target_place, apart = wait
        pairs = []
        for number in range(len(r.step_number)):
            source = self._event.get((source_place, number - apart), -1)
            target = self._event.get((target_place, number), -1)
            if min(source, target) < 0 or self._launch_us[source] > self._launch_us[target]:
                continue
            resumed_us = r.start_us[target] if r.on_device[target] else r.end_us[target]
            if r.end_us[source] > resumed_us + _ENDED_US:
                return []
            pairs.append((source, target))
        return pairs
