"""Which device ops the host's calls waited for: recorded, or inferred from when the calls returned.

A call that waits for a stream names it nowhere. It did not wait for a stream that was still busy, with work launched before, when
it returned; and it returned soon after what it waited for. Of the streams that this leaves, taken over all occurrences of the
call, it is the stream of a copy that the thread launched just before; else that which explains the returns best; where they are
equal, that which explains the thread's other calls best, and then that of the thread's last launch.
"""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np

from dpro_search.collect.readers.kineto.calls import DEVICE_WAITS, EVENT_WAITS, MEMORY_WAITS, STREAM_WAITS
from dpro_search.collect.readers.kineto.device_ops import DeviceOps, Pairs, calls_named
from dpro_search.collect.readers.kineto.evidence import Evidence
from dpro_search.collect.readers.kineto.rank import CLOCK_SLACK_US, RankRecords
from dpro_search.collect.trace import EventKind, Floats

_RETURN_US = 40.0  # by which a call returns after what it waited for
_EQUAL_US = 1.0  # returns that differ less are explained equally well
_MOST_CONTRADICTED = 0.05  # of a call's occurrences
_FULL_QUEUE = 1000  # CUDA holds 1,024 launches
_BLOCKED_US = 20.0


def syncs(r: RankRecords, device: DeviceOps, evidence: Evidence) -> Pairs:
    """Device ops and the calls that waited for them, each pair perhaps more than once."""
    return (
        _recorded(r, device)
        + _of_whole_devices(r, device)
        + _of_streams(r, device, evidence)
        + _of_others(r, device, evidence)
        + _own_copies(r)
        + _full_queues(r, device)
    )


def call_of_correlation(r: RankRecords) -> dict[int, int]:
    """The call with each correlation id, of ranks that have records of synchronisations."""
    if not r.syncs:
        return {}
    calls = np.flatnonzero(np.isin(r.kind, (EventKind.RUNTIME, EventKind.SYNC)) & (r.correlation > 0))
    return dict(zip(r.correlation[calls].tolist(), calls.tolist(), strict=True))


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
    """What waiting for each stream leaves unexplained of a call's occurrences, mean; inf where they contradict, [streams].

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
    pageable = np.array([("Pageable" in name or "Memcpy" not in name) for name in r.names] or [False])
    copies = np.flatnonzero((r.kind == EventKind.COPY) & (r.launch >= 0))
    copies = copies[pageable[r.name[copies]] & (r.size_bytes[copies] != 0)]
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
