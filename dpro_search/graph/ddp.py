"""`Trace` of a PyTorch DistributedDataParallel job -> `DdpGraph`: what each rank's main thread does in a step, in core time.

A rank's main thread runs forward, backward, DDP's copies and the optimizer, one after the other; it waits only for collectives.
Gloo's threads run on the same core. So every instant of a profiled step is one of: the main thread waits; or it has the core, but
for the share of Gloo's threads. What the core gave the main thread is its core time; it is scaled by how much less CPU time the
kernel counted in the steps without the profiler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import SETTLING_STEPS, EventKind, Events, Floats, Ints, TensorInfo, Trace
from dpro_search.errors import GraphError

_LARGEST_SHARE = 0.9  # of a core that Gloo's threads can have taken while the main thread ran
_LEAST_OF_OP = 0.3  # part of an op's time that is its own in any case, not the profiler's
_LATE_END_US = 10_000.0  # two turns of the scheduler
_PLAUSIBLE = (0.6, 1.3)  # counted over passed core time of a step
_COPY = "ddp.reducer::copy_bucket_to_grad"
_BROADCAST = "broadcast"


@dataclass(frozen=True, kw_only=True)
class DdpGraph:
    """One step of a job, a sample per profiled step; times are core time of a rank's main thread in microseconds.

    Attributes
    ----------
    tensors
        Gradients in the order in which they become ready.
    bucket_of
        Recorded bucket of each gradient, [tensors]; buckets are numbered in the order of their all-reduces.
    ready_us
        Core time used up when each gradient is in its bucket, [samples, ranks, tensors].
    backward_us
        Core time used up at the end of the backward pass, [samples, ranks].
    copy_us
        Copy of each reduced gradient out of its bucket, [samples, ranks, tensors]; 0 where gradients are views.
    after_us
        From the last copy to the next step: optimizer and script, [samples, ranks].
    forward_post_us, forward_bytes, forward_is_broadcast
        Collectives that the main thread posts and waits for during the forward pass: when, [samples, ranks, collectives]; their
        bytes; and whether rank 0 only sends, [collectives].
    compression
        Bytes that the buckets' all-reduces moved over those of their gradients: below 1 where a communication hook compresses.
    steps
        Index in the trace of each sample's step, [samples].
    ops
        Events that this was made of.
    """

    tensors: tuple[TensorInfo, ...]
    bucket_of: Ints
    ready_us: Floats
    backward_us: Floats
    copy_us: Floats
    after_us: Floats
    forward_post_us: Floats
    forward_bytes: Floats
    forward_is_broadcast: npt.NDArray[np.bool_]
    compression: float
    steps: Ints
    ops: int

    @property
    def gradient_bytes(self) -> Floats:
        """Bytes that the all-reduce of each gradient moves, [tensors]."""
        return self.compression * np.array([tensor.size_bytes for tensor in self.tensors], dtype=np.float64)

    @property
    def ranks(self) -> int:
        """Number of recorded ranks."""
        return int(self.backward_us.shape[1])

    def __len__(self) -> int:
        return self.ops


def build_ddp_graph(trace: Trace, steps: tuple[int, ...] | None = None, *, with_profiler: bool = False) -> DdpGraph:
    """The graph of a job, with costs from the given profiled steps (all of them if None).

    Parameters
    ----------
    with_profiler
        Keep what profiling added: for comparisons with profiled steps.

    Raises
    ------
    GraphError
        A rank was not profiled, or a gradient was not communicated.
    """
    if not trace.tensors:
        raise GraphError("the trace has no gradient: the profiled steps all-reduced nothing; record a distributed job")
    sampled = _sampled_steps(trace, steps)
    bucket_of = np.unique([int(tensor.node.rpartition(" ")[2]) for tensor in trace.tensors], return_inverse=True)[1]
    ranks = range(trace.meta.ranks)
    axes = {(step, rank): _axis(trace, rank, step) for step in _sampled_steps(trace, None) for rank in ranks}
    if not with_profiler:
        for rank in ranks:
            axes |= _without_profiler({key: axis for key, axis in axes.items() if key[1] == rank}, _usual_cpu_us(trace, rank))
    parts = [[_StepPart(trace, rank, step, bucket_of, axes[step, rank]) for rank in ranks] for step in sampled]
    counts = {len(part.forward_post_us) for row in parts for part in row}
    if len(counts) > 1:
        raise GraphError("the profiled steps differ in how many collectives their forward passes have; record more alike ones")
    first = parts[0][0]
    return DdpGraph(
        tensors=trace.tensors,
        bucket_of=bucket_of,
        ready_us=np.array([[part.ready_us for part in row] for row in parts]),
        backward_us=np.array([[part.backward_us for part in row] for row in parts]),
        copy_us=np.array([[part.copy_us for part in row] for row in parts]),
        after_us=np.array([[part.after_us for part in row] for row in parts]),
        forward_post_us=np.array([[part.forward_post_us for part in row] for row in parts]),
        forward_bytes=first.forward_bytes,
        forward_is_broadcast=first.forward_is_broadcast,
        compression=first.bucket_bytes / max(sum(tensor.size_bytes for tensor in trace.tensors), 1),
        steps=np.array(sampled, dtype=np.int64),
        ops=int((trace.events.kind == EventKind.OP).sum() // max(len(np.unique(trace.events.step)), 1)),
    )


def communication_cpu_us(trace: Trace) -> Floats:
    """Core time of Gloo's threads per step, on each rank, [ranks]."""
    return np.array(
        [float(np.median(trace.steps.comm_cpu_us[_steady(trace, rank, traced=True)])) for rank in range(trace.meta.ranks)]
    )


