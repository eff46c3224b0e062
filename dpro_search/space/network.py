"""How the ranks of a data-parallel job exchange gradients: their network, and the schemes of communication."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpro_search.cluster import Cluster, each_host
from dpro_search.collect.trace import Floats, Ints
from dpro_search.space.replay_graph import OrderPolicy


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """Hosts and their links, one for each direction."""

    host: Ints  # Of each rank, [ranks].
    # transmit_bytes_per_us, receive_bytes_per_us: Link rates of each host, [hosts].
    transmit_bytes_per_us: Floats
    receive_bytes_per_us: Floats
    latency_us: float = 0.0  # Of a message, before its bytes move.
    local_bytes_per_us: float = float("inf")  # Rate between ranks of one host, which use no link.
    # Messages share links as they meet (max-min fair); False: each takes its latency and its bytes at the rate of the idle path, so
    # that only messages of one sender wait for each other.
    flows: bool = False

    @staticmethod
    def uniform(ranks: int, bytes_per_us: float, *, latency_us: float = 0.0, flows: bool = False, other_hosts: int = 0) -> Network:
        """A host for each rank and, after them, hosts for servers; all links alike."""
        rates = np.full(ranks + other_hosts, float(bytes_per_us))
        return Network(
            host=np.arange(ranks), transmit_bytes_per_us=rates, receive_bytes_per_us=rates, latency_us=latency_us, flows=flows
        )

    @staticmethod
    def of(cluster: Cluster, ranks: int | None = None, *, flows: bool = False) -> Network:
        """The network of the first devices of a cluster (None: of all), a rank each.

        All NICs of a host are one link. Every message has the latency of the slowest level, also within a host. Ranks of a host are
        joined at the rate of its rings; the slowest host's where they differ.
        """
        count = cluster.ranks if ranks is None else ranks
        host = np.array([cluster.place(rank)[0] for rank in range(count)], np.int64)
        kinds = list(each_host(cluster))[: int(host[-1]) + 1]
        farthest = cluster.slowest_level(range(count))
        across = [float("inf") if farthest is None else cluster.host_bps(kind, farthest) for kind in kinds]
        rates = np.array(across) / 8e6
        return Network(
            host=host,
            transmit_bytes_per_us=rates,
            receive_bytes_per_us=rates,
            latency_us=0.0 if farthest is None else farthest.latency_us,
            local_bytes_per_us=min(kind.ring_bps(range(kind.devices)) for kind in set(kinds)) / 8e6,
            flows=flows,
        )

    def idle_rate(self, sender: Ints, receiver: Ints) -> Floats:
        """Bytes a us between hosts when nothing else moves, [...]."""
        across = np.minimum(self.transmit_bytes_per_us[sender], self.receive_bytes_per_us[receiver])
        rate: Floats = np.where(sender == receiver, self.local_bytes_per_us, across)
        return rate


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """A collective is one op a rank that moves data when all ranks have enqueued it.

    It takes latency_us + bytes * us_per_byte; where a collective has `ways`, the least of them.
    """

    latency_us: float = 0.0
    us_per_byte: float = 0.0
    # (CollectiveKind, latency in us, us of a byte): the algorithms and protocols that a library chooses among
    # (`costmodel.collectives.nccl`).
    ways: tuple[tuple[int, float, float], ...] = ()

    def ways_of(self, kind: int) -> Floats:
        """Latency and us of a byte of each way, [ways, 2]."""
        rows: Floats = np.array([way[1:] for way in self.ways if way[0] == kind] or [(self.latency_us, self.us_per_byte)])
        return rows

    def time_us(self, kind: int, size_bytes: float) -> float:
        """What a collective takes."""
        ways = self.ways_of(kind)
        return float((ways[:, 0] + ways[:, 1] * size_bytes).min())


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Ring all-reduce, message by message; rank r sends to rank r + 1."""

    reduce_us_per_byte: float = 0.0


@dataclass(frozen=True, kw_only=True)
class HalvingDoubling:
    """Recursive vector halving, then doubling, message by message."""

    reduce_us_per_byte: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ParameterServer:
    """Groups are cut into partitions, each summed by one thread of one server."""

    server_host: tuple[int, ...]  # Host of each server, of the job's network.
    threads: int = 1  # Of each server; partitions take them round-robin.
    partition_bytes: float = 4_096_000.0  # Largest partition.
    # "round-robin": partitions take servers one after the other; "least-load": the server with the fewest bytes so far.
    balance: str = "round-robin"
    # sum_us_per_byte, merge_us_per_byte: What adding one worker's push costs, and copying the sum.
    sum_us_per_byte: float = 0.0
    merge_us_per_byte: float = 0.0
    # How a worker and a server send: None is all messages at once where they are flows, else one after the other (FIFO).
    policy: OrderPolicy | None = None


Scheme = Rendezvous | Ring | HalvingDoubling | ParameterServer
