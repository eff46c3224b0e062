"""Workers and servers of an MXNet job with BytePS, from its trace: `recorded_byteps_job`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import CollectiveKind, EventKind, Events, Floats, Ints, Role, Trace
from dpro_search.errors import GraphError
from dpro_search.graph.dataflow import OpKind
from dpro_search.machine import machine_constants
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.servers.byteps_job import DEFAULT_PARTITION_BYTES, BytepsJob, HalfGradients
from dpro_search.space.servers.recorded_workers import first_users, server_hosts, untraced_us, worker_count
from dpro_search.space.servers.store_job import Segment, goodput_bytes_per_us

_SOON = 0.02  # quantile of a delay at which no other process wanted the core or the link
_SMALL = 0.5  # tensors up to this quantile of the sizes show how long a message takes without its bytes


def recorded_byteps_job(trace: Trace) -> BytepsJob:
    """The job as it was recorded.

    Raises
    ------
    GraphError
        The trace holds no gradient with a known key and size, no server, or no operator.
    """
    workers = worker_count(trace)
    servers = trace.meta.ranks - workers
    sizes = np.array([tensor.size_bytes for tensor in trace.tensors], dtype=np.float64)
    keys = [int(tensor.node.removeprefix("key")) if tensor.node.startswith("key") else -1 for tensor in trace.tensors]
    if not len(sizes) or not sizes.all() or min(keys) < 0:
        raise GraphError("the trace's gradients have no known key and size: record the job with 'dpro-search collect'")
    if servers < 1:
        raise GraphError("the trace holds no server: record the job with 'dpro-search collect'")
    computed = [_Worker(trace, rank) for rank in range(workers)]
    order = np.argsort(np.mean([worker.place for worker in computed], axis=0), kind="stable")
    cores = ClusterSpec.of(trace.meta).cores
    knobs = trace.meta.knobs
    at_once = int(trace.meta.number_knob("MXNET_OPTIMIZER_AGGREGATION_SIZE", 1))
    compression = knobs.get("compression", "")
    halves = HalfGradients(call_us=0.0, us_per_byte=0.0) if compression == "fp16" else None
    cpu_us_per_byte, worker_polling, server_polling = _cpu(trace, workers, sizes if halves is None else sizes / 2)
    delays = _delays(trace, sizes)
    return BytepsJob(
        workers=tuple(worker.segments for worker in computed),
        tensor_bytes=sizes,
        declared_key=np.array(keys),
        group=_groups(np.array(keys), computed[0].updates, at_once),
        order=order,
        scale_us=np.array([worker.scale_us for worker in computed]),
        update_us=np.array([worker.update_us for worker in computed])[:, None] * sizes / sizes.sum(),
        worker_core=cores[:workers],
        server_core=cores[workers:],
        worker_polling=worker_polling,
        server_polling=server_polling,
        partition_bytes=_partition_bytes(trace),
        credit=int(trace.meta.number_knob("BYTEPS_SCHEDULING_CREDIT", 0)),
        hash_name=knobs.get("BYTEPS_KEY_HASH_FN", "djb2"),
        bytes_per_us=goodput_bytes_per_us(trace.meta.rate_bps),
        cpu_us_per_byte=cpu_us_per_byte,
        message_us=machine_constants().byteps.message_us,
        server_host=server_hosts(trace, workers),
        halves=halves,
        recorded_compression=compression,
        reduce_us=delays["reduce_us"],
        before_push_us=delays["before_push_us"],
        reply_us=delays["reply_us"],
        after_pull_us=delays["after_pull_us"],
    )


class _Worker:
    """Computation of one worker. Core times are those of the steps without the profiler.

    Attributes
    ----------
    segments
        Up to the end of the backward pass.
    place, scale_us
        Of each tensor, its place in the order of the push-pulls, and the core time of the operator before its push-pull, [tensors].
    updates, update_us
        Operators that update weights, and their core time.
    """

    def __init__(self, trace: Trace, rank: int) -> None:
        kinds = (EventKind.OP, EventKind.KERNEL, EventKind.COMM)
        worker_events = trace.events.select(
            (trace.events.rank == rank) & np.isin(trace.events.kind, kinds) & (trace.events.step >= 0)
        )
        steps = [worker_events.select(worker_events.step == step) for step in np.unique(worker_events.step)]
        tensors = len(trace.tensors)
        steps = [step for step in steps if (step.kind == EventKind.COMM).sum() == tensors < len(step)]
        if not steps:
            raise GraphError(f"no step of rank {rank} holds all gradients and an operator: record the job again")
        parts = [_RecordedStep(trace, step) for step in steps]
        counts = Counter(tuple(part.names) for part in parts)
        alike = [part for part in parts if tuple(part.names) == counts.most_common(1)[0][0]]
        names, backward = alike[0].names, alike[0].backward
        work_us = np.mean([part.work_us for part in alike], axis=0)
        self.place = np.mean([part.place for part in alike], axis=0)
        self.scale_us = np.mean([part.scale_us for part in alike], axis=0)
        self.updates = alike[0].updates
        self.update_us = float(np.mean([part.update_us for part in alike]))
        # Operators also last while others have the core, and the script has core time beside them.
        scale = untraced_us(trace, rank, trace.steps.compute_cpu_us) / (work_us.sum() + self.scale_us.sum() + self.update_us)
        self.scale_us, self.update_us = self.scale_us * scale, self.update_us * scale
        self.segments = _segments(trace, names, backward, work_us * scale)


class _RecordedStep:
    """A step's operators: those of the passes in their order, the one before each push-pull, the updates."""

    def __init__(self, trace: Trace, step: Events) -> None:
        ops = step.select(step.kind != EventKind.COMM)
        ops = ops.select(np.argsort(ops.start_us, kind="stable"))
        comm = step.select(step.kind == EventKind.COMM)
        comm = comm.select(np.argsort(comm.start_us, kind="stable"))
        names = np.array([trace.names[name] for name in ops.name], dtype=np.str_)
        duration_us = ops.end_us - ops.start_us
        is_update = ops.role == Role.UPDATE
        scales = _before_push(names, ops, comm, is_update)
        passes = ~is_update
        passes[scales] = False
        self.names: list[str] = names[passes].tolist()
        self.backward: list[bool] = (ops.role[passes] == Role.BACKWARD).tolist()
        self.work_us: Floats = duration_us[passes]
        self.updates = int(is_update.sum())
        self.update_us = float(duration_us[is_update].sum())
        self.place = np.zeros(len(trace.tensors))
        self.place[comm.tensor] = np.arange(len(comm))
        self.scale_us = np.zeros(len(trace.tensors))
        if len(scales):
            self.scale_us[comm.tensor] = duration_us[scales]


