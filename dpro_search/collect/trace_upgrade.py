"""Traces of version 1, which have in names what version 2 has columns for.

Only here are names read that this program itself once gave. A trace that is recorded or imported today gets its columns from what
the recording has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from dpro_search.collect.recorded_names import (
    collective_kind_of,
    copies_of_gathers,
    made_for_backward,
    role_in_mxnet,
    role_in_server,
)
from dpro_search.collect.trace_columns import Codes, CollectiveKind, EventKind, Ints, NodeGraph, Role
from dpro_search.collect.trace_meta import TRACE_VERSION
from dpro_search.collect.trace_values import TraceValues

_Job = TypeVar("_Job", bound=TraceValues)

_HOROVOD_KINDS = (
    EventKind.COMM,
    EventKind.NEGOTIATE,
    EventKind.QUEUE,
    EventKind.MEMCPY_IN,
    EventKind.ALLREDUCE,
    EventKind.MEMCPY_OUT,
)
_MXNET_FORMATS = ("mxnet-kvstore", "mxnet-byteps", "mxnet-profiler", "byteps")
_STAGE = re.compile(r" (REDUCE|PUSH|PULL|BROADCAST|push|pull)(?: wire)?$")
_COPY_OF_BUCKET = "ddp.reducer::copy_bucket_to_grad"
_GATHER, _SCATTER, _AGAIN, _ROOT = "all_gather of ", "reduce_scatter of ", " for backward", "the root"


def upgraded(job: _Job) -> _Job:
    """A job that was read as version 1, with the columns that follow from its names; groups, types and shapes stay unknown."""
    events = job.events
    if job.meta.format == "pytorch-fsdp":
        events = replace(events, collective=_with_copies(job))
    role = _by_name(job.names, lambda name: _role(name, job.meta.format))[events.name]
    role[~np.isin(events.kind, _KINDS_WITH_ROLE.get(job.meta.format, _COMPUTING))] = Role.UNKNOWN
    if job.meta.format in _MXNET_FORMATS:
        served = events.kind == EventKind.SERVER
        role[served] = _by_name(job.names, role_in_server)[events.name[served]]
    graphs = tuple(replace(graph, backward=_backward(graph)) for graph in job.graphs)
    meta = msgspec.structs.replace(job.meta, version=TRACE_VERSION)
    return replace(
        job, meta=meta, graphs=graphs, events=replace(events, collective_kind=_collective_kinds(job, events.collective), role=role)
    )


def spread(kind: Codes, collective: Ints) -> Codes:
    """Kinds of collectives, [n], given to all other events of the same collective, [n]."""
    numbers, place = np.unique(collective, return_inverse=True)  # numbers may be as large as a file has them
    known = np.flatnonzero((kind >= 0) & (collective >= 0))
    table = np.full(len(numbers), CollectiveKind.UNKNOWN, np.int8)
    table[place[known]] = kind[known]
    return np.where(kind >= 0, kind, table[place])


def _backward(graph: NodeGraph) -> npt.NDArray[np.bool_]:
    return np.array([made_for_backward(name, op) for name, op in zip(graph.name, graph.op, strict=True)], np.bool_)


def _collective_kinds(job: TraceValues, collective: Ints) -> Codes:
    events = job.events
    if job.meta.comm == "horovod":
        return np.where(np.isin(events.kind, _HOROVOD_KINDS), CollectiveKind.ALL_REDUCE, CollectiveKind.UNKNOWN).astype(np.int8)
    kinds = _by_name(job.names, lambda name: collective_kind_of(_collective(name, job.meta.format)))[events.name]
    of_byteps = job.meta.format in ("byteps", "mxnet-byteps")  # its stages within a worker are COPY events
    kinds[~np.isin(events.kind, (EventKind.COLLECTIVE, EventKind.COPY) if of_byteps else (EventKind.COLLECTIVE,))] = -1
    if job.meta.format == "kineto":  # tensors are named after collectives, "allreduce/7#3"
        of_tensor = _by_name([tensor.name for tensor in job.tensors], lambda name: collective_kind_of(re.split("[/#]", name)[0]))
        known = (events.kind == EventKind.COLLECTIVE) & (events.tensor >= 0)
        kinds[known] = of_tensor[events.tensor[known]]
    return spread(kinds, collective)


def _collective(name: str, format_: str) -> str:
    """The part of an event's name that is a collective's."""
    if format_ in _MXNET_FORMATS:
        stage = _STAGE.search(name)
        return stage[1] if stage else ""
    return name.partition(" of ")[0] if format_ == "pytorch-fsdp" else name


_COMPUTING = (EventKind.OP, EventKind.KERNEL)
_KINDS_WITH_ROLE = {
    "pytorch-fsdp": (EventKind.OP, EventKind.COLLECTIVE, EventKind.ALLREDUCE),
    "straggler-analysis": (EventKind.KERNEL,),
}


def _role(name: str, format_: str) -> Role:
    if format_ == "pytorch-ddp":
        return Role.COPY if name.endswith(_COPY_OF_BUCKET) else Role.UNKNOWN
    if format_ == "pytorch-fsdp":
        if name.startswith(_SCATTER) or (name.startswith(_GATHER) and name.endswith(_AGAIN)):
            return Role.BACKWARD
        if name.startswith(_GATHER):
            return Role.FORWARD
        return Role.COPY if name.endswith(("/fsdp::all_gather_copy_in", "/fsdp::split_with_sizes_copy")) else Role.UNKNOWN
    if format_ == "straggler-analysis":
        return {"forward-compute": Role.FORWARD, "backward-compute": Role.BACKWARD}.get(name.partition(" ")[0], Role.UPDATE)
    if format_ == "kineto":
        return Role.UPDATE if name.startswith(("Optimizer.step", "optimizer.step")) else Role.UNKNOWN
    return role_in_mxnet(name) if format_ in _MXNET_FORMATS else Role.UNKNOWN


def _with_copies(job: TraceValues) -> Ints:
    """Numbers of collectives, [n], also of the ops that copy what ``fully_shard`` gathers."""
    events, collective = job.events, job.events.collective.copy()
    main = (events.kind == EventKind.OP) & (events.stream == 0)
    whole = events.kind == EventKind.COLLECTIVE
    for rank, step in sorted(set(zip(events.rank[whole].tolist(), events.step[whole].tolist(), strict=True))):
        in_step = (events.rank == rank) & (events.step == step)
        enqueued = np.flatnonzero(in_step & whole)
        enqueued = enqueued[np.argsort(events.collective[enqueued], kind="stable")]
        ops = np.flatnonzero(in_step & main)
        ops = ops[np.argsort(events.start_us[ops], kind="stable")]
        units = [_gathered_unit(job.names[name]) for name in events.name[enqueued].tolist()]
        for number, op in copies_of_gathers(units, [job.names[name] for name in events.name[ops].tolist()]):
            collective[ops[op]] = events.collective[enqueued[number]]
    return collective


def _gathered_unit(name: str) -> str | None:
    if not name.startswith(_GATHER):
        return None
    unit = name.removeprefix(_GATHER).removesuffix(_AGAIN)
    return "" if unit == _ROOT else unit


def _by_name(names: Sequence[str], code: Callable[[str], int]) -> Codes:
    """A code for each entry of a table, [names], at least one entry long, so that it can be indexed by an empty column."""
    return np.array([code(name) for name in names] or [-1], np.int8)
