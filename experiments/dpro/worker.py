"""What a profile of one worker says of its step, which is all that Daydream knows of a job: `worker_of(trace)`.

Compute lasts as long as the profile says, whatever else ran meanwhile: a rank has one core, so that its ops are one sequence, and
where several threads of a rank compute at a time, each instant counts once. Pauses between ops count as well (Daydream's "gaps"),
but not those in which the next op waited for communication. Neither what the kernel counts as CPU time nor the other ranks are
looked at, nor what the communication library writes of itself.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from dpro_search.collect.trace import Dependencies, EventKind, Events, Floats, TensorInfo, Trace
from dpro_search.errors import GraphError, InputError
from dpro_search.graph.build import build_graph
from dpro_search.graph.ddp import build_ddp_graph
from dpro_search.space.servers.byteps_recorded import recorded_byteps_job
from dpro_search.space.servers.kvstore_recorded import recorded_kvstore_job
from dpro_search.space.servers.recorded_workers import first_users

_OF_LIBRARY = (
    *(EventKind.NEGOTIATE, EventKind.QUEUE, EventKind.MEMCPY_IN, EventKind.ALLREDUCE, EventKind.MEMCPY_OUT),
    *(EventKind.CYCLE, EventKind.SERVER),
)
_UPDATE = "_update"
_OF_STORE = re.compile("CopyCPU2CPU")  # copies between model and store: communication
_FEW = 3  # with fewer profiled steps the first and the last count as well


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A piece of compute."""

    work_us: float  # Its duration.
    makes: tuple[int, ...] = ()  # Tensors whose gradients are there at its end.
    needs: tuple[int, ...] = ()  # Tensors whose gradients must be back before it.
    wants: tuple[int, ...] = ()  # Tensors whose weights it is the first to use: those of the step before must be back, and updated.


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One worker's step."""

    tensors: tuple[TensorInfo, ...]  # Gradients; a stretch names them by their place here.
    chain: tuple[Stretch, ...]  # Compute in its order.
    updates: tuple[Stretch, ...] = ()  # What runs once its gradients are back, in any order.
    # From the end of all that until the next step begins; None where steps are not separated, but the next one's ops wait only for
    # the weights that they want.
    script_us: float | None = None

    @property
    def compute_us(self) -> float:
        """All compute of a step."""
        return sum(stretch.work_us for stretch in (*self.chain, *self.updates)) + (self.script_us or 0.0)


def worker_of(trace: Trace) -> Worker:
    """Worker 0 of a recorded job; durations are means over the profiled steps.

    Raises
    ------
    InputError
        It is no kind of job that is known here.
    GraphError
        The trace does not hold a whole step.
    """
    if trace.meta.settings is not None:
        return _horovod_worker(trace)
    if trace.meta.format == "pytorch-ddp":
        return _ddp_worker(trace)
    if trace.meta.format in ("mxnet-kvstore", "mxnet-byteps"):
        return _store_worker(trace)
    raise InputError(f"the trace ({trace.meta.format}) is of a job that Daydream's model is not made for here")


def seen_by_worker(trace: Trace) -> Trace:
    """The trace as a profiler of worker 0 alone would have it: its ops, and when it posts gradients and has them back."""
    events, steps = trace.events, trace.steps.select(trace.steps.rank == 0)
    nothing = np.zeros(len(steps))
    knobs = {name: value for name, value in trace.meta.knobs.items() if name != "HOROVOD_CONTROLLER"}
    return replace(
        trace,
        meta=msgspec.structs.replace(trace.meta, ranks=1, hosts=trace.meta.hosts[:1], cores=trace.meta.cores[:1], knobs=knobs),
        events=events.select((events.rank == 0) & ~np.isin(events.kind, _OF_LIBRARY)),
        steps=replace(steps, compute_cpu_us=nothing, comm_cpu_us=nothing),
        graphs=tuple(replace(graph, tensors=None) for graph in trace.graphs),
        graph_of_rank=trace.graph_of_rank[:1],
        dependencies=Dependencies.none(),
    )


