"""``op_level(trace, graph, costs) -> ReplayGraph``: a recorded TensorFlow + Horovod step with every op of every rank.

Three devices a rank. The **core** runs the ops that take time; of those that are ready it takes the first in recorded order, so
that the recorded order holds wherever dependencies allow, and no op waits behind one that cannot run yet. What takes no time is on
a device without bounds. The **communication** thread runs, in the order of the recording rank, a negotiation for each of Horovod's
cycles that sent something, and then the fused collectives of that cycle. They need the enqueues of all their gradients, and release
what uses them. The fusions are those of one recorded step, the one whose iteration is the median.

What communication takes of the core: its cycles a little all the time, which the core's durations include; its collectives a share
while they run, as one slow-down for all kinds of ops. Copies, latencies and transfers cost what `CommCosts` has. Durations have a
sample per recorded step: the core time of that step; latencies and negotiations as variable as they are, in any order.

Memory is what a trace knows: variables of the gradients, gradients, their reduced copies and the fusion buffer. No recording has
the sizes of activations, so they are not in it. Ranks that share a core are given equal parts of it at all times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import EventKind, Floats, Ints, Trace
from dpro_search.costmodel.collectives.horovod import CommCosts, saturation
from dpro_search.errors import GraphError
from dpro_search.graph.core_time import collective_spans
from dpro_search.graph.dataflow import DataflowGraph, OpKind
from dpro_search.space.replay_graph import OrderPolicy, ReplayGraph, csr

_CORE, _FREE, _COMM = range(3)  # a rank's devices
_DEVICES = 3
_MOST_TAKEN = 0.95  # of a core by communication: compute never stops for a whole collective


def op_level(trace: Trace, graph: DataflowGraph, costs: CommCosts, *, step: int | None = None) -> ReplayGraph:
    """The recorded step as a graph of single ops; ``graph`` and ``costs`` are those of ``trace``.

    Op i of ``graph`` is op i of the result: a gradient's COMM op there is its enqueue here; what needed it needs its collective.

    Parameters
    ----------
    step
        The traced step whose fusions are taken; None: `typical_step`.

    Raises
    ------
    GraphError
        A gradient was in no collective of the step, or there is no typical one.
    """
    cycles = _recorded_cycles(trace, graph, costs, typical_step(trace, graph) if step is None else step)
    cycle_us = max(float(costs.negotiate_busy_us.mean()), trace.horovod_settings.cycle_time_us)
    waking = min(costs.cycle_cpu_us / cycle_us, _MOST_TAKEN)
    ops = _Ops(graph, _recorded_position(trace, graph), _ranks_on_core(trace) / (1 - waking))
    for rank in range(graph.ranks):
        ops.add_rank(rank, cycles)
    return ops.to_replay_graph(_slowdown(cycles, waking))


def typical_step(trace: Trace, graph: DataflowGraph) -> int:
    """The sampled step whose iteration on rank 0 is the median (or next above it), of those whose collectives are all recorded.

    Raises
    ------
    GraphError
        There is none.
    """
    transfers = trace.events.select((trace.events.kind == EventKind.ALLREDUCE) & (trace.events.collective >= 0))
    whole = [s for s in graph.steps if len(np.unique(transfers.tensor[transfers.step == s])) == len(graph.tensors)]
    if not whole:
        raise GraphError("in no profiled step were all gradients seen in collectives; record the job again with a Horovod timeline")
    rank_steps = trace.steps.select(trace.steps.rank == 0)
    at = np.searchsorted(rank_steps.index, whole)
    following = np.minimum(at + 1, len(rank_steps) - 1)
    iteration = np.where(following > at, rank_steps.start_us[following], rank_steps.end_us[at]) - rank_steps.start_us[at]
    return int(whole[int(np.argsort(iteration, kind="stable")[len(iteration) // 2])])


@dataclass(frozen=True, kw_only=True)
class _Cycle:
    """A recorded cycle that sent something.

    Attributes
    ----------
    wait_us
        From the last rank's last enqueue to the cycle's begin if the communication thread has nothing else to do.
    negotiation_us
        Of the negotiation, a sample per recorded cycle, ascending.
    collectives
        In order.
    busy_us, taken_us
        How long the collectives ran beside a main stream, and the core time that they took meanwhile.
    """

    wait_us: float
    negotiate_us: Floats
    collectives: tuple[_Collective, ...]
    busy_us: float
    taken_us: float


@dataclass(frozen=True, kw_only=True)
class _Collective:
    """A fused all-reduce of the recording: its tensors (of the graph), its mean latency, and the rest of its time."""

    tensors: Ints
    size_bytes: float
    latency_us: float
    moving_us: float


def _recorded_cycles(trace: Trace, graph: DataflowGraph, costs: CommCosts, step: int) -> list[_Cycle]:
    spans = collective_spans(trace.events)
    inside = spans["step"] == step
    spans = {key: column[inside] for key, column in spans.items()}
    members = _members(trace, graph, spans["number"], step)
    comm = (trace.events.kind == EventKind.COMM) & (trace.events.step == step)
    main_end_us = float(trace.events.start_us[comm].max())
    size, duration = spans["size_bytes"], spans["end_us"] - spans["start_us"]
    left_us = main_end_us - spans["start_us"]
    share = np.clip(left_us / np.maximum(duration, 1e-9), 0.0, 1.0)
    latency = np.where(left_us > 0, costs.alpha_busy_us + costs.alpha_more_us * saturation(size), costs.alpha_tail_us)
    transfer = size * (share * costs.beta_busy_us + (1 - share) * costs.beta_tail_us)
    copies = costs.dispatch_us + size * (costs.copy_in_us + costs.copy_out_us)
    moving = copies + transfer
    whole = latency + moving
    taken = copies + np.minimum(costs.collective_cpu_us, latency / 2) + size * costs.cpu_us
    marks = np.sort(trace.events.start_us[trace.events.kind == EventKind.CYCLE])
    number = np.searchsorted(marks, spans["copy_in_us"], side="right") if len(marks) else np.arange(len(size))
    cycles_of_step = []
    for cycle in np.unique(number):
        rows = np.flatnonzero(number == cycle)
        negotiation = costs.negotiate_busy_us if left_us[rows[0]] > 0 else costs.negotiate_idle_us
        # An enqueue falls into a long cycle more often than into a short one (the inspection paradox), on average into its middle.
        length = np.maximum(negotiation, trace.horovod_settings.cycle_time_us)
        cycles_of_step.append(
            _Cycle(
                wait_us=float((length**2).mean() / length.mean() / 2),
                negotiate_us=negotiation,
                collectives=tuple(
                    _Collective(
                        tensors=members[row],
                        size_bytes=float(size[row]),
                        latency_us=float(latency[row]),
                        moving_us=float(moving[row]),
                    )
                    for row in rows
                ),
                busy_us=float((share * whole)[rows].sum()),
                taken_us=float((share * np.minimum(taken, whole))[rows].sum()),
            )
        )
    return cycles_of_step


def _members(trace: Trace, graph: DataflowGraph, numbers: Floats, step: int) -> list[Ints]:
    """Tensors of the graph that moved in each of the collectives."""
    index = {tensor.name: i for i, tensor in enumerate(graph.tensors)}
    of_trace: Ints = np.array([index[tensor.name] for tensor in trace.tensors], dtype=np.int64)
    transfers = trace.events.select((trace.events.kind == EventKind.ALLREDUCE) & np.isin(trace.events.collective, numbers))
    members = [np.unique(of_trace[transfers.tensor[transfers.collective == number]]) for number in numbers]
    missing = np.setdiff1d(np.arange(len(graph.tensors)), np.concatenate(members) if members else np.zeros(0, dtype=np.int64))
    if len(missing):
        raise GraphError(
            f"gradient '{graph.tensors[missing[0]].name}' was in no collective of step {step} ({len(missing)} of {len(index)} "
            "missing); record the job again with a Horovod timeline"
        )
    return members


def _slowdown(cycles: list[_Cycle], waking: float) -> Floats:
    """Factors by kind: how much longer compute takes beside collectives than beside empty cycles, which its durations include."""
    busy_us, taken_us = (sum(getattr(cycle, name) for cycle in cycles) for name in ("busy_us", "taken_us"))
    factors = np.ones((len(OpKind), len(OpKind)))
    if busy_us > 0:
        factors[:, OpKind.COMM] = max((1 - waking) / (1 - min(taken_us / busy_us, _MOST_TAKEN)), 1.0)
    return factors


def _ranks_on_core(trace: Trace) -> Ints:
    """How many ranks share each rank's core, [ranks]; one that was not pinned has its own."""
    cores = np.array(trace.meta.cores)
    hosts = np.array(trace.meta.hosts)
    together = (cores[:, None] == cores) & (hosts[:, None] == hosts) & (cores >= 0)
    count: Ints = np.maximum(together.sum(axis=1), 1)
    return count