def _before_push(names: npt.NDArray[np.str_], ops: Events, comm: Events, is_update: npt.NDArray[np.bool_]) -> Ints:
    """The operator that scales each push-pull's gradient: of the kind that most of them follow, the last as many; else none."""
    follows = names[np.maximum(np.searchsorted(ops.end_us, comm.start_us, side="right") - 1, 0)].tolist()
    kind, count = Counter(follows).most_common(1)[0]
    of_kind = np.flatnonzero((names == kind) & ~is_update)
    enough = 2 * count > len(comm) and len(of_kind) >= len(comm)
    return of_kind[-len(comm) :] if enough else np.zeros(0, np.int64)


def _segments(trace: Trace, names: Sequence[str], backward: Sequence[bool], work_us: Floats) -> tuple[Segment, ...]:
    """Consecutive operators, cut where one is the first to need a weight."""
    uses = first_users(trace, names)
    cuts = [i for i, tensors in enumerate(uses) if tensors or i == 0]
    segments = []
    for start, stop in zip(cuts, [*cuts[1:], len(names)], strict=True):
        kind = OpKind.BACKWARD if 2 * sum(backward[start:stop]) > stop - start else OpKind.FORWARD
        segments.append(Segment(kind=kind, work_us=float(work_us[start:stop].sum()), uses=uses[start], makes=()))
    return tuple(segments)


