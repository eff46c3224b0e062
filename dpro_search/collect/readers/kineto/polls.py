"""Waits of the host in no call that is known to wait: a host that polls memory or events, or a call of a runtime by another name.

Such a wait is a silence: a thread that launches work does nothing that was recorded, or only asks again and again, until it goes
on a constant time after the end of a device op. The op is the last one launched on its stream before the silence: a host waits
until its stream is empty. What the thread does in a silence may also be work of its own, such as Python that calls no op. A
silence is believed to be a wait only if it repeats in nearly every step (`Evidence.repeated`), and if the time from the end of
the op to that of the silence varies less than the length of the silence, or less than the host's own work ever does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpro_search.collect.readers.kineto.calls import QUERIES
from dpro_search.collect.readers.kineto.device_ops import DeviceOps, Pairs, places_in_step
from dpro_search.collect.readers.kineto.evidence import Evidence
from dpro_search.collect.readers.kineto.rank import CLOCK_SLACK_US, EVENT_COLUMNS, Bools, RankRecords
from dpro_search.collect.trace import EventKind, Floats, Ints, Role

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


def add_polls(r: RankRecords, device: DeviceOps) -> Pairs:
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
    asks = np.array([QUERIES.search(name) is not None for name in r.names] or [False])
    polls = asks[r.name[host]] | _in_rows(r, host, launches_us)
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
    outer = np.flatnonzero(np.append(True, r.start_us[host[1:]] >= reach_us[:-1]))
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
    count = len(silences)
    values = {
        "name": len(r.names) + alike.reshape(-1),
        "kind": np.full(count, EventKind.SYNC),
        "stream": r.stream[silences.before],
        "start_us": silences.begin_us,
        "end_us": silences.end_us,
        "annotation": np.zeros(count),
        "step": r.step[silences.before],
    }
    nothing = np.full(count, -1)
    columns: dict[str, Any] = {name: getattr(r, name) for name in EVENT_COLUMNS}
    for name, column in columns.items():
        columns[name] = np.append(column, values.get(name, nothing)).astype(column.dtype)
    return replace(r, **columns)


def _keep(r: RankRecords, records: RankRecords, polls: Ints) -> None:
    """Add to records those of their silences that are polls."""
    first = len(r)
    rows = np.append(np.arange(first), polls)
    for name in EVENT_COLUMNS:
        setattr(r, name, getattr(records, name)[rows])
    r.names = (*r.names, NAME)
    r.name[first:] = len(r.names) - 1
