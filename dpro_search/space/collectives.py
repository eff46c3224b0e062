"""Collectives in detail: the ops and dependencies of one tensor group's communication, for all ranks at once.

A **row** is a rank that is built. Without folding rows are the ranks; with folding (`folding.py`) one row stands for all ranks of
its class, and what another rank sends comes from the row of that rank's class. So every function takes, for each row, the row of
its partner, and the number of ranks apart from the number of rows. All take the ops after which a row's gradients are there
(``enqueued``) and return the ops after which the row has the result.

A message occupies the sender's transmit device; on the receiver's receive device it is reduced. The two never share a device: a
link carries both directions at once. Cost of n bytes over p ranks, each alone on its links (latency alpha, rate 1 / beta, reduction
gamma):

==================  =======================================================================
rendezvous          alpha + n beta (as given)
ring                2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma; an all-gather or a reduce-scatter of n bytes in all: half
                    of the messages, gamma of the latter only
halving-doubling    2 log2(p) alpha + 2(p-1)/p n beta + (p-1)/p n gamma, p a power of two
parameter server    push and pull of n bytes a worker; each of s servers moves p n / s both ways
==================  =======================================================================

(Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms", 2009; Thakur, Rabenseifner & Gropp, "Optimization of collective
communication operations in MPICH", 2005.)
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import CollectiveKind, Floats, Ints
from dpro_search.graph.dataflow import OpKind
from dpro_search.space.graph_builder import Axis, GraphBuilder
from dpro_search.space.replay_graph import Int32s


class Wire(NamedTuple):
    """How messages travel from each row to its partner."""

    latency_us: float  # Before the bytes move.
    bytes_per_us: Floats  # Rate of the idle path, [...].
    # Links that a flow crosses, [..., 2], -1 for a message that stays on its host; None: messages are durations at the idle rate.
    links: Int32s | None = None

    def cost(self, size_bytes: npt.ArrayLike) -> tuple[Floats, Floats]:
        """Duration (us) and flow (bytes) of each row's message of a size."""
        shape = np.broadcast_shapes(np.shape(size_bytes), self.bytes_per_us.shape)
        sizes = np.broadcast_to(np.asarray(size_bytes, np.float64), shape)
        alone = self.latency_us + sizes / self.bytes_per_us
        if self.links is None:
            return alone, np.zeros_like(alone)
        flows = self.links[..., 0] >= 0
        return np.where(flows, self.latency_us, alone), np.where(flows, sizes, 0.0)

    def of(self, index: npt.NDArray[np.integer]) -> Wire:
        """The wires of some rows (last axis)."""
        return Wire(self.latency_us, self.bytes_per_us[..., index], None if self.links is None else self.links[..., index, :])


class Rows(NamedTuple):
    """The ranks that are built, and where they communicate."""

    rank: Ints  # Rank of each row, [rows].
    # transmit, receive: Devices of each row, [rows].
    transmit: Int32s
    receive: Int32s

    def of(self, index: npt.NDArray[np.integer]) -> Rows:
        """Some of the rows."""
        return Rows(self.rank[index], self.transmit[index], self.receive[index])


class Group(NamedTuple):
    """A fused tensor group, which is communicated as one."""

    name: str
    size_bytes: float
    priority: int
    kind: int = CollectiveKind.ALL_REDUCE


def rendezvous(builder: GraphBuilder, enqueued: Int32s, rows: Rows, group: Group, *, collective: int, duration_us: float) -> Int32s:
    """One part a row, on its transmit device: moves data after the last row's enqueue, ends on all together. Returns [rows]."""
    part = builder.add_ops(
        rows.transmit,
        duration_us,
        kind=OpKind.COMM,
        priority=group.priority,
        collective=collective,
        name=f"{_plain(group.name)}.{CollectiveKind(group.kind).label}@{{0}}",
        axes=(rows.rank,),
    )
    builder.add_edges(enqueued, part)
    return part


def ring(
    builder: GraphBuilder,
    enqueued: Int32s,
    rows: Rows,
    group: Group,
    *,
    ranks: int,
    previous: Ints,
    wire: Wire,
    reduce_us_per_byte: float = 0.0,
) -> Int32s:
    """Ring all-reduce: ranks - 1 steps of reduce-scatter, as many of all-gather, each of size / ranks bytes; or one of the two.

    `previous` is the row that sends to each row, [rows]; `wire` leads to each row's successor, [rows].
    """
    scatters = 0 if group.kind == CollectiveKind.ALL_GATHER else ranks - 1
    gathers = 0 if group.kind == CollectiveKind.REDUCE_SCATTER else ranks - 1
    steps = scatters + gathers
    if not steps:
        return enqueued
    chunk = np.full((steps, 1), group.size_bytes / ranks)
    reduces = np.arange(steps)[:, None] < scatters
    source = np.broadcast_to(previous, (steps, len(previous)))
    return _exchanges(builder, enqueued, rows, group, source, wire, chunk, chunk * reduces * reduce_us_per_byte)


