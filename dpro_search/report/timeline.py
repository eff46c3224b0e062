"""One step as lanes of slices: predicted over measured, rank by rank. Drawn by ``assets/timeline.js`` on a canvas."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpro_search._text import numbers_text
from dpro_search.collect.trace import EventKind, Events, Trace
from dpro_search.report.html import shown

MOST_SLICES = 100_000  # more make the page slow to open, and are shorter than a pixel
_PROCESS = re.compile(r"predicted rank (\d+)$")
_COPY_OF_LANE = re.compile(r"(@\d+| of rank \d+)?( \(\d+\))?$")
_UNIT_US = 0.1
KINDS = ("compute", "backward", "update", "comm", "wait", "copy", "server", "host", "unknown")
_KIND_OF_CATEGORY = {
    "FORWARD": "compute",
    "BACKWARD": "backward",
    "UPDATE": "update",
    "COMM": "comm",
    "SERVER": "server",
    "IO": "copy",
    "HOST": "host",
    "UNKNOWN": "unknown",
    "wait": "wait",
}

_ONLY_PREDICTED = {  # beginnings of lanes' names, and why the recording has no such lane
    "launches": "the time from a call to the start of its op, which no event records",
    "no device": "ops that take no device, like negotiation",
    "core": "the replay gives a rank its cores, the recording names threads",
}
_ONLY_MEASURED = {  # and why the replay has none
    "host thread": "nothing that it does launches an op or waits for one in the replayed step",
    "thread": "the recording names threads, the replay gives a rank its cores",
}


@dataclass(kw_only=True)
class Lane:
    """Slices of one stream, in no order; of a rank, predicted or measured."""

    rank: int
    measured: bool
    name: str
    names: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    start_us: list[float] = field(default_factory=list)
    length_us: list[float] = field(default_factory=list)

    def add(self, name: str, kind: str, start_us: float, length_us: float) -> None:
        """One more slice."""
        self.names.append(name)
        self.kinds.append(kind)
        self.start_us.append(start_us)
        self.length_us.append(length_us)


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """The lanes of a step; `step` is the number of the measured one, None where none was recorded op by op."""

    lanes: Sequence[Lane]
    step: int | None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have lanes."""
        return tuple(sorted({lane.rank for lane in self.lanes}))

    @property
    def one_sided(self) -> tuple[str, ...]:
        """Sentences on lanes that only the replay or only the recording has; none where there is one side only."""
        predicted, measured = ({lane.name for lane in self.lanes if lane.measured is side} for side in (False, True))
        if not predicted or not measured:
            return ()
        sentences = [
            *(f"Only predicted: {lanes}." for lanes in _explained(predicted - measured, _ONLY_PREDICTED)),
            *(f"Only measured: {lanes}." for lanes in _explained(measured - predicted, _ONLY_MEASURED)),
        ]
        ranks = {lane.rank for lane in self.lanes if not lane.measured} ^ {lane.rank for lane in self.lanes if lane.measured}
        if ranks:
            sentences.append(f"Ranks with lanes on one side only: {numbers_text(ranks)}.")
        return tuple(sentences)

    def compact(self, most: int = MOST_SLICES) -> dict[str, Any]:
        """The timeline for the page: times in tenths of a us, names and kinds as numbers; about `most` slices, the longest."""
        lengths = np.array([length for lane in self.lanes for length in lane.length_us])
        limit_us = float(np.partition(lengths, -most)[-most]) if len(lengths) > most else 0.0
        number_of: dict[str, int] = {}
        lanes, left_out = [], 0
        for lane in self.lanes:
            order = sorted(range(len(lane.names)), key=lambda i: (lane.start_us[i], -lane.length_us[i]))
            kept = [i for i in order if lane.length_us[i] >= limit_us]
            left_out += len(order) - len(kept)
            lanes.append(
                {
                    "rank": lane.rank,
                    "measured": lane.measured,
                    "name": shown(lane.name),
                    "start": [round(lane.start_us[i] / _UNIT_US) for i in kept],
                    "length": [
                        round((lane.start_us[i] + lane.length_us[i]) / _UNIT_US) - round(lane.start_us[i] / _UNIT_US) for i in kept
                    ],  # of rounded ends: slices that touch still do
                    "text": [number_of.setdefault(lane.names[i], len(number_of)) for i in kept],
                    "kind": [KINDS.index(lane.kinds[i]) for i in kept],
                }
            )
        return {
            "unit_us": _UNIT_US,
            "kinds": KINDS,
            "names": [shown(name) for name in number_of],
            "lanes": lanes,
            "left_out": left_out,
        }


def predicted_lanes(events: Sequence[Mapping[str, Any]]) -> list[Lane]:
    """Lanes of a replay, from the Chrome trace events that `replay.outputs.perfetto` makes; ops of no length are left out."""
    rank_of: dict[int, int] = {}
    name_of: dict[tuple[int, int], str] = {}
    for event in events:
        if event["ph"] == "M" and event["name"] == "process_name":
            match = _PROCESS.match(event["args"]["name"])
            if match:
                rank_of[event["pid"]] = int(match[1])
        elif event["ph"] == "M" and event["name"] == "thread_name":
            name_of[event["pid"], event["tid"]] = _COPY_OF_LANE.sub("", event["args"]["name"])
    lanes: dict[tuple[int, str], Lane] = {}
    for event in events:
        if event["ph"] == "X" and event["pid"] in rank_of and event["dur"] > 0:
            rank, name = rank_of[event["pid"]], name_of.get((event["pid"], event["tid"]), "")
            lane = lanes.setdefault((rank, name), Lane(rank=rank, measured=False, name=name))
            lane.add(event["name"], _KIND_OF_CATEGORY.get(event["cat"], "host"), event["ts"], event["dur"])
    return list(lanes.values())


