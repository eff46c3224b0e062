"""A recorded job of MXNet with parameter servers -> `KvstoreJob`: `recorded_kvstore_job`.

Operators last while others have their core, so that their shortest durations count; what the measured CPU time leaves beside them
is the work of messages and copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dpro_search.collect.assemble.kvstore_slices import Slicing
from dpro_search.collect.trace import EventKind, Events, Floats, Role, TensorInfo, Trace
from dpro_search.errors import GraphError
from dpro_search.graph.dataflow import OpKind
from dpro_search.machine import machine_constants
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.servers.kvstore_job import KvstoreJob, serving_us_per_byte, store_bytes_per_us
from dpro_search.space.servers.recorded_workers import (
    consumers,
    first_users,
    server_hosts,
    slowest_worker,
    untraced_us,
    worker_count,
)
from dpro_search.space.servers.store_job import Segment

_OF_STORE = (Role.COPY, Role.UPDATE)  # of operators that serve the store, not the model
_AT_ONCE = 4  # tensors that an optimizer of MXNet updates at once (MXNET_OPTIMIZER_AGGREGATION_SIZE)
_BACKWARD = " backward"  # the reader adds it to a node's name for its backward operator
_OPS = (EventKind.OP, EventKind.KERNEL)


def recorded_kvstore_job(trace: Trace) -> KvstoreJob:
    """The job as it was recorded.

    Raises
    ------
    GraphError
        The trace holds no gradient with a known size, or no server.
    """
    workers = worker_count(trace)
    servers = trace.meta.ranks - workers
    sizes = np.array([tensor.size_bytes for tensor in trace.tensors], dtype=np.float64)
    keys = [_key(tensor) for tensor in trace.tensors]
    if not len(sizes) or not sizes.all() or None in keys:
        raise GraphError("the trace's gradients have no known key and size: record a HybridBlock with 'dpro-search collect'")
    if servers < 1:
        raise GraphError("the trace holds no server: its profile is missing")
    cores = ClusterSpec.of(trace.meta).cores
    slicing = Slicing.of_knobs(trace.meta.knobs, servers)
    copy_us_per_byte, sum_us_per_byte, update_us_per_byte = _server_us_per_byte(trace, sizes)
    updates, updating_us = _worker_updates(trace)
    if slicing.priority:
        update_us_per_byte = float(np.mean(updating_us)) / float(sizes.sum())
    segments, beside_us = zip(*(_segments(trace, rank, updating_us[rank]) for rank in range(workers)), strict=True)
    job = KvstoreJob(
        workers=segments,
        tensor_bytes=sizes,
        element_bytes=np.array([np.dtype(tensor.dtype).itemsize for tensor in trace.tensors], dtype=np.float64),
        key=np.array(keys, np.int64),
        worker_core=cores[:workers],
        server_core=cores[workers:],
        slicing=slicing,
        bytes_per_us=store_bytes_per_us(trace.meta.rate_bps),
        comm_us_per_byte=float(np.mean([untraced_us(trace, w, trace.steps.comm_cpu_us) for w in range(workers)]))
        / (2 * float(sizes.sum())),
        beside_us_per_byte=tuple(used_us / float(sizes.sum()) for used_us in beside_us),
        copy_us_per_byte=copy_us_per_byte,
        sum_us_per_byte=sum_us_per_byte,
        update_us_per_byte=update_us_per_byte,
        slice_us=0.0,
        update_call_us=0.0,
        worker_call_us=0.0,
        updates=updates,
        slowest=slowest_worker(trace, workers),
        server_host=server_hosts(trace, workers),
    )
    # A recording holds the sum of what a slice and a call of the optimizer take, or one of them.
    served_us, usual = _served_slice_us(trace, job), machine_constants().kvstore
    if slicing.priority:
        return replace(job, slice_us=served_us, update_call_us=usual.update_call_us)
    slice_us = min(served_us, usual.slice_us)
    call_us = served_us - slice_us
    return replace(job, slice_us=slice_us, update_call_us=call_us, worker_call_us=usual.worker_call_share * call_us)


def _key(tensor: TensorInfo) -> int | None:
    """The number under which KVStore holds a tensor; None if the tensor's node names none."""
    number = tensor.node.removeprefix("key")
    return int(number) if number != tensor.node and number.isascii() and number.isdigit() else None


def _served_slice_us(trace: Trace, job: KvstoreJob) -> float:
    """Processor time of the servers for each slice, without the time for its bytes."""
    workers, servers = len(job.workers), len(job.server_core)
    used_us = sum(untraced_us(trace, workers + server, trace.steps.compute_cpu_us) for server in range(servers))
    for_byte_us = workers * 2 * job.comm_us_per_byte + serving_us_per_byte(job)
    return max(used_us - float(job.tensor_bytes.sum()) * for_byte_us, 0.0) / sum(map(len, job.slices))


