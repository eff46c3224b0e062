"""A recorded job of MXNet with BytePS -> `ReplayGraph`, also with other servers, other partitions, another credit, other links.

After its backward pass a worker scales its gradients one after another and hands each to BytePS, which cuts it into partitions of
at most BYTEPS_PARTITION_BYTES. A partition goes to the server that a hash of its key says: REDUCE and copy within the worker, PUSH,
and once that is acknowledged PULL, whose request waits behind the pushes that the worker still has to send to that server. A server
copies the first worker's part, adds the other ones, and answers requests once all are there. The worker updates the weights of a
group of gradients when all of them are back; an operator of the next step starts when its weights are updated.

With BYTEPS_SCHEDULING_CREDIT (0: off) REDUCE takes partitions by priority (the first parameter first), and holds no more bytes than
that many partitions have. BytePS 0.2.5 returns the credit when REDUCE has ended, whatever is still to be pushed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import Floats, Ints
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.kvstore_job import Segment
from dpro_search.space.replay_graph import OrderPolicy, ReplayGraph

DEFAULT_PARTITION_BYTES = 4_096_000
PAGE_BYTES = 4096
MESSAGE_US = 60.0  # core time of a message whatever its size: queues, hand-over between threads, system calls
_QUANTUM_US = 1_000.0  # for so long an operator keeps a core that others want
_MAX_POLLING = 0.9
_HASHES = ("naive", "djb2", "sdbm")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A partition: BytePS's key, and the server that it goes to."""

    key: int
    size_bytes: float
    server: int


