"""Dependencies within one rank: launches, streams that wait for streams, host calls for the device, host threads for each other.

Profiles that were recorded with synchronisation events record it. All others only record that a stream was made to wait, but not
for what; there it is inferred from the times. A device op that began just when an op on another stream ended, later than its launch
and its stream explain, may have waited for it, if a stream was made to wait between the two launches, and if an event was recorded
while that op was the last on its stream. It is believed if the occurrences in all steps agree (`evidence`). A collective
also needs what its thread launched before it on the stream of its inputs.

No call shows the order between the streams of a CUDA graph, or between any streams if the profiler left such calls out. An op that
begins late in every step, at once after the same op of another stream has ended, is inferred to wait for it (`INFERRED`).

A host thread is handed a burst of work by another: the autograd thread works while the main thread pauses.
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from dpro_search.collect.readers.kineto.evidence import DeviceOps, Evidence, Pairs, calls_named
from dpro_search.collect.readers.kineto.host_waits import add_polls, call_of_correlation, syncs
from dpro_search.collect.readers.kineto.rank import CLOCK_SLACK_US, EVENT_RECORDS, STREAM_ORDERS, RankRecords
from dpro_search.collect.trace import Dependencies, DependencyKind, EventKind, Floats, Ints

_AT_ONCE_US = 15.0  # from the end of what a stream waited for to the start of what waited


def find_dependencies(r: RankRecords) -> Dependencies:
    """Dependencies between the events of a rank, each found once; polls that were inferred are added to its events."""
    ops = np.flatnonzero(r.on_device)
    launched = ops[r.launch[ops] >= 0]
    device = DeviceOps(r)
    evidence = Evidence(r, device.launch_us)
    waits = _recorded_waits(r, device) or evidence.waits(_candidates(r, device))
    synchronised = [*syncs(r, device, evidence), *r.host_waits]
    handed = handed_over(r)
    inferred = [*_inferred_waits(r, device, evidence, waits), *add_polls(r, device)]
    pairs_of_kind = {
        DependencyKind.LAUNCH: np.stack((r.launch[launched], launched), axis=1),
        DependencyKind.EVENT: _as_array(waits),
        DependencyKind.INFERRED: _as_array(inferred),
        DependencyKind.SYNC: _as_array(synchronised),
        DependencyKind.HOST: _as_array(handed),
    }
    kinds = np.concatenate([np.full(len(pairs), int(kind), np.int64) for kind, pairs in pairs_of_kind.items()])
    pairs = np.concatenate(list(pairs_of_kind.values()))
    _, first = np.unique(np.column_stack((pairs, kinds)), axis=0, return_index=True)
    first.sort()
    return Dependencies(source=pairs[first, 0], target=pairs[first, 1], kind=kinds[first])


def _as_array(pairs: Pairs) -> Ints:
    return np.array(pairs, np.int64).reshape(-1, 2)


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


def _inferred_waits(r: RankRecords, device: DeviceOps, evidence: Evidence, known: Pairs) -> Pairs:
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
            after_at = int(np.searchsorted(r.start_us[starts_in_order], to_us, side="left"))
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
    outer = np.ones(len(events), np.bool_)
    outer[1:] = r.start_us[events[1:]] >= reach[:-1]
    first = np.flatnonzero(outer)
    last = np.append(first[1:], len(events)) - 1
    return events[first], reach[last]
