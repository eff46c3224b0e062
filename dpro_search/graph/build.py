"""Builds and validates the `DataflowGraph` of a trace."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import SETTLING_STEPS, EventKind, Events, Floats, Ints, NodeGraph, Trace
from dpro_search.errors import GraphError
from dpro_search.graph.buffers import step_memory
from dpro_search.graph.core_time import ShareProfile, StepWork, communication_shares, divide_step, polls, scaled, without_overhead
from dpro_search.graph.dataflow import (
    DataflowGraph,
    OpKind,
    RankProfile,
    Release,
    StepMemory,
    TensorOps,
    reachable,
    topological_order,
)
from dpro_search.graph.measured import sampled_steps

_PLAUSIBLE = (0.6, 1.3)
_SUMS = ("AddN", "_grad_add", "add_n", "ElementWiseSum")  # TensorFlow, MXNet


def build_graph(trace: Trace, steps: tuple[int, ...] | None = None, *, with_profiler: bool = False) -> DataflowGraph:
    """The graph of a job, with costs from the given traced steps (all of them if None).

    Parameters
    ----------
    with_profiler
        Keep what profiling added to the ops: for comparisons with traced steps.

    Raises
    ------
    GraphError
        A rank is missing, a gradient lacks producer, communication or consumer, or the dependencies have a cycle.
    """
    meta = trace.meta
    if not trace.tensors:
        raise GraphError("the trace has no gradient: the profiled steps all-reduced nothing; record a distributed job")
    sampled = sampled_steps(trace, steps)
    shares = communication_shares(trace, sampled)
    unplaced: dict[str, str] = {}
    parts = [_RankPart(trace, rank, sampled, shares, unplaced, with_profiler) for rank in range(meta.ranks)]
    order = np.argsort(np.mean([part.enqueued_us for part in parts], axis=(0, 1)), kind="stable")
    first = np.concatenate(([0], np.cumsum([len(part.names) for part in parts])))
    comm = [[int(first[r] + part.comm_node[t]) for r, part in enumerate(parts)] for t in range(len(trace.tensors))]
    pred_ptr, pred_idx = _joined_predecessors(parts, first, comm)
    graph = DataflowGraph(
        op_name=tuple(name for part in parts for name in part.names),
        op_type=tuple(kind for part in parts for kind in part.types),
        op_rank=np.repeat(np.arange(meta.ranks), np.diff(first)),
        op_kind=np.concatenate([part.kinds for part in parts]),
        op_work_us=np.concatenate([part.work_us for part in parts], axis=1),
        pred_ptr=pred_ptr,
        pred_idx=pred_idx,
        tensors=tuple(trace.tensors[t] for t in order),
        placements=tuple(_placement(parts, first, comm, int(t)) for t in order),
        profiles=tuple(part.profile(order) for part in parts),
        steps=np.array(sampled, dtype=np.int64),
        unplaced=unplaced,
        nodes=trace.graphs[trace.graph_of_rank[0]],
        memory=_memory(trace, sampled, parts[0].kinds),
    )
    validate(graph)
    return graph


def validate(graph: DataflowGraph) -> None:
    """Raise `GraphError` if the graph has a cycle or a gradient that is not wired on every rank."""
    if len(topological_order(graph.pred_ptr, graph.pred_idx)) != len(graph):
        raise GraphError("the dependencies have a cycle; the trace is damaged or of two different graphs")
    for tensor, placement in zip(graph.tensors, graph.placements, strict=True):
        for rank in range(graph.ranks):
            if placement.producer[rank] < 0:
                raise GraphError(f"gradient '{tensor.name}' has no producer on rank {rank}")
            if not placement.consumers[rank]:
                raise GraphError(f"gradient '{tensor.name}' is used by no op on rank {rank}")


class _RankPart:
    """One rank: its nodes, and what each of them cost in every sampled step."""

    def __init__(
        self,
        trace: Trace,
        rank: int,
        steps: tuple[int, ...],
        shares: dict[tuple[int, int], ShareProfile],
        unplaced: dict[str, str],
        with_profiler: bool,
    ) -> None:
        self._graph = trace.graphs[trace.graph_of_rank[rank]]
        self.names, self.types = self._graph.name, self._graph.op
        # Each dependency within the rank: the node that needs another, and that one.
        self.destination = np.repeat(np.arange(len(self.names)), np.diff(self._graph.input_ptr))
        self.source = np.asarray(self._graph.input_idx, dtype=np.int64)
        index = {name: i for i, name in enumerate(self.names)}
        self.comm_node = np.array([index[tensor.node] for tensor in trace.tensors], dtype=np.int64)
        is_comm = np.zeros(len(self.names), dtype=np.bool_)
        is_comm[self.comm_node] = True
        self._order = topological_order(self._graph.input_ptr, self._graph.input_idx)
        if len(self._order) != len(self.names):
            raise GraphError(f"rank {rank}: the recorded graph has a cycle; record it again")
        waits = np.zeros((len(self.names), len(trace.tensors)), dtype=np.bool_)
        waits[self.comm_node, np.arange(len(trace.tensors))] = True
        self._waits = reachable(waits, self._graph.input_ptr, self._graph.input_idx, self._order)
        self._waits[is_comm] = False
        self.kinds = _kinds(self._graph, self._order, is_comm, np.asarray(self._waits.any(axis=1)))

        rank_events = trace.events.select(trace.events.rank == rank)
        node_of_name = np.array([index.get(name, -1) for name in trace.names], dtype=np.int64)
        for name in {
            trace.names[i] for i in rank_events.name[(rank_events.kind == EventKind.OP) & (node_of_name[rank_events.name] < 0)]
        }:
            unplaced[f"{name}@{rank}"] = "ran, but is not in the executed graph"
        profiler_us = 0.0 if with_profiler else _profiler_cpu_us(trace, rank)
        self._divide(trace, rank, steps, rank_events, node_of_name, shares, profiler_us)
        never = [i for i in np.flatnonzero(~self._ran & ~is_comm) if self.types[i] not in ("Const", "_Arg", "_Retval", "NoOp")]
        for i in never:
            unplaced[f"{self.names[i]}@{rank}"] = f"{self.types[i]} without a time: taken as free"

    def _divide(
        self,
        trace: Trace,
        rank: int,
        steps: tuple[int, ...],
        rank_events: Events,
        node_of_name: Ints,
        shares: dict[tuple[int, int], ShareProfile],
        profiler_us: float,
    ) -> None:
        count = len(trace.tensors)
        self.work_us = np.zeros((len(steps), len(self.names)))
        self.enqueued_us = np.zeros((len(steps), count))
        self._enqueue_main = np.zeros((len(steps), count))
        self._main = np.zeros(len(steps))
        self._host = np.zeros(len(steps))
        self._ran = np.zeros(len(self.names), dtype=np.bool_)
        divided: list[tuple[Ints, Floats, StepWork, float]] = []
        rows = (trace.steps.rank == rank).nonzero()[0]
        row_of_step = {int(trace.steps.index[row]): row for row in rows}
        for i, step in enumerate(steps):
            row = row_of_step[step]
            begin = float(trace.steps.start_us[row])
            events = rank_events.select(rank_events.step == step)
            enqueues = _first_enqueues(events, count, rank, step, trace)
            timed = (events.kind == EventKind.OP) & (node_of_name[events.name] >= 0) & (events.end_us > events.start_us)
            ops = events.select(timed)
            node = node_of_name[ops.name]
            if not self._is_main(node).any():
                raise GraphError(
                    f"rank {rank}, step {step}: no op ran that waits for no communication and that the executed graph names; "
                    "are graph and profile of one job?"
                )
            work = self._divided(ops, node, _returns(events, self.comm_node), shares[rank, step], begin)
            work = without_overhead(work, ops.end_us, self._is_main(node), profiler_us / max(len(node), 1))
            # From the last op to the next call the script runs.
            next_row = row_of_step.get(step + 1)
            next_start = float(trace.steps.start_us[next_row]) if next_row is not None else float(trace.steps.end_us[row])
            last_end = max(float(ops.end_us.max()), float(events.end_us[events.kind == EventKind.COMM].max()))
            self._host[i] = max(next_start - last_end, 0.0)
            ratio = _measured_over_divided(float(trace.steps.compute_cpu_us[row]) - profiler_us - self._host[i], work)
            divided.append((node, enqueues, work, ratio))
            self._ran[node] = True
            self.enqueued_us[i] = enqueues - begin
        # In a step with a low ratio others took the core. What all steps have in common, the kernel's work for the network, stays;
        # but a rank that polls is charged for that itself, and what its clocks lack was never its own.
        usual = 1.0 if polls(trace) else float(np.median([ratio for _, _, _, ratio in divided]))
        for i, (node, enqueues, work, ratio) in enumerate(divided):
            work = scaled(work, ratio / usual)
            np.add.at(self.work_us[i], node, work.work_us)
            self._enqueue_main[i] = work.main_until_us(enqueues)
            self._main[i] = work.main_us[-1]
        self._concurrency = float(np.mean([work.concurrency for _, _, work, _ in divided]))
        # The last profiled step is followed by the profiler's own work, which no other step has.
        self._host = np.minimum(self._host, np.median(self._host) * 2)

    def _divided(self, ops: Events, node: Ints, returned: tuple[Ints, Floats], share: ShareProfile, begin_us: float) -> StepWork:
        ended = np.full(len(self.names), -np.inf)
        np.maximum.at(ended, node, ops.end_us)
        np.maximum.at(ended, *returned)
        ready = _latest(ended, self._graph.input_ptr, self._graph.input_idx)[node]
        return divide_step(ops.start_us, ops.end_us, ready, self._is_main(node), share, begin_us)

    def _is_main(self, node: Ints) -> npt.NDArray[np.bool_]:
        main: npt.NDArray[np.bool_] = np.logical_not(self._waits[node].any(axis=1))
        return main

    def profile(self, order: Ints) -> RankProfile:
        """Summary for the replay, with tensors in enqueue order."""
        nodes = np.flatnonzero(self._waits.any(axis=1) & self.work_us.any(axis=0))
        waits = self._waits[np.ix_(nodes, order)]
        _, first, group = np.unique(np.packbits(waits, axis=1), axis=0, return_index=True, return_inverse=True)
        work = np.zeros((len(first), len(self.work_us)))
        np.add.at(work, group.reshape(-1), self.work_us[:, nodes].T)
        groups = {tuple(np.flatnonzero(waits[row]).tolist()): each for row, each in zip(first, work, strict=True)}
        return RankProfile(
            post_us=self._enqueue_main[:, order],
            main_us=self._main,
            releases=tuple(Release(tensors=key, work_us=work) for key, work in sorted(groups.items())),
            host_us=self._host,
            concurrency=self._concurrency,
        )

    def predecessors(self, node: int) -> Ints:
        """Inputs of a node within the rank."""
        return self._graph.input_idx[self._graph.input_ptr[node] : self._graph.input_ptr[node + 1]]

    def consumers(self, node: int) -> Ints:
        """Nodes that need a node."""
        return np.unique(self.destination[self.source == node])


def _latest(ended_us: Floats, input_ptr: Ints, input_idx: Ints) -> Floats:
    """When the last of each node's inputs had ended, -inf where it has none; `ended_us` is by node, as the result."""
    padded = np.append(ended_us[input_idx], -np.inf)  # a node without inputs may begin behind the last input
    latest: Floats = np.maximum.reduceat(padded, input_ptr[:-1])
    return np.where(np.diff(input_ptr) > 0, latest, -np.inf)


