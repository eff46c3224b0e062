"""`Trace` -> `DataflowGraph`: one graph of a job's step over all ranks, with what each op costs.

Ops are the nodes that ran; a gradient's communication is one COMM op on every rank. Costs are core time (see `core_time`), a sample
per traced step. A rank's compute is summarised as the replay needs it: the compute thread (ops that wait for no communication) with
the points at which it enqueues gradients, and the releases (ops that wait for communication, by what they wait for).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats, Ints, NodeGraph, TensorInfo
from dpro_search.graph.step_memory import StepMemory

# Types of ops that belong to the backward pass and yet wait for nothing of it.
AT_ONCE = ("Const", "Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs")

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
class Placement:
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
    placements: tuple[Placement, ...]
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
    waiting = np.diff(pred_ptr).copy()
    destination = np.repeat(np.arange(count), waiting)
    by_source = np.argsort(pred_idx, kind="stable")
    succ_ptr = np.searchsorted(pred_idx[by_source], np.arange(count + 1))
    succ_idx = destination[by_source]
    order = list(np.flatnonzero(waiting == 0))
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
    marked = starts.copy()
    for op in order:
        needs = pred_idx[pred_ptr[op] : pred_ptr[op + 1]]
        if len(needs):
            marked[op] |= marked[needs].any(axis=0)
    return marked