def _recorded_position(trace: Trace, graph: DataflowGraph) -> Floats:
    """When each op ended within its step, mean over the sampled steps, [ops]; 0 for one that was never seen."""
    events = trace.events.select((trace.events.kind == EventKind.OP) & np.isin(trace.events.step, graph.steps))
    op = _op_of_name(trace, graph)[events.rank, events.name]
    begin = np.zeros((graph.ranks, int(trace.steps.index.max()) + 1))
    begin[trace.steps.rank, trace.steps.index] = trace.steps.start_us
    end = events.end_us - begin[events.rank, events.step]
    total = np.bincount(op[op >= 0], weights=end[op >= 0], minlength=len(graph))
    mean: Floats = total / np.maximum(np.bincount(op[op >= 0], minlength=len(graph)), 1)
    return mean


def _op_of_name(trace: Trace, graph: DataflowGraph) -> Ints:
    """Op of the graph of each rank and name of the trace, -1 where none exists, [ranks, names]."""
    op_of_name = np.full((graph.ranks, len(trace.names)), -1)
    number = {name: i for i, name in enumerate(trace.names)}
    name = np.array([number.get(name, -1) for name in graph.op_name])
    op_of_name[graph.op_rank[name >= 0], name[name >= 0]] = np.flatnonzero(name >= 0)
    return op_of_name


