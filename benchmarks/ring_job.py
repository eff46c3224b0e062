"""A data-parallel job of equal ranks that exchange gradients in rings, message by message: one rank stands for all of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpro_search.graph.dataflow import OpKind
from dpro_search.space.data_parallel import RankStep
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.replay_graph import Int32s, OrderPolicy, ReplayGraph


@dataclass(frozen=True, kw_only=True)
class RingJob:
    """Ranks on a host each, which run one step; each rank sends to the next one.

    A rank begins to exchange a group when it has made all tensors of the group.
    """

    step: RankStep
    ranks: int
    link_bytes_per_us: float
    message_us: float  # Latency of a message, before its bytes move.
    reduce_us_per_byte: float = 0.0

    @property
    def steps(self) -> tuple[RankStep, ...]:
        """The step that all ranks run."""
        return (self.step,)

    def graph(self, groups: tuple[tuple[int, ...], ...]) -> ReplayGraph:
        """The graph of one rank under fused tensors, in the order in which they are posted."""
        step, builder = self.step, GraphBuilder()
        devices = np.array([builder.add_device(0, OrderPolicy(int(policy)), name="stream") for policy in step.policy])
        ops = builder.add_ops(devices[step.device], step.duration_us, kind=step.kind)
        builder.add_edges(ops[step.edge_src], ops[step.edge_dst])
        builder.carry(ops[step.carry_src], ops[step.carry_dst])
        post, transmit, receive = (
            builder.add_device(0, policy, name=name)
            for name, policy in (("post", OrderPolicy.UNBOUNDED), ("transmit", OrderPolicy.FIFO), ("receive", OrderPolicy.FIFO))
        )
        group_of_tensor = np.zeros(len(step.tensor_bytes), np.int64)
        for number, tensors in enumerate(groups):
            group_of_tensor[list(tensors)] = number
        posted = builder.add_ops(np.full(len(groups), post), 0.0, kind=OpKind.HOST)
        received = self._messages(builder, posted, groups, transmit, receive)
        makers = np.unique(np.stack((step.maker_op, group_of_tensor[step.maker_tensor])), axis=1)
        builder.add_edges(ops[makers[0]], posted[makers[1]])
        users = np.unique(np.stack((group_of_tensor[step.user_tensor], step.user_op)), axis=1)
        builder.add_edges(received[users[0]], ops[users[1]])
        return builder.build()

    def _messages(
        self, builder: GraphBuilder, posted: Int32s, groups: tuple[tuple[int, ...], ...], transmit: int, receive: int
    ) -> Int32s:
        """Reduce-scatter and all-gather of each group; the op after which a rank has the group, [groups].

        The next message needs what was received; the first receive needs the rank's own gradients, to which it adds.
        """
        count = 2 * (self.ranks - 1)
        if not count:
            return posted
        chunk_bytes = np.array([self.step.tensor_bytes[list(tensors)].sum() for tensors in groups])[:, None] / self.ranks
        shape = (len(groups), count)
        reduces = np.arange(count) < self.ranks - 1
        sent = builder.add_ops(np.full(shape, transmit), self.message_us + chunk_bytes / self.link_bytes_per_us, kind=OpKind.COMM)
        received = builder.add_ops(np.full(shape, receive), chunk_bytes * reduces * self.reduce_us_per_byte, kind=OpKind.COMM)
        builder.add_edges(posted, sent[:, 0])
        builder.add_edges(posted, received[:, 0])
        builder.add_edges(received[:, :-1], sent[:, 1:])
        builder.add_edges(received[:, :-1], received[:, 1:])
        builder.add_edges(sent, received)
        last: Int32s = received[:, -1]
        return last
