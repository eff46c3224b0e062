"""Data-parallel jobs of many ranks: what one rank computes in a step, and how gradients are exchanged.

Every rank runs a `RankStep`. When all producers of a tensor group have ended on a rank, the rank posts the group. Once all ranks
have posted it, a collective exchanges it; then the ops that use its tensors can run. `data_parallel_graph.py` makes the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import CollectiveKind, Floats, Ints
from dpro_search.errors import GraphError, InputError
from dpro_search.graph.dataflow import DataflowGraph, OpKind
from dpro_search.space.replay_graph import OrderPolicy

_KINDS = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)


def _no_ints() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class RankStep:
    """One rank's compute of a training step: n ops on d local devices, T gradient tensors.

    Attributes
    ----------
    duration_us, kind, device
        Duration, `OpKind` and local device number of each op, [n].
    policy
        `OrderPolicy` of each local device, [d].
    tensor_bytes
        Size of each tensor, [T].
    edge_src, edge_dst
        Dependencies: ``edge_dst`` needs ``edge_src``.
    maker_op, maker_tensor
        Pairs of an op and a tensor that can be posted only when the op has ended.
    user_tensor, user_op
        Pairs of a tensor and an op that needs the tensor's result.
    carry_src, carry_dst
        Dependencies between iterations: ``carry_dst`` needs the ``carry_src`` of the iteration before.
    op_names, tensor_names
        Labels; if empty, numbers are shown.

    Raises
    ------
    InputError
        An index is out of range.
    """

    duration_us: Floats
    kind: Ints
    device: Ints
    policy: Ints
    tensor_bytes: Floats
    edge_src: Ints = field(default_factory=_no_ints)
    edge_dst: Ints = field(default_factory=_no_ints)
    maker_op: Ints = field(default_factory=_no_ints)
    maker_tensor: Ints = field(default_factory=_no_ints)
    user_tensor: Ints = field(default_factory=_no_ints)
    user_op: Ints = field(default_factory=_no_ints)
    carry_src: Ints = field(default_factory=_no_ints)
    carry_dst: Ints = field(default_factory=_no_ints)
    op_names: tuple[str, ...] = ()
    tensor_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for noun, count, columns in (
            ("op", len(self), ("edge_src", "edge_dst", "maker_op", "user_op", "carry_src", "carry_dst")),
            ("device", len(self.policy), ("device",)),
            ("tensor", len(self.tensor_bytes), ("maker_tensor", "user_tensor")),
        ):
            for column in columns:
                values = getattr(self, column)
                if len(values) and (values.min() < 0 or values.max() >= count):
                    raise InputError(f"{column} names {noun} {values[(values < 0) | (values >= count)][0]} of {count}")

    def __len__(self) -> int:
        return len(self.duration_us)


@dataclass(frozen=True, kw_only=True)
class LinearCost:
    """Duration of a collective as a linear function of its bytes, for one algorithm and protocol of a library."""

    kind: CollectiveKind
    latency_us: float
    us_per_byte: float


@dataclass(frozen=True, kw_only=True, eq=False)
class DataParallelJob:
    """N ranks that run steps and exchange gradients.

    Attributes
    ----------
    steps, step_of_rank
        Steps, and the number of the step that each rank runs, [ranks]. All steps have the same tensors.
    costs
        Costs of collectives. If several belong to a kind, a collective takes the least of them, as a library that chooses its
        algorithm by size would (`costmodel.collectives.nccl`).
    groups
        Fused tensors, in the order in which ranks post them; every tensor is in one group. Empty: each tensor alone.
    collectives
        `CollectiveKind` of each tensor's exchange, [tensors]; empty: all-reduces. The tensors of a group have one kind; the size
        of a tensor that is gathered or scattered is that of the whole.
    compute_factor
        Factor on the durations of each rank's ops, [ranks]; empty: 1.

    Raises
    ------
    InputError
        A field does not fit the others.
    """

    steps: tuple[RankStep, ...]
    step_of_rank: Ints
    costs: tuple[LinearCost, ...]
    groups: tuple[tuple[int, ...], ...] = ()
    collectives: Ints = field(default_factory=_no_ints)
    compute_factor: Floats = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if not self.steps or not len(self.tensor_bytes):
            raise InputError("a data-parallel job needs a step with at least one gradient tensor")
        if not self.groups:
            object.__setattr__(self, "groups", tuple((tensor,) for tensor in range(len(self.steps[0].tensor_bytes))))
        if not len(self.compute_factor):
            object.__setattr__(self, "compute_factor", np.ones(self.ranks))
        if not len(self.collectives):
            object.__setattr__(self, "collectives", np.full(len(self.tensor_bytes), int(CollectiveKind.ALL_REDUCE)))
        _check_steps(self)
        _check_collectives(self)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.step_of_rank)

    @property
    def tensor_bytes(self) -> Floats:
        """Size of each tensor, [tensors]."""
        return self.steps[0].tensor_bytes

    def group_name(self, group: int) -> str:
        """Name of a group for people."""
        names = self.steps[0].tensor_names
        return together([names[tensor] if names else f"tensor{tensor}" for tensor in self.groups[group]])

    def collective_kind(self, group: int) -> CollectiveKind:
        """Kind of the collective that exchanges a group."""
        return CollectiveKind(self.collectives[self.groups[group][0]])

    def collective_us(self, group: int) -> float:
        """Duration of the collective that exchanges a group."""
        kind, size_bytes = self.collective_kind(group), float(self.tensor_bytes[list(self.groups[group])].sum())
        return min(cost.latency_us + cost.us_per_byte * size_bytes for cost in self.costs if cost.kind == kind)

    def most_ops(self, ranks: int) -> int:
        """Upper bound of the number of ops in a graph with so many of the ranks."""
        return ranks * (2 * len(self.groups) + max(len(step) for step in self.steps))


def layered_step(
    tensor_bytes: npt.ArrayLike,
    *,
    forward_us: float,
    backward_us: npt.ArrayLike,
    update_us: npt.ArrayLike,
    tensor_names: Sequence[str] = (),
) -> RankStep:
    """A step on one stream: forward, a backward op for each tensor in enqueue order, and an update of each; then the next forward.

    Parameters
    ----------
    tensor_bytes, backward_us, update_us
        [tensors]; one number for all tensors in a duration will do.
    """
    sizes = np.atleast_1d(np.asarray(tensor_bytes, np.float64))
    count = len(sizes)
    tensor = np.arange(count)
    backward, update = 1 + tensor, 1 + count + tensor
    names = tuple(tensor_names) or tuple(f"tensor{t}" for t in range(count))
    durations = [np.broadcast_to(np.asarray(column, np.float64), count) for column in (backward_us, update_us)]
    return RankStep(
        duration_us=np.concatenate(([forward_us], *durations)),
        kind=np.repeat(np.array([OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE], np.int64), [1, count, count]),
        device=np.zeros(1 + 2 * count, np.int64),
        policy=np.array([int(OrderPolicy.FIFO)]),
        tensor_bytes=sizes,
        edge_src=backward - 1,
        edge_dst=backward,
        maker_op=backward,
        maker_tensor=tensor,
        user_tensor=tensor,
        user_op=update,
        carry_src=update,
        carry_dst=np.zeros(count, np.int64),
        op_names=("forward", *(f"{name}.backward" for name in names), *(f"{name}.update" for name in names)),
        tensor_names=names,
    )


def rank_step_of(graph: DataflowGraph, rank: int) -> RankStep:
    """Computation of a recorded rank at the level of tensors: means over the recorded steps.

    The compute thread is cut where the rank enqueues its tensors: forward, a backward segment up to each enqueue, and what is left
    after the last one. The updates are the recorded releases. The script between two steps ends the iteration, when all tensors
    are back.

    Raises
    ------
    GraphError
        The graph has no such rank.
    """
    if not 0 <= rank < graph.ranks:
        raise GraphError(f"rank {rank} is not in the graph: it has ranks 0 to {graph.ranks - 1}")
    profile = graph.profiles[rank]
    tensors = len(graph.tensors)
    post_us = profile.post_us.mean(axis=0)
    enqueued = np.argsort(post_us, kind="stable")
    forward_ops = (graph.op_rank == rank) & np.isin(graph.op_kind, (OpKind.FORWARD, OpKind.IO))
    forward_us = min(float(graph.op_work_us[:, forward_ops].sum(axis=1).mean()), float(post_us[enqueued[0]]))
    rest_us = float(profile.main_us.mean() - post_us[enqueued[-1]])
    releases = profile.releases
    segments = np.diff(post_us[enqueued], prepend=forward_us)
    first_update = tensors + 2
    host = first_update + len(releases)
    backward = 1 + np.arange(tensors)
    updated = [np.array(release.tensors, np.int64) for release in releases]
    update_op = first_update + np.arange(len(releases))
    return RankStep(
        duration_us=np.array(
            [forward_us, *segments, max(rest_us, 0.0), *(float(r.work_us.mean()) for r in releases), float(profile.host_us.mean())]
        ),
        kind=np.repeat(
            np.array([OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE, OpKind.HOST], np.int64),
            [1, tensors + 1, len(releases), 1],
        ),
        device=np.zeros(host + 1, np.int64),
        policy=np.array([int(OrderPolicy.FIFO)]),
        tensor_bytes=np.array([tensor.size_bytes for tensor in graph.tensors], dtype=np.float64),
        edge_src=np.concatenate((np.arange(tensors + 1), update_op, [tensors + 1])),
        edge_dst=np.concatenate((1 + np.arange(tensors + 1), np.full(len(releases) + 1, host))),
        maker_op=backward,
        maker_tensor=enqueued,
        user_tensor=np.concatenate((*updated, np.arange(tensors))),
        user_op=np.concatenate((np.repeat(update_op, [len(part) for part in updated]), np.full(tensors, host))),
        carry_src=np.array([host]),
        carry_dst=np.array([0]),
        op_names=(
            "forward",
            *(f"{graph.tensors[t].name}.backward" for t in enqueued),
            "backward.rest",
            *(f"{together([graph.tensors[t].name for t in release.tensors])}.update" for release in releases),
            "script",
        ),
        tensor_names=tuple(tensor.name for tensor in graph.tensors),
    )


def together(names: Sequence[str]) -> str:
    """Name of several tensors: the first one, and how many more."""
    return names[0] if len(names) == 1 else f"{names[0]}+{len(names) - 1}"


def _check_steps(job: DataParallelJob) -> None:
    count = len(job.tensor_bytes)
    if job.ranks == 0:
        raise InputError("a data-parallel job needs at least one rank")
    if job.step_of_rank.min() < 0 or job.step_of_rank.max() >= len(job.steps):
        raise InputError(f"step_of_rank must name one of the {len(job.steps)} steps")
    if len(job.compute_factor) != job.ranks or not (job.compute_factor > 0).all():
        raise InputError(f"compute_factor must be a number > 0 for each of the {job.ranks} ranks")
    for number, step in enumerate(job.steps):
        if not np.array_equal(step.tensor_bytes, job.tensor_bytes):
            raise InputError(f"step {number} has other tensors than step 0: ranks of a data-parallel job exchange the same ones")
        missing = np.setdiff1d(np.arange(count), step.maker_tensor)
        if len(missing):
            raise InputError(f"step {number}: no op makes tensor {missing[0]}")
    grouped = np.sort(np.concatenate([np.zeros(0, np.int64), *(np.array(group, np.int64) for group in job.groups)]))
    if not np.array_equal(grouped, np.arange(count)):
        raise InputError(f"groups must hold each of the {count} tensors once")


def _check_collectives(job: DataParallelJob) -> None:
    if len(job.collectives) != len(job.tensor_bytes):
        raise InputError(f"collectives has {len(job.collectives)} entries for {len(job.tensor_bytes)} tensors")
    if not np.isin(job.collectives, _KINDS).all():
        raise InputError("tensors are exchanged by all-reduces, all-gathers or reduce-scatters")
    unknown = set(job.collectives.tolist()) - {int(cost.kind) for cost in job.costs}
    if unknown:
        raise InputError(f"the costs of {CollectiveKind(min(unknown)).label} collectives are missing")
    if any(len(np.unique(job.collectives[list(group)])) > 1 for group in job.groups):
        raise InputError("a group is exchanged by one kind of collective")
