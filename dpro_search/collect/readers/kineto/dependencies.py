"""Dependencies within one rank: launches, streams that wait for streams (`device_waits`), host threads that wait or hand over work.

What a call of the host waited for is recorded, or is inferred from when the call returned.

A call that waits for a stream names it nowhere. It did not wait for a stream that was still busy, with work launched before, when
it returned; and it returned soon after what it waited for. Of the streams that this leaves, taken over all occurrences of the
call, it is the stream of a copy that the thread launched just before; else that which explains the returns best; where they are
equal, that which explains the thread's other calls best, and then that of the thread's last launch.

A host may also wait in no call that is known to wait: it polls memory or events, or calls a runtime by another name. Such a
wait is a silence: a thread that launches work does nothing that was recorded, or only asks again and again, until it goes on a
constant time after the end of a device op. The op is the last one launched on its stream before the silence: a host waits until
its stream is empty. What the thread does in a silence may also be work of its own, such as Python that calls no op. A silence
is believed to be a wait only if it repeats in nearly every step (`Evidence.repeated`), and if the time from the end of the op
to that of the silence varies less than the length of the silence, or less than the host's own work ever does.

A host thread is handed a burst of work by another: the autograd thread works while the main thread pauses.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpro_search.collect.readers._nesting import is_outermost
from dpro_search.collect.readers.kineto.columns import Bools
from dpro_search.collect.readers.kineto.device_waits import (
    DeviceOps,
    Evidence,
    Pairs,
    call_of_correlation,
    calls_named,
    inferred_waits,
    places_in_step,
    stream_waits,
)
from dpro_search.collect.readers.kineto.rank import CLOCK_SLACK_US, EVENT_COLUMNS, MAIN_THREAD, RankRecords
from dpro_search.collect.recorded_names import DEVICE_WAITS, EVENT_WAITS, MEMORY_WAITS, QUERIES, STREAM_WAITS
from dpro_search.collect.trace import Dependencies, DependencyKind, EventKind, Floats, Ints, Role

_RETURN_US = 40.0  # by which a call returns after what it waited for
_EQUAL_US = 1.0  # returns that differ less are explained equally well
_MOST_CONTRADICTED = 0.05  # of a call's occurrences
_FULL_QUEUE = 1000  # CUDA holds 1,024 launches
_BLOCKED_US = 20.0
_SHARE_OF_PAUSE = 0.5  # of a pause of the main thread, that a burst of another must last to be what it paused for


def find_dependencies(r: RankRecords) -> Dependencies:
    """Dependencies between the events of a rank, each found once; polls that were inferred are added to its events."""
    ops = np.flatnonzero(r.on_device)
    launched = ops[r.launch[ops] >= 0]
    device = DeviceOps(r)
    evidence = Evidence(r, device.launch_us)
    waits = stream_waits(r, device, evidence)
    synchronised = [*_syncs(r, device, evidence), *r.host_waits]
    handed = _handed_over(r)
    inferred = [*inferred_waits(r, device, evidence, waits), *_add_polls(r, device)]
    pairs_of_kind: dict[DependencyKind, Pairs] = {
        DependencyKind.LAUNCH: list(zip(r.launch[launched].tolist(), launched.tolist(), strict=True)),
        DependencyKind.EVENT: waits,
        DependencyKind.INFERRED: inferred,
        DependencyKind.SYNC: synchronised,
        DependencyKind.HOST: handed,
    }
    kinds = np.repeat(np.array(list(pairs_of_kind), np.int64), [len(pairs) for pairs in pairs_of_kind.values()])
    pairs = np.concatenate([np.array(pairs, np.int64).reshape(-1, 2) for pairs in pairs_of_kind.values()])
    _, first = np.unique(np.column_stack((pairs, kinds)), axis=0, return_index=True)
    first.sort()
    return Dependencies(source=pairs[first, 0], target=pairs[first, 1], kind=kinds[first])


def _syncs(r: RankRecords, device: DeviceOps, evidence: Evidence) -> Pairs:
    """Device ops and the calls that waited for them, each pair perhaps more than once."""
    return (
        _recorded(r, device)
        + _of_whole_devices(r, device)
        + _of_streams(r, device, evidence)
        + _of_others(r, device, evidence)
        + _own_copies(r)
        + _full_queues(r, device)
    )


def _recorded(r: RankRecords, device: DeviceOps) -> Pairs:
    """Waits of calls that CUPTI recorded."""
    pairs = []
    call_of = call_of_correlation(r)
    for kind, stream, correlation, wait_stream, wait_record in r.syncs:
        call = call_of.get(correlation, -1)
        if "wait" in kind.lower() or call < 0:
            continue
        start_us = float(r.start_us[call])
        if "event" in kind.lower():
            record = call_of.get(wait_record, -1)
            streams, before_us = [wait_stream], float(r.start_us[record]) if record >= 0 else -np.inf
        elif "stream" in kind.lower():
            streams, before_us = [stream], start_us
        else:
            streams, before_us = list(device.streams), start_us
        sources = [device.last_launched(s, before_us) for s in streams if s in device.streams]
        pairs += [(s, call) for s in sources if s >= 0 and r.end_us[s] <= r.end_us[call] + CLOCK_SLACK_US]
    return pairs


def _unrecorded(r: RankRecords, *patterns: re.Pattern[str]) -> list[int]:
    """Calls in which the host waits, by their names, of which the profile does not record for what."""
    recorded = {correlation for _, _, correlation, _, _ in r.syncs}
    calls = calls_named(r, *patterns)
    calls = calls[r.kind[calls] == EventKind.SYNC]
    return [call for call in calls.tolist() if int(r.correlation[call]) not in recorded]


def _of_whole_devices(r: RankRecords, device: DeviceOps) -> Pairs:
    pairs = []
    for call in _unrecorded(r, DEVICE_WAITS):
        sources = [device.last_launched(stream, float(r.start_us[call])) for stream in device.streams]
        pairs += [(s, call) for s in sources if s >= 0 and r.end_us[s] <= r.end_us[call] + CLOCK_SLACK_US]
    return pairs


def _of_streams(r: RankRecords, device: DeviceOps, evidence: Evidence) -> Pairs:
    sites: dict[int, list[list[int]]] = defaultdict(list)  # by thread
    for site in evidence.sites(_unrecorded(r, STREAM_WAITS)):
        sites[int(r.stream[site[0]])].append(site)
    streams = list(device.streams)
    pairs = []
    for of_thread in sites.values() if streams else ():
        late_us = [np.array([_late_us(r, device, call, streams) for call in site]) for site in of_thread]
        cost_us = np.array([_cost_us(late) for late in late_us])
        pool_us = np.minimum(cost_us, _RETURN_US).mean(axis=0)
        for site, late, cost in zip(of_thread, late_us, cost_us, strict=True):
            chosen = streams.index(_stream_of(r, device, site[0], streams, cost, pool_us))
            for call, late_by_us in zip(site, late[:, chosen].tolist(), strict=True):
                source = device.last_launched(streams[chosen], float(r.start_us[call]))
                if source >= 0 and late_by_us >= -CLOCK_SLACK_US:
                    pairs.append((source, call))
    return pairs


def _late_us(r: RankRecords, device: DeviceOps, call: int, streams: list[int]) -> list[float]:
    """How long after the end of each stream's work a call returned (of work that had ended before: after its own start)."""
    start_us, end_us = float(r.start_us[call]), float(r.end_us[call])
    last = [device.last_launched(stream, start_us) for stream in streams]
    return [end_us - (max(start_us, float(r.end_us[op])) if op >= 0 else start_us) for op in last]