def main_waits_us(trace: Trace, rank: int, step: int) -> Floats:
    """When the main thread of a rank waited for collectives in a step: (start, end) rows, [waits, 2].

    These are the gaps between its ops, up to the last collective that ended within each. A collective may be seen to end a little
    after the main thread has gone on: Gloo's thread wakes it first, and loses the core to it.
    """
    mine = trace.events.select((trace.events.rank == rank) & (trace.events.step == step))
    ops = mine.select((mine.kind == EventKind.OP) & (mine.stream == 0))
    order = np.argsort(ops.start_us, kind="stable")
    ends = np.sort(mine.end_us[mine.kind == EventKind.COLLECTIVE])
    gap_start, gap_end = np.maximum.accumulate(ops.end_us[order])[:-1], ops.start_us[order][1:]
    latest = gap_end + np.where(gap_end - gap_start > _LATE_END_US, _LATE_END_US, 0.0)
    until = np.searchsorted(ends, latest, side="right")
    waited = (until > np.searchsorted(ends, gap_start, side="left")) & (gap_end > gap_start)
    return np.stack((gap_start[waited], np.minimum(ends[until[waited] - 1], gap_end[waited])), axis=1)


def covered(time_us: Floats, spans_us: Floats) -> npt.NDArray[np.bool_]:
    """Which instants lie in any of the (start, end) rows, [instants]."""
    begun = np.searchsorted(np.sort(spans_us[:, 0]), time_us, side="right")
    ended = np.searchsorted(np.sort(spans_us[:, 1]), time_us, side="right")
    return np.asarray(begun > ended)


