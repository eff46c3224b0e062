"""``apply_fsdp(graph, ...) -> LabelledJob``: a fully sharded job, as recorded or sharded otherwise, on a cluster.

As with DistributedDataParallel (`ddp_job.py`), every rank runs a program of core time, posts and waits. `fsdp_steps` gives that
program for a `DataParallelJob`, whose collectives are rings on the links of other machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from dpro_search.collect.trace import CollectiveKind, Floats, Ints
from dpro_search.costmodel.collectives.horovod import CommCosts, at_cluster
from dpro_search.graph.dataflow import OpKind
from dpro_search.graph.fsdp import CollectiveMark, FsdpGraph, Purpose
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.data_parallel import RankStep
from dpro_search.space.programs.ddp_job import GLOO_THREADS, Action, LabelledJob, numbered_cores
from dpro_search.space.replay_graph import OrderPolicy

_ACTION = {CollectiveMark.POST: Action.POST, CollectiveMark.WAIT: Action.WAIT}
_COLLECTIVE = {
    Purpose.FORWARD: CollectiveKind.ALL_GATHER,
    Purpose.BACKWARD: CollectiveKind.ALL_GATHER,
    Purpose.SCATTER: CollectiveKind.REDUCE_SCATTER,
}  # the script's own are taken for all-reduces


@dataclass(frozen=True)
class _FsdpStep:
    """A mark of the program and the core time before it, [samples, ranks]."""

    mark: CollectiveMark
    collective: int
    work_us: Floats


def apply_fsdp(
    graph: FsdpGraph,
    costs: CommCosts,
    recorded: ClusterSpec,
    *,
    prefetch: bool = False,
    reshard: bool = True,
    cluster: ClusterSpec | None = None,
    threads: int = GLOO_THREADS,
) -> LabelledJob:
    """The job on a cluster (the recorded one if None).

    Parameters
    ----------
    prefetch
        Each unit's parameters are gathered while the unit before it computes, and waited for only where they are needed:
        asynchronous all-gathers, and ``set_modules_to_forward_prefetch`` of the next unit.
    reshard
        False: units keep their parameters after the forward pass (``reshard_after_forward=False``).
    """
    cluster = cluster or recorded
    comm = at_cluster(costs, 1.0, (recorded.rate_bps, recorded.ranks), (cluster.rate_bps, cluster.ranks))
    program, last, order = _program(graph, prefetch=prefetch, reshard=reshard)
    number = {collective: place for place, collective in enumerate(order)}
    profile = np.arange(cluster.ranks) % graph.ranks
    return LabelledJob(
        core=numbered_cores(cluster),
        work_us=np.ascontiguousarray(np.stack([step.work_us for step in [*program, last]], axis=2)[:, profile]),
        action=np.array([*(int(_ACTION[step.mark]) for step in program), int(Action.NONE)], dtype=np.int64),
        collective=np.array([*(number[step.collective] for step in program), -1], dtype=np.int64),
        size_bytes=graph.moved_bytes[order] * graph.lag,  # with the latencies below: until the last rank has its part
        is_broadcast=np.zeros(len(order), dtype=np.bool_),
        threads=threads,
        comm=replace(
            comm,
            alpha_busy_us=comm.alpha_busy_us * graph.lag,
            alpha_more_us=comm.alpha_more_us * graph.lag,
            alpha_tail_us=comm.alpha_tail_us * graph.lag,
        ),
        labels=tuple(graph.labels[collective] for collective in order),
        forward_segments=_forward_segments(program, graph),
    )


def fsdp_steps(graph: FsdpGraph, *, prefetch: bool = False, reshard: bool = True) -> tuple[tuple[RankStep, ...], Ints]:
    """The program of each recorded rank, as means over the recorded steps, and the `CollectiveKind` of each of its collectives.

    Collectives stand as tensors of their whole size: their exchange begins after a post, and what comes after a wait needs it.
    Parameters are those of `apply_fsdp`.
    """
    program, last, order = _program(graph, prefetch=prefetch, reshard=reshard)
    number = {collective: place for place, collective in enumerate(order)}
    op = np.arange(len(program))
    posts = np.array([step.mark == CollectiveMark.POST for step in program])
    tensor = np.array([number[step.collective] for step in program])
    forward, backward = _forward_segments(program, graph), len(program)
    kind = np.where(np.arange(backward + 1) < forward, OpKind.FORWARD, OpKind.BACKWARD)
    kind[-1] = OpKind.UPDATE
    duration_us = np.stack([step.work_us.mean(axis=0) for step in [*program, last]], axis=1)
    labels = tuple(graph.labels[collective] for collective in order)
    names = tuple(f"{Action(_ACTION[step.mark]).name.lower()} of {graph.labels[step.collective]}" for step in program)
    steps = tuple(
        RankStep(
            duration_us=np.ascontiguousarray(duration_us[rank]),
            kind=kind,
            device=np.zeros(backward + 1, np.int64),
            policy=np.array([int(OrderPolicy.FIFO)]),
            tensor_bytes=graph.size_bytes[order],
            edge_src=op,
            edge_dst=op + 1,
            maker_op=op[posts],
            maker_tensor=tensor[posts],
            user_tensor=tensor[~posts],
            user_op=op[~posts] + 1,
            carry_src=np.array([backward]),
            carry_dst=np.array([0]),
            op_names=(*(f"until {name}" for name in names), "optimizer"),
            tensor_names=labels,
        )
        for rank in range(graph.ranks)
    )
    return steps, np.array([_COLLECTIVE.get(Purpose(purpose), CollectiveKind.ALL_REDUCE) for purpose in graph.purpose[order]])


def _program(graph: FsdpGraph, *, prefetch: bool, reshard: bool) -> tuple[list[_FsdpStep], _FsdpStep, list[int]]:
    """Posts and waits of every rank, what comes after the last, and the collectives in the order of their posts."""
    program = [
        _FsdpStep(CollectiveMark(mark), collective, graph.work_us[:, :, place])
        for place, (mark, collective) in enumerate(zip(graph.mark.tolist(), graph.collective.tolist(), strict=True))
    ]
    last = _FsdpStep(CollectiveMark.WAIT, -1, graph.after_us)
    if not reshard:
        program, last = _kept(program, last, set(np.flatnonzero(graph.purpose == Purpose.BACKWARD).tolist()))
    if prefetch:
        program = list(_awaited_late(program, graph))
        program = _posted_early(program, graph)
    program, last = _joined(program, last)
    return program, last, [step.collective for step in program if step.mark == CollectiveMark.POST]


def _forward_segments(program: Sequence[_FsdpStep], graph: FsdpGraph) -> int:
    """How many steps of a program are the forward pass's."""
    behind = (Purpose.BACKWARD, Purpose.SCATTER)
    backward = (place for place, step in enumerate(program) if graph.purpose[step.collective] in behind)
    return next(backward, len(program))


