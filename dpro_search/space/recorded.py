"""``recorded_graph(trace) -> ReplayGraph``: a step of a trace whose events carry streams and dependencies.

Three sorts of devices a rank. **Streams** run what ran on them, in program order. **Host threads** are cut at the moments at which
they launched work, waited or were waited for; the stretch between two such moments is one op, the thread's own time, without the
waiting. **Launching** takes the time from the call to the earliest start of what was launched, for any number of launches at once.

A device op can start when its launch has taken effect, its stream is free and what its stream was made to wait for has ended. So an
idle gap of a stream is nobody's constant: it is the host's time where the launch came late, and the wait for another stream where
that came late. What remains, mostly a microsecond between two kernels, is part of the op; `RecordedOps.unexplained_us` counts it.

The parts of a collective that was matched across ranks post when their streams take them and move data from the last post on: their
duration is the time from the last rank's start to the end, so that no rank's waiting is part of it. Where the other ranks were not
recorded, a collective is an op of its recorded duration: **the wait for the others is inside, and stays when something changes**.

Traces without launches (ops on threads, matched by data dependencies) are graphs of their outermost ops; a thread's pause before an
op that no dependency explains is part of that op.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import DependencyKind, EventKind, Floats, Ints, Trace
from dpro_search.errors import GraphError, InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.space.replay_graph import Int32s, OrderPolicy, ReplayGraph, csr

DEVICE_KINDS = (EventKind.KERNEL, EventKind.COPY, EventKind.COLLECTIVE, EventKind.SERVER)
_CALLS = (EventKind.RUNTIME, EventKind.SYNC)
_LAUNCH_US = 6.0  # where no launch of a rank met an idle stream

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class RecordedOps:
    """n ops of all recorded steps, in program order on every device; the ops of a step are those of its `step`.

    Attributes
    ----------
    key
        Ops of different steps are the same if their keys are: a number for device, role, name and how many of it came before, [n].
    unexplained_us
        Part of each op's duration during which its stream was idle though launch and dependencies had allowed a start, [n].
    event
        Event of the trace that each op is, -1 for stretches of a host thread and launches, [n].
    on_device
        Whether the op is work of a device (not of a host thread, nor a launch), [n].
    known
        False where the duration is not the step's own: the first stretch of a thread whose beginning was not recorded, [n].
    lead_us
        Time from the first event of the recording to an op that nothing else holds back, [n]; ranks enter the recording one by one.
    source, target
        Dependencies, [m] each.
    """

    duration_us: Floats
    device: Int32s
    kind: npt.NDArray[np.int8]
    collective: Int32s
    step: Ints
    key: Ints
    event: Ints
    on_device: Bools
    known: Bools
    unexplained_us: Floats
    lead_us: Floats
    name: tuple[str, ...]
    source: Ints
    target: Ints
    policy: npt.NDArray[np.int8]
    rank_of_device: Int32s
    device_names: tuple[str, ...]
    steps: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.duration_us)


def recorded_graph(trace: Trace, step: int | None = None, *, without: Sequence[int] = ()) -> ReplayGraph:
    """One step as a graph, with carried dependencies. Its samples are the durations that the same ops had in the other steps.

    Parameters
    ----------
    step
        The step whose ops and dependencies are taken; None: the one whose iteration is the median.
    without
        Steps that must not count, neither as structure nor as durations.

    Raises
    ------
    InputError
        There is no such step.
    GraphError
        The trace has no op that ran in a step.
    """
    return graph_of_step(recorded_ops(trace), typical_step(trace, without) if step is None else step, without)


def graph_of_step(ops: RecordedOps, step: int, without: Sequence[int] = (), *, samples: bool = True) -> ReplayGraph:
    """The graph of one of the recorded steps (see `recorded_graph`), with a sample for each step but those left out, if wanted."""
    if step not in ops.steps or step in without:
        raise InputError(f"step {step} is not among the recorded steps {', '.join(map(str, ops.steps))}, or was left out")
    mine = np.flatnonzero(ops.step == step)
    number = np.full(len(ops), -1, np.int64)
    number[mine] = np.arange(len(mine))
    inside = (number[ops.source] >= 0) & (number[ops.target] >= 0)
    pred_ptr, pred_idx = csr(number[ops.target[inside]], number[ops.source[inside]], len(mine))
    duration_us, known = ops.duration_us[mine], ops.known[mine]
    samples_us = np.zeros((0, 0))
    if samples or not known.all():
        samples_us = _samples(ops, mine, [s for s in ops.steps if s not in without])
        duration_us = np.where(known, duration_us, np.median(samples_us, axis=0))
    carry_src, carry_dst = _carried(ops, mine, number, step)
    return ReplayGraph(
        duration_us=duration_us,
        device=ops.device[mine],
        pred_ptr=pred_ptr,
        pred_idx=pred_idx,
        policy=ops.policy,
        rank_of_device=ops.rank_of_device,
        kind=ops.kind[mine],
        collective=_whole_collectives(ops.collective[mine]),
        carry_src=carry_src,
        carry_dst=carry_dst,
        samples_us=samples_us.astype(np.float32),
        names=tuple(ops.name[i] for i in mine.tolist()),
        device_names=ops.device_names,
    )


def graph_of_all(ops: RecordedOps) -> ReplayGraph:
    """All steps as one iteration, with the durations that each had, from the first event of the recording on."""
    pred_ptr, pred_idx = csr(ops.target, ops.source, len(ops))
    return ReplayGraph(
        duration_us=ops.duration_us + ops.lead_us,
        device=ops.device,
        pred_ptr=pred_ptr,
        pred_idx=pred_idx,
        policy=ops.policy,
        rank_of_device=ops.rank_of_device,
        kind=ops.kind,
        collective=_whole_collectives(ops.collective),
        names=ops.name,
        device_names=ops.device_names,
    )


def iterations_us(trace: Trace) -> dict[int, float]:
    """Measured iteration of each step but the first: distance of the last device ends (of all ranks) from the step before."""
    steps = trace.steps
    order = [int(s) for s in dict.fromkeys(steps.index[np.argsort(steps.end_us, kind="stable")].tolist())]
    end_us = {step: float(steps.end_us[steps.index == step].max()) for step in order}
    return {step: end_us[step] - end_us[before] for before, step in pairwise(order)}


def typical_step(trace: Trace, without: Iterable[int] = ()) -> int:
    """The step whose iteration is the median (or next above it); the first step only where there is no other."""
    left_out = set(without)
    measured = {step: us for step, us in iterations_us(trace).items() if step not in left_out}
    if measured:
        order = sorted(measured, key=lambda step: measured[step])
        return order[len(order) // 2]
    rest = [int(step) for step in np.unique(trace.steps.index) if step not in left_out]
    if not rest:
        raise InputError("the trace has no step to make a graph of")
    return rest[0]


def recorded_ops(trace: Trace) -> RecordedOps:
    """Everything that ran in the recorded steps, as ops; raises `GraphError` if nothing did."""
    builder = _Builder(trace)
    for rank in np.unique(trace.events.rank).tolist():
        builder.add_rank(rank)
    return builder.finish()


def _carried(ops: RecordedOps, mine: Ints, number: Ints, step: int) -> tuple[Int32s, Int32s]:
    """Each device's last op before its first; and what depended on the step before."""
    first = np.full(len(ops.policy), -1, np.int64)
    last = first.copy()
    device = ops.device[mine]
    first[device[::-1]] = np.arange(len(mine))[::-1]
    last[device] = np.arange(len(mine))
    ordered = (first >= 0) & (ops.policy == OrderPolicy.PROGRAM)
    at = ops.steps.index(step)
    if at == 0:
        return last[ordered].astype(np.int32), first[ordered].astype(np.int32)
    before = ops.steps[at - 1]
    crossing = (number[ops.target] >= 0) & (ops.step[ops.source] == before)
    of_key = dict(zip(ops.key[mine].tolist(), range(len(mine)), strict=True))
    pairs = [
        (of_key[key], int(number[target]))
        for key, target in zip(ops.key[ops.source[crossing]].tolist(), ops.target[crossing].tolist(), strict=True)
        if key in of_key
    ]
    extra = np.array(pairs, np.int64).reshape(-1, 2)
    source = np.concatenate((last[ordered], extra[:, 0]))
    return source.astype(np.int32), np.concatenate((first[ordered], extra[:, 1])).astype(np.int32)


