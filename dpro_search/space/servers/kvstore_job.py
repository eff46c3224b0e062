"""A job of MXNet with parameter servers -> `ReplayGraph`, as recorded or with other servers, another slicing, other links.

KVStore sends each gradient as soon as its operator has ended. One of fewer elements than MXNET_KVSTORE_BIGARRAY_BOUND goes to one
server, which follows from its key; a larger one is cut into a slice for each server. A server copies the first worker's part, adds
the other ones, updates the weights once all are there, and sends them to all workers; an operator of the next step starts when its
weights are back. Messages between two processes follow each other; those of different pairs share the hosts' links, and those
between processes of one host cross none.

Servers wait for all workers' gradients: a step takes what its slowest worker needs, whichever that is, and core time is of such a
step. With mean durations a CPU-bound job would show 100 % utilisation of its cores; real ones are 87 to 101 % busy.

Of many workers, those that behave alike are folded (`folded`): one stands for its class. Its messages carry the bytes of all of
the class over links as wide as those of all its hosts, and cost a server the core time of all of them. Not exact: a server serves
the workers of a class at once, not one after the other, so that the last one's message comes no earlier than all of them.

With priority slices, servers only add, and each worker updates a few tensors at once when all of them are back. The priority itself
has no place here: ps-lite orders messages by it while its sending thread is behind, which hands them to ZeroMQ's queues at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from dpro_search.collect.assemble.kvstore_slices import Slicing
from dpro_search.collect.trace import Floats, Ints
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.machine import machine_constants
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.rank_classes import host_groups
from dpro_search.space.replay_graph import Int32s, ReplayGraph
from dpro_search.space.servers.cost_spread import CostFactors
from dpro_search.space.servers.op_pattern import OpPattern
from dpro_search.space.servers.store_job import Processes, StoreJob, WorkerClasses, goodput_bytes_per_us


@dataclass(frozen=True, kw_only=True)
class PushCompression:
    """Compression of what workers push. What they pull is not compressed."""

    share: float  # Bytes that are pushed over those of the gradient.
    # quantize_us_per_byte, dequantize_us_per_byte: Core time for each byte of the gradient: of a worker, residual included, and of
    # a server for each worker's part.
    quantize_us_per_byte: float
    dequantize_us_per_byte: float


@dataclass(frozen=True, kw_only=True)
class KvstoreJob(StoreJob):
    """Workers, servers and what they cost."""

    # element_bytes, key: Of each tensor, [tensors].
    element_bytes: Floats
    key: Ints
    slicing: Slicing  # How tensors are cut; with priority slices workers update, else servers.
    comm_us_per_byte: float  # CPU time of a process for each byte that it sends or receives.
    # Core time of a worker for each byte of a gradient, half when it is sent and half when it is back: copies and calls.
    beside_us_per_byte: tuple[float, ...]
    # copy_us_per_byte, sum_us_per_byte, update_us_per_byte: Core time for each byte: of the first worker's part, of each further
    # one, and of the update.
    copy_us_per_byte: float
    sum_us_per_byte: float
    update_us_per_byte: float
    # slice_us, update_call_us: Core time of a server for each slice, whatever its size: for its messages, and, where servers
    # update, the optimizer's own.
    slice_us: float
    update_call_us: float
    # Core time of a worker for each tensor's update beside its bytes, where workers update; 0 where the calls above hold it.
    worker_call_us: float
    updates: tuple[tuple[int, ...], ...]  # Tensors that a worker updates at once, where workers do.
    slowest: float = 1.0  # Core time of a step's slowest worker over the workers' mean: the times above are means.
    # Of what workers push; None: they push gradients. A server then dequantizes the first worker's part in place of a copy, and
    # each further one before it adds it. Slices are cut as without (MXNet's `EncodeCompressedKey` compares the bound with the
    # elements of the gradient; that it rounds slices to 16 of them is left out).
    compression: PushCompression | None = None

    def __post_init__(self) -> None:
        if self.slicing.servers != len(self.server_core) or (self.bytes_per_us is not None and not self.bytes_per_us > 0):
            raise InputError("a job needs a core for each server, and links with a rate above 0")
        super().__post_init__()

    def _of_workers(self, turn: Ints) -> dict[str, Any]:
        return {"beside_us_per_byte": tuple(self.beside_us_per_byte[worker] for worker in turn.tolist())}

    def folded(self, most_classes: int, apart: Collection[int] = ()) -> Self:
        """See `StoreJob.folded`.

        Workers behave alike if they compute alike on hosts whose workers compute alike. A worker that shares its core, or its host
        with a server, is a class of its own.
        """
        workers = len(self.workers)
        if workers <= 2 * most_classes or self.classes is not None:
            return self
        numbers: dict[tuple[int, float], int] = {}
        profile = np.array(
            [numbers.setdefault((id(row), us), len(numbers)) for row, us in zip(self.workers, self.beside_us_per_byte, strict=True)]
        )
        on_core = Counter((*self.worker_core, *self.server_core))
        with_server = np.isin(self.host[:workers], self.host[workers:])
        alone = with_server | np.array([on_core[core] > 1 for core in self.worker_core]) | np.isin(np.arange(workers), list(apart))
        profile[alone] = len(numbers) + np.flatnonzero(alone)
        groups = host_groups(profile, self.host[:workers], most_classes)
        first = groups.first_rank.tolist()
        host_of_group = dict(zip(self.host[groups.first_rank].tolist(), groups.host.tolist(), strict=True))
        server_hosts = sorted(set(self.host[workers:].tolist()) - set(host_of_group))
        host_of_group |= {host: len(groups.hosts) + number for number, host in enumerate(server_hosts)}
        several = groups.ranks > 1
        replayed_as = np.where(several, groups.ranks[several].mean(), 1.0)
        hosts = groups.hosts * np.bincount(groups.host, replayed_as) / np.bincount(groups.host, groups.ranks)
        cores = {core: number for number, core in enumerate(dict.fromkeys((*self.worker_core, *self.server_core)))}
        worker_core = tuple(self.worker_core[worker] for worker in first)
        return replace(
            self,
            workers=tuple(self.workers[worker] for worker in first),
            worker_core=worker_core,
            server_host=tuple(host_of_group[host] for host in self.host[workers:].tolist()),
            classes=WorkerClasses(
                class_of_worker=groups.class_of_rank,
                members=tuple(groups.ranks.tolist()),
                workers=tuple(replayed_as.tolist()),
                number=tuple(first),
                host=tuple(groups.host.tolist()),
                hosts=(*hosts.tolist(), *(1.0,) * len(server_hosts)),
                rank=tuple(cores[core] for core in (*worker_core, *self.server_core)),
            ),
            **self._of_workers(groups.first_rank),
        )

    def at_costs(self, factors: CostFactors) -> Self:
        """The job with the costs that another recording might have given."""
        compute = factors.compute.tolist()
        return replace(
            self,
            workers=self.longer_workers(factors.compute),
            beside_us_per_byte=tuple(us * factor for us, factor in zip(self.beside_us_per_byte, compute, strict=True)),
            comm_us_per_byte=self.comm_us_per_byte * factors.message,
            copy_us_per_byte=self.copy_us_per_byte * factors.server,
            sum_us_per_byte=self.sum_us_per_byte * factors.server,
            update_us_per_byte=self.update_us_per_byte * factors.server,
            slice_us=self.slice_us * factors.server,
            update_call_us=self.update_call_us * factors.server,
        )

    @cached_property
    def slices(self) -> list[list[tuple[int, float]]]:
        """(server, bytes) of each slice of each tensor, [tensors]."""
        elements = np.round(self.tensor_bytes / self.element_bytes).astype(np.int64)
        parts = self.slicing.parts(self.key.tolist(), elements.tolist())
        return [[(server, part * float(size)) for server, part in row] for row, size in zip(parts, self.element_bytes, strict=True)]

    @property
    def served_slice_us(self) -> float:
        """Core time of a server for a slice beside its bytes."""
        return self.slice_us + (0.0 if self.slicing.priority else self.update_call_us)

    @property
    def pushed_share(self) -> float:
        """Bytes that a worker pushes over those that it pulls."""
        return 1.0 if self.compression is None else self.compression.share

    @property
    def summing_us_per_byte(self) -> float:
        """A server's work on a byte until all workers' parts are in the sum."""
        workers = float(self.copies[: len(self.workers)].sum())
        added_us = (workers - 1) * self.sum_us_per_byte
        if self.compression is None:
            return self.copy_us_per_byte + added_us
        return workers * self.compression.dequantize_us_per_byte + added_us

    @property
    def server_bytes(self) -> Floats:
        """Bytes of parameters on each server, [servers]."""
        bytes_of_server = np.zeros(len(self.server_core))
        for row in self.slices:
            for server, size in row:
                bytes_of_server[server] += size
        return bytes_of_server


def store_bytes_per_us(rate_bps: float | None) -> float | None:
    """Goodput of a link while pushes and pulls fill it in both directions, each from several senders."""
    goodput = goodput_bytes_per_us(rate_bps)
    return None if goodput is None else goodput * machine_constants().kvstore.both_ways_share


def kvstore_graph(job: KvstoreJob) -> ReplayGraph:
    """The graph of one iteration, whose end carries over to the next."""
    return _KvstoreGraph(job).build()


@dataclass(frozen=True, kw_only=True)
class ProcessLoad:
    """Work of a process in an iteration."""

    core_us: float  # Core time.
    # sent_bytes, received_bytes: What crosses its host's link.
    sent_bytes: float
    received_bytes: float
    link_us: float | None  # How long that link is busy in each direction with what all processes of the host send (None: no limit).


def serving_us_per_byte(job: KvstoreJob) -> float:
    """A server's work on a byte of a tensor: the first part is copied, others are added, and the sum updates or is copied."""
    last_us = job.copy_us_per_byte if job.slicing.priority else job.update_us_per_byte
    return job.summing_us_per_byte + last_us