def _cost_us(late_us: Floats) -> Floats:
    """Mean time of a call's occurrences that waiting for each stream leaves unexplained; inf where they contradict, [streams].

    A return within the clocks' error before the end is possible, but as unlikely as a late one.
    """
    contradicted = (late_us < -CLOCK_SLACK_US).mean(axis=0) > _MOST_CONTRADICTED
    return np.where(contradicted, np.inf, np.where(late_us < 0, _RETURN_US, late_us).mean(axis=0))


def _stream_of(r: RankRecords, device: DeviceOps, call: int, streams: list[int], cost_us: Floats, pool_us: Floats) -> int:
    last = device.last_of_thread(call)
    launched_on = int(r.stream[last]) if last >= 0 else -1
    if last >= 0 and r.kind[last] == EventKind.COPY and cost_us[streams.index(launched_on)] <= _RETURN_US:
        return launched_on
    equal = [s for s, us in zip(streams, cost_us.tolist(), strict=True) if us <= cost_us.min() + _EQUAL_US]
    return min(equal, key=lambda s: (pool_us[streams.index(s)].round(), s != launched_on))


def _of_others(r: RankRecords, device: DeviceOps, evidence: Evidence) -> Pairs:
    """Calls that wait for an event, copy or free memory, and the op that ended last while each was blocked."""
    candidates = {}
    for call in _unrecorded(r, EVENT_WAITS, MEMORY_WAITS):
        start_us, end_us = float(r.start_us[call]), float(r.end_us[call])
        if end_us - start_us > _BLOCKED_US:
            source = device.last_ended(start_us, end_us + CLOCK_SLACK_US, start_us)
            candidates[call] = [source] if source >= 0 else []
    return evidence.waits(candidates)


