"""The graph of a data-parallel job, in which one rank of each class of equal ranks stands for all of them.

Ranks belong to one class if they run the same step at the same speed. Every collective begins on all ranks together, once the last
rank has posted it. In the folded graph a class therefore has exactly the times that each of its ranks has in the whole graph, and
10,000 ranks replay as fast as a few. (The classes are a stable colouring, and the folded graph is its quotient: Paige & Tarjan,
"Three partition refinement algorithms", 1987.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import CollectiveKind, Ints
from dpro_search.errors import GraphError
from dpro_search.graph.dataflow import OpKind
from dpro_search.space.data_parallel import DataParallelJob, RankStep
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.replay_graph import Int32s, OrderPolicy, ReplayGraph

_MOST_OPS = 20_000_000


@dataclass(frozen=True, kw_only=True, eq=False)
class FoldedJob:
    """A job's graph in which one rank of each class stands for all."""

    graph: ReplayGraph  # Its ranks are the classes.
    rank_class: Ints  # Class of each rank, [ranks]; classes are numbered by their first rank.
    representative: Ints  # First rank of each class, [classes].

    @property
    def multiplicity(self) -> Ints:
        """Number of ranks in each class, [classes]."""
        return np.bincount(self.rank_class)


def fold(job: DataParallelJob, *, most_ops: int = _MOST_OPS) -> FoldedJob:
    """Fold a job; the whole graph is never made.

    Raises
    ------
    GraphError
        So few ranks are alike that the graph would have more than `most_ops` ops.
    """
    rank_class = rank_classes(job)
    _, representative = np.unique(rank_class, return_index=True)
    ops = job.most_ops(len(representative))
    if ops > most_ops:
        raise GraphError(
            f"{job.ranks} ranks fold into {len(representative)} classes, up to {ops:,} ops (most_ops is {most_ops:,}): "
            "fuse tensors into larger groups or raise most_ops"
        )
    return FoldedJob(graph=_graph(job, representative), rank_class=rank_class, representative=representative)


def whole_graph(job: DataParallelJob) -> ReplayGraph:
    """The graph of a job with all its ranks."""
    return _graph(job, np.arange(job.ranks))


def rank_classes(job: DataParallelJob) -> Ints:
    """Class of each rank, [ranks], numbered by their first ranks."""
    behaviour = np.stack((job.step_of_rank, job.compute_factor), axis=1)
    _, first, inverse = np.unique(behaviour, axis=0, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[inverse.ravel()]


def _graph(job: DataParallelJob, ranks: Ints) -> ReplayGraph:
    """The graph of some ranks, [rows]; a rank's ops have the same order in compute, posts and collectives."""
    builder = GraphBuilder()
    compute = [_compute(builder, job, step, ranks) for step in range(len(job.steps))]
    posted = _posts(builder, job, ranks)
    reduced = _collectives(builder, job, ranks, posted)
    group_of_tensor = np.zeros(len(job.tensor_bytes), np.int64)
    for number, tensors in enumerate(job.groups):
        group_of_tensor[list(tensors)] = number
    for step, (rows, ops) in zip(job.steps, compute, strict=True):
        makers = np.unique(np.stack((step.maker_op, group_of_tensor[step.maker_tensor])), axis=1)
        builder.add_edges(ops[makers[0]], posted[makers[1][:, None], rows])
        users = np.unique(np.stack((group_of_tensor[step.user_tensor], step.user_op)), axis=1)
        builder.add_edges(reduced[users[0][:, None], rows], ops[users[1]])
    return builder.build()


def _compute(builder: GraphBuilder, job: DataParallelJob, number: int, ranks: Ints) -> tuple[Ints, Int32s]:
    """Compute ops of the rows whose ranks run a step: (rows, ops [n, rows])."""
    step: RankStep = job.steps[number]
    rows = np.flatnonzero(job.step_of_rank[ranks] == number)
    shape = (len(step.policy), len(rows))
    devices = builder.add_devices(
        np.broadcast_to(rows, shape), np.asarray(step.policy)[:, None], "stream{0}@{1}", (range(shape[0]), ranks[rows])
    )
    ops = builder.add_ops(
        devices[step.device],
        np.outer(step.duration_us, job.compute_factor[ranks[rows]]),
        kind=np.asarray(step.kind)[:, None],
        name="{0}@{1}",
        axes=(step.op_names or tuple(f"op{op}" for op in range(len(step))), ranks[rows]),
    )
    builder.add_edges(ops[step.edge_src], ops[step.edge_dst])
    builder.carry(ops[step.carry_src], ops[step.carry_dst])
    return rows, ops


def _posts(builder: GraphBuilder, job: DataParallelJob, ranks: Ints) -> Int32s:
    """The op with which each row posts each group, [groups, rows]; it ends when the last rank has posted the group."""
    groups, rows = len(job.groups), len(ranks)
    devices = builder.add_devices(np.arange(rows), OrderPolicy.UNBOUNDED, "post@{0}", (ranks,))
    return builder.add_ops(
        np.broadcast_to(devices, (groups, rows)),
        0.0,
        kind=OpKind.HOST,
        collective=np.arange(groups)[:, None],
        name="{0}.post@{1}",
        axes=([job.group_name(number) for number in range(groups)], ranks),
    )


def _collectives(builder: GraphBuilder, job: DataParallelJob, ranks: Ints, posted: Int32s) -> Int32s:
    """The op after which each row has each group, [groups, rows]; a row's collectives run one after the other."""
    groups = len(job.groups)
    devices = builder.add_devices(np.arange(len(ranks)), OrderPolicy.FIFO, "transmit@{0}", (ranks,))
    reduced = [
        builder.add_ops(
            devices,
            job.collective_us(number),
            kind=OpKind.COMM,
            collective=groups + number,
            name=f"{_escaped(job.group_name(number))}.{CollectiveKind(job.collective_kind(number)).label}@{{0}}",
            axes=(ranks,),
        )
        for number in range(groups)
    ]
    ops = np.stack(reduced)
    builder.add_edges(posted, ops)
    return ops


def _escaped(name: str) -> str:
    """A name as part of a template."""
    return name.replace("{", "{{").replace("}", "}}")
