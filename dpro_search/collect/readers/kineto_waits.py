"""What waited for what within one rank: launches, streams for streams, host calls for the device, host threads for each other.

Profiles that were recorded with synchronisation events say it. All others only say that a call waited or made a stream wait, but
not for what; there the times tell:

* A device op that began just when an op on another stream ended, long after its launch and after its stream was free, waited for
  it, if a stream was made to wait between the two launches. What one step shows holds for the same ops of all steps, unless the
  times of one contradict. A collective also needs what its thread launched before it on the stream of its inputs.
* A call that waits for a stream waited for what its thread launched last, if it returned just after the end of that; any other, for
  the last op that ended during it and that was launched before.
* A copy from or to pageable memory, and a launch into a full queue (CUDA holds 1,024), block their call until an op has ended.
* A burst of one thread inside a pause of another was started by it and is awaited by it (the autograd thread in ``backward``).
"""

from __future__ import annotations

import numpy as np

from dpro_search.collect.readers.kineto_rank import CLOCK_SLACK_US, RankRecords
from dpro_search.collect.trace import Dependencies, DependencyKind, EventKind, Floats, Ints

_AT_ONCE_US = 15.0  # from the end of what a stream waited for to the start of what waited
_UNEXPLAINED_US = 3.0  # a start so much later than launch and stream allow has another cause
_LAUNCH_US = 12.0  # by which an idle device has usually begun what was launched
_RETURN_US = 40.0  # by which a synchronising call returns after what it waited for
_FULL_QUEUE = 1000
_BLOCKED_US = 20.0
_SHARE_OF_PAUSE = 0.5

Pairs = list[tuple[int, int]]


def find_dependencies(r: RankRecords) -> Dependencies:
    """Dependencies between the events of a rank, each found once."""
    ops = np.flatnonzero(r.on_device)
    launched = ops[r.launch[ops] >= 0]
    device = _Device(r)
    found = {
        DependencyKind.LAUNCH: np.stack((r.launch[launched], launched), axis=1),
        DependencyKind.EVENT: _as_array(_recorded_stream_waits(r, device) or _in_all_steps(r, _stream_waits(r, device))),
        DependencyKind.SYNC: _as_array(_recorded_syncs(r, device) + _synchronising_calls(r, device) + _blocked_calls(r, device)),
        DependencyKind.HOST: _as_array(_handed_over(r)),
    }
    kinds = np.concatenate([np.full(len(pairs), int(kind), np.int64) for kind, pairs in found.items()])
    pairs = np.concatenate(list(found.values()))
    _, first = np.unique(np.column_stack((pairs, kinds)), axis=0, return_index=True)
    first.sort()
    return Dependencies(source=pairs[first, 0], target=pairs[first, 1], kind=kinds[first])


class _Device:
    """Device ops by stream, in the order in which they ran."""

    def __init__(self, r: RankRecords) -> None:
        self.r = r
        ops = np.flatnonzero(r.on_device)
        self.launch_us = np.where(r.launch >= 0, r.start_us[np.maximum(r.launch, 0)], r.start_us)
        self.streams = {int(stream): ops[r.stream[ops] == stream] for stream in np.unique(r.stream[ops])}
        self.launches = {stream: np.maximum.accumulate(self.launch_us[mine]) for stream, mine in self.streams.items()}
        self.by_end = ops[np.argsort(r.end_us[ops], kind="stable")]
        self.ends_us = r.end_us[self.by_end]
        self.launches_us = np.sort(self.launch_us[ops])

    def last_launched(self, stream: int, before_us: float) -> int:
        """The op on a stream that was launched last before a time; -1: none."""
        at = int(np.searchsorted(self.launches[stream], before_us)) - 1
        return int(self.streams[stream][at]) if at >= 0 else -1

    def first_launched(self, stream: int, after_us: float) -> int:
        """The op on a stream that was launched first after a time; -1: none."""
        at = int(np.searchsorted(self.launches[stream], after_us))
        return int(self.streams[stream][at]) if at < len(self.streams[stream]) else -1

    def last_ended(self, since_us: float, until_us: float, launched_before_us: float) -> int:
        """The op that ended last in an interval, of those that had been launched; -1: none."""
        at = int(np.searchsorted(self.ends_us, until_us, side="right")) - 1
        while at >= 0 and self.ends_us[at] >= since_us:
            op = int(self.by_end[at])
            if self.launch_us[op] <= launched_before_us:
                return op
            at -= 1
        return -1


def _as_array(pairs: Pairs) -> Ints:
    return np.array(pairs, np.int64).reshape(-1, 2)