def _own_copies(r: RankRecords) -> Pairs:
    """Copies from or to pageable memory, for which their call waits, as do fills."""
    waited_for = r.named(lambda name: "Pageable" in name or "Memcpy" not in name) & (r.size_bytes != 0)
    copies = np.flatnonzero((r.kind == EventKind.COPY) & (r.launch >= 0) & waited_for)
    call = r.launch[copies]
    inside = (r.end_us[copies] <= r.end_us[call] + 1.0) & (r.end_us[call] - r.start_us[call] > _BLOCKED_US)
    return list(zip(copies[inside].tolist(), call[inside].tolist(), strict=True))


def _full_queues(r: RankRecords, device: DeviceOps) -> Pairs:
    """Launches that were blocked while the queue was full: until an op had ended."""
    launched = np.flatnonzero(r.on_device & (r.launch >= 0))
    calls = np.unique(r.launch[launched])
    calls = calls[r.end_us[calls] - r.start_us[calls] > _BLOCKED_US]
    pending = np.searchsorted(device.launches_us, r.start_us[calls]) - np.searchsorted(device.ends_us, r.start_us[calls])
    pairs = []
    for call in calls[pending >= _FULL_QUEUE].tolist():
        source = device.last_ended(float(r.start_us[call]), float(r.end_us[call]) + CLOCK_SLACK_US, float(r.start_us[call]))
        if source >= 0:
            pairs.append((source, call))
    return pairs


NAME = "poll of the device (inferred)"

_LEAST_US = 200.0  # of a silence: shorter ones are mostly Python between two ops
_LAST_PART = 0.1  # of a silence, in which what was waited for must have ended; a convention
_FEWEST_POLLS = 8  # ops of one name in a row, none of which launches anything, that may be polls; a convention
_VARIES = 2.0  # times as much as the time from the op's end must the length of a silence vary; a convention


@dataclass(frozen=True, kw_only=True)
class _Silences:
    """n silences of host threads: when they begin and end, and the events that start or end at these moments, [n] each."""

    begin_us: Floats
    end_us: Floats
    before: Ints
    after: Ints
    asking: Bools  # Whether the thread asks again and again until the silence ends.

    def __len__(self) -> int:
        return len(self.before)