class _Ops:
    """The ops of the graph, and those that are added rank by rank: the script between two steps, the cycles, the collectives."""

    def __init__(self, graph: DataflowGraph, position: Floats, stretch: Floats) -> None:
        work = graph.op_work_us * stretch[graph.op_rank]
        self._graph, self._stretch = graph, stretch
        self._enqueues = np.array([placement.comm for placement in graph.placements], dtype=np.int64)  # [tensors, ranks]
        self._samples = [work]
        self._position = [position]
        self._device = [_DEVICES * graph.op_rank + np.where(work.any(axis=0), _CORE, _FREE)]
        kind = graph.op_kind.copy()
        kind[self._enqueues] = OpKind.HOST
        self._kind = [kind]
        self._collective = [np.full(len(graph), -1)]
        self._names = [f"{name}@{rank}" for name, rank in zip(graph.op_name, graph.op_rank, strict=True)]
        # A tensor's return replaces its enqueue as what other ops need; an enqueue needs what was there on its own rank.
        source, destination = graph.edges()
        is_enqueue = np.zeros(len(graph), dtype=np.bool_)
        is_enqueue[self._enqueues] = True
        keep = ~is_enqueue[source] & (graph.op_rank[source] == graph.op_rank[destination])
        self._edges = [(source[keep], destination[keep])]
        self._roots = np.bincount(destination, minlength=len(graph)) == 0
        self._carries: list[tuple[int, int]] = []
        self._buffers: list[tuple[int, float, list[int], str]] = []

    def add_rank(self, rank: int, cycles: list[_Cycle]) -> None:
        """Add what a rank does beside its ops, and what all that needs."""
        graph = self._graph
        ops_of_rank = np.flatnonzero(graph.op_rank == rank)
        begin = self._add("step begins", rank, _FREE, OpKind.HOST)
        script = self._add("script", rank, _CORE, OpKind.HOST, graph.profiles[rank].host_us * self._stretch[rank])
        end = self._add("step ends", rank, _FREE, OpKind.HOST)
        self._need(script, [begin])
        roots = ops_of_rank[self._roots[ops_of_rank]]
        self._edges.append((np.full(len(roots), script), roots))
        self._need(end, ops_of_rank)
        self._carries.append((end, begin))
        for tensor in graph.tensors:
            self._buffers.append((begin, tensor.size_bytes, [], f"variable of {tensor.name}@{rank}"))
        fused = [one.size_bytes for cycle in cycles for one in cycle.collectives if len(one.tensors) > 1]
        if fused:
            self._buffers.append((begin, max(fused), [], f"fusion buffer@{rank}"))
        rng = np.random.default_rng(0)  # the same on every rank: the parts of a collective last equally long
        number = 0
        for i, cycle in enumerate(cycles):
            wait = self._add(f"cycle {i}: wait", rank, _FREE, OpKind.HOST, cycle.wait_us, number)
            negotiate_us = self._spread(np.quantile(cycle.negotiate_us, self._quantiles), float(cycle.negotiate_us.mean()), rng)
            negotiation = self._add(f"cycle {i}: negotiation", rank, _COMM, OpKind.HOST, negotiate_us, number + 1)
            self._need(wait, self._enqueues[np.concatenate([one.tensors for one in cycle.collectives]), rank])
            self._need(negotiation, [wait])
            number += 2
            for one in cycle.collectives:
                more = f" and {len(one.tensors) - 1} more" if len(one.tensors) > 1 else ""
                name = f"all-reduce {graph.tensors[one.tensors[0]].name}{more}"
                # Waiting for the core is as variable as an exponential distribution.
                latency_us = self._spread(-np.log(1 - self._quantiles), one.latency_us, rng)
                part = self._add(name, rank, _COMM, OpKind.COMM, latency_us + one.moving_us, number)
                self._need(part, [negotiation])
                self._need(end, [part])
                for tensor in one.tensors.tolist():
                    self._return(tensor, rank, part)
                number += 1

    @property
    def _quantiles(self) -> Floats:
        """The middles of as many equal parts of [0, 1] as there are samples."""
        count = len(self._graph.steps)
        return (np.arange(count) + 0.5) / count

    @staticmethod
    def _spread(values: Floats, mean: float, rng: np.random.Generator) -> Floats:
        """Values in any order, scaled to a mean."""
        spread: Floats = rng.permutation(values) * (mean / values.mean())
        return spread

    def _return(self, tensor: int, rank: int, part: int) -> None:
        """A collective gives a tensor back: Horovod's op puts the sum beside the gradient that it was given."""
        placement, info = self._graph.placements[tensor], self._graph.tensors[tensor]
        consumers = list(placement.consumers[rank])
        for consumer in consumers:
            self._need(consumer, [part])
        self._buffers.append((placement.producer[rank], info.size_bytes, [part], f"gradient {info.name}@{rank}"))
        self._buffers.append((placement.comm[rank], info.size_bytes, consumers, f"reduced {info.name}@{rank}"))

    def _add(self, name: str, rank: int, device: int, kind: OpKind, duration_us: float | Floats = 0.0, collective: int = -1) -> int:
        samples = np.broadcast_to(np.atleast_1d(duration_us), len(self._graph.steps))
        self._samples.append(samples[:, None])
        self._position.append(np.array([-1.0]))
        self._device.append(np.array([_DEVICES * rank + device]))
        self._kind.append(np.array([int(kind)]))
        self._collective.append(np.array([collective]))
        self._names.append(f"{name}@{rank}")
        return len(self._names) - 1

    def _need(self, op: int, needed: Iterable[int]) -> None:
        sources = np.array(list(needed), dtype=np.int64)
        self._edges.append((sources, np.full(len(sources), op)))

    def to_replay_graph(self, slowdown: Floats) -> ReplayGraph:
        """All ops as arrays."""
        samples = np.concatenate(self._samples, axis=1)
        source, destination = (np.concatenate(ends) for ends in zip(*self._edges, strict=True))
        destination, source = np.divmod(np.unique(destination * len(self._names) + source), len(self._names))
        pred_ptr, pred_idx = csr(destination, source, len(self._names))
        order = np.argsort(np.concatenate(self._position), kind="stable")
        priority = np.empty(len(order), np.int32)
        priority[order] = np.arange(len(order))
        carry_src, carry_dst = np.array(self._carries, dtype=np.int32).T
        buffer_op, buffer_bytes, uses, buffer_names = zip(*self._buffers, strict=True)
        owner = np.repeat(np.arange(len(uses)), [len(use) for use in uses])
        buffer_ptr, buffer_use = csr(owner, np.array([op for use in uses for op in use], dtype=np.int64), len(uses))
        ranks = self._graph.ranks
        return ReplayGraph(
            duration_us=samples.mean(axis=0),
            device=np.concatenate(self._device).astype(np.int32),
            pred_ptr=pred_ptr,
            pred_idx=pred_idx,
            policy=np.tile(np.array([OrderPolicy.PRIORITY, OrderPolicy.UNBOUNDED, OrderPolicy.PROGRAM], np.int8), ranks),
            rank_of_device=np.repeat(np.arange(ranks, dtype=np.int32), _DEVICES),
            kind=np.concatenate(self._kind).astype(np.int8),
            priority=priority,
            collective=np.concatenate(self._collective).astype(np.int32),
            slowdown=slowdown,
            carry_src=carry_src,
            carry_dst=carry_dst,
            samples_us=samples.astype(np.float32),
            buffer_op=np.array(buffer_op, dtype=np.int32),
            buffer_bytes=np.array(buffer_bytes, dtype=np.float64),
            buffer_ptr=buffer_ptr,
            buffer_use=buffer_use,
            names=self._names,
            device_names=[f"{name}@{rank}" for rank in range(ranks) for name in ("core", "no device", "communication")],
            buffer_names=buffer_names,
        )
