"""``apply_ddp(graph, ...) -> DdpJob``: a DistributedDataParallel job under a bucket size and on a cluster, as a program.

Buckets follow PyTorch's rule (``compute_bucket_assignment_by_size`` on gradients in the order in which they became ready): a bucket
is closed by the gradient that brings it to its limit or above.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats, Ints, TensorInfo
from dpro_search.costmodel.collectives.horovod import CommCosts, at_cluster
from dpro_search.costmodel.compressed_gradients import half_back_us, half_cast_us, of_halves
from dpro_search.costmodel.powersgd import COMPRESSIONS as POWERSGD
from dpro_search.costmodel.powersgd import SENT_PARTS, low_rank
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.graph.ddp import DdpGraph
from dpro_search.space.cluster import ClusterSpec

GLOO_THREADS = 2  # collectives that a process group of Gloo runs at a time, unless set otherwise


class Action(enum.IntEnum):
    """The action of a rank's main thread at the end of a segment."""

    NONE = 0
    POST = 1
    WAIT = 2


@dataclass(frozen=True, kw_only=True)
class DdpJob:
    """A job as the same program of S segments on every rank: core time, then an action on one of C collectives."""

    core: Ints  # Core of each rank, numbered from 0, [ranks].
    work_us: Floats  # Core time of each segment, [samples, ranks, S].
    # action, collective: `Action` at the end of each segment, and on which collective (-1 for NONE), [S].
    action: Ints
    collective: Ints
    # size_bytes, is_broadcast: Of each collective, in the order of posting, [C]. Rank 0 does not wait for its broadcasts.
    size_bytes: Floats
    is_broadcast: npt.NDArray[np.bool_]
    threads: int  # How many collectives run at a time.
    comm: CommCosts  # What communication costs on this cluster.
    # Core time of Gloo's thread for each collective that has moved, [C]; empty: none.
    finish_us: Floats = field(default_factory=lambda: np.zeros(0))

    @property
    def first_bucket(self) -> int:
        """The first collective that is a bucket's: those before it are waited for during the forward pass."""
        last_post = np.flatnonzero(self.action == Action.POST).max(initial=-1)
        early = (self.action == Action.WAIT) & (np.arange(len(self.action)) < last_post)
        return int(self.collective[early].max(initial=-1)) + 1

    @property
    def samples(self) -> int:
        """Number of recorded steps whose durations are kept."""
        return len(self.work_us)

    @property
    def collective_names(self) -> list[str]:
        """Names of the collectives for people: buffers that the forward pass synchronises, then buckets."""
        first = self.first_bucket
        return [f"buffers {c}" if c < first else f"bucket {c - first}" for c in range(len(self.size_bytes))]

    @property
    def segment_names(self) -> list[str]:
        """Names of the segments for people."""
        labels, first = self.collective_names, self.first_bucket
        names = []
        for action, collective in zip(self.action.tolist(), self.collective.tolist(), strict=True):
            if action == Action.NONE:
                names.append(f"copies out of {labels[-1]}, optimizer")
            elif collective < first:
                back = "" if action == Action.POST else " back"
                names.append(f"forward until {labels[collective]}{back}")
            elif action == Action.POST:
                names.append(f"{'forward, ' if collective == first else ''}backward until {labels[collective]}")
            else:
                names.append("end of backward" if collective == first else f"copies out of {labels[collective - 1]}")
        return names

    @property
    def segment_kinds(self) -> list[OpKind]:
        """`OpKind` of the segments."""
        kinds = {Action.NONE: OpKind.UPDATE, Action.POST: OpKind.BACKWARD, Action.WAIT: OpKind.BACKWARD}
        forward = self.collective < self.first_bucket
        return [
            OpKind.FORWARD if early and action != Action.NONE else kinds[Action(action)]
            for action, early in zip(self.action.tolist(), forward.tolist(), strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class LabelledJob(DdpJob):
    """A job with the names of its collectives, and how many segments of its program are the forward pass's."""

    labels: tuple[str, ...]
    forward_segments: int

    @property
    def collective_names(self) -> list[str]:
        """Names of the collectives for people."""
        return list(self.labels)

    @property
    def segment_names(self) -> list[str]:
        """Names of the segments for people."""
        forms = {Action.POST: "{0} until {1}", Action.WAIT: "{0} until {1} is back", Action.NONE: "end of backward, optimizer"}
        return [
            forms[Action(action)].format("forward" if number < self.forward_segments else "backward", self.labels[collective])
            for number, (action, collective) in enumerate(zip(self.action.tolist(), self.collective.tolist(), strict=True))
        ]

    @property
    def segment_kinds(self) -> list[OpKind]:
        """`OpKind` of the segments."""
        segments, forward = len(self.action), self.forward_segments
        return [OpKind.FORWARD] * forward + [OpKind.BACKWARD] * (segments - forward - 1) + [OpKind.UPDATE]


def bucket_assignment(tensors: Sequence[TensorInfo], limits_bytes: Sequence[int]) -> Ints:
    """Bucket of each gradient, [tensors], numbered in the order of their all-reduces.

    Parameters
    ----------
    tensors
        Gradients in the order in which they become ready. Those of one type of element share buckets.
    limits_bytes
        Sizes at which the first, second, ... bucket of a type is full; the last holds for all later ones.
    """
    if not limits_bytes or min(limits_bytes) < 0:
        raise InputError(f"bucket limits must be sizes >= 0, not {list(limits_bytes)}")
    members: list[list[int]] = []
    open_of: dict[str, tuple[list[int], int]] = {}
    closed: dict[str, int] = {}
    for index, tensor in enumerate(tensors):
        bucket, size = open_of.pop(tensor.dtype, ([], 0))
        bucket, size = [*bucket, index], size + tensor.size_bytes
        number = closed.get(tensor.dtype, 0)
        if size >= limits_bytes[min(number, len(limits_bytes) - 1)]:
            members.append(bucket)
            closed[tensor.dtype] = number + 1
        else:
            open_of[tensor.dtype] = bucket, size
    members += [bucket for bucket, _ in open_of.values()]
    bucket_of = np.zeros(len(tensors), dtype=np.int64)
    for number, bucket in enumerate(members):
        bucket_of[bucket] = number
    return bucket_of


def apply_ddp(
    graph: DdpGraph,
    costs: CommCosts,
    recorded: ClusterSpec,
    *,
    bucket_limits_bytes: Sequence[int] = (),
    cluster: ClusterSpec | None = None,
    threads: int = GLOO_THREADS,
    compression: str | None = None,
    as_views: bool = False,
) -> DdpJob:
    """The job with other buckets (as recorded if no limit is given) on a cluster (the recorded one if None).

    Limits are those of `bucket_assignment`. Ranks beyond the recorded ones behave like the recorded ones in turn. With the
    compression "fp16", float32 buckets travel in half precision: `fp16_compress_hook` casts a bucket on the main thread when it is
    full, before its post, and the callback of its future casts it back on Gloo's thread, before the main thread's wait for it ends.
    With one of `costmodel.powersgd`, the main thread waits for each full bucket (`runtime/follow/ddp.py` says why). With
    `as_views` gradients are views of the buckets, and nothing is copied out of them.
    """
    cluster = cluster or recorded
    if as_views:
        graph = replace(graph, copy_us=np.zeros_like(graph.copy_us))
    bucket_of = bucket_assignment(graph.tensors, bucket_limits_bytes) if bucket_limits_bytes else graph.bucket_of
    full_us = np.stack([graph.ready_us[:, :, bucket_of == b].max(axis=2) for b in range(int(bucket_of.max()) + 1)], axis=2)
    # Buckets are posted in order.
    full_us = np.minimum(np.maximum.accumulate(full_us, axis=2), graph.backward_us[:, :, None])
    comm = at_cluster(costs, 1.0, (recorded.rate_bps, recorded.ranks), (cluster.rate_bps, cluster.ranks))
    if compression in POWERSGD:
        return _low_rank_job(graph, bucket_of, full_us, POWERSGD[compression], cluster, threads, comm)
    return _overlapped_job(graph, bucket_of, full_us, cluster, threads, comm, half=compression == "fp16")


def _overlapped_job(
    graph: DdpGraph, bucket_of: Ints, post: Floats, cluster: ClusterSpec, threads: int, comm: CommCosts, *, half: bool
) -> DdpJob:
    """Buckets travel beside the backward pass; `post` is the core time used up when each is full, [samples, ranks, buckets]."""
    profile = np.arange(cluster.ranks) % graph.ranks
    buckets, forward = post.shape[2], len(graph.forward_bytes)
    gradient_bytes, backward_us, finish_us = graph.gradient_bytes, graph.backward_us, np.zeros(forward + buckets)
    if half:
        is_float32 = np.array([tensor.dtype == "float32" for tensor in graph.tensors])
        float32_bytes = np.where(is_float32, gradient_bytes, 0.0)
        hooked_bytes = np.asarray(np.bincount(bucket_of, weights=float32_bytes, minlength=buckets), dtype=np.float64)
        gradient_bytes = np.where(is_float32, gradient_bytes / 2, gradient_bytes)
        cast_us = np.cumsum(half_cast_us(hooked_bytes))
        post, backward_us = post + cast_us, backward_us + cast_us[-1]
        finish_us[forward:] = half_back_us(hooked_bytes)
    copies = np.stack([graph.copy_us[:, :, bucket_of == b].sum(axis=2) for b in range(buckets)], axis=2)
    upto = np.concatenate((graph.forward_post_us, post, backward_us[:, :, None]), axis=2)
    posting = np.diff(np.maximum.accumulate(upto, axis=2), axis=2, prepend=0.0)
    nothing = np.zeros((*posting.shape[:2], forward))
    # A segment ends with its action: the copy out of a bucket comes before the wait for the next.
    posted = posting[:, :, :forward], nothing, posting[:, :, forward:]
    last = copies[:, :, -1:] + graph.after_us[:, :, None]
    work = np.concatenate((*posted, copies[:, :, :-1], last), axis=2)
    first, later = np.arange(forward), forward + np.arange(buckets)
    steps = [(Action.POST, first), (Action.WAIT, first), (Action.POST, later), (Action.WAIT, later), (Action.NONE, np.array([-1]))]
    return DdpJob(
        core=numbered_cores(cluster),
        work_us=np.ascontiguousarray(work[:, profile]),
        action=np.concatenate([np.full(len(which), int(action)) for action, which in steps]),
        collective=np.concatenate([which for _, which in steps]),
        size_bytes=np.concatenate(
            (
                graph.forward_bytes,
                np.bincount(bucket_of, weights=gradient_bytes, minlength=buckets),
            )
        ),
        is_broadcast=np.concatenate((graph.forward_is_broadcast, np.zeros(buckets, dtype=np.bool_))),
        threads=threads,
        finish_us=finish_us,
        comm=of_halves(comm, cluster.ranks) if half else comm,
    )


def _low_rank_job(
    graph: DdpGraph, bucket_of: Ints, full_us: Floats, rank: int, cluster: ClusterSpec, threads: int, comm: CommCosts
) -> LabelledJob:
    """Each bucket's all-reduces, and what PowerSGD computes between them, stand in the backward pass where the bucket is full.

    An all-reduce of nothing is left out: Gloo has none to send.
    """
    profile, factors = np.arange(cluster.ranks) % graph.ranks, low_rank(graph.tensors, bucket_of, rank)
    forward = len(graph.forward_bytes)
    forward_us = np.diff(np.maximum.accumulate(graph.forward_post_us, axis=2), axis=2, prepend=0.0)
    steps = [(Action.POST, c, forward_us[:, :, c]) for c in range(forward)]
    steps += [(Action.WAIT, c, np.zeros_like(graph.backward_us)) for c in range(forward)]
    labels, sizes = [f"buffers {c}" for c in range(forward)], graph.forward_bytes.tolist()
    now_us, pending_us = forward_us.sum(axis=2), np.zeros_like(graph.backward_us)
    for bucket, (sent, stages) in enumerate(zip(factors.sent_bytes.tolist(), factors.stages_us.tolist(), strict=True)):
        pending_us = pending_us + np.maximum(full_us[:, :, bucket] - now_us, 0.0)
        now_us = np.maximum(now_us, full_us[:, :, bucket])
        for part, size_bytes, before_us in zip(SENT_PARTS, sent, stages, strict=False):
            pending_us = pending_us + before_us
            if size_bytes:
                steps += [
                    (Action.POST, len(sizes), pending_us),
                    (Action.WAIT, len(sizes), np.zeros_like(pending_us)),
                ]
                labels.append(f"{part} of bucket {bucket}")
                sizes.append(size_bytes)
                pending_us = np.zeros_like(pending_us)
        pending_us = pending_us + stages[-1]
    pending_us = pending_us + np.maximum(graph.backward_us - now_us, 0.0) + graph.copy_us.sum(axis=2) + graph.after_us
    steps.append((Action.NONE, -1, pending_us))
    work = np.stack([us for _, _, us in steps], axis=2)
    return LabelledJob(
        core=numbered_cores(cluster),
        work_us=np.ascontiguousarray(work[:, profile]),
        action=np.array([int(action) for action, _, _ in steps]),
        collective=np.array([which for _, which, _ in steps]),
        size_bytes=np.array(sizes),
        is_broadcast=np.concatenate((graph.forward_is_broadcast, np.zeros(len(sizes) - forward, dtype=np.bool_))),
        threads=threads,
        comm=comm,
        labels=tuple(labels),
        forward_segments=2 * forward,
    )


def numbered_cores(cluster: ClusterSpec) -> Ints:
    """Core of each rank, numbered from 0 in the order of the ranks, [ranks]."""
    numbers = {core: i for i, core in enumerate(dict.fromkeys(cluster.cores))}
    return np.array([numbers[core] for core in cluster.cores], dtype=np.int64)