def _add_polls(r: RankRecords, device: DeviceOps) -> Pairs:
    """Device ops and the polls that waited for them; the polls are added to the records, as calls that wait."""
    silences, first = _silences(r), len(r)
    if silences is None:
        return []
    awaited = {first + i: ops for i in range(len(silences)) if (ops := _awaited(r, device, silences, i))}
    if not awaited:
        return []
    records = _with_silences(r, silences)
    launch_us, free_us = (np.append(column, silences.begin_us) for column in (device.launch_us, np.zeros(first)))
    pairs = Evidence(records, launch_us, _places(r, silences)).repeated(awaited, free_us, varies=_VARIES)
    if not pairs:
        return []
    polls = np.unique([poll for _, poll in pairs])
    _keep(r, records, polls)
    return [(op, first + int(np.searchsorted(polls, poll))) for op, poll in pairs]


def _silences(r: RankRecords) -> _Silences | None:
    """Silences of the threads that launch work, in the recorded steps; None if no thread launches any."""
    threads = np.unique(r.stream[r.launch[r.launch >= 0]])
    silences = [_of_thread(r, thread) for thread in threads.tolist()]
    if not silences:
        return None
    columns: dict[str, Any] = {name: np.concatenate([vars(one)[name] for one in silences]) for name in vars(silences[0])}
    return _Silences(**columns)


def _of_thread(r: RankRecords, thread: int) -> _Silences:
    """Silences of a thread while no thread launches anything, other than in known waits, in launches and in loading of input."""
    host = np.flatnonzero(~r.on_device & (r.stream == thread))
    launches_us = np.sort(r.start_us[np.unique(r.launch[r.launch >= 0])])
    moments_us, events, asking = _moments(r, host[~r.annotation[host]], launches_us)
    begin_us, end_us = moments_us[:-1], moments_us[1:]
    known = host[(r.kind[host] == EventKind.SYNC) | np.isin(host, r.launch) | (r.role[host] == Role.LOADING)]
    reach_us = np.append(-np.inf, np.maximum.accumulate(r.end_us[known]))[
        np.searchsorted(r.start_us[known], begin_us, side="right")
    ]
    launches = np.searchsorted(launches_us, end_us) > np.searchsorted(launches_us, begin_us, side="right")
    silent = (end_us - begin_us > _LEAST_US) & (reach_us < end_us) & ~launches & np.isin(r.step[events[:-1]], r.step_number)
    columns: dict[str, Any] = {
        "begin_us": begin_us,
        "end_us": end_us,
        "before": events[:-1],
        "after": events[1:],
        "asking": asking[1:],
    }
    return _Silences(**{name: column[silent] for name, column in columns.items()})


def _moments(r: RankRecords, host: Ints, launches_us: Floats) -> tuple[Floats, Ints, Bools]:
    """When events of a thread start or end, in order, these events, and whether they poll; of polls in a row only the last end."""
    polls = r.named(QUERIES.search)[host] | _in_rows(r, host, launches_us)
    first = np.flatnonzero(polls & ~np.append(False, polls)[:-1])
    until_us = np.maximum.reduceat(np.where(polls, r.end_us[host], -np.inf), first) if len(first) else np.zeros(0)
    kept = host[~polls]
    times_us = np.concatenate((until_us, r.start_us[kept], r.end_us[kept]))
    events = np.concatenate((host[first], kept, kept))
    order = np.argsort(times_us, kind="stable")
    return times_us[order], events[order], order < len(first)


def _in_rows(r: RankRecords, host: Ints, launches_us: Floats) -> Bools:
    """Whether each event of a thread is one of many ops of one name in a row that launch nothing, or inside of one, [host]."""
    inside = np.zeros(len(host), np.bool_)
    if not len(host):
        return inside
    reach_us = np.maximum.accumulate(r.end_us[host])
    outer = np.flatnonzero(is_outermost(r.start_us[host], r.end_us[host]))
    begin = np.append(0, np.flatnonzero(np.diff(r.name[host[outer]])) + 1)
    end = np.append(begin[1:], len(outer))
    for first, after in zip(begin[end - begin >= _FEWEST_POLLS], end[end - begin >= _FEWEST_POLLS], strict=True):
        rows = slice(outer[first], outer[after] if after < len(outer) else len(host))
        since_us, until_us = r.start_us[host[rows.start]], reach_us[rows.stop - 1]
        inside[rows] = np.searchsorted(launches_us, until_us) == np.searchsorted(launches_us, since_us)
    return inside