@dataclass(frozen=True, kw_only=True)
class BytepsJob:
    """Workers, servers and what they cost; t tensors.

    Attributes
    ----------
    workers
        Segments of each worker up to the end of its backward pass, in their order, [workers].
    tensor_bytes, declared_key, group
        Of each tensor: size, number by which BytePS knows it, and the group with which its weights are updated, [t].
    order
        Tensors in the order in which they are handed to BytePS, [t].
    scale_us, update_us
        Core time of each tensor's scaling and of its part of the update, on each worker, [workers, t].
    worker_core, server_core
        Core of each process; those of equal number share it, [workers] and [servers].
    worker_polling, server_polling
        Share of its core that a process uses to look for work.
    partition_bytes, credit, hash_name
        BytePS's knobs.
    bytes_per_us
        What a host's link carries in each direction; with None the processors are the limit.
    cpu_us_per_byte, message_us
        Core time of a process for each byte that it sends, receives or adds, and for each message.
    reduce_us, before_push_us, reply_us, after_pull_us
        Delays that take no core: the stage REDUCE, from there to the push, until a message is acknowledged, and from the arrival of
        the sum to its use.
    """

    workers: tuple[tuple[Segment, ...], ...]
    tensor_bytes: Floats
    declared_key: Ints
    group: Ints
    order: Ints
    scale_us: Floats
    update_us: Floats
    worker_core: tuple[int, ...]
    server_core: tuple[int, ...]
    worker_polling: float
    server_polling: float
    partition_bytes: int
    credit: int
    hash_name: str
    bytes_per_us: float | None
    cpu_us_per_byte: float
    message_us: float
    reduce_us: float
    before_push_us: float
    reply_us: float
    after_pull_us: float

    def __post_init__(self) -> None:
        if not self.server_core or self.partition_bytes < 1 or self.credit < 0:
            raise InputError("a job needs at least one server, partitions of at least one byte, and a credit of at least 0")
        if self.bytes_per_us is not None and not self.bytes_per_us > 0:
            raise InputError("links need a rate above 0")
        if self.hash_name not in _HASHES:
            raise InputError(f"BYTEPS_KEY_HASH_FN={self.hash_name}: cannot be followed; known are {', '.join(_HASHES)}")

    @property
    def page_partition_bytes(self) -> int:
        """The bound that BytePS uses: whole pages."""
        return -(-self.partition_bytes // PAGE_BYTES) * PAGE_BYTES

    def parts(self, tensor: int) -> list[Part]:
        """Partitions of a tensor."""
        size, bound = float(self.tensor_bytes[tensor]), self.page_partition_bytes
        found = []
        for number in range(int(-(-size // bound))):
            key = (int(self.declared_key[tensor]) << 16) + number
            server = hash_of(key, self.hash_name) % len(self.server_core)
            found.append(Part(key=key, size_bytes=min(bound, size - number * bound), server=server))
        return found


def hash_of(key: int, name: str) -> int:
    """BytePS's hash of a partition's key (BYTEPS_KEY_HASH_FN), in 64 bits; djb2 and sdbm are those of D. Bernstein and of sdbm."""
    if name == "naive":
        return ((key >> 16) + key % 65536) * 9973
    value = 5381 if name == "djb2" else 0
    for character in str(key).encode():
        shifted = (value << 5) + value if name == "djb2" else (value << 6) + (value << 16) - value
        value = (shifted + character) % 2**64
    return value


def byteps_graph(job: BytepsJob) -> ReplayGraph:
    """The graph of one iteration, whose end carries over to the next."""
    return _BytepsGraph(job).build()


class _BytepsGraph:
    """Every process's core time is ops of its core's device: in pieces, served as they become ready, as a core is shared."""

    def __init__(self, job: BytepsJob) -> None:
        self._job = job
        self._builder = GraphBuilder()
        self._process_core = (*job.worker_core, *job.server_core)
        cores = list(dict.fromkeys(self._process_core))
        devices = self._builder.add_devices(np.arange(len(cores)), OrderPolicy.FIFO, "core{0}", (cores,))
        self._core = dict(zip(cores, devices.tolist(), strict=True))
        polling = dict.fromkeys(cores, 0.0)
        for process, core in enumerate(self._process_core):
            polling[core] += job.worker_polling if process < len(job.worker_core) else job.server_polling
        self._stretch = {core: 1 / (1 - min(share, _MAX_POLLING)) for core, share in polling.items()}
        processes = range(len(self._process_core))
        rank = np.array([cores.index(core) for core in self._process_core])
        pairs = np.broadcast_to(rank[:, None], (len(processes), len(processes)))
        self._send = self._builder.add_devices(pairs, OrderPolicy.FIFO, "{0} to {1}", (processes, processes)).tolist()
        self._delay = self._builder.add_devices(rank, OrderPolicy.UNBOUNDED, "delays of {0}", (processes,)).tolist()
        policy = OrderPolicy.PRIORITY if job.credit else OrderPolicy.UNBOUNDED
        self._reduce = self._builder.add_devices(
            rank[: len(job.workers)], policy, "reduce of {0}", (range(len(job.workers)),)
        ).tolist()
        if job.bytes_per_us is not None:
            self._out, self._into = (self._builder.add_links(np.full(len(processes), job.bytes_per_us)).tolist() for _ in range(2))

    def build(self) -> ReplayGraph:
        job = self._job
        wanted: list[dict[int, int]] = []
        scaled: list[dict[int, int]] = []
        for worker in range(len(job.workers)):
            uses, made = self._compute(worker)
            wanted.append(uses)
            scaled.append(made)
        back: list[dict[int, list[int]]] = [{} for _ in job.workers]
        for tensor in job.order.tolist():
            for part in job.parts(tensor):
                for worker, op in enumerate(self._exchanged(tensor, part, [made[tensor] for made in scaled])):
                    back[worker].setdefault(tensor, []).append(op)
        for worker in range(len(job.workers)):
            self._update(worker, back[worker], wanted[worker])
        return self._builder.build()

    def _work(self, process: int, work_us: float, name: str, kind: OpKind, after: Sequence[int]) -> int:
        """Core time of a process; returns the last of its pieces."""
        core = self._process_core[process]
        pieces = max(int(np.ceil(work_us / _QUANTUM_US)), 1)
        op = -1
        for piece in range(pieces):
            label = name if pieces == 1 else f"{name}.{piece}"
            op = self._builder.add_op(
                self._core[core],
                work_us / pieces * self._stretch[core],
                name=label,
                kind=kind,
                after=after if piece == 0 else [op],
            )
        return op

    def _compute(self, worker: int) -> tuple[dict[int, int], dict[int, int]]:
        """Of a worker, the op that wants each tensor's weights and the op after which its gradient is handed over."""
        job, builder = self._job, self._builder
        uses: dict[int, int] = {}
        scaled: dict[int, int] = {}
        first = last = -1
        for number, segment in enumerate(job.workers[worker]):
            start = len(builder)
            last = self._work(worker, segment.work_us, f"segment{number}@{worker}", segment.kind, [last] if last >= 0 else [])
            first = start if first < 0 else first
            uses |= dict.fromkeys(segment.uses, start)
        for tensor in job.order.tolist():
            last = self._work(
                worker, float(job.scale_us[worker, tensor]), f"tensor{tensor}.scale@{worker}", OpKind.BACKWARD, [last]
            )
            scaled[tensor] = last
        builder.carry(last, first)
        return uses, scaled

    def _exchanged(self, tensor: int, part: Part, ready: Sequence[int]) -> list[int]:
        """Push, sum and pull a partition whose gradients are ready after these ops; returns its arrival on each worker."""
        job = self._job
        what, server = f"tensor{tensor}.{part.key & 0xFFFF}", len(job.workers) + part.server
        cpu_us = job.message_us + part.size_bytes * job.cpu_us_per_byte
        summed, asked = [], []
        for worker, made in enumerate(ready):
            sent = self._work(worker, cpu_us, f"{what}.send@{worker}", OpKind.COMM, [self._queued(what, part, worker, made)])
            arrived = self._message(f"{what}.push@{worker}", worker, server, part.size_bytes, sent)
            taken = self._work(server, cpu_us, f"{what}.receive@{worker}", OpKind.COMM, [arrived])
            sum_us = part.size_bytes * job.cpu_us_per_byte
            summed.append(self._work(server, sum_us, f"{what}.sum@{worker}", OpKind.SERVER, [taken]))
            told = self._message(f"{what}.acknowledge@{worker}", server, worker, 0.0, taken)
            asks = self._wait(worker, job.reply_us, f"{what}.acknowledged@{worker}", told)
            asked.append(self._message(f"{what}.request@{worker}", worker, server, 0.0, asks))
        back = []
        for worker, request in enumerate(asked):
            answered = self._work(server, cpu_us, f"{what}.answer@{worker}", OpKind.COMM, [*summed, request])
            arrived = self._message(f"{what}.pull@{worker}", server, worker, part.size_bytes, answered)
            taken = self._work(worker, cpu_us, f"{what}.take@{worker}", OpKind.COMM, [arrived])
            back.append(self._wait(worker, job.after_pull_us, f"{what}.copied@{worker}", taken))
        return back

    def _queued(self, what: str, part: Part, worker: int, made: int) -> int:
        """The stages before the push. Those that share the credit's bytes pass REDUCE at the rate at which it returns them."""
        job = self._job
        held = min(part.size_bytes / (job.credit * job.page_partition_bytes), 1.0) if job.credit else 1.0
        reduced = self._builder.add_op(
            self._reduce[worker],
            job.reduce_us * held,
            name=f"{what}.reduce@{worker}",
            kind=OpKind.COMM,
            priority=min(part.key, 2**31 - 1),
            after=[made],
        )
        return self._wait(worker, job.reduce_us * (1 - held) + job.before_push_us, f"{what}.queued@{worker}", reduced)

    def _wait(self, process: int, delay_us: float, name: str, after: int) -> int:
        return self._builder.add_op(self._delay[process], delay_us, name=name, kind=OpKind.COMM, after=[after])

    def _message(self, name: str, sender: int, receiver: int, size: float, after: int) -> int:
        """The way from a process to another, behind what the sender has sent there before."""
        links = () if self._job.bytes_per_us is None else (self._out[sender], self._into[receiver])
        return self._builder.add_op(
            self._send[sender][receiver],
            0.0,
            name=name,
            kind=OpKind.COMM,
            after=[after],
            flow_bytes=size if links else 0.0,
            links=links,
        )

    def _update(self, worker: int, back: dict[int, list[int]], wanted: dict[int, int]) -> None:
        """Updates of the weights, a group of gradients at a time."""
        job = self._job
        for group in np.unique(job.group).tolist():
            members = np.flatnonzero(job.group == group).tolist()
            work_us = float(job.update_us[worker, members].sum())
            ready = [op for tensor in members for op in back[tensor]]
            updated = self._work(worker, work_us, f"group{group}.update@{worker}", OpKind.UPDATE, ready)
            for first in dict.fromkeys(wanted[tensor] for tensor in members):
                self._builder.carry(updated, first)
