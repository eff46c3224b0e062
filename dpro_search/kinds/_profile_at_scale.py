"""``profile_at_scale(job, cluster)``: a profiled data-parallel job on the devices of another cluster.

Each rank computes as in its typical step, cut where it posts a collective and where it goes on after one; the collectives are
rings. Of all-reduces the buckets can be joined, for a profile does not tell what a rank computes between two gradients of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dpro_search.cluster import Cluster
from dpro_search.collect.trace import CollectiveKind, EventKind, Floats, TensorInfo, Trace
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.kinds._at_scale import AtScale, Workload, members
from dpro_search.kinds._base import Job
from dpro_search.space.data_parallel import RankStep
from dpro_search.space.ddp_job import bucket_assignment
from dpro_search.space.plan import Plan
from dpro_search.space.recorded import typical_step
from dpro_search.space.replay_graph import OrderPolicy
from dpro_search.space.transformations import BucketSize, JobFacts, PlanSpace

_RINGS = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)


class _Exchange(NamedTuple):
    """A collective of a rank's step."""

    kind: int
    size_bytes: int
    start_us: float
    end_us: float


def profile_at_scale(job: Job, cluster: Cluster, ranks: int | None) -> AtScale:
    """The job on a cluster; raises `InputError` where the ranks' collectives differ, or have no known sizes."""
    assert job.trace is not None, "a profile"
    trace, step = job.trace, typical_step(job.trace)
    found = [_exchanges_of(trace, rank, step) for rank in range(trace.meta.ranks)]
    if any([each[:2] for each in own] != [each[:2] for each in found[0]] for own in found):
        raise InputError("--cluster: the ranks' collectives differ in the typical step: they cannot be rings of all ranks")
    if not found[0] or min(each.size_bytes for each in found[0]) <= 0:
        raise InputError("--cluster: the profile does not have the sizes of its collectives; profile with record_shapes=True")
    steps = tuple(_rank_step(trace, rank, step, mine) for rank, mine in enumerate(found))
    kinds = np.array([exchange.kind for exchange in found[0]])
    tensors = tuple(
        TensorInfo(name=name, node=name, dtype="uint8", shape=(size,), size_bytes=size)
        for name, size in zip(steps[0].tensor_names, steps[0].tensor_bytes.astype(int).tolist(), strict=True)
    )
    facts = JobFacts(name=job.title, tensors=tensors)
    joined = bool((kinds == CollectiveKind.ALL_REDUCE).all())

    def workload(plan: Plan) -> Workload:
        limit = plan.get("bucket_cap_bytes")
        if limit is None:
            return Workload(steps=steps, groups=members(np.arange(len(tensors))), collectives=kinds)
        return Workload(steps=steps, groups=members(bucket_assignment(tensors, [limit])))

    return AtScale(
        title=job.title,
        tensors=tensors,
        space=PlanSpace(facts, [BucketSize(facts)] if joined else []),
        workload=workload,
        cluster=cluster,
        ranks=ranks,
        trace=trace,
        questions={"bucket_cap_bytes=1GiB": Plan.of(bucket_cap_bytes=2**30)} if joined else {},
    )


def _exchanges_of(trace: Trace, rank: int, step: int) -> list[_Exchange]:
    """The collectives of a rank's step that rings can carry out, in order."""
    events = trace.events
    mine = (events.rank == rank) & (events.step == step) & (events.kind == EventKind.COLLECTIVE)
    chosen = np.flatnonzero(mine & np.isin(events.collective_kind, _RINGS))
    chosen = chosen[np.argsort(events.start_us[chosen], kind="stable")]
    return [
        _Exchange(int(events.collective_kind[i]), int(events.size_bytes[i]), float(events.start_us[i]), float(events.end_us[i]))
        for i in chosen.tolist()
    ]


def _rank_step(trace: Trace, rank: int, step: int, exchanges: Sequence[_Exchange]) -> RankStep:
    """A rank's step: stretches between the instants at which it posts a collective or goes on after one.

    A stretch takes its time without that in which the device did nothing but communicate. What comes after a gather needs it; the
    last stretch needs all others.
    """
    begin_us, end_us = _span(trace, rank, step)
    gathers = [number for number, exchange in enumerate(exchanges) if exchange.kind == CollectiveKind.ALL_GATHER]
    posts = [(exchange.start_us, number) for number, exchange in enumerate(exchanges)]
    resumes = [(exchanges[number].end_us, number) for number in gathers]
    last = max((exchange.end_us for exchange in exchanges), default=begin_us)
    cuts = sorted({begin_us, *(us for us, _ in (*posts, *resumes)), min(last, end_us)})
    bounds = np.array([*cuts, max(end_us, cuts[-1])])
    op = np.arange(len(bounds) - 1)
    at = {us: number for number, us in enumerate(cuts)}
    optimizer = at[min(last, end_us)]
    awaited = [number for number in range(len(exchanges)) if number not in gathers]
    return RankStep(
        duration_us=np.diff(bounds) - _alone(trace, rank, step, bounds),
        kind=np.where(op < optimizer, OpKind.BACKWARD, OpKind.UPDATE),
        device=np.zeros(len(op), np.int64),
        policy=np.array([int(OrderPolicy.FIFO)]),
        tensor_bytes=np.array([float(exchange.size_bytes) for exchange in exchanges]),
        edge_src=op[:-1],
        edge_dst=op[1:],
        maker_op=np.array([max(at[us] - 1, 0) for us, _ in posts]),
        maker_tensor=np.array([number for _, number in posts]),
        user_tensor=np.array([*gathers, *awaited], np.int64),
        user_op=np.array([*(at[us] for us, _ in resumes), *(optimizer for _ in awaited)], np.int64),
        carry_src=op[-1:],
        carry_dst=op[:1],
        tensor_names=tuple(f"{CollectiveKind(exchange.kind).label} {number}" for number, exchange in enumerate(exchanges)),
    )


def _span(trace: Trace, rank: int, step: int) -> tuple[float, float]:
    row = (trace.steps.rank == rank) & (trace.steps.index == step)
    return float(trace.steps.start_us[row][0]), float(trace.steps.end_us[row][0])


def _alone(trace: Trace, rank: int, step: int, bounds_us: Floats) -> Floats:
    """Time between bounds in which a collective ran and nothing else, [bounds - 1]."""
    events = trace.events
    mine = (events.rank == rank) & (events.step == step)

    def covered(kinds: Sequence[EventKind], until_us: float) -> float:
        chosen = mine & np.isin(events.kind, kinds) & (events.start_us < until_us)
        total_us, reached_us = 0.0, bounds_us[0]
        for start, end in sorted(zip(events.start_us[chosen].tolist(), events.end_us[chosen].tolist(), strict=True)):
            end = min(end, until_us)
            total_us += max(end - max(start, reached_us), 0.0)
            reached_us = max(reached_us, end)
        return total_us

    computes = (EventKind.KERNEL, EventKind.COPY)
    alone = [covered((*computes, EventKind.COLLECTIVE), us) - covered(computes, us) for us in bounds_us.tolist()]
    return np.diff(np.array(alone))
