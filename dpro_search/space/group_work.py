"""`GroupWork`: what the predicted cost of a grouping of tensors needs beside the grouping; arrays for `replay/kernels/groups.py`.

A **row** is a rank that is built (see `folding.py`), a **slot** a place for a group: a group has the slot of its last tensor.
Iterations are unrolled: tensor t of iteration k has number ``k * tensors + t``, and carried dependencies are dependencies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import CollectiveKind, Floats, Ints
from dpro_search.space.collectives import halving_doubling_partners
from dpro_search.space.data_parallel import DataParallelJob
from dpro_search.space.network import HalvingDoubling, Rendezvous, Ring
from dpro_search.space.replay_graph import Int32s, OrderPolicy, csr


class GroupWork(NamedTuple):
    """R rows, T tensors, n compute ops, S steps of a group's communication; devices are the rows' streams, senders and receivers.

    Arrays of integers come first, then those of floats, then numbers: `replay/kernels/group_packing.py` relies on that.

    Attributes
    ----------
    duration_us, device, key, needs
        Of each compute op, [n]; `key` is its place among all by (priority, number), `needs` counts predecessors and tensors.
    succ_ptr, succ_idx
        Compute ops that need each one, CSR.
    make_ptr, make_idx
        Tensors (``row * T + tensor``) that each op makes, CSR.
    use_ptr, use_op
        Ops that need each row's tensors, CSR over ``row * T + tensor``.
    makers
        Ops that make each row's tensors, [R * T].
    sources
        Ops that need nothing.
    restart_ptr, restart_idx
        Those of them that can begin an iteration (the others come later in their stream's program): which carried ops, by number,
        each needs of the iteration before, CSR.
    carried
        Number of each op among those that the next iteration needs, -1 for none, [n].
    tensor_bytes
        [T].
    slot_ptr
        Each device's stretch of the line of waiting work, [devices + 1]; streams come first, then senders, then receivers.
    program
        Ops of the streams in program order, where they stand in that line; -1 elsewhere.
    in_program
        1 for a device that takes its work in program order, else 0, [devices].
    rows, streams, steps, iterations
        R, number of streams, S, and how many iterations this is.
    meets
        A group is one op a row that waits for all (`Rendezvous`); else `steps` messages.
    negotiate_us
        Below 0: a row begins a group when it has enqueued it; else so long after the last row has.
    way_us, way_us_per_byte
        Latency and us of a byte of a group that meets, of each way to do it; the least counts.
    latency_us
        Of a message.
    divide, bytes_per_us, reduce_us_per_byte
        A message of step s of row r has ``size / divide[s]`` bytes and a rate of ``bytes_per_us[s * R + r]``; what its receiver
        does with it.
    dest_ptr, dest_row
        Rows that get the message of each ``step * R + row``, CSR.
    """

    device: Int32s
    key: Int32s
    needs: Int32s
    succ_ptr: Int32s
    succ_idx: Int32s
    make_ptr: Int32s
    make_idx: Int32s
    use_ptr: Int32s
    use_op: Int32s
    makers: Int32s
    sources: Int32s
    restart_ptr: Int32s
    restart_idx: Int32s
    carried: Int32s
    slot_ptr: Int32s
    program: Int32s
    in_program: Int32s
    dest_ptr: Int32s
    dest_row: Int32s
    duration_us: Floats
    tensor_bytes: Floats
    divide: Floats
    bytes_per_us: Floats
    reduce_us_per_byte: Floats
    way_us: Floats
    way_us_per_byte: Floats
    rows: int
    streams: int
    steps: int
    iterations: int
    meets: bool
    negotiate_us: float
    latency_us: float


def why_not(job: DataParallelJob) -> str | None:
    """Why the cost of a grouping of a job needs its whole graph each time; None if they need not."""
    if not isinstance(job.scheme, Rendezvous | Ring | HalvingDoubling):
        return f"{type(job.scheme).__name__} cuts groups into partitions"
    if len(job.collectives) and job.collectives.any():
        return "not all collectives are all-reduces"
    if job.network is not None and job.network.flows and not isinstance(job.scheme, Rendezvous):
        return "messages share links"
    if isinstance(job.scheme, HalvingDoubling) and job.ranks & (job.ranks - 1):
        return "halving-doubling has surplus ranks"
    if job.slowdown is not None and job.slowdown.size and job.slowdown.max() > 1:
        return "communication slows computation"
    if len(job.group_priority) and job.group_priority.any():
        return "groups have priorities"
    if not all(np.isin(step.policy, (OrderPolicy.PROGRAM, OrderPolicy.FIFO)).all() for step in job.steps):
        return "a stream serves by priority, or is unbounded"
    return None


def group_work(job: DataParallelJob, rank: Ints, row_of_rank: Ints, iterations: int) -> GroupWork:
    """The arrays of some ranks that stand for all, for a job that `why_not` has nothing against.

    Rows are given as to `job_graph.build_rows`.
    """
    compute = _Compute(job, rank, iterations)
    exchange = _exchange(job, rank, row_of_rank)
    rows, tensors, steps = len(rank), len(job.tensor_bytes) * iterations, len(exchange["divide"])
    streams = compute.streams
    meets = isinstance(job.scheme, Rendezvous)
    senders, receivers = np.full(rows, tensors * max(steps, 1)), np.full(rows, tensors * steps)
    slot_ptr = np.cumsum(np.concatenate(([0], np.bincount(compute.device, minlength=streams), senders, receivers)))
    in_program = np.zeros(streams + 2 * rows, np.bool_)
    in_program[:streams] = compute.policy == OrderPolicy.PROGRAM
    in_program[streams : streams + rows] = meets and job.negotiate_us is None
    program = np.full(slot_ptr[-1], -1, np.int32)
    by_device = np.argsort(compute.device, kind="stable")
    program[: len(by_device)] = np.where(in_program[compute.device[by_device]], by_device, -1)
    return GroupWork(
        **compute.columns(),
        tensor_bytes=np.tile(job.tensor_bytes.astype(np.float64), iterations),
        slot_ptr=slot_ptr.astype(np.int32),
        program=program,
        in_program=in_program.astype(np.int32),
        rows=rows,
        streams=streams,
        steps=steps,
        iterations=iterations,
        meets=meets,
        negotiate_us=-1.0 if job.negotiate_us is None else float(job.negotiate_us),
        **exchange,
    )


class _Compute:
    """Compute ops of all rows and iterations: iteration by iteration, within it row by row, each in the order of its step."""

    def __init__(self, job: DataParallelJob, rank: Ints, iterations: int) -> None:
        steps = [job.steps[number] for number in job.step_of_rank[rank].tolist()]
        first_op = np.cumsum([0, *(len(step) for step in steps)])
        first_stream = np.cumsum([0, *(len(step.policy) for step in steps)])
        tensors = len(job.tensor_bytes)
        ops, makers, users, edges, carries = int(first_op[-1]), [], [], [], []
        for row, step in enumerate(steps):
            # A row's tensors of all iterations are neighbours: row * (iterations * tensors) + iteration * tensors + tensor.
            base = row * iterations * tensors
            makers.append(np.unique(np.stack((first_op[row] + step.maker_op, base + step.maker_tensor)), axis=1))
            users.append(np.unique(np.stack((first_op[row] + step.user_op, base + step.user_tensor)), axis=1))
            edges.append(first_op[row] + np.stack((step.edge_src, step.edge_dst)))
            carries.append(first_op[row] + np.stack((step.carry_src, step.carry_dst)))
        self.streams = int(first_stream[-1])
        self.policy = np.concatenate([np.asarray(step.policy) for step in steps])
        self._ops, self._iterations, self._cells = ops, iterations, len(rank) * iterations * tensors
        factors = job.compute_factor[rank].tolist()
        self.duration_us = self._tiled([step.duration_us * factor for step, factor in zip(steps, factors, strict=True)])
        self.device = self._tiled([first_stream[row] + np.asarray(step.device) for row, step in enumerate(steps)])
        priority = self._tiled([step.priority if len(step.priority) else np.zeros(len(step), np.int64) for step in steps])
        self._key = np.empty(len(priority), np.int32)
        self._key[np.argsort(priority, kind="stable")] = np.arange(len(priority))
        self._makers = self._unrolled(np.concatenate(makers, axis=1), (ops, tensors))
        self._users = self._unrolled(np.concatenate(users, axis=1), (ops, tensors))
        self._carries = np.concatenate(carries, axis=1)
        carried = self._unrolled(self._carries, (ops, ops))
        later = carried[1] + ops < ops * iterations
        self._edges = np.concatenate(
            (self._unrolled(np.concatenate(edges, axis=1), (ops, ops)), carried[:, later] + np.array([[0], [ops]])), axis=1
        )

    def columns(self) -> dict[str, Any]:
        """Columns of `GroupWork`."""
        count, cells = self._ops * self._iterations, self._cells
        succ_ptr, succ_idx = csr(self._edges[0], self._edges[1], count)
        make_ptr, make_idx = csr(self._makers[0], self._makers[1], count)
        use_ptr, use_op = csr(self._users[1], self._users[0], cells)
        needs = np.bincount(self._edges[1], minlength=count) + np.bincount(self._users[0], minlength=count)
        sources = np.flatnonzero(needs == 0)
        carried_ops = np.unique(self._carries[0])
        number = np.full(count, -1, np.int32)
        number[carried_ops] = np.arange(len(carried_ops))
        first_of_stream = np.unique(self.device, return_index=True)[1]
        in_program = self.policy[self.device[sources]] == OrderPolicy.PROGRAM
        starters = sources[~in_program | np.isin(sources, first_of_stream)]
        place = np.full(count, -1)
        place[starters] = np.arange(len(starters))
        restarts = place[self._carries[1]] >= 0
        restart_ptr, restart_idx = csr(place[self._carries[1][restarts]], number[self._carries[0][restarts]], len(starters))
        return {
            "duration_us": self.duration_us.astype(np.float64),
            "device": self.device.astype(np.int32),
            "key": self._key,
            "needs": needs.astype(np.int32),
            "succ_ptr": succ_ptr,
            "succ_idx": succ_idx,
            "make_ptr": make_ptr,
            "make_idx": make_idx,
            "use_ptr": use_ptr,
            "use_op": use_op,
            "makers": np.bincount(self._makers[1], minlength=cells).astype(np.int32),
            "sources": sources.astype(np.int32),
            "restart_ptr": restart_ptr,
            "restart_idx": restart_idx,
            "carried": number,
        }

    def _tiled(self, columns: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return np.tile(np.concatenate(columns), self._iterations)

    def _unrolled(self, pairs: Ints, strides: tuple[int, int]) -> Ints:
        """Pairs of all iterations; each side's numbers grow by its stride from one to the next."""
        later = np.arange(self._iterations)[:, None]
        return np.stack([(pairs[side] + later * strides[side]).ravel() for side in (0, 1)]).astype(np.int64)


def _exchange(job: DataParallelJob, rank: Ints, row_of_rank: Ints) -> dict[str, Any]:
    """What a group's messages cost and where they go, by step and row."""
    scheme, rows, ranks = job.scheme, len(rank), job.ranks
    if isinstance(scheme, Rendezvous):
        none = np.zeros(0)
        nobody = np.zeros(0, np.int32)
        ways = scheme.ways_of(CollectiveKind.ALL_REDUCE)
        return {
            "latency_us": 0.0, "way_us": ways[:, 0], "way_us_per_byte": ways[:, 1], "divide": none, "bytes_per_us": none,
            "reduce_us_per_byte": none, "dest_ptr": np.zeros(1, np.int32), "dest_row": nobody,
        }  # fmt: skip
    if isinstance(scheme, Ring):
        steps = 2 * (ranks - 1)
        divide = np.full(steps, float(ranks))
        reduces = np.arange(steps) < ranks - 1
        sender = np.broadcast_to((rank - 1) % ranks, (steps, rows))
        receiver = np.broadcast_to((rank + 1) % ranks, (steps, rows))
    else:
        assert isinstance(scheme, HalvingDoubling)  # `why_not` was called before
        partner = halving_doubling_partners(ranks).partner[:, rank]
        order = np.concatenate((np.arange(len(partner)), np.arange(len(partner))[::-1]))
        divide = np.exp2(order + 1.0)
        reduces = np.arange(len(order)) < len(partner)
        sender = receiver = partner[order]
    network = job.network
    assert network is not None  # the job was checked
    row = np.arange(len(divide) * rows).reshape(-1, rows)
    owner = np.arange(len(divide))[:, None] * rows + row_of_rank[sender]
    dest_ptr, dest_row = csr(owner.ravel(), (row % max(rows, 1)).ravel(), len(divide) * rows)
    return {
        "latency_us": float(network.latency_us),
        "way_us": np.zeros(0),
        "way_us_per_byte": np.zeros(0),
        "divide": divide,
        "bytes_per_us": network.idle_rate(network.host[rank], network.host[receiver]).ravel().astype(np.float64),
        "reduce_us_per_byte": np.where(reduces, float(scheme.reduce_us_per_byte), 0.0),
        "dest_ptr": dest_ptr,
        "dest_row": dest_row,
    }
