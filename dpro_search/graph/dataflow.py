"""`Trace` -> `DataflowGraph`: one graph of a job's step over all ranks, with what each op costs.

Ops are the nodes that ran; a gradient's communication is one COMM op on every rank. Costs are core time (see `core_time`), a sample
per traced step. A rank's compute is summarised as the replay needs it: the compute thread (ops that wait for no communication) with
the points at which it enqueues gradients, and the releases (ops that wait for communication, by what they wait for). Its memory is
the buffers of a step, who writes and reads them, and when (`StepMemory`, made by `graph/buffers.py`).
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats, Ints, NodeGraph, TensorInfo
from dpro_search.errors import InputError

# Types of ops that belong to the backward pass and yet wait for nothing of it.
AT_ONCE = ("Const", "Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs")


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Buffers of one rank's step. An instant is a place in the order in which ops began and ended."""

    # op_name, begin, end, backward: Ops of the rank, the instants at which they began and ended (-1: did not run), and whether they
    # wait for gradients, [ops].
    op_name: tuple[str, ...]
    begin: Ints
    end: Ints
    backward: npt.NDArray[np.bool_]
    # workspace_bytes, workspace_scales: What an op takes only while it runs, and whether that grows with the batch, [ops].
    workspace_bytes: Floats
    workspace_scales: npt.NDArray[np.bool_]
    # size_bytes, scales, is_float32, persistent: Buffers: size, whether it grows with the batch, element type, whether it stays
    # from step to step, [buffers].
    size_bytes: Floats
    scales: npt.NDArray[np.bool_]
    is_float32: npt.NDArray[np.bool_]
    persistent: npt.NDArray[np.bool_]
    # writer_ptr, writer_op: Ops that write a buffer, the one that allocates it first; none if it is persistent. CSR.
    writer_ptr: Ints
    writer_op: Ints
    # use_buffer, use_op: (buffer, op that reads it), [uses].
    use_buffer: Ints
    use_op: Ints
    # Rows of (buffer, variable's buffer): the first takes the place of the second once its last use has ended, [assignments, 2].
    assigned: Ints
    # gradient_bytes, first_post: Sizes of the communicated gradients, [tensors], and the instant at which the first of them is
    # enqueued.
    gradient_bytes: Floats
    first_post: int
    instants: int  # How many there are.
    batch: int  # Samples of a step, by the shapes of its inputs; 0: not known, and nothing grows.

    def mask(self, names: Collection[str], what: str) -> npt.NDArray[np.bool_]:
        """Which ops are named; raises `InputError`, naming the field `what`, if a name is not an op's."""
        selected = np.zeros(len(self.op_name), dtype=np.bool_)
        for name in names:
            if name not in self._number:
                raise InputError(f"{what}: op '{name}' is not in the recorded graph")
            selected[self._number[name]] = True
        return selected

    def lifetimes(self) -> tuple[Ints, Ints]:
        """The instants from which and before which each buffer is alive, [buffers] each: arrays of the caller's own."""
        from_, to = self._lifetimes
        return from_.copy(), to.copy()

    def taken_bytes(self) -> float:
        """The most that is alive at a time, workspaces left out."""
        from_, to = self._lifetimes
        change = np.bincount(from_, self.size_bytes, self.instants + 1) - np.bincount(to, self.size_bytes, self.instants + 1)
        return float(np.cumsum(change).max())

    def all_writers(self, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Buffers that are written, and by chosen ops only, [buffers]."""
        others = np.bincount(self._writer_buffer, ~chosen[self.writer_op], len(self.size_bytes))
        return np.asarray((others == 0) & (np.diff(self.writer_ptr) > 0))

    def writers(self, buffer: int) -> Ints:
        """Ops that write a buffer."""
        return self.writer_op[self.writer_ptr[buffer] : self.writer_ptr[buffer + 1]]

    def last_written(self) -> Ints:
        """The instant at which the last op that writes a buffer began; 0 if none exists, [buffers]."""
        written_us = np.zeros(len(self.size_bytes), dtype=np.int64)
        np.maximum.at(written_us, self._writer_buffer, self.begin[self.writer_op])
        return written_us

    def last_end(self, buffer: Ints, op: Ints) -> Ints:
        """The instant at which the last of some uses and of the writers of each buffer ends, [buffers]."""
        end_us = np.zeros(len(self.size_bytes), dtype=np.int64)
        np.maximum.at(end_us, self._writer_buffer, self.end[self.writer_op])
        np.maximum.at(end_us, buffer, self.end[op])
        return end_us

    @functools.cached_property
    def buffers_read(self) -> list[list[int]]:
        """Buffers that each op reads."""
        buffers_of_op: list[list[int]] = [[] for _ in self.op_name]
        for buffer, op in zip(self.use_buffer.tolist(), self.use_op.tolist(), strict=True):
            buffers_of_op[op].append(buffer)
        return buffers_of_op

    @functools.cached_property
    def _number(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.op_name)}

    @functools.cached_property
    def _writer_buffer(self) -> Ints:
        return np.repeat(np.arange(len(self.size_bytes)), np.diff(self.writer_ptr))

    @functools.cached_property
    def _lifetimes(self) -> tuple[Ints, Ints]:
        from_ = np.zeros(len(self.size_bytes), dtype=np.int64)
        written = np.diff(self.writer_ptr) > 0
        from_[written] = self.begin[self.writer_op[self.writer_ptr[:-1][written]]]
        to = np.where(self.persistent, self.instants, self.last_end(self.use_buffer, self.use_op))
        return from_, to


if TYPE_CHECKING:
    import networkx


class OpKind(enum.IntEnum):
    """The role of an op in a training step."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2
    COMM = 3
    SERVER = 4
    IO = 5
    HOST = 6
    UNKNOWN = 7  # Time of a device that nothing in the recording explains.


@dataclass(frozen=True, kw_only=True)
class Release:
    """Work that a rank can do once some tensors are back: their updates."""

    tensors: tuple[int, ...]  # Indices of the tensors waited for.
    work_us: Floats  # Core time, a sample per traced step, [steps].


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """A rank's compute in one step; every array has a sample per traced step, in the same order on all ranks."""

    post_us: Floats  # Main core time used up when each tensor is enqueued, [steps, tensors].
    main_us: Floats  # Core time of the whole compute thread, [steps].
    releases: tuple[Release, ...]  # What becomes possible when communication ends.
    host_us: Floats  # From the end of a step's call to the start of the next, [steps]: the training script between two steps.
    concurrency: float  # Executor threads busy at a time while the compute thread runs.


@dataclass(frozen=True, kw_only=True)
class TensorOps:
    """A tensor's ops, by rank: the one that makes the gradient, the one that communicates it, those that use the result."""

    producer: tuple[int, ...]
    comm: tuple[int, ...]
    consumers: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class DataflowGraph:
    """One job's training step."""

    # op_name, op_type: Of every op, [ops]; identity of an op is ``name@rank``.
    op_name: tuple[str, ...]
    op_type: tuple[str, ...]
    # op_rank, op_kind: Rank and `OpKind`, [ops].
    op_rank: Ints
    op_kind: Ints
    op_work_us: Floats  # Core time, a sample per traced step, [steps, ops]; 0 for COMM, whose cost depends on the plan.
    # pred_ptr, pred_idx: Dependencies in CSR form: op i needs ``pred_idx[pred_ptr[i] : pred_ptr[i + 1]]``; a tensor's COMM op needs
    # its producers on all ranks.
    pred_ptr: Ints
    pred_idx: Ints
    # tensors, placements: The communicated tensors, in the order in which they are enqueued.
    tensors: tuple[TensorInfo, ...]
    placements: tuple[TensorOps, ...]
    profiles: tuple[RankProfile, ...]  # One per rank.
    steps: Ints  # Index in the trace of each sample's step, [steps].
    unplaced: Mapping[str, str]  # What the trace has but the graph does not, with the reason.
    nodes: NodeGraph | None = None  # Rank 0's graph as it was executed, with the types of its tensors if they were recorded.
    # Buffers of rank 0's step, in the order of the recorded step that takes the most; None if the types of its tensors were not
    # recorded.
    memory: StepMemory | None = None

    @property
    def ranks(self) -> int:
        """Number of recorded ranks."""
        return len(self.profiles)

    def __len__(self) -> int:
        return len(self.op_name)

    def edges(self) -> tuple[Ints, Ints]:
        """Dependencies as (source, destination) arrays."""
        return self.pred_idx, np.repeat(np.arange(len(self)), np.diff(self.pred_ptr))

    def to_networkx(self) -> networkx.DiGraph:
        """The graph for queries by people: nodes ``name@rank`` with kind, rank and mean core time in us."""
        import networkx

        keys = [f"{name}@{rank}" for name, rank in zip(self.op_name, self.op_rank, strict=True)]
        graph = networkx.DiGraph()
        work = self.op_work_us.mean(axis=0)
        for key, kind, rank, mean in zip(keys, self.op_kind, self.op_rank, work, strict=True):
            graph.add_node(key, kind=OpKind(kind).name, rank=int(rank), work_us=float(mean))
        source, destination = self.edges()
        graph.add_edges_from((keys[s], keys[d]) for s, d in zip(source, destination, strict=True))
        return graph


def topological_order(pred_ptr: Ints, pred_idx: Ints) -> Ints:
    """An order in which every op follows what it needs; shorter than the graph where there is a cycle."""
    count = len(pred_ptr) - 1
    missing = np.diff(pred_ptr)
    destination = np.repeat(np.arange(count), missing)
    by_source = np.argsort(pred_idx, kind="stable")
    # Lists, because the loop reads single elements.
    succ_ptr = np.searchsorted(pred_idx[by_source], np.arange(count + 1)).tolist()
    succ_idx, waiting = destination[by_source].tolist(), missing.tolist()
    order = np.flatnonzero(missing == 0).tolist()
    for op in order:
        for next_op in succ_idx[succ_ptr[op] : succ_ptr[op + 1]]:
            waiting[next_op] -= 1
            if waiting[next_op] == 0:
                order.append(next_op)
    return np.array(order, dtype=np.int64)


def waits_for_gradients(kind: Ints, op_type: Sequence[str], pred_ptr: Ints, pred_idx: Ints) -> npt.NDArray[np.bool_]:
    """Ops of the backward pass that need another; the others run at once, and what they read is not kept for them, [ops].

    Parameters
    ----------
    kind, op_type
        `OpKind` and type of each op, [ops].
    pred_ptr, pred_idx
        What each op needs, CSR.
    """
    backward = kind == OpKind.BACKWARD
    gradient = backward & ~np.isin(np.array(op_type), AT_ONCE)
    waits = np.zeros(len(kind), dtype=np.bool_)
    owner = np.repeat(np.arange(len(kind)), np.diff(pred_ptr))
    waits[owner[gradient[pred_idx]]] = True
    waits &= backward
    return waits


def reachable(starts: npt.NDArray[np.bool_], pred_ptr: Ints, pred_idx: Ints, order: Ints) -> npt.NDArray[np.bool_]:
    """Ops that need, directly or not, one of the marked ops; columns of a 2-D mark are independent."""
    rows = starts.reshape(len(starts), -1)
    packed = np.packbits(rows, axis=1)
    marks = [int.from_bytes(row.tobytes(), "big") for row in packed]  # a row is a number: the union of two rows is one operation
    first, needs = pred_ptr.tolist(), pred_idx.tolist()
    for op in order.tolist():
        for need in needs[first[op] : first[op + 1]]:
            marks[op] |= marks[need]
    width = packed.shape[1]
    raw = b"".join(mark.to_bytes(width, "big") for mark in marks)
    unpacked = np.unpackbits(np.frombuffer(raw, dtype=np.uint8).reshape(packed.shape), axis=1, count=rows.shape[1])
    return unpacked.astype(np.bool_).reshape(starts.shape)
