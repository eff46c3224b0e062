"""Waits of device ops for other streams, and the evidence on which a wait is believed.

Profiles that were recorded with synchronisation events record what a stream was made to wait for. All others only record that it
was made to wait; there it is inferred from the times. A device op that began just when an op on another stream ended, later than
its launch and its stream explain, may have waited for it, if a stream was made to wait between the two launches, and if an event
was recorded while that op was the last on its stream. It is believed if the occurrences in all steps agree. A collective also
needs what its thread launched before it on the stream of its inputs.

No call shows the order between the streams of a CUDA graph, or between any streams if the profiler left such calls out. An op that
begins late in every step, at once after the same op of another stream has ended, is inferred to wait for it (`INFERRED`).

`DeviceOps` holds the device ops of a rank by stream and by launch, `Evidence` the events that are the same in different steps.

An event waits for the same op in every step: the one that has the same place in its step. Chance makes another op end at the right
moment in each step; a wait, always the same one.

If calls show that a stream was made to wait, only for what is unknown, and half of the occurrences are enough (`waits`). If no call
shows a wait, the times alone must rule chance out (`repeated`): the event follows the end of the same op by the same time in nearly
every step, which would be very unlikely if it had not waited.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

from dpro_search.collect.readers.kineto.rank import CLOCK_SLACK_US, RankRecords
from dpro_search.collect.recorded_names import EVENT_RECORDS, STREAM_ORDERS
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
        events_of_place: dict[int, list[int]] = defaultdict(list)
        for event in events:
            if event in self._place:
                events_of_place[self._place[event]].append(event)
        return list(events_of_place.values())

    def waits(self, candidates: Mapping[int, Sequence[int]]) -> Pairs:
        """Waits of some events, given the ops that each may have waited for, the likeliest first; none where it is unknown.

        Of the occurrences of an event, at least half must have the same candidate, and no step may contradict; then it holds in
        all steps. What an accepted wait does not explain may have a second one.
        """
        accepted: set[tuple[int, int]] = set()
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
                    accepted.update(pairs)
                    left -= explained
        return sorted(accepted)

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
        """Spread in us of the times from the ends to the events; None where chance or the event's own time explains them too."""
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


Pairs = list[tuple[int, int]]  # (what was waited for, what waited), events of a rank

_AT_ONCE_US = 15.0  # from the end of what a stream waited for to the start of what waited
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
        self.launches = {stream: np.maximum.accumulate(self.launch_us[members]) for stream, members in self.streams.items()}
        self.by_end = ops[np.argsort(r.end_us[ops], kind="stable")]
        self.ends_us = r.end_us[self.by_end]
        self._queued_us = self.launch_us.copy()  # When each event had been launched, at the latest.
        for members in self.streams.values():
            self._queued_us[_launched_before(r, members)] = -np.inf
        self.launches_us = np.sort(self._queued_us[ops])
        self.explained_us = np.full(len(r), np.inf)
        for members in self.streams.values():
            free_us = np.concatenate(([-np.inf], np.maximum.accumulate(r.end_us[members])[:-1]))
            self.explained_us[members] = np.maximum(self.launch_us[members] + LAUNCH_US, free_us + UNEXPLAINED_US)

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
        last_ops = [self.last_launched(stream, float(r.start_us[call])) for stream in self.streams]
        launched_by_thread = [op for op in last_ops if op >= 0 and r.launch[op] >= 0 and r.stream[r.launch[op]] == r.stream[call]]
        return max(launched_by_thread, key=lambda op: self.launch_us[op], default=-1)


def _launched_before(r: RankRecords, stream: Ints) -> Ints:
    """Ops of a stream that were queued when the recording began: without a launch in it, before the first that has one."""
    launched = r.launch[stream] >= 0
    return stream[: int(np.argmax(launched))] if launched.any() else stream[:0]


def calls_named(r: RankRecords, *patterns: re.Pattern[str]) -> Ints:
    """Calls of the runtime whose names match a pattern (constants of `recorded_names`)."""
    named = r.named(lambda name: any(pattern.search(name) for pattern in patterns))
    return np.flatnonzero(named & np.isin(r.kind, (EventKind.RUNTIME, EventKind.SYNC)))


def call_of_correlation(r: RankRecords) -> dict[int, int]:
    """The call with each correlation id, of ranks that have records of synchronisations."""
    if not r.syncs:
        return {}
    calls = np.flatnonzero(np.isin(r.kind, (EventKind.RUNTIME, EventKind.SYNC)) & (r.correlation > 0))
    return dict(zip(r.correlation[calls].tolist(), calls.tolist(), strict=True))


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


def stream_waits(r: RankRecords, device: DeviceOps, evidence: Evidence) -> Pairs:
    """Waits of streams for device ops: as recorded, else inferred from the calls that made a stream wait."""
    return _recorded_waits(r, device) or evidence.waits(_candidates(r, device))


def _recorded_waits(r: RankRecords, device: DeviceOps) -> Pairs:
    """Waits of streams that CUPTI recorded."""
    pairs = []
    call_of = call_of_correlation(r)
    for kind, stream, correlation, wait_stream, wait_record in r.syncs:
        if "wait" not in kind.lower():
            continue
        call, record = call_of.get(correlation, -1), call_of.get(wait_record, -1)
        if min(call, record) < 0 or stream not in device.streams or wait_stream not in device.streams:
            r.dropped["stream waits whose event is unknown"] += 1
            continue
        source = device.last_launched(wait_stream, float(r.start_us[record]))
        target = device.first_launched(stream, float(r.start_us[call]))
        if min(source, target) >= 0 and r.end_us[source] <= r.start_us[target] + CLOCK_SLACK_US and source != target:
            pairs.append((source, target))
    return pairs