def _stream_waits(r: RankRecords, device: _Device) -> Pairs:
    waits = r.start_us[_calls_named(r, "StreamWaitEvent")]
    if not len(waits) or len(device.streams) < 2:
        return []
    pairs = []
    for stream, ops in device.streams.items():
        launch_us = device.launch_us[ops]
        before_us = np.concatenate(([-np.inf], device.launches[stream][:-1]))
        first = np.searchsorted(waits, before_us, side="right")
        after = np.searchsorted(waits, launch_us, side="right")
        stream_free_us = np.concatenate(([-np.inf], np.maximum.accumulate(r.end_us[ops])[:-1]))
        for i in np.flatnonzero(after > first).tolist():
            op, last_wait_us = int(ops[i]), float(waits[after[i] - 1])
            explained_us = max(float(launch_us[i]) + _LAUNCH_US, float(stream_free_us[i]) + _UNEXPLAINED_US)
            source = -1
            if r.start_us[op] > explained_us:
                source = _ended_just_before(r, device, op, last_wait_us)
            if source < 0 and r.kind[op] == EventKind.COLLECTIVE:
                source = _input_of(r, device, op, last_wait_us)
            if source >= 0:
                pairs.append((source, op))
    return pairs


def _ended_just_before(r: RankRecords, device: _Device, op: int, wait_us: float) -> int:
    """The op on another stream with whose end an op's start coincides; -1: none."""
    start_us = float(r.start_us[op])
    at = int(np.searchsorted(device.ends_us, start_us + 1.0, side="right")) - 1
    while at >= 0 and device.ends_us[at] >= start_us - _AT_ONCE_US:
        source = int(device.by_end[at])
        if r.stream[source] != r.stream[op] and device.launch_us[source] <= wait_us:
            return source
        at -= 1
    return -1


def _input_of(r: RankRecords, device: _Device, op: int, wait_us: float) -> int:
    """The last op that a collective's thread launched before it on a stream that computes; -1: none that had ended."""
    launch = r.launch[op]
    if launch < 0:
        return -1
    best = -1
    for stream in device.streams:
        if stream == r.stream[op]:
            continue
        source = device.last_launched(stream, wait_us)
        same_thread = source >= 0 and r.launch[source] >= 0 and r.stream[r.launch[source]] == r.stream[launch]
        if (
            same_thread
            and r.kind[source] != EventKind.COLLECTIVE
            and (best < 0 or device.launch_us[source] > device.launch_us[best])
        ):
            best = source
    return best if best >= 0 and r.end_us[best] <= r.start_us[op] + CLOCK_SLACK_US else -1


def _in_all_steps(r: RankRecords, pairs: Pairs) -> Pairs:
    """The pairs, and the same pairs of ops in the other steps where their times allow it.

    An op is the same if it is the k-th of its name on its stream in its step.
    """
    if not pairs or len(r.step_number) < 2:
        return pairs
    occurrence = _occurrence_in_step(r)
    ops = np.flatnonzero(r.on_device)
    keys = list(zip(r.stream[ops].tolist(), r.name[ops].tolist(), occurrence[ops].tolist(), strict=True))
    place = {(int(step), key): int(op) for op, step, key in zip(ops, r.step[ops], keys, strict=True)}
    key_of = dict(zip(ops.tolist(), keys, strict=True))
    position = {int(number): i for i, number in enumerate(r.step_number)}
    general = {
        (key_of[source], key_of[target], position[int(r.step[target])] - position[int(r.step[source])])
        for source, target in pairs
        if int(r.step[source]) in position and int(r.step[target]) in position
    }
    found = set(pairs)
    launch_us = np.where(r.launch >= 0, r.start_us[np.maximum(r.launch, 0)], r.start_us)
    for source_key, target_key, apart in general:
        same = []
        for i, number in enumerate(r.step_number.tolist()):
            before = int(r.step_number[i - apart]) if 0 <= i - apart < len(r.step_number) else -1
            source, target = place.get((before, source_key), -1), place.get((number, target_key), -1)
            if source >= 0 and target >= 0 and launch_us[source] <= launch_us[target]:
                same.append((source, target))
        if all(r.end_us[source] <= r.start_us[target] + 1.0 for source, target in same):
            found.update(same)
        else:
            found.difference_update(same)  # one step contradicts: elsewhere it was chance
    return sorted(found)


def _occurrence_in_step(r: RankRecords) -> Ints:
    """Of each event, how many of its name came before it on its stream in its step."""
    order = np.lexsort((np.arange(len(r)), r.name, r.stream, r.step))
    key = np.column_stack((r.step, r.stream, r.name))[order]
    new = np.ones(len(r), np.bool_)
    new[1:] = (key[1:] != key[:-1]).any(axis=1)
    first = np.maximum.accumulate(np.where(new, np.arange(len(r)), 0))
    occurrence = np.empty(len(r), np.int64)
    occurrence[order] = np.arange(len(r)) - first
    return occurrence


def _recorded_stream_waits(r: RankRecords, device: _Device) -> Pairs:
    """From CUPTI's records of streams that waited."""
    pairs = []
    call_of = _call_of_correlation(r)
    for kind, stream, correlation, wait_stream, wait_record in r.syncs:
        if "wait" not in kind.lower():
            continue
        call, record = call_of.get(correlation, -1), call_of.get(wait_record, -1)
        target_stream, source_stream = _device_stream(device, stream), _device_stream(device, wait_stream)
        if min(call, record, target_stream, source_stream) < 0:
            r.dropped["stream waits whose event is unknown"] += 1
            continue
        source = device.last_launched(source_stream, float(r.start_us[record]))
        target = device.first_launched(target_stream, float(r.start_us[call]))
        if min(source, target) >= 0 and r.end_us[source] <= r.start_us[target] + CLOCK_SLACK_US and source != target:
            pairs.append((source, target))
    return pairs


