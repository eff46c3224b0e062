"""What jobs with parameter servers (KVStore, BytePS) have in common: workers and servers, their cores, hosts and links."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dpro_search.collect.trace import Floats, Ints
from dpro_search.graph.dataflow import OpKind
from dpro_search.machine import machine_constants
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.placement import process_hosts
from dpro_search.space.replay_graph import Int32s, OrderPolicy


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive operators of one worker: no weight is first used and no gradient ready but at its ends.

    Attributes
    ----------
    work_us
        Core time.
    uses, makes
        Tensors whose weights the first operator needs, and whose gradients are ready after the last.
    """

    kind: OpKind
    work_us: float
    uses: tuple[int, ...]
    makes: tuple[int, ...]

    def longer(self, factor: float) -> Segment:
        """The same, with so many times the core time."""
        return replace(self, work_us=self.work_us * factor)


@dataclass(frozen=True, kw_only=True)
class StoreJob:
    """Workers, servers and where they run.

    Attributes
    ----------
    workers
        Segments of each worker, in their order, [workers].
    tensor_bytes
        Size of each tensor, [tensors].
    worker_core, server_core
        Core of each process; processes of one core number share the core, [workers] and [servers].
    bytes_per_us
        What a host's link carries in each direction; with None the processors are the limit.
    server_host
        Host of each server, [servers], see `placement.py`; empty: each has one of its own.
    """

    workers: tuple[tuple[Segment, ...], ...]
    tensor_bytes: Floats
    worker_core: tuple[int, ...]
    server_core: tuple[int, ...]
    bytes_per_us: float | None
    server_host: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        process_hosts(len(self.workers), len(self.server_core), self.server_host)  # which raises what is wrong with them

    @cached_property
    def host(self) -> Ints:
        """Host of each worker, then of each server."""
        return process_hosts(len(self.workers), len(self.server_core), self.server_host)

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
        devices = builder.add_devices(np.arange(len(cores)), OrderPolicy.FIFO, "core{0}", (cores,))
        self.rank: Ints = np.array([cores.index(core) for core in process_core])
        self.core: Int32s = devices[self.rank]
        count = len(process_core)
        self.send: Int32s = builder.add_devices(
            np.broadcast_to(self.rank[:, None], (count, count)), OrderPolicy.FIFO, "{0} to {1}", (range(count), range(count))
        )
        self.out = self.into = np.zeros(0, np.int32)
        if job.bytes_per_us is not None:
            hosts = int(job.host.max()) + 1
            self.out, self.into = (builder.add_links(np.full(hosts, job.bytes_per_us))[job.host] for _ in range(2))


def goodput_bytes_per_us(rate_bps: float | None) -> float | None:
    """What TCP carries over a link of a rate; None stays None."""
    return None if rate_bps is None else rate_bps / 8e6 * machine_constants().host.tcp_goodput