def _memory(trace: Trace, steps: tuple[int, ...], kinds: Ints) -> StepMemory | None:
    """Buffers of the step that takes the most, of all ranks that run rank 0's graph."""
    graph = trace.graphs[trace.graph_of_rank[0]]
    if graph.tensors is None:
        return None
    index = {name: i for i, name in enumerate(graph.name)}
    node_of_name = np.array([index.get(name, -1) for name in trace.names], dtype=np.int64)
    events = trace.events.select(
        np.isin(trace.events.kind, (EventKind.OP, EventKind.COMM)) & (node_of_name[trace.events.name] >= 0)
    )
    spans = []
    for rank in (rank for rank, number in enumerate(trace.graph_of_rank) if number == trace.graph_of_rank[0]):
        for step in steps:
            in_step = (events.rank == rank) & (events.step == step)
            begin, end = np.full(len(graph.name), np.inf), np.full(len(graph.name), -np.inf)
            np.minimum.at(begin, node_of_name[events.name[in_step]], events.start_us[in_step])
            np.maximum.at(end, node_of_name[events.name[in_step]], events.end_us[in_step])
            spans.append((begin, end))
    return step_memory(graph, kinds, spans, [tensor.size_bytes for tensor in trace.tensors])


def _first_enqueues(events: Events, count: int, rank: int, step: int, trace: Trace) -> Floats:
    comm = events.kind == EventKind.COMM
    enqueues = np.full(count, np.inf)
    np.minimum.at(enqueues, events.tensor[comm], events.start_us[comm])
    missing = np.flatnonzero(~np.isfinite(enqueues))
    if len(missing):
        raise GraphError(
            f"gradient '{trace.tensors[missing[0]].name}' was not communicated on rank {rank} in step {step} "
            f"({len(missing)} of {count} missing); record the job again"
        )
    return enqueues