def process_loads(job: KvstoreJob) -> list[ProcessLoad]:
    """Load of each worker, then of each server."""
    total, workers = float(job.tensor_bytes.sum()), len(job.workers)
    update_us = total * job.update_us_per_byte + len(job.tensor_bytes) * job.worker_call_us if job.slicing.priority else 0.0
    pulled = [total] * workers + (job.server_bytes * workers).tolist()
    pushed = [size * job.pushed_share for size in pulled]
    sent, received = pushed[:workers] + pulled[workers:], pulled[:workers] + pushed[workers:]
    quantize_us = 0.0 if job.compression is None else total * job.compression.quantize_us_per_byte
    cores = [
        sum(segment.work_us for segment in segments) + total * beside_us + update_us + quantize_us
        for segments, beside_us in zip(job.workers, job.beside_us_per_byte, strict=True)
    ]
    count = np.bincount([server for row in job.slices for server, _ in row], minlength=len(job.server_core))
    cores += (job.server_bytes * serving_us_per_byte(job) + count * job.served_slice_us).tolist()
    apart = job.host[:workers, None] != job.host[workers:]
    at_workers, at_servers = apart @ job.server_bytes, apart.sum(axis=0) * job.server_bytes
    leaving = np.concatenate((at_workers * job.pushed_share, at_servers))
    arriving = np.concatenate((at_workers, at_servers * job.pushed_share))
    of_link = np.maximum(np.bincount(job.host, leaving), np.bincount(job.host, arriving))[job.host]
    return [
        ProcessLoad(
            core_us=float(core_us + (out + into) * job.comm_us_per_byte),
            sent_bytes=crossed_out,
            received_bytes=crossed_into,
            link_us=None if job.bytes_per_us is None else shared / job.bytes_per_us,
        )
        for core_us, out, into, crossed_out, crossed_into, shared in zip(
            cores, sent, received, leaving.tolist(), arriving.tolist(), of_link.tolist(), strict=True
        )
    ]