def _samples(ops: RecordedOps, mine: Ints, steps: Sequence[int]) -> Floats:
    """Duration of each op in each step, [steps, ops]; the median of the others where a step has no such op."""
    order = np.argsort(ops.key[mine], kind="stable")
    keys = ops.key[mine][order]
    table = np.full((len(steps), len(mine)), np.nan)
    for row, step in enumerate(steps):
        theirs = np.flatnonzero((ops.step == step) & ops.known)
        at = np.minimum(np.searchsorted(keys, ops.key[theirs]), len(keys) - 1)
        same = keys[at] == ops.key[theirs]
        table[row, order[at[same]]] = ops.duration_us[theirs[same]]
    nobody = np.isnan(table).all(axis=0)
    table[:, nobody] = ops.duration_us[mine[nobody]]
    usual = np.nanmedian(table, axis=0)
    return np.where(np.isnan(table), usual, table)


def _whole_collectives(collective: Int32s) -> Int32s:
    """Renumbered from 0; empty where there are none."""
    if not (collective >= 0).any():
        return np.zeros(0, np.int32)
    numbers, index = np.unique(collective, return_inverse=True)
    return (index - int(numbers[0] < 0)).astype(np.int32)


class _Builder:
    """Makes ops rank by rank; dependencies between them are resolved at the end."""

    def __init__(self, trace: Trace) -> None:
        events = trace.events
        self._trace, self._events = trace, events
        self._in_step = np.isin(events.step, trace.steps.index) & (events.step >= 0)
        self._steps = _steps_in_order(trace)
        self._sources = _incoming(trace)
        self._last_post_us = _last_posts(trace, self._in_step)
        self._launched = _launched(trace)
        self._ops: list[tuple[int, float, int, int, int, int, bool, bool, float, float]] = []
        self._begin_us = float(events.start_us[self._in_step].min()) if self._in_step.any() else 0.0
        self._keys: dict[tuple[int, int, int, int], int] = {}
        self._seen: dict[tuple[int, int, int, int], int] = {}
        self._key: list[int] = []
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
        calls = np.isin(events.kind[mine], _CALLS)
        on_device = np.isin(events.kind[mine], DEVICE_KINDS)
        if calls.any():
            self._add_host(rank, mine[~on_device])
            self._add_streams(rank, mine[on_device])
        else:
            self._add_streams(rank, _outermost(events.stream, events.start_us, events.end_us, mine))

    def finish(self) -> RecordedOps:
        if not self._ops:
            raise GraphError("no op of the trace ran in a step: nothing to replay")
        for event, op, at_end in self._waiting:
            table = self._after if at_end else self._of_event
            if event in table:
                self._edges.append((table[event], op))
        columns = list(zip(*self._ops, strict=True))
        edges = np.array(self._edges, np.int64).reshape(-1, 2)
        ran = set(columns[4])
        return RecordedOps(
            device=np.array(columns[0], np.int32),
            duration_us=np.maximum(np.array(columns[1], np.float64), 0.0),
            kind=np.array(columns[2], np.int8),
            collective=np.array(columns[3], np.int32),
            step=np.array(columns[4], np.int64),
            event=np.array(columns[5], np.int64),
            on_device=np.array(columns[6], np.bool_),
            known=np.array(columns[7], np.bool_),
            unexplained_us=np.array(columns[8], np.float64),
            lead_us=np.array(columns[9], np.float64),
            key=np.array(self._key, np.int64),
            name=tuple(self._names),
            source=edges[:, 0],
            target=edges[:, 1],
            policy=np.array(self._policy, np.int8),
            rank_of_device=np.array(self._rank_of_device, np.int32),
            device_names=tuple(self._device_names),
            steps=tuple(step for step in self._steps if step in ran),
        )

    def _device(self, rank: int, policy: OrderPolicy, name: str) -> int:
        self._policy.append(int(policy))
        self._rank_of_device.append(rank)
        self._device_names.append(f"{name} of rank {rank}")
        return len(self._policy) - 1

    def _op(
        self, device: int, duration_us: float, kind: OpKind, step: int, role: int, name: int, label: str, *,
        event: int = -1, on_device: bool = False, collective: int = -1, known: bool = True, unexplained_us: float = 0.0,
        lead_us: float = 0.0,
    ) -> int:  # fmt: skip
        in_step = (step, device, role, name)
        occurrence = self._seen[in_step] = self._seen.get(in_step, -1) + 1
        self._key.append(self._keys.setdefault((device, role, name, occurrence), len(self._keys)))
        self._names.append(label)
        self._ops.append((device, duration_us, int(kind), collective, step, event, on_device, known, unexplained_us, lead_us))
        return len(self._ops) - 1

    def _add_host(self, rank: int, host: Ints) -> None:
        events = self._events
        points = _host_points(self._trace, self._sources, host, self._in_step)
        for stream in sorted({stream for stream, _, _, _ in points}, reverse=True):
            device = self._device(rank, OrderPolicy.PROGRAM, f"host thread {-stream}" if stream < 0 else f"host thread {stream}")
            mine = sorted((us, order, event) for s, us, order, event in points if s == stream)
            on_thread = host[events.stream[host] == stream]
            self._add_thread(rank, device, mine, float(events.start_us[on_thread].min()))

    def _add_thread(self, rank: int, device: int, points: list[tuple[float, int, int]], begin_us: float) -> None:
        """Stretches between the points of a thread, each with what had to come before it."""
        events, names = self._events, self._trace.names
        cursor_us, known, lead_us = begin_us, False, begin_us - self._begin_us
        waits: list[tuple[int, bool]] = []
        for time_us, order, event in points:
            name = int(events.name[self._launched.get(event, event)] if order == _LAUNCHES else events.name[event])
            if order == _RESUMES:
                sources = [s for s, kind in self._sources[event] if kind == DependencyKind.HOST]
                waits += [(s, True) for s in sources]
                arrival_us = max(float(events.end_us[s]) for s in sources)
                free_us = cursor_us if known else -np.inf  # a thread that begins so was idle before
                cursor_us, known, lead_us = max(free_us, min(arrival_us, time_us)), True, 0.0
                continue
            label = f"{_ROLES[order]} {names[name]}@{rank}"
            step = int(events.step[event])
            op = self._op(device, time_us - cursor_us, OpKind.HOST, step, order, name, label, known=known, lead_us=lead_us)
            self._waiting += [(source, op, at_end) for source, at_end in waits]
            waits = []
            cursor_us, known, lead_us = max(cursor_us, time_us), True, 0.0
            if order == _LAUNCHES:
                self._out[event] = op
            elif order == _ENDS:
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
        kinds = _compute_kinds(self._trace, ops, launch)
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
            needs.append(self._op(launching, latency_us, OpKind.HOST, step, _LAUNCHES, name, f"launch of {label}"))
            self._edges.append((self._out[call], needs[0]))
            ready_us = max(ready_us, called_us + latency_us)
        gap_us = max(start_us - ready_us, 0.0) if np.isfinite(ready_us) else 0.0
        lead_us = 0.0 if np.isfinite(ready_us) else start_us - self._begin_us
        own_us = end_us - max(start_us, before_us)
        collective = int(events.collective[op]) if op in self._last_post_us else -1
        if collective >= 0:
            pause = self._op(
                device, gap_us, OpKind.COMM, step, _PAUSES, name, f"before {label}", unexplained_us=gap_us, lead_us=lead_us
            )
            self._edges += [(need, pause) for need in needs]
            self._waiting += [(s, pause, False) for s, _ in self._sources.get(op, ())]
            needs, gap_us, lead_us, own_us = [pause], 0.0, 0.0, end_us - self._last_post_us[op]
        node = self._op(
            device, gap_us + max(own_us, 0.0), kind, step, _RUNS, name, label,
            event=op, on_device=True, collective=collective, unexplained_us=gap_us, lead_us=lead_us,
        )  # fmt: skip
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
        return max(float(np.median(found)), 0.0) if found else _LAUNCH_US