def _kept(program: Sequence[_FsdpStep], last: _FsdpStep, dropped: set[int]) -> tuple[list[_FsdpStep], _FsdpStep]:
    """Without some gathers and the copies that belong to them; what was computed beside stays."""
    copied = {step.collective for step in program if step.mark == CollectiveMark.COPY_IN}
    steps: list[_FsdpStep] = []
    carried = np.zeros_like(last.work_us)
    for step in program:
        if step.collective not in dropped:
            steps.append(replace(step, work_us=step.work_us + carried))
            carried = np.zeros_like(carried)
        elif (
            step.mark not in (CollectiveMark.POST, CollectiveMark.READY) or step.collective not in copied
        ):  # before these: the copies
            carried = carried + step.work_us
    return steps, replace(last, work_us=last.work_us + carried)


def _awaited_late(program: Sequence[_FsdpStep], graph: FsdpGraph) -> Iterator[_FsdpStep]:
    """With the wait for each gather where its parameters are copied to their places."""
    copied = {step.collective for step in program if step.mark == CollectiveMark.COPY_OUT}
    carried = np.zeros_like(graph.after_us)
    for step in program:
        if step.mark == CollectiveMark.WAIT and step.collective in copied:
            carried = carried + step.work_us
            continue
        work_us, carried = step.work_us + carried, np.zeros_like(carried)
        if step.mark == CollectiveMark.COPY_OUT:
            yield _FsdpStep(CollectiveMark.WAIT, step.collective, work_us)
            work_us = np.zeros_like(work_us)
        yield replace(step, work_us=work_us)


def _posted_early(program: list[_FsdpStep], graph: FsdpGraph) -> list[_FsdpStep]:
    """With each gather of the forward pass, and the copy before it, where the parameters of the one before are in their places."""
    order = [step.collective for step in program if step.mark == CollectiveMark.POST]
    for before, gather in pairwise(order):
        if graph.purpose[before] != Purpose.FORWARD or graph.purpose[gather] != Purpose.FORWARD:
            continue
        place = {(step.mark, step.collective): i for i, step in enumerate(program)}
        begin, posted, ready = (
            place.get(key, -1)
            for key in ((CollectiveMark.COPY_IN, gather), (CollectiveMark.POST, gather), (CollectiveMark.READY, before))
        )
        if begin < 0 or posted != begin + 1 or not 0 <= ready < begin:
            continue
        following = program[posted + 1]
        program = [
            *program[: ready + 1],
            replace(program[begin], work_us=np.zeros_like(graph.after_us)),
            program[posted],
            *program[ready + 1 : begin],
            replace(following, work_us=following.work_us + program[begin].work_us),
            *program[posted + 2 :],
        ]
    return program


def _joined(program: Sequence[_FsdpStep], last: _FsdpStep) -> tuple[list[_FsdpStep], _FsdpStep]:
    """Posts and waits only."""
    steps: list[_FsdpStep] = []
    carried = np.zeros_like(last.work_us)
    for step in program:
        carried = carried + step.work_us
        if step.mark in _ACTION:
            steps.append(replace(step, work_us=carried))
            carried = np.zeros_like(carried)
    return steps, replace(last, work_us=last.work_us + carried)
