"""The part that jobs with parameter servers (KVStore, BytePS) share: workers and servers, their cores, hosts and links."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from dpro_search.collect.trace import Floats, Ints
from dpro_search.graph.dataflow import OpKind
from dpro_search.machine import machine_constants
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.replay_graph import Int32s, OrderPolicy
from dpro_search.space.servers.placement import hosts_of_workers, on_workers, process_hosts


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive operators of one worker: no weight is first used and no gradient ready but at its ends."""

    kind: OpKind
    work_us: float  # Core time.
    # uses, makes: Tensors whose weights the first operator needs, and whose gradients are ready after the last.
    uses: tuple[int, ...]
    makes: tuple[int, ...]

    def longer(self, factor: float) -> Segment:
        """The same, with so many times the core time."""
        return replace(self, work_us=self.work_us * factor)


@dataclass(frozen=True, kw_only=True)
class WorkerClasses:
    """Classes of workers that behave alike, in a job whose workers each stand for all workers of a class (`space.rank_classes`)."""

    class_of_worker: Ints  # Class of each worker of the whole job, [workers of the whole job].
    members: tuple[int, ...]  # Number of workers in each class, [classes].
    # Number of workers that each class is replayed as, [classes]: the mean of all classes with several members, so that links are
    # shared evenly between them, as between single workers.
    workers: tuple[float, ...]
    number: tuple[int, ...]  # Number of the class's first worker in the whole job, [classes].
    host: tuple[int, ...]  # Host of each class, [classes]; hosts of servers follow.
    hosts: tuple[float, ...]  # Number of hosts that each of these is replayed as; a host with a server is one.
    rank: tuple[int, ...]  # Number of the core of each class, then of each server, among the cores of the whole job.

    def slowest(self, factors: Floats) -> Floats:
        """The largest factor of each class's workers: [..., workers of the whole job] -> [..., classes].

        Servers wait for the last worker of a class.
        """
        by_class = np.argsort(self.class_of_worker, kind="stable")
        first_of_class = np.concatenate(([0], np.cumsum(self.members)[:-1]))
        slowest: Floats = np.maximum.reduceat(factors[..., by_class], first_of_class, axis=-1)
        return slowest