# What an op's key says of it; also the order of points of one thread at one time.
_RESUMES, _ENDS, _LAUNCHES, _WAITS, _RUNS, _PAUSES = range(6)
_ROLES = {_ENDS: "host until the end of", _LAUNCHES: "host until the launch of", _WAITS: "host until the wait in"}


def _steps_in_order(trace: Trace) -> tuple[int, ...]:
    order = np.argsort(trace.steps.end_us, kind="stable")
    return tuple(int(step) for step in dict.fromkeys(trace.steps.index[order].tolist()))


def _incoming(trace: Trace) -> dict[int, list[tuple[int, int]]]:
    """(source, kind) of the dependencies of each event."""
    needs = trace.dependencies
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for source, target, kind in zip(needs.source.tolist(), needs.target.tolist(), needs.kind.tolist(), strict=True):
        found[target].append((source, kind))
    return found


def _launched(trace: Trace) -> dict[int, int]:
    """The first op that each call launched."""
    needs = trace.dependencies
    launches = np.flatnonzero(needs.kind == DependencyKind.LAUNCH)[::-1]
    return dict(zip(needs.source[launches].tolist(), needs.target[launches].tolist(), strict=True))


def _last_posts(trace: Trace, in_step: Bools) -> dict[int, float]:
    """When the last rank posted, for each part of a collective that several ranks are seen to post."""
    events = trace.events
    parts = np.flatnonzero((events.collective >= 0) & (events.kind == EventKind.COLLECTIVE) & in_step)
    if not len(parts):
        return {}
    _, group, count = np.unique(events.collective[parts], return_inverse=True, return_counts=True)
    last_us = np.full(len(count), -np.inf)
    np.maximum.at(last_us, group, events.start_us[parts])
    shared = count[group] > 1
    return dict(zip(parts[shared].tolist(), last_us[group[shared]].tolist(), strict=True))


