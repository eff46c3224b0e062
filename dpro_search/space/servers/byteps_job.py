"""A recorded job of MXNet with BytePS -> `ReplayGraph`, also with other servers, other partitions, another credit, other links.

After its backward pass a worker scales its gradients one after another and hands each to BytePS, which cuts it into partitions of
at most BYTEPS_PARTITION_BYTES. A partition goes to the server that a hash of its key selects: REDUCE and copy within the worker,
PUSH, and once that is acknowledged PULL, whose request waits behind the pushes that the worker still has to send to that server. A
server copies the first worker's part, adds the other ones, and answers requests once all are there. The worker updates the weights
of a group of gradients when all of them are back; an operator of the next step starts when its weights are updated.

Where gradients are compressed to fp16 (`byteps.mxnet.compression.FP16Compressor`), the worker makes a half of each behind its
scaling, BytePS cuts, sends and adds the half, and the worker makes it whole before its update, both on the thread of its operators.

With BYTEPS_SCHEDULING_CREDIT (0: off) REDUCE takes partitions by priority (the first parameter first), and holds no more bytes than
that many partitions have. BytePS 0.2.5 returns the credit when REDUCE has ended, whatever is still to be pushed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np

from dpro_search.collect.trace import Floats, Ints
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.machine import machine_constants
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.replay_graph import Int32s, OrderPolicy, ReplayGraph
from dpro_search.space.servers.cost_spread import CostFactors
from dpro_search.space.servers.op_pattern import OpPattern
from dpro_search.space.servers.store_job import Processes, StoreJob

DEFAULT_PARTITION_BYTES = 4_096_000
PAGE_BYTES = 4096
_HASHES = ("naive", "djb2", "sdbm")


class Part(NamedTuple):
    """A partition: BytePS's key, and the server that it goes to."""

    key: int
    size_bytes: float
    server: int


@dataclass(frozen=True, kw_only=True)
class HalfGradients:
    """Gradients of float32 that workers and servers exchange as fp16."""

    # call_us, us_per_byte: Core time of a worker for each gradient, and for each of its bytes: half of it before the gradient is
    # handed to BytePS, half of it once it is back.
    call_us: float
    us_per_byte: float

    def cast_us(self, tensor_bytes: float) -> float:
        """Core time of one of the two ways of a gradient."""
        return (self.call_us + tensor_bytes * self.us_per_byte) / 2