def _segments(trace: Trace, rank: int, updating_us: float) -> tuple[tuple[Segment, ...], float]:
    """Segments of a worker, and its core time that is of no operator of the model."""
    kept = np.isin(trace.events.kind, (*_OPS, EventKind.COMM))
    events = trace.events.select((trace.events.rank == rank) & kept & (trace.events.step >= 0))
    by_step = [events.select(events.step == step) for step in np.unique(events.step)]
    whole = max(by_step, key=lambda part: int((part.kind == EventKind.COMM).sum()))
    ops = _ops(whole)
    names = [trace.names[name] for name in ops.name]
    uses, makes = first_users(trace, names), _makers(trace, whole, ops, names)
    least_us = _least_durations(by_step)
    seen: defaultdict[int, int] = defaultdict(int)
    work_us = []
    for name in ops.name.tolist():
        work_us.append(least_us[name, seen[name]])
        seen[name] += 1
    left_us = untraced_us(trace, rank, trace.steps.compute_cpu_us) - updating_us - sum(work_us)
    scale = 1 + min(left_us, 0) / sum(work_us)
    segments: list[Segment] = []
    start = 0
    for i in range(len(names)):
        if makes[i] or i + 1 == len(names) or uses[i + 1]:
            is_backward = ops.role[i] == Role.BACKWARD
            segments.append(
                Segment(
                    kind=OpKind.BACKWARD if is_backward else OpKind.FORWARD,
                    work_us=sum(work_us[start : i + 1]) * scale,
                    uses=uses[start],
                    makes=makes[i],
                )
            )
            start = i + 1
    return tuple(segments), max(left_us, 0.0)


def _worker_updates(trace: Trace) -> tuple[tuple[tuple[int, ...], ...], list[float]]:
    """Tensors of each update operator, in the order of their keys, and each worker's core time for all of them in a step."""
    is_update = trace.events.role == Role.UPDATE
    events = trace.events.select(np.isin(trace.events.kind, _OPS) & is_update & (trace.events.step >= 0))
    steps = max(len(np.unique(trace.events.step[trace.events.step >= 0])), 1)
    update_us: list[float] = []
    count = 0
    for rank in range(worker_count(trace)):
        rank_events = events.select(events.rank == rank)
        duration = (rank_events.end_us - rank_events.start_us)[np.argsort(rank_events.start_us)]
        count = max(count, len(rank_events) // steps)
        # An update may run when the next step has begun, so that steps do not divide them; but each step has as many.
        update_us.append(float(duration[: count * steps].reshape(steps, count).min(axis=0).sum()) if count else 0.0)
    order = sorted(range(len(trace.tensors)), key=lambda tensor: _key(trace.tensors[tensor]) or 0)
    at_once = -(-len(order) // count) if count else _AT_ONCE
    return tuple(tuple(order[i : i + at_once]) for i in range(0, len(order), at_once)), update_us


def _ops(step: Events) -> Events:
    """A step's operators of the model in the order of their starts."""
    ops = step.select(np.isin(step.kind, _OPS) & ~np.isin(step.role, _OF_STORE))
    return ops.select(np.argsort(ops.start_us, kind="stable"))


def _least_durations(steps: Sequence[Events]) -> dict[tuple[int, int], float]:
    """Least duration of the i-th op of a name in a step, by (name, i): an op also lasts while others have its core."""
    durations_of: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for part in steps:
        ops = _ops(part)
        seen: defaultdict[int, int] = defaultdict(int)
        for name, duration in zip(ops.name.tolist(), (ops.end_us - ops.start_us).tolist(), strict=True):
            durations_of[name, seen[name]].append(duration)
            seen[name] += 1
    return {key: float(np.min(values)) for key, values in durations_of.items()}


def _makers(trace: Trace, step: Events, ops: Events, names: Sequence[str]) -> list[tuple[int, ...]]:
    """Tensors whose gradients are ready after each op: its node's, else those sent after it and before the next had ended."""
    reads, maker = consumers(trace), dict[int, int]()
    for i, name in enumerate(names):
        if ops.role[i] == Role.BACKWARD:
            maker |= dict.fromkeys(reads.get(name.removesuffix(_BACKWARD), []), i)
    sent = step.select(step.kind == EventKind.COMM)
    for tensor, start_us in zip(sent.tensor.tolist(), sent.start_us.tolist(), strict=True):
        maker.setdefault(tensor, max(int(np.searchsorted(ops.end_us, start_us, side="right")) - 1, 0))
    makes: list[list[int]] = [[] for _ in names]
    for tensor, i in sorted(maker.items()):
        makes[i].append(tensor)
    return [tuple(tensors) for tensors in makes]


def _server_us_per_byte(trace: Trace, size: Floats) -> tuple[float, float, float]:
    """Core time of a server for each byte that it copies, adds and updates.

    Operations also last while others have the server's core: of those on one tensor, the shortest count.
    """
    work = trace.events.select((trace.events.kind == EventKind.SERVER) & (trace.events.tensor >= 0))
    if not len(work):
        raise GraphError("the trace holds no work of a server that was matched to a gradient")
    duration = work.end_us - work.start_us
    rates = []
    for role in (Role.COPY, Role.UNKNOWN, Role.UPDATE):  # without a role: the sums
        in_role = work.role == role
        used_us = moved = 0.0
        for tensor in np.unique(work.tensor[in_role]):
            of = in_role & (work.tensor == tensor)
            steps = np.unique(work.step[of])
            per_step = np.array([duration[of & (work.step == step)].sum() for step in steps])
            most = np.array([(of & (work.step == step)).sum() for step in steps])
            whole = per_step[most == most.max()]  # a step in which a part was not recognised does not count
            used_us += float(whole.min())
            moved += float(size[tensor])
        rates.append(used_us / moved if moved else 0.0)
    copies = 1 if (work.role == Role.UPDATE).any() else 2
    return rates[0] / copies, rates[1] / max(worker_count(trace) - 1, 1), rates[2]