def _horovod_worker(trace: Trace) -> Worker:
    """Main stream up to each post, then updates as gradients come back."""
    graph = build_graph(seen_by_worker(trace), with_profiler=True)
    profile = graph.profiles[0]
    posts_us = np.maximum.accumulate(profile.post_us.mean(axis=0))
    return Worker(
        tensors=graph.tensors,
        chain=_until_posts(posts_us, float(profile.main_us.mean())),
        updates=tuple(Stretch(work_us=float(release.work_us.mean()), needs=release.tensors) for release in profile.releases),
        script_us=float(profile.host_us.mean()),
    )


def _ddp_worker(trace: Trace) -> Worker:
    """The main thread: up to each gradient, to the end of the backward pass, then each bucket's copies, and the optimizer."""
    graph = build_ddp_graph(seen_by_worker(trace), with_profiler=True)
    ready_us, copy_us = graph.ready_us.mean(axis=(0, 1)), graph.copy_us.mean(axis=(0, 1))
    order = np.argsort(ready_us, kind="stable")
    chain = _until_posts(ready_us[order], float(graph.backward_us.mean()), order.tolist())
    buckets = [np.flatnonzero(graph.bucket_of == bucket) for bucket in np.unique(graph.bucket_of)]
    copies = [Stretch(work_us=float(copy_us[members].sum()), needs=tuple(members.tolist())) for members in buckets]
    return Worker(tensors=graph.tensors, chain=(*chain, *copies), script_us=float(graph.after_us.mean()))


def _until_posts(posts_us: Floats, end_us: float, tensors: Sequence[int] | None = None) -> tuple[Stretch, ...]:
    """Compute from one post to the next, and from the last to the end; posts are sorted."""
    named = range(len(posts_us)) if tensors is None else tensors
    parts_us = np.diff(posts_us, prepend=0.0).tolist()
    posting = [Stretch(work_us=us, makes=(tensor,)) for us, tensor in zip(parts_us, named, strict=True)]
    return (*posting, Stretch(work_us=max(end_us - float(posts_us[-1]), 0.0)))


# Jobs with parameter servers: MXNet's engine runs behind the script, and a step begins before the one before has ended.


def _store_worker(trace: Trace) -> Worker:
    seen = seen_by_worker(trace).events
    of_store = np.array([_OF_STORE.search(name) is not None for name in trace.names])
    computes = np.isin(seen.kind, (EventKind.OP, EventKind.KERNEL)) & (seen.step >= 0)
    ops = seen.select(computes & ~of_store[seen.name])
    comm = seen.select((seen.kind == EventKind.COMM) & (seen.step >= 0) & (seen.tensor >= 0))
    if not len(ops) or not len(comm):
        raise GraphError("the first worker's profile has no operator or no gradient: record the job again")
    steps = _Steps(trace, ops.select(np.argsort(ops.start_us, kind="stable")), comm)
    groups = _updated_together(trace)
    sizes = np.array([tensor.size_bytes for tensor in trace.tensors], dtype=np.float64)
    each_us = steps.update_us * sizes / sizes.sum()
    return Worker(
        tensors=trace.tensors,
        chain=steps.chain,
        updates=tuple(Stretch(work_us=float(each_us[group].sum()), needs=tuple(group)) for group in groups),
    )