def _awaited(r: RankRecords, device: DeviceOps, silences: _Silences, at: int) -> Sequence[int]:
    """Ops that a host may have waited for in a silence, the likeliest first: launched before it, and ended in its last part.

    The candidates are the last op launched on each stream. A host that asks again and again may ask for an event that was recorded
    earlier: then the op that ended last is one, too.
    """
    begin_us, end_us = float(silences.begin_us[at]), float(silences.end_us[at])
    since_us, until_us = end_us - _LAST_PART * (end_us - begin_us), end_us + CLOCK_SLACK_US
    last = [device.last_launched(stream, begin_us) for stream in device.streams]
    if silences.asking[at]:
        last.append(device.last_ended(since_us, until_us, begin_us))
    ended = {op for op in last if op >= 0 and since_us <= r.end_us[op] <= until_us}
    return sorted(ended, key=lambda op: -r.end_us[op])


def _places(r: RankRecords, silences: _Silences) -> Ints:
    """A number for each silence, equal in different steps for those between the same events."""
    host = np.flatnonzero(~r.on_device)
    place = np.full(len(r), -1, np.int64)
    place[host] = places_in_step(r, host)
    _, number = np.unique(np.stack((place[silences.before], place[silences.after])), axis=1, return_inverse=True)
    return number.reshape(-1)


def _with_silences(r: RankRecords, silences: _Silences) -> RankRecords:
    """The records with all silences at their end, as calls that wait; those between events of the same names have one name."""
    names = np.stack((r.name[silences.before], r.name[silences.after]))
    _, alike = np.unique(names, axis=1, return_inverse=True)
    return r.with_events(
        name=len(r.names) + alike.reshape(-1),
        kind=EventKind.SYNC,
        stream=r.stream[silences.before],
        start_us=silences.begin_us,
        end_us=silences.end_us,
        annotation=False,
        step=r.step[silences.before],
    )


def _keep(r: RankRecords, records: RankRecords, polls: Ints) -> None:
    """Add to records those of their silences that are polls."""
    first = len(r)
    rows = np.append(np.arange(first), polls)
    for name in EVENT_COLUMNS:
        setattr(r, name, getattr(records, name)[rows])
    r.names = (*r.names, NAME)
    r.name[first:] = len(r.names) - 1


def _handed_over(r: RankRecords) -> Pairs:
    """Bursts of threads that launch work, inside pauses of the main thread."""
    host = np.flatnonzero(~r.on_device & ~r.annotation)
    main = host[r.stream[host] == MAIN_THREAD]
    if len(main) < 2:
        return []
    moments = np.sort(np.concatenate((r.start_us[main], r.end_us[main])))
    by_end = main[np.argsort(r.end_us[main], kind="stable")]
    launchers = {*r.stream[r.launch[r.launch >= 0]].tolist(), *r.stream[r.kind == EventKind.SYNC].tolist()}
    pairs = []
    for stream in sorted(launchers - {MAIN_THREAD}, reverse=True):
        its_events = host[r.stream[host] == stream]
        outer, until_us = _outermost(r, its_events)
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
            after_at = int(np.searchsorted(r.start_us[main], to_us, side="left"))
            inside = its_events[(r.start_us[its_events] >= begin_us) & (r.end_us[its_events] <= end_us)]
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
    first = np.flatnonzero(is_outermost(r.start_us[events], r.end_us[events]))
    last = np.append(first[1:], len(events)) - 1
    return events[first], reach[last]
