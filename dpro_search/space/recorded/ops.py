"""``recorded_ops(trace)``: everything that ran in the recorded steps of a trace with streams and dependencies, as ops.

A rank has three kinds of devices. **Streams** run what ran on them, in program order. **Host threads** are cut at the moments at
which they launched work, waited or were waited for; the stretch between two such moments is one op, the thread's own time, without
the waiting. **Launching** takes the time from the call to the earliest start of what was launched, for any number of launches at
once.

A device op can start when its launch has taken effect, its stream is free and what its stream was made to wait for has ended. So an
idle gap of a stream is nobody's constant: it is the host's time where the launch came late, and the wait for another stream where
that came late. `RecordedOps.unexplained_us` counts what remains. Up to `UNEXPLAINED_US`, in which a stream turns from one kernel to
the next, it is part of the op. A longer gap is an op of its own before that op, of kind `OpKind.UNKNOWN`: no recorded launch, order
or wait says what the device did or waited for, so that it is neither computation nor communication.

The parts of a collective that was matched across ranks are enqueued when their streams take them and move data from the last
enqueue on: their duration is the time from the last rank's start to the end, so that no rank's waiting is part of it. Where the
other ranks were not recorded, a collective is an op of its recorded duration: **the wait for the others is inside, and stays when
something changes**.

Where no device worked, a step ends where its script's thread says so, which is a moment of that thread too. So what a thread does
after its last collective belongs to the step in which it does it.

Traces without launches (ops on threads, matched by data dependencies) are graphs of their outermost ops; a thread's pause before an
op that no dependency explains is part of that op.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro_search.collect.readers.kineto.device_waits import UNEXPLAINED_US
from dpro_search.collect.trace import DependencyKind, EventKind, Floats, Ints, Role, Trace
from dpro_search.errors import GraphError
from dpro_search.graph.dataflow import OpKind
from dpro_search.machine import machine_constants
from dpro_search.space.recorded.events import (
    CALL_KINDS,
    CLOSES,
    DEVICE_KINDS,
    ENDS,
    LAUNCHES,
    MAIN_THREAD,
    PAUSES,
    RESUMES,
    RUNS,
    WAITS,
    WAITS_OF_HOST,
    Bools,
    complete_us,
    compute_kinds,
    first_launched,
    host_points,
    last_enqueues,
    outermost,
    sources_of,
    step_ends,
    steps_in_order,
)
from dpro_search.space.recorded.op_table import COLUMNS, Block, TableOp, block_of, codes, empty_block, occurrences
from dpro_search.space.replay_graph import Int32s, OrderPolicy

# What stands before an event's name in the name of an op.
_ROLES = {
    ENDS: "host until the end of ",
    LAUNCHES: "host until the launch of ",
    WAITS: "host until the wait in ",
    PAUSES: "before ",
    RUNS: "",
}
_LAUNCH = "launch of "  # likewise, of an op of the device that launches
_CLOSING = "host until the end of the step"  # the whole name


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
    about: Ints  # Event that each op is, launches, or ends before, [n].
    role: npt.NDArray[np.int8]  # Role of each op for its event, [n]: one of the numbers of `recorded.events`.
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


def transfer_limits_us(trace: Trace, ops: RecordedOps, residual_us: float) -> tuple[Floats, Floats]:
    """Durations of all ops, [n] each, with transfers as short and as long as they can be if clocks differ by up to `residual_us`.

    A transfer that several ranks take part in begins when the last of them has enqueued it, which is known only as well as the
    clocks are. It is never longer than the collective took on any of the ranks, by that rank's own clock.
    """
    events = trace.events
    parts = np.flatnonzero((ops.collective >= 0) & (ops.role == RUNS) & (ops.event >= 0))
    _, group = np.unique(ops.collective[parts], return_inverse=True)
    least_us = np.full(int(group.max(initial=-1)) + 1, np.inf)
    np.minimum.at(least_us, group, events.end_us[ops.event[parts]] - events.start_us[ops.event[parts]])
    shortest_us, longest_us = ops.duration_us.copy(), ops.duration_us.copy()
    shortest_us[parts] = np.maximum(shortest_us[parts] - residual_us, 0.0)
    longest_us[parts] = np.maximum(np.minimum(longest_us[parts] + residual_us, least_us[group]), longest_us[parts])
    return shortest_us, longest_us


# A device op that starts later after its call, on an idle stream, waits for something else than its launch: so many times the
# usual latency, and so long at the least. 99 % of the launches of eight profiles of V100, A100 and H200 take 15 to 39 us.
_LONG_LATENCY = 10
_LONG_LATENCY_US = 100.0


class _Builder:
    """Makes ops rank by rank, a thread or a stream at a time; dependencies between them are resolved at the end."""

    def __init__(self, trace: Trace) -> None:
        events, needs = trace.events, trace.dependencies
        self._trace, self._events, self._needs = trace, events, needs
        self._complete_us = complete_us(trace)
        self._in_step = np.isin(events.step, trace.steps.index) & (events.step >= 0)
        self._steps = steps_in_order(trace)
        self._step_before = dict(zip(self._steps[1:], self._steps, strict=False))
        self._step_begin_us = {step: self._end_us(before) for step, before in self._step_before.items()}
        self._last_post_us = last_enqueues(trace, self._in_step)
        self._begin_us = float(events.start_us[self._in_step].min()) if self._in_step.any() else 0.0
        # Where no kernel ran, host threads compute themselves.
        on_devices = np.isin(events.kind, (EventKind.KERNEL, EventKind.COPY, EventKind.UNKNOWN)).any()
        self._host_kind = OpKind.HOST if on_devices or trace.meta.unrecorded_devices else OpKind.FORWARD
        self._numbers = trace.meta.numbers  # of the ranks in the job
        # When what an event waited for, beside its launch, had ended; by event.
        self._free_us = np.full(len(events), -np.inf)
        waited = needs.kind != DependencyKind.LAUNCH
        np.maximum.at(self._free_us, needs.target[waited], self._complete_us[needs.source[waited]])
        by_rank = np.argsort(events.rank[needs.target], kind="stable")
        ranks, first = np.unique(events.rank[needs.target[by_rank]], return_index=True)
        # Indices of the dependencies of each rank's events, in order.
        self._needs_of_rank: dict[int, Ints] = defaultdict(lambda: np.zeros(0, np.int64))
        self._needs_of_rank |= zip(ranks.tolist(), np.split(by_rank, first[1:]), strict=False)
        self._first_launched = first_launched(trace)
        self._handed = sources_of(trace, DependencyKind.HOST)
        self._awaited = sources_of(trace, *WAITS_OF_HOST)
        self._blocks: list[Block] = []
        self._count = 0
        self._edges: list[Ints] = [np.zeros((2, 0), np.int64)]  # source and target
        self._waiting: list[Ints] = [np.zeros((3, 0), np.int64)]  # event, op that needs it, whether at the end of a host event
        nothing = np.full(len(events), -1, np.int64)
        # Ops by event, -1: none.
        self._of_event = nothing  # that ends when the event does
        self._waits_for = nothing.copy()  # that waits in the place of the event
        self._call = nothing.copy()  # the event that launched it
        self._out = nothing.copy()  # stretch of a host thread that ends where a call launches
        self._after = nothing.copy()  # stretch of a host thread that ends where the event does
        self._policy: list[int] = []
        self._rank_of_device: list[int] = []
        self._places: list[str] = []  # names of the devices within their ranks

    def add_rank(self, rank: int) -> None:
        events = self._events
        rank_events = np.flatnonzero((events.rank == rank) & self._in_step)
        calls = np.isin(events.kind[rank_events], CALL_KINDS)
        on_device = np.isin(events.kind[rank_events], DEVICE_KINDS)
        if calls.any():
            self._add_host(rank, rank_events[~on_device])
            self._add_streams(rank, rank_events[on_device])
        else:
            self._add_streams(rank, outermost(events.stream, events.start_us, events.end_us, rank_events))

    def finish(self) -> RecordedOps:
        if not self._count:
            raise GraphError("no op of the trace ran in a step: nothing to replay")
        columns = {name: np.concatenate([block.pop(name) for block in self._blocks]) for name in COLUMNS}
        name, role, device, step = columns.pop("name"), columns.pop("role"), columns.pop("device"), columns.pop("step")
        source, target = self._resolved()
        policy, rank_of_device = np.array(self._policy, np.int8), np.array(self._rank_of_device, np.int32)
        _, place = np.unique(self._places, return_inverse=True)
        occurrence = occurrences(codes(step, device, role, name))
        ran = set(step.tolist())
        return RecordedOps(
            device=device.astype(np.int32),
            duration_us=np.maximum(columns.pop("duration_us"), 0.0),
            collective=columns.pop("collective").astype(np.int32),
            step=step,
            role=role.astype(np.int8),
            key=codes(device, role, name, occurrence),
            peer=codes(place[device], role, name, occurrence),
            name=self._labels(name, role, policy[device] == OrderPolicy.UNBOUNDED, rank_of_device[device]),
            source=source,
            target=target,
            policy=policy,
            rank_of_device=rank_of_device,
            device_names=tuple(
                f"{place} of rank {self._numbers[rank]}" for place, rank in zip(self._places, self._rank_of_device, strict=True)
            ),
            steps=tuple(step for step in self._steps if step in ran),
            **columns,
        )

    def _resolved(self) -> tuple[Ints, Ints]:
        """Source and target of all dependencies: those between the ops of one event first, then those between events."""
        edges = np.concatenate(self._edges, axis=1)
        event, op, at_end = np.concatenate(self._waiting, axis=1)
        needed = np.where(at_end, self._after[event], self._of_event[event])
        known = needed >= 0
        edges, waits = edges[:, np.argsort(edges[1], kind="stable")], np.stack((needed, op))[:, known]
        waits = waits[:, np.argsort(waits[1], kind="stable")]
        source, target = np.concatenate((edges, waits), axis=1)
        return source, target

    def _labels(self, name: Ints, role: Ints, launching: Bools, rank: Int32s) -> tuple[str, ...]:
        names = self._trace.names
        rows = zip(name.tolist(), role.tolist(), launching.tolist(), rank.tolist(), strict=True)
        return tuple(
            f"{_CLOSING if what == CLOSES else f'{_LAUNCH if launch else _ROLES[what]}{names[n]}'}@{self._numbers[r]}"
            for n, what, launch, r in rows
        )

    def _end_us(self, step: int) -> float:
        steps = self._trace.steps
        return float(steps.end_us[steps.index == step].max())

    def _device(self, rank: int, policy: OrderPolicy, place: str) -> int:
        self._policy.append(int(policy))
        self._rank_of_device.append(rank)
        self._places.append(place)
        return len(self._policy) - 1

    def _add(self, block: Block) -> None:
        self._blocks.append(block)
        self._count += len(block["device"])

    def _add_host(self, rank: int, host: Ints) -> None:
        events = self._events
        streams, times_us, orders, at = host_points(self._trace, host, self._in_step)
        about = np.where(orders == LAUNCHES, self._first_launched[at], at)
        columns = [times_us, orders, at, about, events.name[about], events.step[at]]
        closed, begin_us = step_ends(self._trace, rank, host), {}
        if len(closed.time_us):
            more = [closed.time_us, np.full(len(closed.event), CLOSES), closed.event, closed.event, np.full(len(closed.event), -1)]
            streams = np.append(streams, np.full(len(closed.event), MAIN_THREAD))
            columns = [np.append(column, rows) for column, rows in zip(columns, (*more, closed.step), strict=True)]
            order = np.lexsort((columns[2], columns[1], columns[0], streams))
            streams, columns = streams[order], [column[order] for column in columns]
            begin_us[MAIN_THREAD] = max(closed.begin_us, self._begin_us)
        for stream in np.unique(streams)[::-1].tolist():
            device = self._device(rank, OrderPolicy.PROGRAM, f"host thread {-stream}" if stream < 0 else f"host thread {stream}")
            on_stream = streams == stream
            points = list(zip(*(column[on_stream].tolist() for column in columns), strict=True))
            on_thread = host[events.stream[host] == stream]
            loads = on_thread[events.role[on_thread] == Role.LOADING]
            spans = np.stack((events.start_us[loads], events.end_us[loads]))
            known_us = begin_us.get(stream)
            first_us = float(events.start_us[on_thread].min()) if known_us is None else known_us
            self._add_thread(device, points, first_us, spans, known=known_us is not None)

    def _add_thread(
        self, device: int, points: list[tuple[float, int, int, int, int, int]], begin_us: float, loading: Floats, *, known: bool
    ) -> None:
        """Stretches between the points of a thread, each with what had to come before it.

        Points are (time, what happens, event, the event it is about, name, step); spans of loading are [2, spans]. `known`: whether
        the thread was at work from `begin_us` on.
        """
        complete_us = self._complete_us
        # A thread of a rank whose device was not recorded launches and waits for what is not known.
        kind = OpKind.UNKNOWN if self._rank_of_device[device] in self._trace.meta.unrecorded_devices else self._host_kind
        cursor_us, lead_us = begin_us, begin_us - self._begin_us
        last_step = -1
        waits: list[tuple[int, bool]] = []
        stretches: list[TableOp] = []
        waiting: list[tuple[int, int, bool]] = []
        ended_at: list[int] = []  # the event at which each stretch ends
        for time_us, order, event, about, name, step in points:
            if order == RESUMES:
                sources = self._handed[event]
                waits += [(s, True) for s in sources]
                arrival_us = max(float(complete_us[s]) for s in sources)
                free_us = cursor_us if known else -np.inf  # a thread that begins so was idle before
                cursor_us, known, lead_us = max(free_us, min(arrival_us, time_us)), True, 0.0
                continue
            before = self._step_before.get(step)
            if not waits and before is not None and last_step not in (before, step):  # it had nothing to do in the step before
                idle_since_us = cursor_us if known else self._begin_us
                cursor_us = max(idle_since_us, min(self._step_begin_us[step], time_us))
                known, lead_us = True, cursor_us - idle_since_us
            last_step = step
            loading_us = _overlap_us(loading, cursor_us, time_us) if loading.size else 0.0
            stretch = TableOp(
                device, time_us - cursor_us, kind, step, order, name,
                about=about, known=known, lead_us=lead_us, loading_us=loading_us, end_us=time_us,
            )  # fmt: skip
            waiting += [(source, self._count + len(stretches), at_end) for source, at_end in waits]
            stretches.append(stretch)
            ended_at.append(event)
            waits = []
            cursor_us, known, lead_us = max(cursor_us, time_us), True, 0.0
            if order == WAITS:
                sources = self._awaited[event]
                waits = [(s, False) for s in sources]
                arrival_us = max(float(complete_us[s]) for s in sources)
                cursor_us = max(cursor_us, min(arrival_us, float(self._events.end_us[event])))
        if not stretches:
            return
        block = block_of(stretches)
        role = block["role"]
        for table, what in ((self._out, LAUNCHES), (self._after, ENDS)):
            table[np.array(ended_at)[role == what]] = self._count + np.flatnonzero(role == what)
        self._waiting.append(np.array(waiting, np.int64).reshape(-1, 3).T)
        self._add(block)

    def _add_streams(self, rank: int, ops: Ints) -> None:
        if not len(ops):
            return
        events = self._events
        ops = ops[np.lexsort((events.end_us[ops], events.start_us[ops], events.stream[ops]))]
        streams, first = np.unique(events.stream[ops], return_index=True)
        before_us = np.concatenate([_before_us(self._complete_us[of_rank]) for of_rank in np.split(ops, first[1:])])
        call = self._launches(rank, ops)
        usual_us = self._usual_latency(ops, call, np.maximum(before_us, self._queued_until_us(rank, ops)))
        launching = self._device(rank, OrderPolicy.UNBOUNDED, "launches") if (call >= 0).any() else -1
        kinds = compute_kinds(self._trace, ops, call)
        places = [f"stream {stream}" if stream >= 0 else f"thread {-stream}" for stream in streams.tolist()]
        devices = np.array([self._device(rank, OrderPolicy.PROGRAM, place) for place in places])
        device = np.repeat(devices, np.diff(np.append(first, len(ops))))
        self._add_device_ops(ops, device, launching, call, before_us, usual_us, kinds)
        needs, of_rank = self._needs, self._needs_of_rank[rank]
        target = needs.target[of_rank]
        waits = (needs.kind[of_rank] != DependencyKind.LAUNCH) | np.isfinite(self._last_post_us[target])
        of_rank = of_rank[waits & (self._waits_for[target] >= 0)]
        op = self._waits_for[needs.target[of_rank]]
        self._waiting.append(np.stack((needs.source[of_rank], op, np.zeros_like(op))))

    def _add_device_ops(
        self, ops: Ints, device: Ints, launching: int, call: Ints, before_us: Floats, usual_us: float, kinds: npt.NDArray[np.int8]
    ) -> None:
        """Add the ops of device events, in order.

        Each op follows its launch. A delay stands behind the launch if that took far longer than launches do. A pause stands before
        the op if it is a part of a collective, or if its stream was idle before it for a reason that is not known.
        """
        events = self._events
        start_us, end_us = events.start_us[ops], self._complete_us[ops]
        ready_us = np.maximum(self._free_us[ops], before_us)
        launched, shared = call >= 0, np.isfinite(self._last_post_us[ops])
        called_us = np.where(launched, events.start_us[call], -np.inf)
        latency_us = np.where(launched, np.maximum(start_us - called_us, 0.0), 0.0)
        latency_us = np.where(called_us + usual_us >= ready_us, latency_us, np.minimum(usual_us, latency_us))
        ready_us = np.maximum(ready_us, called_us + latency_us)
        delay_us = np.zeros(len(ops))  # what is longer than a launch and than its call is a wait that no call shows
        if self._host_kind == OpKind.HOST:
            longest_us = np.maximum(max(_LONG_LATENCY * usual_us, _LONG_LATENCY_US), events.end_us[call] - called_us)
            delay_us = np.where(launched, np.maximum(latency_us - longest_us, 0.0), 0.0)
        # An op that is delayed in one step has a delay in every step, of 0 us in the others, so that all steps have the same ops.
        stream, name = events.stream[ops], events.name[ops]
        op_of_step = codes(stream, name, occurrences(codes(events.step[ops], stream, name)))
        delayed = launched & np.isin(op_of_step, op_of_step[delay_us > 0])
        free = np.isfinite(ready_us)
        gap_us = np.where(free, np.maximum(start_us - ready_us, 0.0), 0.0)
        lead_us = np.where(free, 0.0, start_us - self._begin_us)
        busy_us = end_us - np.where(shared, self._last_post_us[ops], np.maximum(start_us, before_us))

        unknown = (gap_us > UNEXPLAINED_US) & np.isin(events.kind[ops], DEVICE_KINDS)
        pausing = shared | unknown
        rows = np.ones(len(ops), np.int64) + launched + delayed + pausing
        runs = np.cumsum(rows) - 1
        launches, delays, pauses = (runs - pausing - delayed - 1)[launched], (runs - pausing - 1)[delayed], (runs - 1)[pausing]
        of = np.repeat(np.arange(len(ops)), rows)
        block: Block = empty_block(len(of))
        block |= {"device": device[of], "step": events.step[ops][of], "name": events.name[ops][of], "kind": kinds[of]}
        block["role"][:] = RUNS
        block["duration_us"][runs] = np.where(pausing, 0.0, gap_us) + np.maximum(busy_us, 0.0)
        block["about"] = ops[of]
        block["event"][runs] = ops
        block["on_device"][runs] = self._host_kind == OpKind.HOST
        block["collective"][runs] = np.where(shared, events.collective[ops], -1)
        block["role"][pauses] = PAUSES
        block["kind"][pauses] = np.where(unknown[pausing], int(OpKind.UNKNOWN), int(OpKind.COMM))
        block["duration_us"][pauses] = gap_us[pausing]
        waits_for = np.where(pausing, runs - 1, runs)  # the op that waits in the place of its event
        block["unexplained_us"][waits_for] = gap_us
        block["lead_us"][waits_for] = lead_us
        block["device"][launches] = launching
        block["role"][launches] = LAUNCHES
        block["kind"][launches] = int(OpKind.HOST)
        block["duration_us"][launches] = (latency_us - delay_us)[launched]
        block["device"][delays] = launching
        block["role"][delays] = PAUSES
        block["kind"][delays] = int(OpKind.UNKNOWN)
        block["duration_us"][delays] = delay_us[delayed]

        begin = self._count
        self._of_event[ops] = begin + runs
        needed = [(self._out[call[launched]], begin + launches)]
        needed.append((begin + launches, begin + np.where(delayed, runs - pausing - 1, waits_for)[launched]))
        needed.append((begin + delays, begin + waits_for[delayed]))
        needed.append((begin + pauses, begin + runs[pausing]))
        self._edges += [np.stack(edges) for edges in needed]
        self._waits_for[ops] = begin + waits_for
        self._add(block)

    def _launches(self, rank: int, ops: Ints) -> Ints:
        """The call that launched each op of a rank, if its moment is known, [ops]; -1: none."""
        needs, of_rank = self._needs, self._needs_of_rank[rank]
        known = of_rank[(needs.kind[of_rank] == DependencyKind.LAUNCH) & (self._out[needs.source[of_rank]] >= 0)][::-1]
        self._call[needs.target[known]] = needs.source[known]  # of several, the first
        return self._call[ops]

    def _queued_until_us(self, rank: int, ops: Ints) -> Floats:
        """When what is of no step and began before each op of a rank had ended on its stream, [ops]; -inf: none.

        The profiler's window begins with what was launched before it, of which the queue may be full.
        """
        events = self._events
        outside = np.flatnonzero((events.rank == rank) & ~self._in_step & np.isin(events.kind, DEVICE_KINDS))
        until_us = np.full(len(ops), -np.inf)
        for stream in np.unique(events.stream[outside]).tolist():
            early = outside[events.stream[outside] == stream]
            early = early[np.argsort(events.start_us[early], kind="stable")]
            on_stream = np.flatnonzero(events.stream[ops] == stream)
            count = np.searchsorted(events.start_us[early], events.start_us[ops[on_stream]])
            until_us[on_stream] = np.append(-np.inf, np.maximum.accumulate(events.end_us[early]))[count]
        return until_us

    def _usual_latency(self, ops: Ints, call: Ints, before_us: Floats) -> float:
        """Median time from the call to the start, of ops whose stream was idle at the call."""
        start_us = self._events.start_us
        idle = (call >= 0) & (np.maximum(self._free_us[ops], before_us) <= start_us[call])
        if not idle.any():
            return machine_constants().gpu.launch_us
        return max(float(np.median(start_us[ops[idle]] - start_us[call[idle]])), 0.0)


def _before_us(end_us: Floats) -> Floats:
    """When all ops before each op of a stream have ended, from their ends in program order."""
    return np.concatenate(([-np.inf], np.maximum.accumulate(end_us)[:-1]))


def _overlap_us(spans: Floats, start_us: float, end_us: float) -> float:
    """Time that disjoint spans, [2, spans], have in common with a stretch."""
    return float(np.maximum(np.minimum(spans[1], end_us) - np.maximum(spans[0], start_us), 0.0).sum())