@dataclass(frozen=True, kw_only=True)
class BytepsJob(StoreJob):
    """Workers, servers and what they cost; t tensors. A worker's segments end with its backward pass."""

    # declared_key, group: Of each tensor: number by which BytePS knows it, and the group with which its weights are updated, [t].
    declared_key: Ints
    group: Ints
    order: Ints  # Tensors in the order in which they are handed to BytePS, [t].
    # scale_us, update_us: Core time of each tensor's scaling and of its part of the update, on each worker, [workers, t].
    scale_us: Floats
    update_us: Floats
    # worker_polling, server_polling: Share of its core that a process uses to poll for work.
    worker_polling: float
    server_polling: float
    # partition_bytes, credit, hash_name: BytePS's knobs.
    partition_bytes: int
    credit: int
    hash_name: str
    # cpu_us_per_byte, message_us: Core time of a process for each byte that it sends, receives or adds, and for each message.
    cpu_us_per_byte: float
    message_us: float
    # reduce_us, before_push_us, reply_us, after_pull_us: Delays that take no core: the stage REDUCE, from there to the push, until
    # a message is acknowledged, and from the arrival of the sum to its use.
    reduce_us: float
    before_push_us: float
    reply_us: float
    after_pull_us: float
    halves: HalfGradients | None = None  # What it costs that gradients are exchanged as fp16; None: they are exchanged as they are.
    # How the recorded gradients were compressed; "": not at all. fp16's casts are among the recorded operators.
    recorded_compression: str = ""

    def __post_init__(self) -> None:
        if not self.server_core or self.partition_bytes < 1 or self.credit < 0:
            raise InputError("a job needs at least one server, partitions of at least one byte, and a credit of at least 0")
        if self.bytes_per_us is not None and not self.bytes_per_us > 0:
            raise InputError("links need a rate above 0")
        if self.hash_name not in _HASHES:
            raise InputError(f"BYTEPS_KEY_HASH_FN={self.hash_name}: cannot be followed; known are {', '.join(_HASHES)}")
        super().__post_init__()

    def _of_workers(self, turn: Ints) -> dict[str, Any]:
        return {"scale_us": self.scale_us[turn], "update_us": self.update_us[turn]}

    def at_costs(self, factors: CostFactors) -> Self:
        """The job with the costs that another recording might have given; a server's additions cost what its messages do."""
        return replace(
            self,
            workers=self.longer_workers(factors.compute),
            scale_us=self.scale_us * factors.compute[:, None],
            update_us=self.update_us * factors.compute[:, None],
            cpu_us_per_byte=self.cpu_us_per_byte * factors.message,
            message_us=self.message_us * factors.message,
        )

    @property
    def page_partition_bytes(self) -> int:
        """The bound that BytePS uses: whole pages."""
        return -(-self.partition_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def sent_bytes(self) -> Floats:
        """Bytes that a worker sends of each tensor, [t]."""
        return self.tensor_bytes if self.halves is None else self.tensor_bytes / 2

    def parts(self, tensor: int) -> list[Part]:
        """Partitions of what is sent of a tensor."""
        size, bound = float(self.sent_bytes[tensor]), self.page_partition_bytes
        partitions = []
        for number in range(int(-(-size // bound))):
            key = (int(self.declared_key[tensor]) << 16) + number
            server = hash_of(key, self.hash_name) % len(self.server_core)
            partitions.append(Part(key=key, size_bytes=min(bound, size - number * bound), server=server))
        return partitions


@lru_cache(maxsize=1 << 16)  # plans have many keys in common
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
        process_core = (*job.worker_core, *job.server_core)
        polling = dict.fromkeys(process_core, 0.0)
        for process, core in enumerate(process_core):
            polling[core] += job.worker_polling if process < len(job.worker_core) else job.server_polling
        most = machine_constants().byteps.most_polling
        self._stretch = np.array([1 / (1 - min(polling[core], most)) for core in process_core])
        self._processes = Processes(self._builder, job)
        rank, processes = self._processes.rank, range(len(process_core))
        self._delay = self._builder.add_devices(rank, OrderPolicy.UNBOUNDED, "delays of {0}", (processes,)).tolist()
        policy = OrderPolicy.PRIORITY if job.credit else OrderPolicy.UNBOUNDED
        self._reduce = self._builder.add_devices(
            rank[: len(job.workers)], policy, "reduce of {0}", (range(len(job.workers)),)
        ).tolist()

    def build(self) -> ReplayGraph:
        job = self._job
        uses, scaled = zip(*(self._compute(worker) for worker in range(len(job.workers))), strict=True)
        parts = [(tensor, part) for tensor in job.order.tolist() for part in job.parts(tensor)]
        made = np.array([[ops[tensor] for ops in scaled] for tensor, _ in parts])
        arrived: dict[int, list[list[int]]] = {}  # of each tensor's partitions, on each worker
        for (tensor, _), ops in zip(parts, self._exchanged(parts, made).tolist(), strict=True):
            arrived.setdefault(tensor, []).append(ops)
        for worker, first_users in enumerate(uses):
            back = {tensor: [ops[worker] for ops in each] for tensor, each in arrived.items()}
            if job.halves is not None:
                back = {tensor: [self._cast(worker, tensor, "whole", OpKind.UPDATE, ops)] for tensor, ops in back.items()}
            self._update(worker, back, first_users)
        return self._builder.build()

    def _work(self, process: int, work_us: float, name: str, kind: OpKind, after: Sequence[int]) -> int:
        """Core time of a process; returns the last of its pieces."""
        pieces = _pieces_of(work_us)
        op = -1
        for piece in range(pieces):
            label = name if pieces == 1 else f"{name}.{piece}"
            op = self._builder.add_op(
                int(self._processes.core[process]),
                work_us / pieces * float(self._stretch[process]),
                name=label,
                kind=kind,
                after=after if piece == 0 else [op],
            )
        return op

    def _compute(self, worker: int) -> tuple[dict[int, int], dict[int, int]]:
        """The op of a worker that uses each tensor's weights, and the op after which its gradient is handed over."""
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
            if job.halves is not None:
                last = self._cast(worker, tensor, "half", OpKind.BACKWARD, [last])
            scaled[tensor] = last
        builder.carry(last, first)
        return uses, scaled

    def _cast(self, worker: int, tensor: int, name: str, kind: OpKind, after: Sequence[int]) -> int:
        """A worker's casts of a gradient, one way."""
        assert self._job.halves is not None
        work_us = self._job.halves.cast_us(float(self._job.tensor_bytes[tensor]))
        return self._work(worker, work_us, f"tensor{tensor}.{name}@{worker}", kind, after)

    def _exchanged(self, parts: Sequence[tuple[int, Part]], made: Ints) -> Int32s:
        """Push, sum and pull partitions.

        Parameters
        ----------
        parts
            Tensors and partitions, [p].
        made
            Op after which a partition's gradient is ready on each worker, [p, workers].

        Returns
        -------
        Int32s
            Its arrival on each worker, [p, workers].
        """
        job, workers = self._job, len(self._job.workers)
        pattern = OpPattern([f"tensor{tensor}.{part.key & 0xFFFF}" for tensor, part in parts])
        size = np.array([part.size_bytes for _, part in parts])
        server = np.array([workers + part.server for _, part in parts])
        sum_us = size * job.cpu_us_per_byte
        cpu_us = job.message_us + sum_us
        priority = np.array([min(part.key, 2**31 - 1) for _, part in parts])
        # Those that share the credit's bytes pass REDUCE at the rate at which it returns them.
        held = np.minimum(size / (job.credit * job.page_partition_bytes), 1.0) if job.credit else np.ones(len(parts))
        queued_us = job.reduce_us * (1 - held) + job.before_push_us
        summed, requests = [], []
        for worker in range(workers):
            reduced = pattern.add(
                self._reduce[worker], job.reduce_us * held, f"reduce@{worker}", priority=priority, since=made[:, worker]
            )
            queued = pattern.add(self._delay[worker], queued_us, f"queued@{worker}", after=[reduced])
            sent = self._worked(pattern, worker, cpu_us, f"send@{worker}", [queued])
            arrived = self._message(pattern, f"push@{worker}", worker, server, size, sent)
            taken = self._worked(pattern, server, cpu_us, f"receive@{worker}", [arrived])
            summed.append(self._worked(pattern, server, sum_us, f"sum@{worker}", [taken], OpKind.SERVER))
            acknowledged = self._message(pattern, f"acknowledge@{worker}", server, worker, 0.0, taken)
            requested = pattern.add(self._delay[worker], job.reply_us, f"acknowledged@{worker}", after=[acknowledged])
            requests.append(self._message(pattern, f"request@{worker}", worker, server, 0.0, requested))
        back = []
        for worker, request in enumerate(requests):
            answered = self._worked(pattern, server, cpu_us, f"answer@{worker}", [*summed, request])
            arrived = self._message(pattern, f"pull@{worker}", server, worker, size, answered)
            taken = self._worked(pattern, worker, cpu_us, f"take@{worker}", [arrived])
            back.append(pattern.add(self._delay[worker], job.after_pull_us, f"copied@{worker}", after=[taken]))
        return pattern.into(self._builder)[:, back]

    def _worked(
        self,
        pattern: OpPattern,
        process: int | Ints,
        work_us: Floats,
        name: str,
        after: Sequence[int | Ints],
        kind: OpKind = OpKind.COMM,
    ) -> Ints:
        """As `_work`, for each partition; returns the places of their last pieces."""
        pieces = np.maximum(np.ceil(work_us / machine_constants().byteps.quantum_us), 1).astype(np.int64)
        most = int(pieces.max())
        last = np.zeros(len(pieces), np.int64)
        for piece in range(-1, most if most > 1 else 0):  # before the pieces, the ops that are of one piece
            where = pieces == 1 if piece < 0 else pieces > max(piece, 1)
            last[where] = pattern.add(
                self._processes.core[process],
                work_us / pieces * self._stretch[process],
                name if piece < 0 else f"{name}.{piece}",
                kind=kind,
                after=after if piece < 1 else [last.copy()],
                where=where,
            )
        return last

    def _message(
        self, pattern: OpPattern, name: str, sender: int | Ints, receiver: int | Ints, size: float | Floats, after: int | Ints
    ) -> int:
        """The way from a process to another, behind what the sender has sent there before; no link is crossed within a host."""
        processes, host, limited = self._processes, self._job.host, self._job.bytes_per_us is not None
        crosses = host[sender] != host[receiver]
        return pattern.add(
            self._processes.send[sender, receiver],
            0.0,
            name,
            after=[after],
            flow_bytes=np.where(crosses, size, 0.0) if limited else 0.0,
            links=tuple(np.where(crosses, link, -1) for link in (processes.out[sender], processes.into[receiver]))
            if limited
            else (),
        )

    def _update(self, worker: int, back: dict[int, list[int]], first_users: dict[int, int]) -> None:
        """Updates of the weights, a group of gradients at a time."""
        job = self._job
        for group in np.unique(job.group).tolist():
            members = np.flatnonzero(job.group == group).tolist()
            work_us = float(job.update_us[worker, members].sum())
            ready = [op for tensor in members for op in back[tensor]]
            updated = self._work(worker, work_us, f"group{group}.update@{worker}", OpKind.UPDATE, ready)
            for first in dict.fromkeys(first_users[tensor] for tensor in members):
                self._builder.carry(updated, first)


def _pieces_of(work_us: float) -> int:
    """Number of scheduling quanta in an operator's core time."""
    return max(math.ceil(work_us / machine_constants().byteps.quantum_us), 1)
