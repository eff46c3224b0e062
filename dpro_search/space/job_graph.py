"""The graph of a data-parallel job: compute, enqueues and communication, built with numpy over all ranks at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpro_search.collect.trace import Ints
from dpro_search.graph.dataflow import OpKind
from dpro_search.space.collectives import (
    Group,
    Hypercube,
    Rows,
    Wire,
    halving_doubling,
    halving_doubling_partners,
    least_load,
    parameter_server,
    partition,
    rendezvous,
    ring,
    round_robin,
)
from dpro_search.space.data_parallel import DataParallelJob, RankStep
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.network import Network, ParameterServer, Rendezvous, Ring
from dpro_search.space.replay_graph import Int32s, OrderPolicy, ReplayGraph


def build(job: DataParallelJob) -> ReplayGraph:
    """The graph of a job with all its ranks."""
    everyone = np.arange(job.ranks)
    return build_rows(job, everyone, everyone)


def build_rows(job: DataParallelJob, rank: Ints, row_of_rank: Ints) -> ReplayGraph:
    """The graph of some ranks that stand for all of them (see `folding.py`, which knows when that is exact).

    `rank` is the rank that each row builds, [rows]; `row_of_rank` is the row that stands for each rank, [ranks].
    """
    return _JobGraph(job, rank, row_of_rank).build()


class _JobGraph:
    """Builds a job's graph: compute, then enqueues, then communication; a rank's ops have the same order in each."""

    def __init__(self, job: DataParallelJob, rank: Ints, row_of_rank: Ints) -> None:
        self.job, self.rank, self.row_of_rank = job, rank, row_of_rank
        self.builder = GraphBuilder()
        self.count = len(rank)
        self.group_of_tensor = np.zeros(len(job.tensor_bytes), np.int64)
        for number, tensors in enumerate(job.groups):
            self.group_of_tensor[list(tensors)] = number

    def build(self) -> ReplayGraph:
        first = [self._compute(number) for number in range(len(self.job.steps))]
        enqueued = self._enqueues()
        done = self._communicate(enqueued)
        for step, (rows, ops) in zip(self.job.steps, first, strict=True):
            self._join(step, rows, ops, enqueued, done)
        return self.builder.build(self.job.slowdown)

    def _compute(self, number: int) -> tuple[Ints, Int32s]:
        """Compute ops of the rows that run a step: (rows, ops [n, rows])."""
        step = self.job.steps[number]
        rows = np.flatnonzero(self.job.step_of_rank[self.rank] == number)
        ranks = self.rank[rows]
        shape = (len(step.policy), len(rows))
        devices = self.builder.add_devices(
            np.broadcast_to(rows, shape), np.asarray(step.policy)[:, None], "stream{0}@{1}", (range(shape[0]), ranks)
        )
        names = step.op_names or tuple(f"op{op}" for op in range(len(step)))
        ops = self.builder.add_ops(
            devices[step.device],
            np.outer(step.duration_us, self.job.compute_factor[ranks]),
            kind=np.asarray(step.kind)[:, None],
            priority=np.asarray(step.priority)[:, None] if len(step.priority) else 0,
            name="{0}@{1}",
            axes=(names, ranks),
        )
        self.builder.add_edges(ops[step.edge_src], ops[step.edge_dst])
        self.builder.carry(ops[step.carry_src], ops[step.carry_dst])
        return rows, ops

    def _enqueues(self) -> Int32s:
        """The op with which each row enqueues each group, [groups, rows]."""
        device = self.builder.add_devices(np.arange(self.count), OrderPolicy.UNBOUNDED, "post@{0}", (self.rank,))
        groups = len(self.job.groups)
        return self.builder.add_ops(
            np.broadcast_to(device, (groups, self.count)),
            self.job.negotiate_us or 0.0,
            kind=OpKind.HOST,
            collective=-1 if self.job.negotiate_us is None else np.arange(groups)[:, None],
            name="{0}.post@{1}",
            axes=([self.job.group(number).name for number in range(groups)], self.rank),
        )

    def _join(self, step: RankStep, rows: Ints, ops: Int32s, enqueued: Int32s, done: Int32s) -> None:
        makers = np.unique(np.stack((step.maker_op, self.group_of_tensor[step.maker_tensor])), axis=1)
        self.builder.add_edges(ops[makers[0]], enqueued[makers[1][:, None], rows])
        users = np.unique(np.stack((self.group_of_tensor[step.user_tensor], step.user_op)), axis=1)
        self.builder.add_edges(done[users[0][:, None], rows], ops[users[1]])

    def _communicate(self, enqueued: Int32s) -> Int32s:
        """The op after which each row has each group, [groups, rows]."""
        scheme = self.job.scheme
        groups = [self.job.group(number) for number in range(len(self.job.groups))]
        if isinstance(scheme, ParameterServer):
            return self._parameter_server(scheme, groups, enqueued)
        if isinstance(scheme, Rendezvous):
            # Once negotiated, groups are ready at the same instant everywhere; if not, only one order on all ranks cannot deadlock.
            rows = self._devices(OrderPolicy.PROGRAM if self.job.negotiate_us is None else OrderPolicy.FIFO)
            return np.stack(
                [
                    rendezvous(
                        self.builder,
                        enqueued[number],
                        rows,
                        group,
                        collective=len(groups) + number,
                        duration_us=scheme.time_us(group.kind, group.size_bytes),
                    )
                    for number, group in enumerate(groups)
                ]
            )
        rows, links = self._devices(OrderPolicy.FIFO), self._links(())
        if isinstance(scheme, Ring):
            ranks = self.job.ranks
            after = (self.rank + 1) % ranks
            options: dict[str, Any] = {
                "ranks": ranks,
                "previous": self.row_of_rank[(self.rank - 1) % ranks],
                "wire": links.wire(self._host(self.rank), self._host(after)),
            }
            communicate: Callable[..., Int32s] = ring
        else:
            cube = halving_doubling_partners(self.job.ranks)
            partner, mate = cube.partner[:, self.rank], cube.mate[self.rank]
            options = {
                "cube": Hypercube(
                    partner=np.where(partner >= 0, self.row_of_rank[partner], -1),
                    mate=np.where(mate >= 0, self.row_of_rank[mate], -1),
                    surplus=cube.surplus[self.rank],
                ),
                "wire": links.wire(self._host(np.broadcast_to(self.rank, partner.shape)), self._host(partner)),
                "mate_wire": links.wire(self._host(self.rank), self._host(mate)),
            }
            communicate = halving_doubling
        options["reduce_us_per_byte"] = scheme.reduce_us_per_byte
        return np.stack([communicate(self.builder, enqueued[g], rows, group, **options) for g, group in enumerate(groups)])

    def _parameter_server(self, scheme: ParameterServer, groups: list[Group], enqueued: Int32s) -> Int32s:
        network = _needed(self.job.network)
        policy = scheme.policy
        if policy is None:
            policy = OrderPolicy.UNBOUNDED if network.flows else OrderPolicy.FIFO
        rows, links = self._devices(policy, OrderPolicy.UNBOUNDED), self._links(scheme.server_host)
        server_hosts = np.array(scheme.server_host)
        server = np.arange(len(server_hosts))
        threads = self.builder.add_devices(
            np.broadcast_to(self.count + server[:, None], (len(server), scheme.threads)),
            OrderPolicy.FIFO,
            "server{0}.thread{1}",
            (server, range(scheme.threads)),
        )
        respond = self.builder.add_devices(self.count + server, policy, "server{0}.respond", (server,))
        sizes = [partition(group.size_bytes, scheme.partition_bytes) for group in groups]
        every_size = np.concatenate(sizes)
        chosen = (least_load if scheme.balance == "least-load" else round_robin)(every_size, len(server))
        # A server's partitions take its threads round-robin.
        turn = np.zeros(len(chosen), np.int64)
        for one in server:
            turn[chosen == one] = np.arange(np.count_nonzero(chosen == one))
        worker_host = self._host(self.rank)
        done, start = [], 0
        for number, group in enumerate(groups):
            mine = slice(start, start + len(sizes[number]))
            start = mine.stop
            workers, host = np.broadcast_arrays(worker_host, server_hosts[chosen[mine]][:, None])
            done.append(
                parameter_server(
                    self.builder,
                    enqueued[number],
                    rows,
                    group,
                    partition_bytes=sizes[number],
                    thread=threads[chosen[mine], turn[mine] % scheme.threads],
                    respond=respond[chosen[mine]],
                    push=links.wire(workers, host),
                    pull=links.wire(host, workers),
                    sum_us_per_byte=scheme.sum_us_per_byte,
                    merge_us_per_byte=scheme.merge_us_per_byte,
                )
            )
        return np.stack(done)

    def _devices(self, transmit: OrderPolicy, receive: OrderPolicy = OrderPolicy.FIFO) -> Rows:
        row = np.arange(self.count)
        sends = self.builder.add_devices(row, transmit, "transmit@{0}", (self.rank,))
        if isinstance(self.job.scheme, Rendezvous):
            return Rows(self.rank, sends, sends)
        return Rows(self.rank, sends, self.builder.add_devices(row, receive, "receive@{0}", (self.rank,)))

    def _host(self, rank: Ints) -> Ints:
        return _needed(self.job.network).host[rank]

    def _links(self, server_hosts: tuple[int, ...]) -> _Links:
        """Links of the hosts of the rows, each of which stands for the hosts of the ranks that its row stands for."""
        network = _needed(self.job.network)
        stands_for = np.arange(len(network.transmit_bytes_per_us))
        stands_for[network.host] = network.host[self.rank[self.row_of_rank]]
        used = np.unique(stands_for[[*network.host, *server_hosts]])
        transmit, receive = np.full((2, len(stands_for)), -1, np.int32)
        if network.flows:
            transmit[used] = self.builder.add_links(network.transmit_bytes_per_us[used])
            receive[used] = self.builder.add_links(network.receive_bytes_per_us[used])
        return _Links(network, transmit[stands_for], receive[stands_for])


@dataclass(frozen=True)
class _Links:
    """The links of each host, [hosts]."""

    network: Network
    transmit: Int32s
    receive: Int32s

    def wire(self, sender: Ints, receiver: Ints) -> Wire:
        """From hosts to hosts, [...]."""
        rate = self.network.idle_rate(sender, receiver)
        if not self.network.flows:
            return Wire(self.network.latency_us, rate)
        crossed = np.stack((self.transmit[sender], self.receive[receiver]), axis=-1)
        return Wire(self.network.latency_us, rate, np.where((sender == receiver)[..., None], -1, crossed).astype(np.int32))


def _needed(network: Network | None) -> Network:
    assert network is not None  # the job was checked
    return network