def _host_points(
    trace: Trace, sources: dict[int, list[tuple[int, int]]], host: Ints, in_step: Bools
) -> list[tuple[int, float, int, int]]:
    """(thread, time, what happens, event) where a rank's host threads launch, wait, or are waited for."""
    events, needs = trace.events, trace.dependencies
    mine = np.zeros(len(events), np.bool_)
    mine[host] = True
    points = []
    leaving = mine[needs.source] & in_step[needs.target]
    for kind, order in ((DependencyKind.LAUNCH, _LAUNCHES), (DependencyKind.HOST, _ENDS)):
        for event in np.unique(needs.source[leaving & (needs.kind == kind)]).tolist():
            time_us = events.start_us[event] if order == _LAUNCHES else events.end_us[event]
            points.append((int(events.stream[event]), float(time_us), order, event))
    arriving = mine[needs.target] & in_step[needs.source]
    for kind, order in ((DependencyKind.SYNC, _WAITS), (DependencyKind.HOST, _RESUMES)):
        found = np.unique(needs.target[arriving & (needs.kind == kind)]).tolist()
        points += [(int(events.stream[event]), float(events.start_us[event]), order, event) for event in found]
    return points


def _outermost(stream: Ints, start_us: Floats, end_us: Floats, rows: Ints) -> Ints:
    """Rows that no other of their stream contains."""
    order = rows[np.lexsort((-end_us[rows], start_us[rows], stream[rows]))]
    kept, current, reach = [], None, -np.inf
    for row in order.tolist():
        if stream[row] != current:
            current, reach = stream[row], -np.inf
        if end_us[row] > reach or start_us[row] >= reach:
            kept.append(row)
            reach = max(reach, float(end_us[row]))
    return np.array(sorted(kept), np.int64)