def kinds_by_name(lanes: Sequence[Lane]) -> dict[str, str]:
    """Kinds of ops by name, of names that have one kind: a kernel may run in the forward and in the backward pass."""
    kinds_of_name: dict[str, set[str]] = {}
    for lane in lanes:
        for name, kind in zip(lane.names, lane.kinds, strict=True):
            kinds_of_name.setdefault(name, set()).add(kind)
    return {name: kinds.pop() for name, kinds in kinds_of_name.items() if len(kinds) == 1}


def measured_lanes(trace: Trace, step: int, kind_of: Mapping[str, str]) -> list[Lane]:
    """Lanes of a recorded step. It begins with its first computation: what servers still do for the step before starts below 0.

    Parameters
    ----------
    kind_of
        Kinds of ops that the replay knows, by ``name@rank``.
    """
    events = trace.events.select((trace.events.step == step) & (trace.events.end_us > trace.events.start_us))
    if not len(events):
        return []
    computes = np.isin(events.kind, (EventKind.OP, EventKind.KERNEL))
    begin_us = float(events.start_us[computes if computes.any() else slice(None)].min())
    lane_of = _measured_kinds(events)
    devices, calls = EventKind.KERNEL in lane_of, EventKind.RUNTIME in lane_of
    lanes: dict[tuple[int, str], Lane] = {}
    seen: set[tuple[int, int]] = set()
    numbers = dict(enumerate(trace.meta.numbers))
    columns = (
        events.kind,
        events.rank,
        events.stream,
        events.name,
        events.tensor,
        events.collective,
        events.start_us,
        events.end_us,
    )
    for kind, rank, stream, text, tensor, collective, start_us, end_us in zip(*(c.tolist() for c in columns), strict=True):
        if kind not in lane_of:
            continue
        if kind == EventKind.ALLREDUCE and collective >= 0:
            if (rank, collective) in seen:
                continue  # a slice for all tensors of a fused collective
            seen.add((rank, collective))
        title, colour = lane_of[kind]
        name = trace.names[text]
        rank = numbers.get(rank, rank)
        if kind == EventKind.OP:
            colour = kind_of.get(f"{name}@{rank}", "host" if devices else "compute")
        elif kind == EventKind.KERNEL:
            colour = kind_of.get(f"{name}@{rank}", colour)
        elif kind in (EventKind.ALLREDUCE, EventKind.COMM) and tensor >= 0:
            name = f"{name} {trace.tensors[tensor].name}"
        if kind in _BY_STREAM or title == "stream":
            title = f"host thread {abs(stream)}" if calls and title == "thread" else f"{title} {stream}"
        lane = lanes.setdefault((rank, title), Lane(rank=rank, measured=True, name=title))
        lane.add(name, colour, start_us - begin_us, end_us - start_us)
    return list(lanes.values())


def typical_step(trace: Trace) -> int | None:
    """The profiled step with the median length by the events of all ranks; None where no step was profiled."""
    events = trace.events
    inside = np.isin(events.step, trace.steps.index[trace.steps.traced])
    if not inside.any():
        return None
    steps, number = np.unique(events.step[inside], return_inverse=True)
    start, end = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
    np.minimum.at(start, number, events.start_us[inside])
    np.maximum.at(end, number, events.end_us[inside])
    return int(steps[np.argsort(end - start, kind="stable")[len(steps) // 2]])


def _explained(lanes: Set[str], reasons: Mapping[str, str]) -> list[str]:
    """Names of lanes by the reason why the other side has none like them, with it if it is known."""
    lanes_of_reason: dict[str, list[str]] = {}
    for lane in sorted(lanes):
        lanes_of_reason.setdefault(next((why for kind, why in reasons.items() if lane.startswith(kind)), ""), []).append(lane)
    return [", ".join(names) + (f" ({why})" if why else "") for why, names in lanes_of_reason.items()]


_BY_STREAM = (EventKind.OP, EventKind.KERNEL, EventKind.COPY, EventKind.UNKNOWN, EventKind.RUNTIME, EventKind.SYNC)


def _measured_kinds(events: Events) -> dict[int, tuple[str, str]]:
    """Lane and colour of each kind of event that is shown; of communication, the closest to the wire that was recorded."""
    lane_of_kind: dict[int, tuple[str, str]] = {
        EventKind.OP: ("thread", "compute"),
        EventKind.KERNEL: ("stream", "compute"),
        EventKind.COPY: ("stream", "copy"),
        EventKind.RUNTIME: ("thread", "host"),
        EventKind.SYNC: ("thread", "wait"),
        EventKind.SERVER: ("server", "server"),
        EventKind.UNKNOWN: ("stream", "unknown"),
    }
    present = set(events.kind.tolist())
    wire = next((kind for kind in (EventKind.COLLECTIVE, EventKind.ALLREDUCE, EventKind.COMM) if kind in present), None)
    if wire is not None:  # of a device it is an op of its stream, as in the replay
        on_stream = wire == EventKind.COLLECTIVE and EventKind.KERNEL in present
        lane_of_kind[wire] = ("stream" if on_stream else "communication", "comm")
    if EventKind.KERNEL in present and EventKind.RUNTIME not in present:  # all ops are nodes of one graph, as in the replay
        lane_of_kind[EventKind.OP] = ("stream", "compute")
    return {kind: lane for kind, lane in lane_of_kind.items() if kind in present}
