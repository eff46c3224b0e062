"""From what coincided in single steps to waits that hold in all: a wait is believed if nearly all occurrences speak for it.

An event waits for the same op in every step: the one that has the same place in its step. Chance makes another op end at the right
moment in each step; a wait, always the same one.

If calls show that a stream was made to wait, only for what is unknown, and half of the occurrences are enough (`waits`). If no call
shows a wait, the times alone must rule chance out (`repeated`): the event follows the end of the same op by the same time in nearly
every step, which would be very unlikely if it had not waited.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from dpro_search.collect.readers.kineto.device_ops import Pairs, places_in_step
from dpro_search.collect.readers.kineto.rank import RankRecords
from dpro_search.collect.trace import EventKind, Floats, Ints

_SHARE = 0.5  # of the occurrences that need an explanation, for which one of an event's waits must be one
_ENDED_US = 1.0  # by which an op may end after the start of what waited for it
_RESOLUTION_US = 1.0  # of time stamps: equal ones may be so far apart
# Evidence that a wait needs if no call shows it: at least three occurrences, in three of four cases, and a coincidence that chance
# makes once in ten thousand profiles. The numbers are a convention of statistics, not measured.
_LEAST_REPEATED = 3
_REPEATED_SHARE = 0.75
_MOST_CHANCE = 1e-4
# Part of its length by which a host's own work varies at least: less than half of the least, 0.5 %, of 125 silences in 5 real
# profiles, of which 95 % vary by 2 % or more.
_CONSTANT = 0.002

_Wait = tuple[int, int, int]  # places of what was waited for and of what waited, and how many steps lie between


class Evidence:
    """Which events of a rank are the same in different steps, and when each could begin to wait."""

    def __init__(self, r: RankRecords, launch_us: Floats, last_places: Ints | None = None) -> None:
        """`launch_us` is when each event was launched or began; `last_places` are the places of the last events, if known."""
        self._r = r
        self._on_device = r.on_device
        self._launch_us = launch_us
        self._number = {int(number): i for i, number in enumerate(r.step_number.tolist())}
        events = np.flatnonzero((self._on_device | (r.kind == EventKind.SYNC)) & np.isin(r.step, r.step_number))
        places = places_in_step(r, events).tolist()
        if last_places is not None:
            places[len(places) - len(last_places) :] = (len(events) + last_places).tolist()
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

    def repeated(self, candidates: Mapping[int, Sequence[int]], free_us: Floats, *, varies: float = 0.5) -> Pairs:
        """Waits that no call shows: events that follow the end of an op by nearly the same time wherever they occur.

        The same pair of names on the same streams, as of the layers of a model, is one piece of evidence.

        Parameters
        ----------
        candidates
            The ops that each event that needs an explanation may have waited for, the likeliest first.
        free_us
            When each event could have begun or, of a call, began to wait, [events].
        varies
            The time since `free_us`, which may be the event's own, must vary by so many times what the time since the end of the
            op varies by.
        """
        waits = [wait for site in self.sites(candidates) for wait in self._frequent(site, candidates)]
        alike: dict[tuple[int, ...], list[_Wait]] = defaultdict(list)
        for wait in waits:
            alike[self._label(wait)].append(wait)
        believed = sorted(
            (spread_us, order, wait)
            for order, group in enumerate(alike.values())
            for spread_us in [self._spread_beyond_chance(group, candidates, free_us, varies)]
            if spread_us is not None
            for wait in group
        )
        pairs: set[tuple[int, int]] = set()
        explained: set[int] = set()  # places of events
        for _, _, wait in believed:
            if wait[1] not in explained and (in_steps := self._in_all_steps(wait)):
                pairs.update(in_steps)
                explained.add(wait[1])
        return sorted(pairs)

    def _frequent(self, site: Sequence[int], candidates: Mapping[int, Sequence[int]]) -> list[_Wait]:
        """The waits that nearly all occurrences of an event in the recorded steps speak for, whether or not these were delayed."""
        votes = Counter(wait for event in site for wait in self._waits_of(event, candidates[event]))
        place = self._place[site[0]]
        occurrences = sum((place, number) in self._event for number in range(len(self._r.step_number)))
        return [wait for wait, count in votes.items() if count >= _REPEATED_SHARE * occurrences]

    def _label(self, wait: _Wait) -> tuple[int, ...]:
        """Names and streams of what was waited for and of what waited."""
        columns = self._r.name, self._r.stream
        source, target = next(self._occurrences(wait))
        return tuple(int(column[event]) for event in (source, target) for column in columns)

    def _spread_beyond_chance(
        self, group: Sequence[_Wait], candidates: Mapping[int, Sequence[int]], free_us: Floats, varies: float
    ) -> float | None:
        """By how much the times from the ends to the events differ; None where chance or the event's own time explains them too."""
        occurrences = (pair for wait in group for pair in self._occurrences(wait))
        votes = np.array([(s, t) for s, t in occurrences if s in candidates.get(t, ())], np.int64).reshape(-1, 2)
        if len(votes) < _LEAST_REPEATED:
            return None
        sources, targets = votes.T
        moments_us = np.array([self._resumed_us(target) for target in targets.tolist()])
        late_us = moments_us - free_us[targets]
        spread_us = float(np.ptp(moments_us - self._r.end_us[sources]))
        constant_us = max(_RESOLUTION_US, _CONSTANT * float(np.median(late_us)))
        explained_better = spread_us > constant_us and np.ptp(late_us) < varies * spread_us
        within_us = max(spread_us, _RESOLUTION_US)
        # The first occurrence tells by how much the event follows; that each of the others does so too may be chance.
        log_chance = np.log(within_us / (within_us + np.maximum(late_us, 0.0))).mean() * (len(votes) - 1)
        return None if explained_better or log_chance > np.log(_MOST_CHANCE) else spread_us

    def _occurrences(self, wait: _Wait) -> Iterator[tuple[int, int]]:
        """Pairs of the op that was waited for and the op that waited, in each step that has both."""
        source_place, target_place, apart = wait
        for number in range(len(self._r.step_number)):
            source = self._event.get((source_place, number - apart), -1)
            target = self._event.get((target_place, number), -1)
            if min(source, target) >= 0 and self._launch_us[source] <= self._launch_us[target]:
                yield source, target

    def _resumed_us(self, event: int) -> float:
        """When an event no longer waited: an op of the device began, a call of the host returned."""
        r = self._r
        return float(r.start_us[event] if self._on_device[event] else r.end_us[event])

    def _waits_of(self, event: int, sources: Sequence[int]) -> list[_Wait]:
        place, number, step = self._place, self._number, self._r.step
        return [
            (place[source], place[event], number[int(step[event])] - number[int(step[source])])
            for source in sources
            if source in place
        ]

    def _in_all_steps(self, wait: _Wait) -> Pairs:
        """The wait in each step that has both its ops; none if one step contradicts."""
        pairs = list(self._occurrences(wait))
        ended_us = self._r.end_us
        return [] if any(ended_us[source] > self._resumed_us(target) + _ENDED_US for source, target in pairs) else pairs
