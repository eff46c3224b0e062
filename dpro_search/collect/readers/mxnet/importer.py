"""MXNet's profiler: one JSON file a process, of workers and of parameter servers, with the model's symbol graph where it was kept.

Operators are matched to the graph (see `node_matching`). A worker's KVStore operation is one span per key and step, from the moment
at which its gradient was ready to that at which the new value was there; where the server was recorded, the span is divided into
the way there, the server's work and the way back. Keys are not in the files: a worker's are found from the graph, a server's from
the time at which it can have worked on a key and from how long it took.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpro_search.collect.assemble.described import described
from dpro_search.collect.clock import CommSpans
from dpro_search.collect.readers._salvage import shown
from dpro_search.collect.readers.event_table import EventTable, clocks_checked
from dpro_search.collect.readers.importers import Importer, read_head
from dpro_search.collect.readers.mxnet.files import COMM, Profile, Span, Symbol, is_symbol, read_profile, read_symbol
from dpro_search.collect.readers.mxnet.node_matching import (
    SAME_TYPE,
    identified_by_order,
    identified_by_size,
    match_backward,
    match_forward,
    match_gradients,
    unmatched_warnings,
)
from dpro_search.collect.readers.mxnet.servers import Comm, ServerWork
from dpro_search.collect.recorded_names import role_in_mxnet
from dpro_search.collect.trace import (
    ClockReport,
    CollectiveKind,
    DependencyKind,
    EventKind,
    NodeGraph,
    TensorInfo,
    Trace,
)
from dpro_search.errors import InputError, TraceFormatError

FORMAT = "mxnet-profiler"

_MARKS = (b'"MXNET_C_API"', b'"cpu pinned/"', b'"cpu shared/"')
_STEP = re.compile(r"\D*(\d{1,15})\D*")
_AWAIT = re.compile(r"Wait|SyncCopy")
_OF_STORE = re.compile(r"CopyCPU2CPU|_update")  # copies of gradients and weights, and updates: of no node
_API_STREAM = 100


def recognise(head: bytes, path: Path) -> bool:
    """Whether a file that begins with `head` was written by MXNet's profiler."""
    return b"traceEvents" in head and any(mark in head for mark in _MARKS)


def companion(head: bytes, path: Path) -> bool:
    """Whether a file is the symbol graph of a model."""
    return is_symbol(head)


def read(paths: Sequence[Path]) -> Trace:
    """Read the profiles of the processes of one job.

    Operators are KERNEL events: the engine's threads are devices, on which API calls (RUNTIME) launch work and for which others
    (SYNC) wait. Ranks are the workers (processes that computed gradients) in the order of their paths, then the servers. Steps are
    the tasks that the script marked, else from one first operator to the next. KVStore spans (COMM) of one key and step share a
    collective number; their ways to the server and back are COLLECTIVE events.

    Raises
    ------
    InputError
        A file cannot be read, or the workers' clocks contradict each other.
    TraceFormatError
        No operator in any file.
    """
    dropped: Counter[str] = Counter()
    graphs = [path for path in paths if is_symbol(read_head(path))]
    profiles = [read_profile(path, dropped) for path in paths if path not in graphs]
    for profile in profiles:
        dropped[f"ranks without an operator: {shown(profile.path)}"] += not profile.ops
    profiles = [profile for profile in profiles if profile.ops]
    if not profiles:
        raise TraceFormatError(f"{paths[0]}: no operator of MXNet in it; record with profile_all=True, aggregate_stats=True")
    symbols = [symbol for path in graphs if (symbol := read_symbol(path)) is not None]
    dropped["damaged symbol graphs"] += len(graphs) - len(symbols)
    dropped["further symbol graphs"] += max(len(symbols) - 1, 0)
    workers = [profile for profile in profiles if profile.trains] or profiles
    servers = [profile for profile in profiles if profile not in workers]
    try:
        return described(trace_of_profiles(workers, servers, symbols[0] if symbols else None, dropped))
    except InputError as error:
        raise InputError(f"{paths[0]}: {error}") from error