def _profiler_cpu_us(trace: Trace, rank: int) -> float:
    """Core time that profiling adds to a step: what a traced step uses more than an untraced one."""
    steps = trace.steps.select(trace.steps.rank == rank)
    steady = np.append(steps.traced[:-1] == steps.traced[1:], False) & (steps.index >= SETTLING_STEPS)
    traced, untraced = (steps.compute_cpu_us[steady & which] for which in (steps.traced, ~steps.traced))
    if len(traced) < 3 or len(untraced) < 3:
        return 0.0
    return max(float(np.median(traced) - np.median(untraced)), 0.0)


def _measured_over_divided(cpu_us: float, work: StepWork) -> float:
    """Measured CPU time of a step over what was divided among its ops: below 1 where others took the core meanwhile.

    1 where the recording has no plausible CPU time (another system, or the profiler's own start within the step).
    """
    ratio = cpu_us / float(work.work_us.sum())
    return ratio if _PLAUSIBLE[0] < ratio < _PLAUSIBLE[1] else 1.0


def _returns(events: Events, comm_node: Ints) -> tuple[Ints, Floats]:
    """Communication nodes, and when each of their tensors came back."""
    comm = events.kind == EventKind.COMM
    return comm_node[events.tensor[comm]], events.end_us[comm]


