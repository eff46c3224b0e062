"""``program_graph(job) -> ReplayGraph``: an iteration of a PyTorch job whose ranks share cores with Gloo's threads.

A rank's main thread is a device in program order with a core; its ops are the segments of the program. Gloo is one device for all
ranks: it runs `threads` collectives at a time, in the order in which they are enqueued. A collective is a message. It starts once
every rank has enqueued it, and the segment after a wait needs it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.costmodel.collectives.horovod import saturation
from dpro_search.errors import GraphError
from dpro_search.graph.dataflow import OpKind
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.programs.ddp_job import Action, DdpJob
from dpro_search.space.replay_graph import OrderPolicy, ReplayGraph, SharedCores

_LEAST_LATENCY_US = 1.0
_KEPT = 32  # patterns that are kept: a search asks for jobs of one pattern again and again


class Pattern(NamedTuple):
    """The part that jobs with one program on the same cores share. It is the key of the graphs that were built from it."""

    # action, collective, is_broadcast, core: The bytes of these arrays of `DdpJob`.
    action: bytes
    collective: bytes
    is_broadcast: bytes
    core: bytes
    threads: int

    @classmethod
    def of(cls, job: DdpJob) -> Pattern:
        """The graph of a job."""
        action, collective, core = (np.asarray(column, np.int64) for column in (job.action, job.collective, job.core))
        return cls(action.tobytes(), collective.tobytes(), job.is_broadcast.tobytes(), core.tobytes(), job.threads)


def program_graph(job: DdpJob, latency_factors: Floats | None = None) -> ReplayGraph:
    """One iteration with the durations of the first recorded step.

    Ops are the segments, rank by rank, then the collectives; a program that ends with a wait has a last segment without work.

    Parameters
    ----------
    latency_factors
        Those of `SharedCores`.

    Raises
    ------
    GraphError
        A rank waits for a collective that it never enqueues.
    """
    pattern = pattern_graph(Pattern.of(job))
    costs = job.comm
    sizes = job.size_bytes
    more_us = costs.alpha_more_us * saturation(sizes)
    latency_us = np.maximum(costs.alpha_busy_us + more_us, _LEAST_LATENCY_US)
    duration_us, flow_bytes, idle_us, core_us, finish_us = np.zeros((5, len(pattern)))
    first = len(pattern) - len(sizes)
    duration_us[:first], duration_us[first:] = segment_work_us(job)[0], latency_us
    flow_bytes[first:] = sizes
    idle_us[first:], core_us[first:] = max(costs.alpha_tail_us, _LEAST_LATENCY_US), costs.collective_cpu_us
    if len(job.finish_us):
        finish_us[first:] = job.finish_us
    assert pattern.cores is not None
    cores = SharedCores(
        core=pattern.cores.core,
        idle_us=idle_us,
        core_us=core_us,
        finish_us=finish_us,
        idle_bytes_per_us=np.array([1.0 / costs.beta_tail_us]),
        core_us_per_byte=np.array([costs.cpu_us]),
        latency_factors=np.zeros(0) if latency_factors is None else latency_factors,
    )
    rates = np.array([1.0 / costs.beta_busy_us])
    return replace(pattern, duration_us=duration_us, flow_bytes=flow_bytes, link_bytes_per_us=rates, cores=cores)


def segment_work_us(job: DdpJob) -> Floats:
    """Core time of the segments of the graph, [samples, ranks * segments]."""
    work_us = job.work_us
    if job.action[-1] == Action.WAIT:
        work_us = np.concatenate((work_us, np.zeros((*work_us.shape[:2], 1))), axis=2)
    return work_us.reshape(len(work_us), -1)


@lru_cache(maxsize=_KEPT)
def pattern_graph(pattern: Pattern) -> ReplayGraph:
    """The graph of a pattern, without its numbers."""
    action, collective, core = (np.frombuffer(column, np.int64) for column in (pattern.action, pattern.collective, pattern.core))
    is_broadcast = np.frombuffer(pattern.is_broadcast, np.bool_)
    ranks, collectives = len(core), len(is_broadcast)
    segments = len(action) + (action[-1] == Action.WAIT)
    builder = GraphBuilder()
    main = builder.add_devices(np.arange(ranks), OrderPolicy.PROGRAM, "main thread of rank {0}", (range(ranks),))
    gloo = builder.add_device(0, OrderPolicy.PROGRAM, "Gloo")
    link = builder.add_link(1.0)
    work = builder.add_ops(np.broadcast_to(main[:, None], (ranks, segments)), 0.0)
    moved = builder.add_ops(np.full(collectives, gloo), 1.0, kind=OpKind.COMM, links=[link])
    posts, waits = np.flatnonzero(action == Action.POST), np.flatnonzero(action == Action.WAIT)
    builder.add_edges(work[:, posts], moved[collective[posts]])
    for place in waits.tolist():
        number = collective[place]
        held = slice(1, None) if is_broadcast[number] else slice(None)
        builder.add_edges(moved[number], work[held, place + 1])
    builder.carry(work[:, -1], work[:, 0])
    if not set(collective[waits].tolist()) <= set(collective[posts].tolist()):
        raise GraphError("the job cannot go on: a rank waits for a collective that another never posts")
    zeros, one = np.zeros(ranks * segments + collectives), np.ones(1)
    cores = SharedCores(
        core=np.append(core, -1).astype(np.int32),
        idle_us=zeros,
        core_us=zeros,
        finish_us=zeros,
        idle_bytes_per_us=one,
        core_us_per_byte=one,
    )
    servers = np.array([*[1] * ranks, pattern.threads], np.int32)
    return builder.build(servers=servers, cores=cores)
