"""What carries the gradients of a job, as recorded and under its best plan: collectives, buckets, messages to servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from dpro_search.cli.run import describe
from dpro_search.collect.trace import Trace
from dpro_search.replay.horovod import machine
from dpro_search.replay.store_plans import BytepsPlans, KvstorePlans
from dpro_search.report.groups import Group, TensorGroups, planned_groups, recorded_groups
from dpro_search.space.plan import Plan

if TYPE_CHECKING:
    from dpro_search.replay import Predictor

_RECORDED = "as recorded"
_REPLAYED_ITERATIONS = 8


def groups_of(trace: Trace, step: int | None, best: Plan | None) -> TensorGroups | None:
    """The groups of a trace's job, and of the best plan of its search; None where the recording tells nothing of them.

    Parameters
    ----------
    step
        The recorded step to look at; None: none was recorded op by op.
    best
        None: no search, or no plan beside the recorded setting.
    """
    if trace.meta.format == "pytorch-ddp":
        return _buckets(trace, best)
    if trace.meta.format in ("mxnet-kvstore", "mxnet-byteps"):
        return _messages(trace, best)
    recorded = () if step is None else recorded_groups(trace, step)
    if trace.meta.settings is not None:
        return _collectives(trace, recorded, best)
    return TensorGroups(groups={_RECORDED: recorded}) if any(group.count > 1 for group in recorded) else None


def _collectives(trace: Trace, recorded: Sequence[Group], best: Plan | None) -> TensorGroups | None:
    """Of a Horovod job, whose groups are the plan's or form while it runs."""
    from dpro_search.replay import Predictor

    found: dict[str, Sequence[Group]] = {_RECORDED: recorded} if recorded else {}
    note = ""
    if best is not None and best.tensor_groups is not None:
        found[describe(best)] = planned_groups(trace.tensors, best.tensor_groups)
    elif best is not None and (best.fusion_threshold_bytes is not None or best.cycle_time_us is not None):
        # Algorithms, of which only the search's model knows, hardly change which groups form.
        planned = replayed_groups(Predictor.from_trace(trace), msgspec.structs.replace(best, allreduce_algorithms=None))
        if planned:
            found[describe(best)] = planned
            note = "The plan sets a limit; these groups formed under it in a replayed iteration, and vary from one to the next."
    return TensorGroups(groups=found, note=note) if found else None


def replayed_groups(predictor: Predictor, plan: Plan) -> tuple[Group, ...]:
    """The collectives that form in an iteration of a replay, in order, their tensors counted; empty if it logged no whole one."""
    job, log = predictor.job(plan), predictor.timeline(plan, log=True, iterations=_REPLAYED_ITERATIONS).log
    posts = log[log[:, machine.LOG_KIND] == machine.LOG_POST]
    posts = posts[posts[:, machine.LOG_RANK] == 0]
    iterations = [posts[posts[:, machine.LOG_ITERATION] == number] for number in np.unique(posts[:, machine.LOG_ITERATION])]
    whole = [rows for rows in iterations if len(rows) == job.units]
    if not whole:
        return ()
    chosen = whole[len(whole) // 2]
    found: dict[float, list[int]] = {}
    for row in chosen[np.argsort(chosen[:, machine.LOG_END], kind="stable")]:
        found.setdefault(float(row[machine.LOG_COLLECTIVE]), []).append(int(row[machine.LOG_UNIT]))
    return tuple(
        Group(tensors=(), size_bytes=round(float(job.unit_bytes[units].sum())), unnamed=int(job.unit_tensors[units].sum()))
        for units in found.values()
    )


def _buckets(trace: Trace, best: Plan | None) -> TensorGroups:
    """Of a DistributedDataParallel job: they follow from a size alone."""
    from dpro_search.replay.ddp.predictor import DdpPredictor
    from dpro_search.space.ddp_job import bucket_assignment

    graph = DdpPredictor.from_trace(trace).graph
    numbers = {_RECORDED: graph.bucket_of}
    if best is not None and best.bucket_cap_bytes is not None:
        numbers[describe(best)] = bucket_assignment(graph.tensors, [best.bucket_cap_bytes])
    found: dict[str, Sequence[Group]] = {}
    for setting, bucket_of in numbers.items():
        members = [np.flatnonzero(bucket_of == bucket).tolist() for bucket in range(int(bucket_of.max(initial=-1)) + 1)]
        found[setting] = [
            Group(
                tensors=tuple(graph.tensors[place].name for place in own), size_bytes=round(float(graph.gradient_bytes[own].sum()))
            )
            for own in members
        ]
    return TensorGroups(groups=found, noun="bucket")


def _messages(trace: Trace, best: Plan | None) -> TensorGroups:
    """Of a job with parameter servers: parts of tensors, by the server that they go to."""
    names = [tensor.name for tensor in trace.tensors]
    parts: dict[str, Mapping[int, Iterable[Group]]] = {}
    if trace.meta.format == "mxnet-kvstore":
        kvstore = KvstorePlans.from_trace(trace)
        for setting, plan in _plans(best).items():
            job = kvstore.job(plan)
            parts[setting] = _by_server(
                len(job.server_core),
                ((server, name, size) for name, row in zip(names, job.slices, strict=True) for server, size in row),
            )
    else:
        byteps = BytepsPlans.from_trace(trace)
        for setting, plan in _plans(best).items():
            byteps_job = byteps.job(plan)
            parts[setting] = _by_server(
                len(byteps_job.server_core),
                ((part.server, name, part.size_bytes) for place, name in enumerate(names) for part in byteps_job.parts(place)),
            )
    found = {f"{setting}, server {server}": tuple(own) for setting, servers in parts.items() for server, own in servers.items()}
    return TensorGroups(groups=found, noun="message", note="A worker sends them to the server, and gets as much back.")


def _plans(best: Plan | None) -> dict[str, Plan]:
    return {_RECORDED: Plan()} | ({} if best is None else {describe(best): best})


def _by_server(servers: int, messages: Iterable[tuple[int, str, float]]) -> dict[int, list[Group]]:
    found: dict[int, list[Group]] = {server: [] for server in range(servers)}
    for server, name, size_bytes in messages:
        found[server].append(Group(tensors=(name,), size_bytes=round(size_bytes)))
    return found
