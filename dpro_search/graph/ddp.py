"""`Trace` of a PyTorch DistributedDataParallel job -> `DdpGraph`: what each rank's main thread does in a step, in core time.

Core time is that of `graph/main_thread.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro_search.collect.modules import ModuleInfo
from dpro_search.collect.trace import CollectiveKind, EventKind, Events, Floats, Ints, Role, Trace
from dpro_search.errors import GraphError
from dpro_search.graph.main_thread import CoreTime, MainThreadGraph, core_times, ops_per_step
from dpro_search.graph.measured import sampled_steps

# Core times of a module, and what they are for one without a known call.
_MODULE_TIMES = {
    "forward_from_us": 0.0,
    "forward_us": 0.0,
    "again_us": 0.0,
    "backward_from_us": np.inf,
    "backward_until_us": np.inf,
}


@dataclass(frozen=True, kw_only=True)
class DdpGraph(MainThreadGraph):
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
        Collectives that the main thread enqueues and waits for during the forward pass: when, [samples, ranks, collectives]; their
        bytes; and whether rank 0 only sends, [collectives].
    compression
        Bytes that the buckets' all-reduces moved over those of their gradients: below 1 where a communication hook compresses.
    comm_hook
        Name of the communication hook that the recorded model had; empty: none, or not known.
    modules
        Those of the model, in the order in which they run; none where the recording does not have them.
    forward_from_us, forward_us, again_us
        Of each module, the core time used up when its forward pass begins, how long that takes, and how long it takes to compute it
        again, [samples, ranks, modules]; 0 for one that cannot be computed again.
    backward_from_us, backward_until_us
        Core time used up when its backward pass begins and when it ends, likewise; infinite for one that cannot be computed again.
    """

    bucket_of: Ints
    ready_us: Floats
    backward_us: Floats
    copy_us: Floats
    forward_post_us: Floats
    forward_bytes: Floats
    forward_is_broadcast: npt.NDArray[np.bool_]
    compression: float
    modules: tuple[ModuleInfo, ...]
    forward_from_us: Floats
    forward_us: Floats
    again_us: Floats
    backward_from_us: Floats
    backward_until_us: Floats
    comm_hook: str = ""

    @property
    def gradient_bytes(self) -> Floats:
        """Bytes that the all-reduce of each gradient moves, [tensors]."""
        return self.compression * np.array([tensor.size_bytes for tensor in self.tensors], dtype=np.float64)


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
    sampled = sampled_steps(trace, steps)
    bucket_of = np.unique([int(tensor.node.rpartition(" ")[2]) for tensor in trace.tensors], return_inverse=True)[1]
    times = core_times(trace, with_profiler=with_profiler)
    parts = [[_DdpPart(trace, rank, step, bucket_of, times[step, rank]) for rank in range(trace.meta.ranks)] for step in sampled]
    counts = {len(part.forward_post_us) for row in parts for part in row}
    if len(counts) > 1:
        raise GraphError(
            "the profiled steps differ in how many collectives their forward passes have; record steps that do the same"
        )
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
        modules=trace.modules,
        **{name: np.array([[part.modules_us[name] for part in row] for row in parts]) for name in _MODULE_TIMES},
        steps=np.array(sampled, dtype=np.int64),
        comm_hook=str(trace.meta.knobs.get("comm_hook", "")),
        ops=ops_per_step(trace),
    )


class _DdpPart:
    """One rank in one step, divided at its enqueues and waits."""

    def __init__(self, trace: Trace, rank: int, step: int, bucket_of: Ints, axis: CoreTime) -> None:
        step_events = trace.events.select((trace.events.rank == rank) & (trace.events.step == step))
        whole = step_events.select(step_events.kind == EventKind.COLLECTIVE)
        comm = step_events.select(step_events.kind == EventKind.COMM)
        comm = comm.select(np.argsort(comm.tensor, kind="stable"))
        if len(comm) != len(bucket_of):
            raise GraphError(f"{len(bucket_of) - len(comm)} gradients were not communicated on rank {rank} in step {step}")
        self.ready_us = axis.used_us(comm.start_us)
        copies = _copies(axis.ops, len(bucket_of))
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
        self.forward_is_broadcast = forward.collective_kind == CollectiveKind.BROADCAST
        calls = trace.module_calls
        of_step = (calls.rank == rank) & (calls.step == step)
        begin_us = axis.used_us(calls.start_us[of_step])
        times_us = {
            "forward_from_us": begin_us,
            "forward_us": axis.used_us(calls.end_us[of_step]) - begin_us,
            "again_us": axis.used_us(calls.again_us[of_step]) - begin_us,
            "backward_from_us": axis.used_us(calls.backward_us[of_step]),
            "backward_until_us": axis.used_us(calls.backward_end_us[of_step]),
        }
        self.modules_us = {name: np.full(len(trace.modules), unknown) for name, unknown in _MODULE_TIMES.items()}
        for name, us in times_us.items():
            self.modules_us[name][calls.module[of_step]] = us


def _copies(ops: Events, tensors: int) -> Ints | None:
    """Rows of the ops that copy gradients out of their buckets, one per gradient; None where none exist."""
    rows = np.flatnonzero(ops.role == Role.COPY)
    return rows[-tensors:] if len(rows) >= tensors and rows[-tensors] > 0 else None