def _candidates(r: RankRecords, device: DeviceOps) -> dict[int, list[int]]:
    """Sources of each op that began later than launch and stream explain: ops that it may have waited for, the latest end first."""
    waits_us = r.start_us[calls_named(r, STREAM_ORDERS)]
    if not len(waits_us) or len(device.streams) < 2:
        return {}
    records_us = r.start_us[calls_named(r, EVENT_RECORDS)]
    sources_of_op = {}
    for stream, ops in device.streams.items():
        before_us = np.concatenate(([-np.inf], device.launches[stream][:-1]))
        first = np.searchsorted(waits_us, before_us, side="right")
        after = np.searchsorted(waits_us, device.launch_us[ops], side="right")
        for i in np.flatnonzero(after > first).tolist():
            op, wait_us = int(ops[i]), float(waits_us[after[i] - 1])
            sources = []
            late = bool(r.start_us[op] > device.explained_us[op])
            if late:
                sources = [
                    source
                    for source in _ended_just_before(r, device, op)
                    if device.launch_us[source] <= wait_us and _has_event(r, device, source, wait_us, records_us)
                ]
            if not sources and r.kind[op] == EventKind.COLLECTIVE:
                sources = _input_of(r, device, op, wait_us)
            if late or sources:
                sources_of_op[op] = sources
    return sources_of_op


def inferred_waits(r: RankRecords, device: DeviceOps, evidence: Evidence, known: Pairs) -> Pairs:
    """Waits that no call shows: of ops that begin late wherever they occur, right after the same op of another stream."""
    free_us = device.explained_us.copy()
    for source, target in known:
        free_us[target] = max(free_us[target], float(r.end_us[source]) + _AT_ONCE_US)
    launched = np.flatnonzero(r.launch >= 0)
    launched = launched[np.lexsort((r.end_us[launched], r.launch[launched]))]
    launch = r.launch[launched]
    candidates = {}
    for ops in device.streams.values() if len(device.streams) > 1 else ():
        for op in ops[r.start_us[ops] > free_us[ops]].tolist():
            candidates[op] = _ended_just_before(r, device, op)
            if not candidates[op] and r.kind[op] == EventKind.COLLECTIVE and r.launch[op] >= 0:
                candidates[op] = _made_before(r, launched, launch, op)
                free_us[op] = max([free_us[op], *(r.end_us[source] for source in candidates[op])])
    return evidence.repeated(candidates, free_us)


def _ended_just_before(r: RankRecords, device: DeviceOps, op: int) -> list[int]:
    """Ops on other streams with whose end an op's start coincides, launched before it; the last to end first."""
    start_us, launch_us = float(r.start_us[op]), device.launch_us
    ended = device.ended_between(start_us - _AT_ONCE_US, start_us + 1.0).tolist()
    return [source for source in ended if r.stream[source] != r.stream[op] and launch_us[source] <= launch_us[op]]


def _made_before(r: RankRecords, launched: Ints, launch: Ints, op: int) -> list[int]:
    """The op whose result a collective of a CUDA graph may send: the last to end before it, of those launched together with it.

    `launched` are the device ops in the order of their launches, and in that of their ends; `launch` is the launch of each.
    """
    first, after = (int(np.searchsorted(launch, r.launch[op], side=side)) for side in ("left", "right"))
    before = first + int(np.searchsorted(r.end_us[launched[first:after]], r.start_us[op], side="right"))
    together = map(int, launched[first:before][::-1])
    other = (source for source in together if r.kind[source] != EventKind.COLLECTIVE and r.stream[source] != r.stream[op])
    return list(islice(other, 1))


def _has_event(r: RankRecords, device: DeviceOps, op: int, wait_us: float, records_us: Floats) -> bool:
    """Whether an event can stand for the end of an op: recorded after its launch, before its stream's next and before the wait.

    Some versions of the profiler leave these calls out; then any op can have one.
    """
    if not len(records_us):
        return True
    after = device.first_launched(int(r.stream[op]), float(np.nextafter(device.launch_us[op], np.inf)))
    until_us = min(wait_us, float(device.launch_us[after]) if after >= 0 else np.inf)
    return bool(np.searchsorted(records_us, until_us, side="right") > np.searchsorted(records_us, device.launch_us[op]))


def _input_of(r: RankRecords, device: DeviceOps, op: int, wait_us: float) -> list[int]:
    """The last op that a collective's thread launched before it on a stream that computes; none if it ended later."""
    launch = r.launch[op]
    last_ops = [device.last_launched(stream, wait_us) for stream in device.streams if stream != r.stream[op]] if launch >= 0 else []
    inputs = [
        source
        for source in last_ops
        if source >= 0
        and r.launch[source] >= 0
        and r.stream[r.launch[source]] == r.stream[launch]
        and r.kind[source] != EventKind.COLLECTIVE
    ]
    best = max(inputs, key=lambda source: device.launch_us[source], default=-1)
    return [best] if best >= 0 and r.end_us[best] <= r.start_us[op] + CLOCK_SLACK_US else []