def _kinds(graph: NodeGraph, order: Ints, is_comm: npt.NDArray[np.bool_], waits: npt.NDArray[np.bool_]) -> Ints:
    """COMM; UPDATE: whatever waits for communication; BACKWARD as the graph has it; IO by type; or FORWARD.

    Sums of gradients, and of such sums, are made outside of TensorFlow's scope of gradients, and are backward ops as well.
    """
    backward = np.zeros(len(graph.name), np.bool_) if graph.backward is None else graph.backward.copy()
    io = np.array([op.startswith(("Iterator", "Dataset", "Send", "_Send", "_Recv", "Recv")) for op in graph.op])
    host = np.array([op in ("_Arg", "_Retval", "NoOp", "Const") for op in graph.op])
    kinds = np.full(len(graph.name), int(OpKind.FORWARD), dtype=np.int64)
    kinds[host] = OpKind.HOST
    kinds[io] = OpKind.IO
    for node in (node for node in order.tolist() if graph.op[node] in _SUMS):
        inputs = graph.input_idx[graph.input_ptr[node] : graph.input_ptr[node + 1]]
        backward[node] |= len(inputs) > 0 and bool(backward[inputs].all())
    kinds[backward] = OpKind.BACKWARD
    kinds[waits] = OpKind.UPDATE
    kinds[is_comm] = OpKind.COMM
    return kinds


def _joined_predecessors(parts: list[_RankPart], first: Ints, comm: list[list[int]]) -> tuple[Ints, Ints]:
    """All ranks' dependencies; a COMM op also needs what its twins on the other ranks need."""
    ops = [first[rank] + part.destination for rank, part in enumerate(parts)]
    needs = [first[rank] + part.source for rank, part in enumerate(parts)]
    for row in comm:
        joined = np.concatenate([first[rank] + part.predecessors(row[rank] - int(first[rank])) for rank, part in enumerate(parts)])
        ops.append(np.repeat(np.array(row, dtype=np.int64), len(joined)))
        needs.append(np.tile(joined, len(row)))
    count = int(first[-1])
    op, need = np.divmod(np.unique(np.concatenate(ops) * count + np.concatenate(needs)), count)
    return np.searchsorted(op, np.arange(count + 1)), need


def _placement(parts: list[_RankPart], first: Ints, comm: list[list[int]], tensor: int) -> TensorOps:
    producers, consumers = [], []
    for rank, part in enumerate(parts):
        node = comm[tensor][rank] - int(first[rank])
        inputs = part.predecessors(node)
        producers.append(int(first[rank] + inputs[0]) if len(inputs) else -1)
        consumers.append(tuple(int(first[rank] + i) for i in part.consumers(node)))
    return TensorOps(producer=tuple(producers), comm=tuple(comm[tensor]), consumers=tuple(consumers))
