"""``recorded_ops(trace)``: everything that ran in the recorded steps of a trace with streams and dependencies, as ops.

Three sorts of devices a rank. **Streams** run what ran on them, in program order. **Host threads** are cut at the moments at which
they launched work, waited or were waited for; the stretch between two such moments is one op, the thread's own time, without the
waiting. **Launching** takes the time from the call to the earliest start of what was launched, for any number of launches at once.

A device op can start when its launch has taken effect, its stream is free and what its stream was made to wait for has ended. So an
idle gap of a stream is nobody's constant: it is the host's time where the launch came late, and the wait for another stream where
that came late. What remains, mostly a microsecond between two kernels, is part of the op; `RecordedOps.unexplained_us` counts it.

The parts of a collective that was matched across ranks are enqueued when their streams take them and move data from the last
enqueue on: their duration is the time from the last rank's start to the end, so that no rank's waiting is part of it. Where the
other ranks were not recorded, a collective is an op of its recorded duration: **the wait for the others is inside, and stays when
something changes**.

Traces without launches (ops on threads, matched by data dependencies) are graphs of their outermost ops; a thread's pause before an
op that no dependency explains is part of that op.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import DependencyKind, EventKind, Floats, Ints, Role, Trace
from dpro_search.errors import GraphError
from dpro_search.graph.dataflow import OpKind
from dpro_search.machine import machine_constants
from dpro_search.space.recorded_events import (
    CALL_KINDS,
    DEVICE_KINDS,
    ENDS,
    LAUNCHES,
    PAUSES,
    RESUMES,
    RUNS,
    WAITS,
    Bools,
    compute_kinds,
    host_points,
    incoming,
    last_enqueues,
    launched,
    outermost,
    steps_in_order,
)
from dpro_search.space.replay_graph import Int32s, OrderPolicy

_ROLES = {ENDS: "host until the end of", LAUNCHES: "host until the launch of", WAITS: "host until the wait in"}


@dataclass(frozen=True, kw_only=True)
class RecordedOps:
    """n ops of all recorded steps, in program order on every device; the ops of a step are those of its `step`."""

    duration_us: Floats
    device: Int32s
    kind: npt.NDArray[np.int8]
    collective: Int32s
    step: Ints
    # Ops of different steps are the same if their keys are: a number for device, role, name and how many of it came before, [n].
    key: Ints
    # Likewise for ops of different ranks, [n]: a number for the device's name within its rank, role, name and how many before.
    peer: Ints
    event: Ints  # Event of the trace that each op is, -1 for stretches of a host thread and launches, [n].
    role: npt.NDArray[np.int8]  # What each op is to an event, [n]: one of the numbers of `recorded_events`.
    loading_us: Floats  # Part of each stretch of a host thread in which it loads input or waits for it, [n].
    end_us: Floats  # Recorded end of each stretch of a host thread, which began its duration earlier; NaN of other ops, [n].
    on_device: Bools  # Whether the op is work of a device (not of a host thread, nor a launch), [n].
    # False where the duration is not the step's own: the first stretch of a thread whose beginning was not recorded, [n].
    known: Bools
    # Part of each op's duration during which its stream was idle though launch and dependencies had allowed a start, [n].
    unexplained_us: Floats
    # Idle time before an op that nothing else holds back, [n]: from the first event of the recording, for ranks enter it one by
    # one; of a thread that had nothing to do in the step before, up to the op's step.
    lead_us: Floats
    name: tuple[str, ...]
    # source, target: Dependencies, [m] each.
    source: Ints
    target: Ints
    policy: npt.NDArray[np.int8]
    rank_of_device: Int32s
    device_names: tuple[str, ...]
    steps: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.duration_us)


def recorded_ops(trace: Trace) -> RecordedOps:
    """Everything that ran in the recorded steps, as ops; raises `GraphError` if nothing did."""
    builder = _Builder(trace)
    for rank in np.unique(trace.events.rank).tolist():
        builder.add_rank(rank)
    return builder.finish()


class _Op(NamedTuple):
    device: int
    duration_us: float
    kind: OpKind
    step: int
    event: int = -1
    on_device: bool = False
    collective: int = -1
    known: bool = True
    unexplained_us: float = 0.0
    lead_us: float = 0.0
    loading_us: float = 0.0
    end_us: float = np.nan


class _Builder:
    """Makes ops rank by rank; dependencies between them are resolved at the end."""

    def __init__(self, trace: Trace) -> None:
        events = trace.events
        self._trace, self._events = trace, events
        self._in_step = np.isin(events.step, trace.steps.index) & (events.step >= 0)
        self._steps = steps_in_order(trace)
        self._step_before = dict(zip(self._steps[1:], self._steps, strict=False))
        self._step_begin_us = {step: self._end_us(before) for step, before in self._step_before.items()}
        self._sources = incoming(trace)
        self._last_post_us = last_enqueues(trace, self._in_step)
        self._launched = launched(trace)
        self._ops: list[_Op] = []
        self._begin_us = float(events.start_us[self._in_step].min()) if self._in_step.any() else 0.0
        # Where no kernel ran, host threads compute themselves.
        self._host_kind = OpKind.HOST if np.isin(events.kind, (EventKind.KERNEL, EventKind.COPY)).any() else OpKind.FORWARD
        self._keys: dict[tuple[int, int, int, int], int] = {}
        self._seen: dict[tuple[int, int, int, int], int] = {}
        self._key: list[int] = []
        self._peers: dict[tuple[str, int, int, int], int] = {}
        self._peer: list[int] = []
        self._role: list[int] = []
        self._names: list[str] = []
        self._edges: list[tuple[int, int]] = []
        self._of_event: dict[int, int] = {}  # op that ends when the event does
        self._out: dict[int, int] = {}  # stretch of a host thread that ends where a call launches
        self._after: dict[int, int] = {}  # stretch of a host thread that ends where the event does
        self._waiting: list[tuple[int, int, bool]] = []  # (event, op that needs it, whether at the end of a host event)
        self._policy: list[int] = []
        self._rank_of_device: list[int] = []
        self._device_names: list[str] = []

    def add_rank(self, rank: int) -> None:
        events = self._events
        mine = np.flatnonzero((events.rank == rank) & self._in_step)
        calls = np.isin(events.kind[mine], CALL_KINDS)
        on_device = np.isin(events.kind[mine], DEVICE_KINDS)
        if calls.any():
            self._add_host(rank, mine[~on_device])
            self._add_streams(rank, mine[on_device])
        else:
            self._add_streams(rank, outermost(events.stream, events.start_us, events.end_us, mine))

    def finish(self) -> RecordedOps:
        if not self._ops:
            raise GraphError("no op of the trace ran in a step: nothing to replay")
        for event, op, at_end in self._waiting:
            table = self._after if at_end else self._of_event
            if event in table:
                self._edges.append((table[event], op))
        columns = dict(zip(_Op._fields, zip(*self._ops, strict=True), strict=True))
        edges = np.array(self._edges, np.int64).reshape(-1, 2)
        ran = set(columns["step"])
        return RecordedOps(
            device=np.array(columns["device"], np.int32),
            duration_us=np.maximum(np.array(columns["duration_us"], np.float64), 0.0),
            kind=np.array(columns["kind"], np.int8),
            collective=np.array(columns["collective"], np.int32),
            step=np.array(columns["step"], np.int64),
            event=np.array(columns["event"], np.int64),
            role=np.array(self._role, np.int8),
            loading_us=np.array(columns["loading_us"], np.float64),
            end_us=np.array(columns["end_us"], np.float64),
            on_device=np.array(columns["on_device"], np.bool_),
            known=np.array(columns["known"], np.bool_),
            unexplained_us=np.array(columns["unexplained_us"], np.float64),
            lead_us=np.array(columns["lead_us"], np.float64),
            key=np.array(self._key, np.int64),
            peer=np.array(self._peer, np.int64),
            name=tuple(self._names),
            source=edges[:, 0],
            target=edges[:, 1],
            policy=np.array(self._policy, np.int8),
            rank_of_device=np.array(self._rank_of_device, np.int32),
            device_names=tuple(self._device_names),
            steps=tuple(step for step in self._steps if step in ran),
        )

    def _end_us(self, step: int) -> float:
        steps = self._trace.steps
        return float(steps.end_us[steps.index == step].max())

    def _device(self, rank: int, policy: OrderPolicy, name: str) -> int:
        self._policy.append(int(policy))
        self._rank_of_device.append(rank)
        self._device_names.append(f"{name} of rank {rank}")
        return len(self._policy) - 1

    def _add(self, op: _Op, role: int, name: int, label: str) -> int:
        """Append an op, which is the same in another step if device, role, name and how many came before are."""
        in_step = (op.step, op.device, role, name)
        occurrence = self._seen[in_step] = self._seen.get(in_step, -1) + 1
        self._key.append(self._keys.setdefault((op.device, role, name, occurrence), len(self._keys)))
        place = self._device_names[op.device].rpartition(" of rank ")[0]
        self._peer.append(self._peers.setdefault((place, role, name, occurrence), len(self._peers)))
        self._names.append(label)
        self._role.append(role)
        self._ops.append(op)
        return len(self._ops) - 1

    def _add_host(self, rank: int, host: Ints) -> None:
        events = self._events
        points = host_points(self._trace, self._sources, host, self._in_step)
        for stream in sorted({stream for stream, _, _, _ in points}, reverse=True):
            device = self._device(rank, OrderPolicy.PROGRAM, f"host thread {-stream}" if stream < 0 else f"host thread {stream}")
            mine = sorted((us, order, event) for s, us, order, event in points if s == stream)
            on_thread = host[events.stream[host] == stream]
            loads = on_thread[events.role[on_thread] == Role.LOADING]
            spans = np.stack((events.start_us[loads], events.end_us[loads]))
            self._add_thread(rank, device, mine, float(events.start_us[on_thread].min()), spans)

    def _add_thread(self, rank: int, device: int, points: list[tuple[float, int, int]], begin_us: float, loading: Floats) -> None:
        """Stretches between the points of a thread, each with what had to come before it; spans of loading are [2, spans]."""
        events, names = self._events, self._trace.names
        cursor_us, known, lead_us = begin_us, False, begin_us - self._begin_us
        last_step = -1
        waits: list[tuple[int, bool]] = []
        for time_us, order, event in points:
            name = int(events.name[self._launched.get(event, event)] if order == LAUNCHES else events.name[event])
            if order == RESUMES:
                sources = [s for s, kind in self._sources[event] if kind == DependencyKind.HOST]
                waits += [(s, True) for s in sources]
                arrival_us = max(float(events.end_us[s]) for s in sources)
                free_us = cursor_us if known else -np.inf  # a thread that begins so was idle before
                cursor_us, known, lead_us = max(free_us, min(arrival_us, time_us)), True, 0.0
                continue
            label = f"{_ROLES[order]} {names[name]}@{rank}"
            step = int(events.step[event])
            before = self._step_before.get(step)
            if not waits and before is not None and last_step not in (before, step):  # it had nothing to do in the step before
                idle_since_us = cursor_us if known else self._begin_us
                cursor_us = max(idle_since_us, min(self._step_begin_us[step], time_us))
                known, lead_us = True, cursor_us - idle_since_us
            last_step = step
            loading_us = _overlap_us(loading, cursor_us, time_us)
            stretch = _Op(
                device, time_us - cursor_us, self._host_kind, step,
                known=known, lead_us=lead_us, loading_us=loading_us, end_us=time_us,
            )  # fmt: skip
            op = self._add(stretch, order, name, label)
            self._waiting += [(source, op, at_end) for source, at_end in waits]
            waits = []
            cursor_us, known, lead_us = max(cursor_us, time_us), True, 0.0
            if order == LAUNCHES:
                self._out[event] = op
            elif order == ENDS:
                self._after[event] = op
            else:
                sources = [s for s, kind in self._sources[event] if kind == DependencyKind.SYNC]
                waits = [(s, False) for s in sources]
                arrival_us = max(float(events.end_us[s]) for s in sources)
                cursor_us = max(cursor_us, min(arrival_us, float(events.end_us[event])))

    def _add_streams(self, rank: int, ops: Ints) -> None:
        if not len(ops):
            return
        events = self._events
        streams = np.unique(events.stream[ops]).tolist()
        ordered = {stream: ops[events.stream[ops] == stream] for stream in streams}
        for stream in streams:
            mine = ordered[stream]
            ordered[stream] = mine[np.lexsort((events.end_us[mine], events.start_us[mine]))]
        launch = {op: self._launch(op) for op in ops.tolist()}
        free_us = {op: self._free_us(op) for op in ops.tolist()}
        before_us: dict[int, float] = {}
        for mine in ordered.values():
            reach = np.maximum.accumulate(events.end_us[mine])
            before_us |= dict(zip(mine.tolist(), [-np.inf, *reach[:-1].tolist()], strict=True))
        usual_us = self._usual_latency(ops, launch, free_us, before_us)
        launching = self._device(rank, OrderPolicy.UNBOUNDED, "launches") if any(call >= 0 for call in launch.values()) else -1
        kinds = compute_kinds(self._trace, ops, launch)
        for stream, mine in ordered.items():
            device = self._device(rank, OrderPolicy.PROGRAM, f"stream {stream}" if stream >= 0 else f"thread {-stream}")
            for op in mine.tolist():
                self._add_device_op(rank, device, launching, op, launch[op], free_us[op], before_us[op], usual_us, kinds[op])

    def _add_device_op(
        self,
        rank: int,
        device: int,
        launching: int,
        op: int,
        call: int,
        free_us: float,
        before_us: float,
        usual_us: float,
        kind: OpKind,
    ) -> None:
        events = self._events
        start_us, end_us, step = float(events.start_us[op]), float(events.end_us[op]), int(events.step[op])
        name = int(events.name[op])
        label = f"{self._trace.names[name]}@{rank}"
        ready_us = max(free_us, before_us)
        needs: list[int] = []
        if call >= 0:
            called_us = float(events.start_us[call])
            bound = called_us + usual_us >= ready_us
            latency_us = max(start_us - called_us, 0.0) if bound else min(usual_us, max(start_us - called_us, 0.0))
            needs.append(self._add(_Op(launching, latency_us, OpKind.HOST, step), LAUNCHES, name, f"launch of {label}"))
            self._edges.append((self._out[call], needs[0]))
            ready_us = max(ready_us, called_us + latency_us)
        gap_us = max(start_us - ready_us, 0.0) if np.isfinite(ready_us) else 0.0
        lead_us = 0.0 if np.isfinite(ready_us) else start_us - self._begin_us
        own_us = end_us - max(start_us, before_us)
        collective = int(events.collective[op]) if op in self._last_post_us else -1
        if collective >= 0:
            paused = _Op(device, gap_us, OpKind.COMM, step, unexplained_us=gap_us, lead_us=lead_us)
            pause = self._add(paused, PAUSES, name, f"before {label}")
            self._edges += [(need, pause) for need in needs]
            self._waiting += [(s, pause, False) for s, _ in self._sources.get(op, ())]
            needs, gap_us, lead_us, own_us = [pause], 0.0, 0.0, end_us - self._last_post_us[op]
        runs = _Op(
            device, gap_us + max(own_us, 0.0), kind, step,
            event=op, on_device=self._host_kind == OpKind.HOST, collective=collective, unexplained_us=gap_us, lead_us=lead_us,
        )  # fmt: skip
        node = self._add(runs, RUNS, name, label)
        self._of_event[op] = node
        self._edges += [(need, node) for need in needs]
        if collective < 0:
            self._waiting += [(s, node, False) for s, k in self._sources.get(op, ()) if k != DependencyKind.LAUNCH]

    def _launch(self, op: int) -> int:
        """The call that launched an op, if its moment is known; -1: none."""
        return next((s for s, kind in self._sources.get(op, ()) if kind == DependencyKind.LAUNCH and s in self._out), -1)

    def _free_us(self, op: int) -> float:
        """When what an op waited for, beside its launch, had ended."""
        ends = [float(self._events.end_us[s]) for s, kind in self._sources.get(op, ()) if kind != DependencyKind.LAUNCH]
        return max(ends, default=-np.inf)

    def _usual_latency(self, ops: Ints, launch: dict[int, int], free_us: dict[int, float], before_us: dict[int, float]) -> float:
        """Median time from the call to the start, of ops whose stream was idle at the call."""
        events = self._events
        found = [
            float(events.start_us[op] - events.start_us[launch[op]])
            for op in ops.tolist()
            if launch[op] >= 0 and max(free_us[op], before_us[op]) <= events.start_us[launch[op]]
        ]
        return max(float(np.median(found)), 0.0) if found else machine_constants().gpu.launch_us


def _overlap_us(spans: Floats, start_us: float, end_us: float) -> float:
    """Time that disjoint spans, [2, spans], have in common with a stretch."""
    return float(np.maximum(np.minimum(spans[1], end_us) - np.maximum(spans[0], start_us), 0.0).sum())