def trace_of_profiles(
    workers: Sequence[Profile], servers: Sequence[Profile], symbol: Symbol | None, dropped: Counter[str]
) -> Trace:
    """The trace of profiles whose roles are known, in the order of the ranks; `dropped` is what their readers left out.

    Raises `InputError` if the workers' clocks contradict each other.
    """
    return ProfileWriter(workers, servers, symbol, dropped).trace()


def step_starts(profile: Profile) -> list[tuple[int, float, float]]:
    """(index, start_us, end_us) of the steps of one worker, in order."""
    marked = [(int(number[1]), task.start_us, task.end_us) for task in profile.tasks if (number := _STEP.fullmatch(task.name))]
    if marked:
        return marked
    first = profile.ops[0].name
    cuts = [profile.ops[0].start_us]
    trained = False
    for op in profile.ops:
        if op.name == first and trained:
            cuts.append(op.start_us)
            trained = False
        trained |= op.name.startswith("_backward_")
    last = max(op.end_us for op in profile.ops)
    return [(i, start, end) for i, (start, end) in enumerate(zip(cuts, [*cuts[1:], last], strict=True))]


class ProfileWriter:
    """Makes the events of all ranks."""

    def __init__(
        self, workers: Sequence[Profile], servers: Sequence[Profile], symbol: Symbol | None, dropped: Counter[str]
    ) -> None:
        self._workers, self._servers, self._symbol, self._dropped = workers, servers, symbol, dropped
        self._base_us = min(profile.ops[0].start_us for profile in (*workers, *servers))
        self._table = EventTable()
        self._tensors: dict[int, int] = {}  # parameter -> tensor
        self._comm: list[list[Comm]] = []
        self._unmatched: Counter[str] = Counter()
        self._op_us = self._unmatched_us = 0.0
        self._collectives = 0
        # A push-pull of a parameter server is two messages.
        self._comm_kind = CollectiveKind.ALL_REDUCE if self._comm_name() == "horovod" else CollectiveKind.UNKNOWN
        self._pushes: list[tuple[list[tuple[int, float]], list[Comm]]] = []  # calls and what they sent, of each rank and step

    def trace(self) -> Trace:
        steps = [step_starts(profile) for profile in self._workers]
        for rank, profile in enumerate(self._workers):
            self._add_worker(rank, profile, steps[rank])
        self._tell_apart()
        self._add_launches()
        self._number_collectives()
        clock = self._clock()
        work = ServerWork(
            self._table,
            base_us=self._base_us,
            clock=clock,
            common=self._common(),
            workers=len(self._workers),
            tensors=self._tensors,
            unmatched=self._unmatched,
            least_size=self._least_size,
            name=self._parameter_name,
            first_collective=self._collectives,
        )
        work.add_wire(
            [work.add_server(len(self._workers) + i, profile, self._parts_on_server(i)) for i, profile in enumerate(self._servers)]
        )
        graphs: tuple[NodeGraph, ...] = ()
        if self._symbol is not None:
            nothing = NodeGraph(name=(), op=(), input_ptr=np.zeros(1, np.int64), input_idx=np.zeros(0, np.int64))
            graphs = (self._symbol.graph(), nothing) if self._servers else (self._symbol.graph(),)
        return self._table.trace(
            format=FORMAT,
            framework="mxnet",
            comm=self._comm_name(),
            clock=clock,
            steps=(
                (rank, index, start - self._base_us, end - self._base_us)
                for rank, of_rank in enumerate(steps)
                for index, start, end in of_rank
            ),
            dropped=self._dropped,
            warnings=self._warnings(),
            tensors=self._tensor_infos(),
            graphs=graphs,
            graph_of_rank=(*(0 for _ in self._workers), *(1 for _ in self._servers)) if graphs else (),
        )

    def _comm_name(self) -> str:
        names = {op.name for profile in self._workers for op in profile.ops if COMM.search(op.name)}
        for mark, name in (("KVStore", "kvstore"), ("P3Store", "kvstore"), ("BytePS", "byteps"), ("orovod", "horovod")):
            if any(mark in op_name for op_name in names):
                return name
        return "none"

    def _tensor_infos(self) -> tuple[TensorInfo, ...]:
        infos = []
        for parameter in self._tensors:
            size = 4 * self._symbol.size[parameter] if self._symbol is not None and parameter >= 0 else 0
            name = self._parameter_name(parameter)
            infos.append(TensorInfo(name=name, node="", dtype="float32" if size else "", shape=(), size_bytes=size))
        return tuple(infos)

    def _warnings(self) -> tuple[str, ...]:
        warnings = []
        if self._symbol is None:
            warnings.append("no symbol graph: operators are known by type, gradients by the order in which they are sent")
        warnings += [f"{count} {name}" for name, count in sorted(self._unmatched.items()) if count]
        return (*warnings, *unmatched_warnings(self._unmatched_us, self._op_us))

    # Workers

    def _add_worker(self, rank: int, profile: Profile, steps: Sequence[tuple[int, float, float]]) -> None:
        starts = [start for _, start, _ in steps]
        by_step: dict[int, list[Span]] = defaultdict(list)
        for op in profile.ops:
            by_step[bisect_right(starts, op.start_us) - 1].append(op)
        self._comm.append([])
        calls: dict[int, list[Span]] = defaultdict(list)
        for call in profile.calls:
            calls[bisect_right(starts, call.start_us) - 1].append(call)
        for position, ops in by_step.items():
            self._add_step(rank, steps[position][0] if position >= 0 else -1, ops, calls[position] if position >= 0 else [])

    def _add_step(self, rank: int, step: int, ops: Sequence[Span], calls: Sequence[Span]) -> None:
        comm = [op for op in ops if COMM.search(op.name)]
        others = [op for op in ops if not COMM.search(op.name)]
        plain = [op for op in others if not op.name.startswith("_backward_")]
        forward = match_forward(self._symbol, plain) if self._symbol is not None and step >= 0 else [-1] * len(plain)
        begins = min((op.start_us for op in others if op.name.startswith("_backward_")), default=math.inf)
        # The gradients of some operators (batch_dot, transpose) are computed by operators of the same types.
        again = {i for i, (op, node) in enumerate(zip(plain, forward, strict=True)) if node < 0 and op.start_us >= begins}
        backward_ops = sorted(
            [op for op in others if op.name.startswith("_backward_")] + [plain[i] for i in again if plain[i].name in SAME_TYPE]
        )
        kept = [i for i in range(len(plain)) if i not in again or plain[i].name not in SAME_TYPE]
        groups = {
            False: [(plain[i], forward[i]) for i in kept],
            True: list(
                zip(
                    backward_ops,
                    match_backward(self._symbol, backward_ops)
                    if self._symbol is not None and step >= 0
                    else [-1] * len(backward_ops),
                    strict=True,
                )
            ),
        }
        events: dict[tuple[int, bool], int] = {}
        added: list[tuple[Span, int]] = []
        for is_backward, group in groups.items():
            for op, node in group:
                name = op.name
                self._op_us += op.end_us - op.start_us
                if self._symbol is not None and node >= 0:
                    name = self._symbol.names[node] + (" backward" if is_backward else "")
                elif self._symbol is not None and step >= 0:
                    self._dropped[f"operators matched to no node of the graph: {op.name}"] += 1
                    self._unmatched_us += 0.0 if _OF_STORE.search(op.name) else op.end_us - op.start_us
                event = self._table.add(
                    name, EventKind.KERNEL, rank=rank, stream=op.thread, step=step, role=role_in_mxnet(name), **self._span(op)
                )
                if node >= 0:
                    events[node, is_backward] = event  # of several events of a node, the last
                added.append((op, event))
        self._add_data_dependencies(events)
        sent = self._add_comm(rank, step, comm, groups[True], events)
        self._add_consumers(sent, sorted(added))
        self._add_calls(rank, step, calls, sent, added)

    def _span(self, span: Span) -> dict[str, Any]:
        return {"start_us": span.start_us - self._base_us, "end_us": span.end_us - self._base_us}

    def _add_data_dependencies(self, events: dict[tuple[int, bool], int]) -> None:
        """Along the graph's edges, forward and in reverse; only between operators that were matched."""
        if self._symbol is None:
            return
        for node, row in enumerate(self._symbol.inputs):
            for source in row:
                for before, after in (((source, False), (node, False)), ((node, True), (source, True))):
                    if before in events and after in events:
                        self._table.need(events[before], events[after])
            if (node, True) in events and (node, False) in events:
                self._table.need(events[node, False], events[node, True])

    def _add_comm(
        self,
        rank: int,
        step: int,
        comm: Sequence[Span],
        backward: Sequence[tuple[Span, int]],
        events: dict[tuple[int, bool], int],
    ) -> list[Comm]:
        parameters = [-1 - i for i in range(len(comm))]  # known by their order only
        if self._symbol is not None and step >= 0 and comm:
            matched = match_gradients(self._symbol, backward, comm)
            if -1 in matched:
                self._unmatched["gradients whose parameter was not recovered"] += len(comm)
            else:
                parameters = matched
        node_of = {p: node for _, node in backward if self._symbol is not None and node >= 0 for p in self._symbol.parameters[node]}
        sent = []
        for op, parameter in zip(comm, parameters, strict=True):
            tensor = self._tensors.setdefault(parameter, len(self._tensors))
            event = self._table.add(
                op.name,
                EventKind.COMM,
                rank=rank,
                stream=op.thread,
                step=step,
                tensor=tensor,
                collective_kind=self._comm_kind,
                **self._span(op),
            )
            producer = events.get((node_of.get(parameter, -1), True), -1)
            if producer >= 0:
                self._table.need(producer, event)
            sent.append(
                Comm(
                    event=event,
                    parameter=parameter,
                    node=node_of.get(parameter, -1),
                    producer=producer,
                    step=step,
                    start_us=op.start_us,
                    end_us=op.end_us,
                )
            )
        self._comm[rank] += sent if step >= 0 else []
        return sent

    def _add_consumers(self, sent: Sequence[Comm], ops: Sequence[tuple[Span, int]]) -> None:
        """Add the operator that uses each value that came back: the first that starts after it, where the step has one."""
        starts = [op.start_us for op, _ in ops]
        for comm in sent:
            position = bisect_left(starts, comm.end_us)
            if position < len(ops):
                comm.consumer = ops[position][1]
                self._table.need(comm.event, comm.consumer)

    def _add_calls(
        self, rank: int, step: int, calls: Sequence[Span], sent: Sequence[Comm], work: Sequence[tuple[Span, int]]
    ) -> None:
        """Calls that launch or await work.

        An operator is launched by the last call before it (of backward, for a backward operator), and an awaiting call needs the
        operator that ended last while it waited.
        """
        ends = sorted((op.end_us, event) for op, event in work)
        pushes = []
        launching: dict[bool, list[tuple[float, int]]] = {False: [], True: []}
        for call in calls:
            kind = EventKind.SYNC if _AWAIT.search(call.name) else EventKind.RUNTIME
            event = self._table.add(call.name, kind, rank=rank, stream=_API_STREAM + call.thread, step=step, **self._span(call))
            if call.name == "MXKVStorePushPull":
                pushes.append((event, call.start_us))
            if kind is EventKind.RUNTIME and call.name != "MXKVStorePushPull":
                launching["Backward" in call.name].append((call.start_us, event))
            last = bisect_right(ends, (call.end_us, len(self._table.name))) - 1
            if kind is EventKind.SYNC and last >= 0 and ends[last][0] >= call.start_us:
                self._table.need(ends[last][1], event, DependencyKind.SYNC)
        self._pushes.append((pushes, list(sent)))
        for op, event in work:
            calls_before = launching[op.name.startswith("_backward_")]
            position = bisect_right(calls_before, (op.start_us, len(self._table.name))) - 1
            if position >= 0:
                self._table.need(calls_before[position][1], event, DependencyKind.LAUNCH)

    def _add_launches(self) -> None:
        """Gradients are handed over in the order of the sorted parameter names."""
        for pushes, sent in self._pushes:
            if self._symbol is None or len(pushes) != len(sent) or any(comm.parameter < 0 for comm in sent):
                continue
            names = self._symbol.names
            for (event, start_us), comm in zip(pushes, sorted(sent, key=lambda comm: names[comm.parameter]), strict=True):
                if start_us <= comm.start_us:
                    self._table.need(event, comm.event, DependencyKind.LAUNCH)

    # Between workers

    def _tell_apart(self) -> None:
        for of_rank in self._comm:
            self._assign(identified_by_size(of_rank, self._least_size))
        self._assign(identified_by_order(self._comm, self._least_size))

    def _assign(self, corrections: Iterable[tuple[Comm, int]]) -> None:
        for comm, parameter in corrections:
            comm.parameter = parameter
            self._table.step[comm.event], self._table.tensor[comm.event] = comm.step, self._tensors[parameter]

    def _number_collectives(self) -> None:
        """Make collectives of the communication events of one key in one step on all workers."""
        parts: dict[tuple[int, int], list[int]] = defaultdict(list)
        for comm in (comm for of_rank in self._comm for comm in of_rank):
            parts[comm.step, comm.parameter].append(comm.event)
        for events in parts.values():
            if len(events) == len(self._workers):
                for event in events:
                    self._table.collective[event] = self._collectives
                self._collectives += 1

    def _common(self) -> dict[tuple[int, int], list[Comm]]:
        """The communication on every worker, by step and parameter."""
        parts: dict[tuple[int, int], list[Comm]] = defaultdict(list)
        for of_rank in self._comm:
            for comm in of_rank:
                parts[comm.step, comm.parameter].append(comm)
        return {key: comms for key, comms in sorted(parts.items()) if len(comms) == len(self._workers)}

    def _common_spans(self, base_us: float = 0.0) -> CommSpans:
        """The same as collectives, of which those of one parameter take about equally long."""
        common = self._common()
        rows = [[(comm.start_us, comm.end_us) for comm in comms] for comms in common.values()]
        return CommSpans.of(rows, (parameter for _, parameter in common), len(self._workers), base_us)

    def _clock(self) -> ClockReport:
        report = clocks_checked(self._common_spans(self._base_us), "push-pull of a gradient")
        more = (0.0,) * len(self._servers)
        method = report.method + ("; servers taken to share the first worker's clock" if more else "")
        return ClockReport(offset_us=report.offset_us + more, residual_us=report.residual_us + more, method=method)

    def _parts_on_server(self, server: int) -> dict[int, list[int]] | None:
        """Elements of the parts of each parameter on a server; None: not known, each may have one there."""
        return None

    def _least_size(self, parameter: int) -> int:
        return self._symbol.least_size[parameter] if self._symbol is not None and parameter >= 0 else 0

    def _parameter_name(self, parameter: int) -> str:
        return (
            self._symbol.names[parameter]
            if self._symbol is not None and parameter >= 0
            else f"gradient {-1 - parameter} in start order"
        )


IMPORTER = Importer(
    name=FORMAT,
    description="profiles of MXNet (JSON with traceEvents of MXNET_C_API and operators)",
    recognise=recognise,
    read=read,
    companion=companion,
)