def _groups(declared: Ints, updates: int, at_once: int) -> Ints:
    """Group of each tensor: so many at once in the order of their keys, if that makes as many updates as were seen; else evenly."""
    count = len(declared)
    if at_once < 1 or -(-count // at_once) != updates:
        at_once = max(-(-count // max(updates, 1)), 1)
    rank = np.empty(count, np.int64)
    rank[np.argsort(declared)] = np.arange(count)
    return rank // at_once


def _partition_bytes(trace: Trace) -> int:
    return int(trace.meta.number_knob("BYTEPS_PARTITION_BYTES", DEFAULT_PARTITION_BYTES, least=1))


def _cpu(trace: Trace, workers: int, sizes: Floats) -> tuple[float, float, float]:
    """Core time of a byte, and the shares of a core that a worker and a server use to poll for work.

    A server's CPU time gives the cost of a byte, because its polling was measured before the job began. A worker's threads
    cost the same for a byte; the rest of their CPU time is spent on polling.
    """
    servers = range(workers, trace.meta.ranks)
    total = float(sizes.sum())
    parts = int(np.ceil(sizes / _partition_bytes(trace)).sum())
    iteration_us = float(np.median(trace.iterations_us())) if len(trace.iterations_us()) else 0.0
    busy_us = sum(untraced_us(trace, rank, trace.steps.compute_cpu_us) for rank in servers)
    looking_us = float(np.mean([untraced_us(trace, rank, trace.steps.comm_cpu_us) for rank in servers]))
    messages_us = 2 * workers * parts * machine_constants().byteps.message_us
    per_byte = max(busy_us - messages_us, 0.0) / (3 * workers * total)
    comm_us = float(np.mean([untraced_us(trace, rank, trace.steps.comm_cpu_us) for rank in range(workers)]))
    rest_us = max(comm_us - 2 * total * per_byte - 2 * parts * machine_constants().byteps.message_us, 0.0)
    if not iteration_us:
        return per_byte, 0.0, 0.0
    return per_byte, rest_us / iteration_us, looking_us / iteration_us


def _delays(trace: Trace, sizes: Floats) -> dict[str, float]:
    """How long the stages of a partition take where no other process wants the core or the link."""
    events, workers = trace.events, worker_count(trace)
    small = (sizes <= np.quantile(sizes, _SMALL))[events.tensor] & (events.tensor >= 0) & (events.rank < workers)
    partition = _partitions(trace)
    total: dict[tuple[int, ...], tuple[float, float]] = {}
    spans: dict[int, dict[tuple[int, ...], tuple[float, float]]] = defaultdict(dict)
    for i in np.flatnonzero(small & (events.step >= 0)).tolist():
        push_pull = (int(events.rank[i]), int(events.step[i]), int(events.tensor[i]))
        span = (float(events.start_us[i]), float(events.end_us[i]))
        if events.kind[i] == EventKind.COMM:
            total[push_pull] = span
        else:
            spans[int(events.collective_kind[i])][(*push_pull, int(partition[i]))] = span
    reduce, push, pull = (spans[kind] for kind in (CollectiveKind.REDUCE, CollectiveKind.PUSH, CollectiveKind.PULL))
    taken = [reduce[key][1] - total[key[:3]][0] for key in reduce if key[:3] in total]
    return {
        "reduce_us": _soon(taken),
        "before_push_us": _soon([push[key][0] - reduce[key][1] for key in push if key in reduce]),
        "reply_us": _soon([end - start for start, end in push.values()]),
        "after_pull_us": _soon([total[key[:3]][1] - pull[key][1] for key in pull if key[:3] in total]),
    }


def _partitions(trace: Trace) -> Ints:
    """The first stage of each event's partition in its step. Stages of one worker and tensor follow from each other."""
    events, needs = trace.events, trace.dependencies
    first = np.arange(len(events))
    stage = np.isin(events.kind, (EventKind.COPY, EventKind.COLLECTIVE)) & (events.tensor >= 0)
    inside = stage[needs.source] & stage[needs.target]
    for column in (events.rank, events.step, events.tensor):
        inside &= column[needs.source] == column[needs.target]
    for source, target in sorted(zip(needs.source[inside].tolist(), needs.target[inside].tolist(), strict=True)):
        first[target] = first[source]
    return first


def _soon(delays_us: Sequence[float]) -> float:
    return max(float(np.quantile(delays_us, _SOON)), 0.0) if delays_us else 0.0