def _compute_kinds(trace: Trace, ops: Ints, launch: dict[int, int]) -> dict[int, OpKind]:
    """Kind of each device op: what the autograd thread launched is backward, what an optimizer step launched is the update."""
    events = trace.events
    optimizer = np.array([name.startswith(("Optimizer.step", "optimizer.step")) for name in trace.names] or [False])
    spans = np.flatnonzero(optimizer[events.name] & ~np.isin(events.kind, DEVICE_KINDS))
    spans = spans[np.argsort(events.start_us[spans], kind="stable")]
    kinds = {}
    for op in ops.tolist():
        kind, call = int(events.kind[op]), launch[op]
        if kind == EventKind.COLLECTIVE:
            kinds[op] = OpKind.COMM
        elif kind == EventKind.COPY:
            kinds[op] = OpKind.IO
        elif kind == EventKind.SERVER:
            kinds[op] = OpKind.SERVER
        elif call < 0:
            kinds[op] = OpKind.FORWARD
        else:
            at = int(np.searchsorted(events.start_us[spans], events.start_us[call], side="right")) - 1
            updates = at >= 0 and events.end_us[spans[at]] >= events.start_us[call] and events.rank[spans[at]] == events.rank[call]
            backward = events.stream[call] < -1
            kinds[op] = OpKind.UPDATE if updates else OpKind.BACKWARD if backward else OpKind.FORWARD
    return kinds