def _sampled_steps(trace: Trace, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    """Steps that are profiled on every rank; the last is left out, for the profiler stops before the next one starts."""
    common: set[int] | None = None
    for rank in range(trace.meta.ranks):
        traced = set(trace.steps.index[(trace.steps.rank == rank) & trace.steps.traced].tolist())
        if not traced:
            raise GraphError(f"rank {rank} has no profiled step: its files are missing or its job ended early; record it again")
        common = traced if common is None else common & traced
    found = sorted(common or ())
    found = found[:-1] if len(found) > 1 else found
    chosen = found if wanted is None else [step for step in found if step in wanted]
    if not chosen:
        raise GraphError(f"none of the steps asked for was profiled on every rank (profiled: {found})")
    return tuple(chosen)


def _steady(trace: Trace, rank: int, *, traced: bool) -> npt.NDArray[np.bool_]:
    """Rows of a rank's steps of one kind, neither among the first nor beside a start or a stop of the profiler."""
    steps = trace.steps
    rows = np.flatnonzero(steps.rank == rank)
    kind = steps.traced[rows]
    alike = np.append(kind[:-1] == kind[1:], False) & (kind == traced) & (steps.index[rows] >= SETTLING_STEPS)
    found = np.zeros(len(steps), dtype=np.bool_)
    found[rows[alike if alike.any() else kind == traced]] = True
    return found


def _usual_cpu_us(trace: Trace, rank: int) -> tuple[float, float] | None:
    """Median CPU time of the main thread in (unprofiled, profiled) steps; None where the recording lacks either."""
    plain, profiled = (trace.steps.compute_cpu_us[_steady(trace, rank, traced=traced)] for traced in (False, True))
    if len(plain) < 3 or len(profiled) < 1 or not profiled.min() > 0:
        return None
    return float(np.median(plain)), float(np.median(profiled))


@dataclass(frozen=True)
class _Axis:
    """Core time of the main thread over one step of one rank: a piecewise linear function of the time of day.

    `cpu_us` is what the kernel counted for the main thread in this step.
    """

    edge_us: Floats
    core_us: Floats
    ops: Events
    cpu_us: float

    def used_us(self, time_us: Floats) -> Floats:
        return np.interp(time_us, self.edge_us, self.core_us)


def _axis(trace: Trace, rank: int, step: int) -> _Axis:
    row = np.flatnonzero((trace.steps.rank == rank) & (trace.steps.index == step))[0]
    following = np.flatnonzero((trace.steps.rank == rank) & (trace.steps.index == step + 1))
    begin = float(trace.steps.start_us[row])
    end = float(trace.steps.start_us[following[0]]) if len(following) else float(trace.steps.end_us[row])
    mine = trace.events.select((trace.events.rank == rank) & (trace.events.step == step))
    ops = mine.select((mine.kind == EventKind.OP) & (mine.stream == 0))
    if not len(ops):
        raise GraphError(f"rank {rank} ran no op in step {step}; its profile is damaged: record it again")
    ops = ops.select(np.argsort(ops.start_us, kind="stable"))
    transfers = mine.select(mine.kind == EventKind.ALLREDUCE)
    waits, moves = main_waits_us(trace, rank, step), np.stack((transfers.start_us, transfers.end_us), axis=1)
    edges = np.unique(np.clip(np.concatenate(([begin, end], ops.end_us, waits.ravel(), moves.ravel())), begin, end))
    middle, width = (edges[:-1] + edges[1:]) / 2, np.diff(edges)
    waiting, moving = covered(middle, waits), covered(middle, moves)
    comm_cpu_us = min(float(trace.steps.comm_cpu_us[row]), 1.5 * float(np.median(trace.steps.comm_cpu_us)))
    share = min(comm_cpu_us / max(float(width[moving].sum()), 1.0), _LARGEST_SHARE)
    core = np.where(waiting, 0.0, width * np.where(moving, 1 - share, 1.0))
    return _Axis(edges, np.concatenate(([0.0], np.cumsum(core))), ops, float(trace.steps.compute_cpu_us[row]))


def _without_profiler(axes: dict[tuple[int, int], _Axis], usual: tuple[float, float] | None) -> dict[tuple[int, int], _Axis]:
    """The steps of one rank without what the profiler added to each op, scaled to the CPU time of unprofiled steps.

    Where the kernel counted less than passed, others took the core; what all steps have in common of this, stays.
    """
    if usual is None:
        return axes
    plain, profiled = usual
    counted = {key: min(max(axis.cpu_us, 0.7 * profiled), 1.3 * profiled) for key, axis in axes.items()}
    shares = [counted[key] / max(float(axis.core_us[-1]), 1e-9) for key, axis in axes.items()]
    share = min(max(float(np.median(shares)), _PLAUSIBLE[0]), _PLAUSIBLE[1])
    found = {}
    for key, axis in axes.items():
        added_us = max(profiled - plain, 0.0) / len(axis.ops)
        parts = np.diff(axis.core_us)
        ended = np.bincount(np.maximum(np.searchsorted(axis.edge_us, axis.ops.end_us) - 1, 0), minlength=len(parts))
        parts = np.maximum(parts - ended[: len(parts)] * added_us, _LEAST_OF_OP * parts)
        wanted_us = counted[key] / share * plain / profiled
        parts *= wanted_us / max(float(parts.sum()), 1e-9)
        found[key] = replace(axis, core_us=np.concatenate(([0.0], np.cumsum(parts))))
    return found


class _StepPart:
    """One rank in one step, divided at its posts and waits."""

    def __init__(self, trace: Trace, rank: int, step: int, bucket_of: Ints, axis: _Axis) -> None:
        mine = trace.events.select((trace.events.rank == rank) & (trace.events.step == step))
        whole = mine.select(mine.kind == EventKind.COLLECTIVE)
        comm = mine.select(mine.kind == EventKind.COMM)
        comm = comm.select(np.argsort(comm.tensor, kind="stable"))
        if len(comm) != len(bucket_of):
            raise GraphError(f"{len(bucket_of) - len(comm)} gradients were not communicated on rank {rank} in step {step}")
        self.ready_us = axis.used_us(comm.start_us)
        copies = _copies(trace, axis.ops, len(bucket_of))
        last = float(comm.start_us.max())
        if copies is None:
            self.copy_us = np.zeros(len(bucket_of))
            self.backward_us = float(axis.used_us(np.array([last]))[0])
            self.after_us = float(axis.core_us[-1]) - self.backward_us
        else:
            marks = axis.used_us(np.concatenate((axis.ops.end_us[copies[0] - 1 : copies[0]], axis.ops.end_us[copies])))
            self.copy_us, self.backward_us = np.diff(marks), float(marks[0])
            self.after_us = float(axis.core_us[-1] - marks[-1])
        buckets = np.isin(whole.collective, comm.collective)
        self.bucket_bytes = float(whole.size_bytes[buckets].sum())
        forward = whole.select(~buckets & (whole.start_us < last))
        forward = forward.select(np.argsort(forward.start_us, kind="stable"))
        self.forward_post_us = axis.used_us(forward.start_us)
        self.forward_bytes = forward.size_bytes.astype(np.float64)
        self.forward_is_broadcast = np.array([trace.names[name] == _BROADCAST for name in forward.name], dtype=np.bool_)


def _copies(trace: Trace, ops: Events, tensors: int) -> Ints | None:
    """Rows of the ops that copy gradients out of their buckets, one per gradient; None where there are none."""
    named = np.array([name.endswith(_COPY) for name in trace.names], dtype=np.bool_)
    rows = np.flatnonzero(named[ops.name])
    return rows[-tensors:] if len(rows) >= tensors and rows[-tensors] > 0 else None