@dataclass(frozen=True, kw_only=True)
class StoreJob:
    """Workers, servers and where they run."""

    workers: tuple[tuple[Segment, ...], ...]  # Segments of each worker, in their order, [workers].
    tensor_bytes: Floats  # Size of each tensor, [tensors].
    # worker_core, server_core: Core of each process; processes of one core number share the core, [workers] and [servers].
    worker_core: tuple[int, ...]
    server_core: tuple[int, ...]
    bytes_per_us: float | None  # What a host's link carries in each direction; with None the processors are the limit.
    server_host: tuple[int, ...] = ()  # Host of each server, [servers], see `placement.py`; empty: each has one of its own.
    workers_per_host: int = 1  # Workers that share a host and its link.
    classes: WorkerClasses | None = None  # The workers that each worker stands for; None: itself.

    def __post_init__(self) -> None:
        self.host  # noqa: B018  which raises what is wrong with the hosts

    @cached_property
    def host(self) -> Ints:
        """Host of each worker, then of each server."""
        if self.classes is not None:
            return np.array([*self.classes.host, *self.server_host])
        return process_hosts(len(self.workers), len(self.server_core), self.server_host, self.workers_per_host)

    @cached_property
    def worker_number(self) -> tuple[int, ...]:
        """Number of each worker in the whole job."""
        return tuple(range(len(self.workers))) if self.classes is None else self.classes.number

    @cached_property
    def copies(self) -> Floats:
        """Number of processes that each worker, then each server is replayed as, [processes]."""
        workers: tuple[float, ...] = (1.0,) * len(self.workers) if self.classes is None else self.classes.workers
        return np.array([*workers, *(1.0,) * len(self.server_core)])

    @property
    def worker_hosts(self) -> int:
        """Number of hosts with workers."""
        return -(-len(self.workers) // self.workers_per_host)

    def with_workers(self, workers: int, workers_per_host: int = 1) -> Self:
        """The job with so many workers, which compute like the recorded ones in turn, and the recorded number of servers.

        Further workers have cores of their own. Servers stay on hosts of their own, or on the workers' hosts, which take them in
        turn; there they have a worker's core if the recorded ones have.
        """
        if (workers, workers_per_host) == (len(self.workers), self.workers_per_host):
            return self
        turn = np.arange(workers) % len(self.workers)
        free = max(*self.worker_core, *self.server_core) + 1
        worker_core = (*self.worker_core, *range(free, free + workers))[:workers]
        server_core, server_host = self.server_core, tuple[int, ...]()
        if on_workers(len(self.workers), self.server_host):
            server_host = hosts_of_workers(-(-workers // workers_per_host), len(server_core))
            if set(server_core) <= set(self.worker_core):
                server_core = tuple(worker_core[at * workers_per_host] for at in server_host)
        return replace(
            self,
            workers=tuple(self.workers[worker] for worker in turn.tolist()),
            worker_core=worker_core,
            server_core=server_core,
            server_host=server_host,
            workers_per_host=workers_per_host,
            **self._of_workers(turn),
        )

    def _of_workers(self, turn: Ints) -> dict[str, Any]:
        """The other fields that hold a value for each worker, reduced to the workers with the given numbers, [workers]."""
        return {}

    def folded(self, most_classes: int, apart: Collection[int] = ()) -> Self:
        """The job with one worker for each class of workers that behave alike; the job itself where none are folded.

        Parameters
        ----------
        most_classes
            Classes are split until there are about so many. A job of up to twice as many workers is left as it is.
        apart
            Workers that are not folded.
        """
        return self

    def longer_workers(self, compute: Floats) -> tuple[tuple[Segment, ...], ...]:
        """The workers' segments with core times multiplied by a factor for each worker, [workers]."""
        return tuple(
            tuple(segment.longer(factor) for segment in segments)
            for segments, factor in zip(self.workers, compute.tolist(), strict=True)
        )


class Processes:
    """Devices and links of the workers, then of the servers, of a job in a graph.

    Attributes
    ----------
    rank
        Number of each process's core among the cores of the job, [processes].
    core, send
        Device of each process's core, [processes], and of its messages to each other process, which it sends in order,
        [processes, processes].
    out, into
        Links of each process's host, [processes]; empty where the links of the job have no limit.
    """

    def __init__(self, builder: GraphBuilder, job: StoreJob) -> None:
        process_core = (*job.worker_core, *job.server_core)
        cores = list(dict.fromkeys(process_core))
        core_of_process = np.array([cores.index(core) for core in process_core])
        self.rank: Ints = core_of_process if job.classes is None else np.array(job.classes.rank)
        rank_of_core = np.zeros(len(cores), np.int64)
        rank_of_core[core_of_process] = self.rank
        devices = builder.add_devices(rank_of_core, OrderPolicy.FIFO, "core{0}", (cores,))
        self.core: Int32s = devices[core_of_process]
        count = len(process_core)
        self.send: Int32s = builder.add_devices(
            np.broadcast_to(self.rank[:, None], (count, count)), OrderPolicy.FIFO, "{0} to {1}", (range(count), range(count))
        )
        self.out = self.into = np.zeros(0, np.int32)
        if job.bytes_per_us is not None:
            hosts = np.ones(int(job.host.max()) + 1) if job.classes is None else np.array(job.classes.hosts)
            self.out, self.into = (builder.add_links(hosts * job.bytes_per_us)[job.host] for _ in range(2))


def goodput_bytes_per_us(rate_bps: float | None) -> float | None:
    """Goodput of TCP over a link of a rate; None stays None."""
    return None if rate_bps is None else rate_bps / 8e6 * machine_constants().host.tcp_goodput