class Hypercube(NamedTuple):
    """Who exchanges with whom among p ranks (or rows that stand for ranks).

    2^k of them form a hypercube; the surplus hands data to a keeper and gets it back.
    """

    partner: Ints  # Rank at the other end of each dimension's edge, [k, p]; -1 for a surplus rank.
    mate: Ints  # The keeper of a surplus rank and the surplus rank of a keeper, [p]; -1: none.
    surplus: npt.NDArray[np.bool_]  # Whether a rank is surplus, [p].


def halving_doubling_partners(ranks: int) -> Hypercube:
    """Surplus ranks: the even ones of the first 2 (p - 2^k) ranks. The rank that follows each of them takes its data."""
    dimensions = ranks.bit_length() - 1
    surplus_count = ranks - (1 << dimensions)
    rank = np.arange(ranks)
    paired = rank < 2 * surplus_count
    surplus = paired & (rank % 2 == 0)
    mate = np.where(paired, rank ^ 1, -1)
    core = np.flatnonzero(~surplus)
    partner = np.full((dimensions, ranks), -1)
    partner[:, core] = core[np.arange(len(core)) ^ (1 << np.arange(dimensions))[:, None]]
    return Hypercube(partner, mate, surplus)


def halving_doubling(
    builder: GraphBuilder,
    enqueued: Int32s,
    rows: Rows,
    group: Group,
    *,
    cube: Hypercube,
    wire: Wire,
    mate_wire: Wire,
    reduce_us_per_byte: float = 0.0,
) -> Int32s:
    """Recursive vector halving (reduce-scatter), then doubling (all-gather); surplus ranks hand over before and get it back after.

    In dimension k of the `cube` size / 2^(k+1) bytes are exchanged. `wire` and `mate_wire` lead to the partner in each dimension,
    [k, rows], and to the mate, [rows].
    """
    partner, mate, surplus = cube
    extra, core = np.flatnonzero(surplus), np.flatnonzero(~surplus)
    keeper = core[mate[core] >= 0]
    done = enqueued.copy()
    whole_us = group.size_bytes * reduce_us_per_byte
    if len(extra):
        done[keeper] = _hand_over(builder, done, rows, group, "before", extra, keeper, mate, mate_wire, whole_us)
    dimensions = len(partner)
    if dimensions:
        order = np.concatenate((np.arange(dimensions), np.arange(dimensions)[::-1]))
        place = np.full(len(rows.rank), -1)
        place[core] = np.arange(len(core))
        sizes: Floats = (group.size_bytes / np.exp2(order + 1.0))[:, None]
        reduces = (np.arange(len(order)) < dimensions)[:, None]
        source = place[partner[order][:, core]]
        wires = Wire(wire.latency_us, wire.bytes_per_us[order], None if wire.links is None else wire.links[order]).of(core)
        reduce_us: Floats = sizes * reduces * reduce_us_per_byte
        done[core] = _exchanges(builder, done[core], rows.of(core), group, source, wires, sizes, reduce_us)
    if len(extra):
        done[extra] = _hand_over(builder, done, rows, group, "after", keeper, extra, mate, mate_wire, 0.0)
    return done