# The graph


class _KvstoreGraph:
    """Every process's core time is ops of its core's device: in pieces, served as they become ready, as a core is shared."""

    def __init__(self, job: KvstoreJob) -> None:
        self._job = job
        self._builder = GraphBuilder()
        self._processes = Processes(self._builder, job)
        self._tensors = [f"tensor{tensor}" for tensor in range(len(job.tensor_bytes))]

    def build(self) -> ReplayGraph:
        job, builder = self._job, self._builder
        ready, first_users = self._compute()
        parts = [(tensor, part, server, size) for tensor, row in enumerate(job.slices) for part, (server, size) in enumerate(row)]
        tensor = np.array([part[0] for part in parts])
        sent = self._posted(ready)[tensor]
        pulled = self._exchanged(
            [f"tensor{tensor}.{part}" for tensor, part, _, _ in parts],
            len(job.workers) + np.array([part[2] for part in parts]),
            np.array([part[3] for part in parts]),
            sent,
        )
        for worker in range(len(job.workers)):
            back = self._beside(worker, "back")
            builder.add_edges(pulled[:, worker], back[tensor])
            builder.carry(self._updated(worker, back), first_users[worker])
        return builder.build()

    def _posted(self, ready: Ints) -> Int32s:
        """Ops of workers before a gradient is sent, which is ready after an op [workers, tensors]: [tensors, workers]."""
        job, pattern = self._job, OpPattern(self._tensors)
        places = []
        for worker, made in enumerate(ready):
            cost_us = job.tensor_bytes * job.beside_us_per_byte[worker] / 2
            place = self._work(pattern, worker, cost_us, f"posted@{job.worker_number[worker]}", since=made)
            if job.compression is not None:
                cost_us = job.tensor_bytes * job.compression.quantize_us_per_byte
                place = self._work(pattern, worker, cost_us, f"quantized@{job.worker_number[worker]}", after=[place])
            places.append(place)
        return pattern.into(self._builder)[:, places]

    def _beside(self, worker: int, name: str) -> Int32s:
        """Ops of a worker for each gradient that has come back, [tensors]."""
        pattern = OpPattern(self._tensors)
        self._work(
            pattern,
            worker,
            self._job.tensor_bytes * self._job.beside_us_per_byte[worker] / 2,
            f"{name}@{self._job.worker_number[worker]}",
        )
        return pattern.into(self._builder)[:, 0]

    def _exchanged(self, names: Sequence[str], server: Ints, size: Floats, sent: Int32s) -> Int32s:
        """Push, sum, update (or copy) and pull slices.

        Parameters
        ----------
        server, size
            The process of each slice's server, and its bytes, [slices].
        sent
            Op after which each worker sends it, [slices, workers].

        Returns
        -------
        Int32s
            Its arrival on each worker, [slices, workers].
        """
        job, pattern = self._job, OpPattern(names)
        copies = job.copies[: len(job.workers)]
        part_us = job.summing_us_per_byte / copies.sum() * copies
        summed = []
        for worker in range(len(job.workers)):
            number = job.worker_number[worker]
            pushed = self._message(pattern, f"push@{number}", worker, server, size * job.pushed_share, since=sent[:, worker])
            summed.append(self._work(pattern, server, size * part_us[worker], f"sum@{number}", OpKind.SERVER, [pushed]))
        last_us = job.copy_us_per_byte if job.slicing.priority else job.update_us_per_byte
        served = self._work(pattern, server, job.served_slice_us + size * last_us, "update", OpKind.SERVER, summed)
        pulled = [
            self._message(pattern, f"pull@{number}", server, worker, size, after=[served])
            for worker, number in enumerate(job.worker_number)
        ]
        return pattern.into(self._builder)[:, pulled]

    def _message(
        self,
        pattern: OpPattern,
        name: str,
        sender: int | Ints,
        receiver: int | Ints,
        size: Floats,
        *,
        after: Sequence[int] = (),
        since: Int32s | None = None,
    ) -> int:
        """From a process to another: core time on both sides, and between them the way over their hosts' links, if these differ."""
        job = self._job
        cpu_us = size * job.comm_us_per_byte
        messages = np.maximum(job.copies[sender], job.copies[receiver])  # all workers of a class send or receive one each
        sender_us, receiver_us = (cpu_us * messages / job.copies[process] for process in (sender, receiver))
        sent = self._work(pattern, sender, sender_us, f"{name}.send", after=after, since=since)
        crosses = job.host[sender] != job.host[receiver]
        arrived = np.full(len(size), sent)
        if job.bytes_per_us is not None and crosses.any():
            links = (self._processes.out[sender], self._processes.into[receiver])
            arrived[crosses] = pattern.add(
                self._processes.send[sender, receiver],
                0.0,
                name,
                flow_bytes=size * messages,
                links=links,
                after=[sent],
                where=crosses,
            )
        return self._work(pattern, receiver, receiver_us, f"{name}.receive", after=[arrived])

    def _work(
        self,
        pattern: OpPattern,
        process: int | Ints,
        mean_us: Floats,
        name: str,
        kind: OpKind = OpKind.COMM,
        after: Sequence[int | Ints] = (),
        since: Ints | Int32s | None = None,
    ) -> int:
        """Core time of a process, in a step's slowest."""
        duration_us = mean_us * self._job.slowest
        return pattern.add(self._processes.core[process], duration_us, name, kind=kind, after=after, since=since)

    def _updated(self, worker: int, back: Int32s) -> Int32s:
        """After which op a worker has each tensor's new weights, given when it is back, both [tensors]."""
        job = self._job
        if not job.slicing.priority:
            return back
        count = np.array([len(group) for group in job.updates])
        members = np.concatenate([np.array(group, np.int64) for group in job.updates])
        group = np.repeat(np.arange(len(count)), count)
        work_us = np.bincount(group, job.tensor_bytes[members]) * job.update_us_per_byte + count * job.worker_call_us
        ops = self._builder.add_ops(
            np.full(len(count), self._processes.core[worker]),
            work_us * job.slowest,
            kind=OpKind.UPDATE,
            name=f"update{{0}}@{job.worker_number[worker]}",
            axes=(range(len(count)),),
        )
        self._builder.add_edges(back[members], ops[group])
        updated = back.copy()
        updated[members] = ops[group]
        return updated

    def _compute(self) -> tuple[Ints, Ints]:
        """The op that makes each tensor's gradient and the one that wants its weights, [workers, tensors] both."""
        job = self._job
        ready, first_users = ([[-1] * len(job.tensor_bytes) for _ in job.workers] for _ in range(2))
        for worker, segments in enumerate(job.workers):
            work_us = np.array([segment.work_us for segment in segments])
            pieces = np.maximum(np.ceil(work_us / machine_constants().kvstore.quantum_us), 1).astype(np.int64)
            number = np.repeat(np.arange(len(segments)), pieces)
            ends = np.cumsum(pieces)
            ops = self._builder.add_ops(
                np.full(len(number), self._processes.core[worker]),
                (work_us / pieces * job.slowest)[number],
                kind=np.array([segment.kind for segment in segments])[number],
                name=f"segment{{0}}@{job.worker_number[worker]}",
                axes=(_Pieces(number, np.arange(len(number)) - (ends - pieces)[number]),),
            )
            self._builder.add_edges(ops[:-1], ops[1:])
            self._builder.carry(ops[-1], ops[0])
            for segment, first, last in zip(segments, ops[ends - pieces].tolist(), ops[ends - 1].tolist(), strict=True):
                for tensor in segment.uses:
                    first_users[worker][tensor] = first
                for tensor in segment.makes:
                    ready[worker][tensor] = last
        return np.array(ready), np.array(first_users)


class _Pieces:
    """Numbers of segments and of their pieces, spelled when they are needed: an axis of names."""

    def __init__(self, segment: Ints, piece: Ints) -> None:
        self._segment, self._piece = segment, piece

    def __len__(self) -> int:
        return len(self._segment)

    def __getitem__(self, index: int, /) -> str:
        return f"{self._segment[index]}.{self._piece[index]}"