class _Steps:
    """The profiled steps of one worker.

    Attributes
    ----------
    chain
        Operators of the model in the order of a step in the middle; durations are means over all steps with the same operators.
    update_us
        Operators that update weights, all of a step, mean.
    """

    def __init__(self, trace: Trace, ops: Events, comm: Events) -> None:
        """`ops` are sorted by their starts."""
        names = [trace.names[name] for name in ops.name.tolist()]
        is_update = np.array([_UPDATE in name for name in names])
        rows = {int(step): np.flatnonzero((ops.step == step) & ~is_update) for step in np.unique(ops.step[~is_update])}
        uses: list[tuple[int, ...]] = [()] * len(ops)
        for mine in rows.values():
            for row, used in zip(mine.tolist(), first_users(trace, [names[row] for row in mine]), strict=True):
                uses[row] = used
        work_us = _own_us(ops) + _pauses_us(ops, uses, is_update, comm)
        whole = list(rows)[1:-1] if len(rows) > _FEW else list(rows)
        kinds = {step: tuple(sorted(names[row] for row in rows[step])) for step in whole}
        usual = Counter(kinds.values()).most_common(1)[0][0]
        alike = [step for step in whole if kinds[step] == usual]
        middle = sorted(alike, key=lambda step: float(work_us[rows[step]].sum()))[len(alike) // 2]
        mean_us = _means(names, work_us, [rows[step].tolist() for step in alike])
        makes = _made_after(ops.select(rows[middle]), comm.select(comm.step == middle), len(trace.tensors))
        seen: Counter[str] = Counter()
        chain = []
        for place, row in enumerate(rows[middle].tolist()):
            chain.append(Stretch(work_us=mean_us[names[row], seen[names[row]]], makes=tuple(makes[place]), wants=uses[row]))
            seen[names[row]] += 1
        self.chain = tuple(chain)
        self.update_us = float(np.mean([work_us[(ops.step == step) & is_update].sum() for step in alike]))


def _own_us(ops: Events) -> Floats:
    """Of each op, the time that none before it covers; ops are sorted by their starts."""
    return np.maximum(ops.end_us - np.maximum(ops.start_us, _covered_until_us(ops)), 0.0)


def _covered_until_us(ops: Events) -> Floats:
    return np.concatenate(([-np.inf], np.maximum.accumulate(ops.end_us)[:-1]))


def _pauses_us(ops: Events, uses: Sequence[tuple[int, ...]], is_update: np.ndarray, comm: Events) -> Floats:
    """Idle time before each op from when the weights that it wants were back; before updates all of it is waiting."""
    backs = {tensor: np.sort(comm.end_us[comm.tensor == tensor]) for tensor in np.unique(comm.tensor).tolist()}
    free_us = _covered_until_us(ops)
    pauses = np.zeros(len(ops))
    for row in np.flatnonzero((ops.start_us > free_us) & np.isfinite(free_us) & ~is_update).tolist():
        start_us = float(ops.start_us[row])
        since_us = float(free_us[row])
        for tensor in uses[row]:
            before = np.searchsorted(backs[tensor], start_us, side="right") if tensor in backs else 0
            if before:
                since_us = max(since_us, float(backs[tensor][before - 1]))
        pauses[row] = start_us - since_us
    return pauses


def _means(names: Sequence[str], work_us: Floats, steps: Sequence[Sequence[int]]) -> dict[tuple[str, int], float]:
    """Mean over steps of the i-th op of a name, by (name, i)."""
    found: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for rows in steps:
        seen: Counter[str] = Counter()
        for row in rows:
            found[names[row], seen[names[row]]].append(float(work_us[row]))
            seen[names[row]] += 1
    return {key: float(np.mean(values)) for key, values in found.items()}


def _made_after(ops: Events, comm: Events, tensors: int) -> list[list[int]]:
    """Tensors that were sent after each op of a step had ended and before the next had."""
    ends_us = np.maximum.accumulate(ops.end_us)
    found: list[list[int]] = [[] for _ in range(len(ops))]
    for tensor in np.unique(comm.tensor).tolist():
        sent_us = float(comm.start_us[comm.tensor == tensor].min())
        found[max(int(np.searchsorted(ends_us, sent_us, side="right")) - 1, 0)].append(tensor)
    missing = set(range(tensors)).difference(*found)
    if missing:
        raise GraphError(f"{len(missing)} gradients were not sent in the step that is looked at; record the job again")
    return found


def _updated_together(trace: Trace) -> list[list[int]]:
    """Tensors that the worker updates at once; none where servers update."""
    if trace.meta.format == "mxnet-byteps":
        group = recorded_byteps_job(trace).group
        return [np.flatnonzero(group == number).tolist() for number in np.unique(group)]
    job = recorded_kvstore_job(trace)
    return [list(tensors) for tensors in job.updates] if job.slicing.priority else []