def partition(size_bytes: float, partition_bytes: float) -> Floats:
    """Sizes of a group's partitions: full ones and what is left, [partitions]."""
    full = int(size_bytes // partition_bytes)
    rest = size_bytes - full * partition_bytes
    return np.array([partition_bytes] * full + ([rest] if rest > 0 or not full else []), dtype=np.float64)


def round_robin(partition_bytes: Floats, servers: int) -> Ints:
    """Server of each partition, [partitions]: one after the other."""
    return np.arange(len(partition_bytes)) % servers


def least_load(partition_bytes: Floats, servers: int) -> Ints:
    """Server of each partition, [partitions]: in their order, the one with the fewest bytes so far (of equals the first)."""
    load = [(0.0, server) for server in range(servers)]
    chosen = np.zeros(len(partition_bytes), np.int64)
    for index, size in enumerate(partition_bytes.tolist()):
        bytes_so_far, chosen[index] = load[0]
        heapq.heapreplace(load, (bytes_so_far + size, int(chosen[index])))
    return chosen


def parameter_server(
    builder: GraphBuilder,
    enqueued: Int32s,
    rows: Rows,
    group: Group,
    *,
    partition_bytes: Floats,
    thread: Int32s,
    respond: Int32s,
    push: Wire,
    pull: Wire,
    sum_us_per_byte: float = 0.0,
    merge_us_per_byte: float = 0.0,
) -> Int32s:
    """Push, sum and pull each partition through its server.

    The server's thread adds the pushes in the order of their arrival; the first is copied, which is taken to cost as much as a sum,
    for which push comes first is not known before the replay. When all are in, the result is copied once and goes to all workers.

    Parameters
    ----------
    partition_bytes
        [partitions].
    thread, respond
        Server device that sums each partition, and the one that sends its responses, [partitions].
    push, pull
        From each worker to each partition's server and back, [partitions, rows].
    """
    sizes = partition_bytes[:, None]
    shape = (len(partition_bytes), len(enqueued))
    parts = [f".{number}" for number in range(shape[0])]
    name = _plain(group.name)
    axes = (parts, rows.rank)
    pushed = _messages(builder, np.broadcast_to(rows.transmit, shape), push, sizes, group, "push{0}@{1}", axes)
    summed = builder.add_ops(
        np.broadcast_to(thread[:, None], shape),
        np.broadcast_to(sizes * sum_us_per_byte, shape),
        kind=OpKind.SERVER,
        priority=group.priority,
        name=f"{name}.sum{{0}}@{{1}}",
        axes=axes,
    )
    merged = builder.add_ops(
        thread,
        partition_bytes * merge_us_per_byte,
        kind=OpKind.SERVER,
        priority=group.priority,
        name=f"{name}.merge{{0}}",
        axes=(parts,),
    )
    pulled = _messages(builder, np.broadcast_to(respond[:, None], shape), pull, sizes, group, "pull{0}@{1}", axes)
    builder.add_edges(enqueued, pushed)
    builder.add_edges(pushed, summed)
    builder.add_edges(summed, merged[:, None])
    builder.add_edges(merged[:, None], pulled)
    if shape[0] == 1:
        only: Int32s = pulled[0]
        return only
    # Workers take what arrived without a queue: one op that all consumers can wait for.
    done = builder.add_ops(
        rows.receive, 0.0, kind=OpKind.COMM, priority=group.priority, name=f"{name}.done@{{0}}", axes=(rows.rank,)
    )
    builder.add_edges(pulled, done)
    return done


def _exchanges(
    builder: GraphBuilder,
    enqueued: Int32s,
    rows: Rows,
    group: Group,
    source: Ints,
    wire: Wire,
    size_bytes: Floats,
    reduce_us: Floats,
) -> Int32s:
    """Steps in which each row sends one message and receives one; the next send needs what was received.

    Receives are in order, and the first needs the row's own gradients, for that is what it is added to.

    Parameters
    ----------
    source
        Row from which each step's message comes, [steps, rows].
    size_bytes, reduce_us
        Size of each step's messages and what a receive costs, [steps, 1].
    """
    steps = [f".{step}" for step in range(len(source))]
    axes = (steps, rows.rank)
    sizes, transmit = np.broadcast_to(size_bytes, source.shape), np.broadcast_to(rows.transmit, source.shape)
    send = _messages(builder, transmit, wire, sizes, group, "send{0}@{1}", axes)
    receive = builder.add_ops(
        np.broadcast_to(rows.receive, source.shape),
        np.broadcast_to(reduce_us, source.shape),
        kind=OpKind.COMM,
        priority=group.priority,
        name=f"{_plain(group.name)}.receive{{0}}@{{1}}",
        axes=axes,
    )
    builder.add_edges(enqueued, send[0])
    builder.add_edges(enqueued, receive[0])
    builder.add_edges(receive[:-1], send[1:])
    builder.add_edges(receive[:-1], receive[1:])
    builder.add_edges(np.take_along_axis(send, source, axis=1), receive)
    last: Int32s = receive[-1]
    return last


def _hand_over(
    builder: GraphBuilder,
    done: Int32s,
    rows: Rows,
    group: Group,
    when: str,
    sender: Ints,
    receiver: Ints,
    mate: Ints,
    wire: Wire,
    reduce_us: float,
) -> Int32s:
    """All of a group's bytes from some rows to their mates; returns the receives."""
    from_ranks = (rows.rank[sender],)
    send = _messages(builder, rows.transmit[sender], wire.of(sender), group.size_bytes, group, f"{when}.send@{{0}}", from_ranks)
    receive = builder.add_ops(
        rows.receive[receiver],
        reduce_us,
        kind=OpKind.COMM,
        priority=group.priority,
        name=f"{_plain(group.name)}.{when}.receive@{{0}}",
        axes=(rows.rank[receiver],),
    )
    send_of_row = np.full(len(rows.rank), -1, np.int32)
    send_of_row[sender] = send
    builder.add_edges(done[sender], send)
    builder.add_edges(done[receiver], receive)
    builder.add_edges(send_of_row[mate[receiver]], receive)
    return receive


def _messages(
    builder: GraphBuilder,
    device: Int32s,
    wire: Wire,
    size_bytes: npt.ArrayLike,
    group: Group,
    name: str,
    axes: Sequence[Axis],
) -> Int32s:
    """Messages of a group over wires, one an entry of `device`; `name` is a template of the axes."""
    duration_us, flow_bytes = wire.cost(size_bytes)
    return builder.add_ops(
        device,
        duration_us,
        kind=OpKind.COMM,
        priority=group.priority,
        flow_bytes=flow_bytes,
        links=wire.links,
        name=f"{_plain(group.name)}.{name}",
        axes=axes,
    )


def _plain(name: str) -> str:
    """A name that a template can hold."""
    return name.replace("{", "{{").replace("}", "}}")