def _recorded_syncs(r: RankRecords, device: _Device) -> Pairs:
    """From CUPTI's records of calls that waited."""
    pairs = []
    call_of = _call_of_correlation(r)
    for kind, stream, correlation, wait_stream, wait_record in r.syncs:
        call = call_of.get(correlation, -1)
        if "wait" in kind.lower() or call < 0:
            continue
        start_us = float(r.start_us[call])
        if "event" in kind.lower():
            record = call_of.get(wait_record, -1)
            streams, before_us = [_device_stream(device, wait_stream)], float(r.start_us[record]) if record >= 0 else -np.inf
        elif "stream" in kind.lower():
            streams, before_us = [_device_stream(device, stream)], start_us
        else:
            streams, before_us = list(device.streams), start_us
        sources = [device.last_launched(s, before_us) for s in streams if s >= 0]
        pairs += [(s, call) for s in sources if s >= 0 and r.end_us[s] <= r.end_us[call] + CLOCK_SLACK_US]
    return pairs


def _call_of_correlation(r: RankRecords) -> dict[int, int]:
    if not r.syncs:
        return {}
    calls = np.flatnonzero(np.isin(r.kind, (EventKind.RUNTIME, EventKind.SYNC)) & (r.correlation > 0))
    return dict(zip(r.correlation[calls].tolist(), calls.tolist(), strict=True))


def _device_stream(device: _Device, stream: int) -> int:
    return stream if stream in device.streams else -1


def _synchronising_calls(r: RankRecords, device: _Device) -> Pairs:
    recorded = {correlation for _, _, correlation, _, _ in r.syncs}
    pairs = []
    for call in np.flatnonzero(r.kind == EventKind.SYNC).tolist():
        if int(r.correlation[call]) in recorded:
            continue
        start_us, end_us = float(r.start_us[call]), float(r.end_us[call])
        name = r.names[r.name[call]]
        if "Device" in name or "Ctx" in name:
            sources = [device.last_launched(stream, start_us) for stream in device.streams]
        else:
            own = _last_of_thread(r, device, call) if "Stream" in name else -1
            ended = own >= 0 and end_us - r.end_us[own] >= -CLOCK_SLACK_US
            if ended and end_us - max(float(r.end_us[own]), start_us) <= _RETURN_US:
                sources = [own]
            else:
                other = device.last_ended(start_us, end_us + CLOCK_SLACK_US, start_us)
                sources = [own if other < 0 else other]
        pairs += [(s, call) for s in sources if s >= 0 and r.end_us[s] <= end_us + CLOCK_SLACK_US]
    return pairs


def _last_of_thread(r: RankRecords, device: _Device, call: int) -> int:
    """The op that a call's thread launched last before it; -1: none."""
    found = [device.last_launched(stream, float(r.start_us[call])) for stream in device.streams]
    mine = [op for op in found if op >= 0 and r.launch[op] >= 0 and r.stream[r.launch[op]] == r.stream[call]]
    return max(mine, key=lambda op: device.launch_us[op], default=-1)


def _blocked_calls(r: RankRecords, device: _Device) -> Pairs:
    """Copies that their call waited for, and launches into a full queue."""
    pageable = np.array([("Pageable" in name or "Memcpy" not in name) for name in r.names] or [False])
    copies = np.flatnonzero((r.kind == EventKind.COPY) & (r.launch >= 0))
    copies = copies[pageable[r.name[copies]] & (r.size_bytes[copies] != 0)]
    call = r.launch[copies]
    inside = (r.end_us[copies] <= r.end_us[call] + 1.0) & (r.end_us[call] - r.start_us[call] > _BLOCKED_US)
    pairs = list(zip(copies[inside].tolist(), call[inside].tolist(), strict=True))
    launched = np.flatnonzero(r.on_device & (r.launch >= 0))
    calls = np.unique(r.launch[launched])
    calls = calls[r.end_us[calls] - r.start_us[calls] > _BLOCKED_US]
    pending = np.searchsorted(device.launches_us, r.start_us[calls]) - np.searchsorted(device.ends_us, r.start_us[calls])
    for one in calls[pending >= _FULL_QUEUE].tolist():
        source = device.last_ended(float(r.start_us[one]), float(r.end_us[one]) + CLOCK_SLACK_US, float(r.start_us[one]))
        if source >= 0:
            pairs.append((source, one))
    return pairs


def _calls_named(r: RankRecords, ending: str) -> Ints:
    named = np.array([name.endswith(ending) for name in r.names] or [False])
    return np.flatnonzero(named[r.name] & (r.kind == EventKind.RUNTIME))


def _handed_over(r: RankRecords) -> Pairs:
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
