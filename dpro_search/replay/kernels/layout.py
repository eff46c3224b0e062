"""`Layout`: a `ReplayGraph`'s arrays as the compiled passes want them, ops relabelled in the order in which they run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats
from dpro_search.space.replay_graph import Int8s, Int32s, OrderPolicy, ReplayGraph, csr


class Layout(NamedTuple):
    """Arrays by label, [n] unless another shape is given; the op of label k is ``op_of[k]``. Compiled passes take it as a whole."""

    op_of: Int32s  # Op of each label; neighbours in time are neighbours in memory.
    duration_us: Floats
    device: Int32s
    key: Int32s  # Place of each op among all by (priority, op number): decides between ops that became ready together.
    priority: Int32s  # Empty unless a device serves by priority.
    # pred_ptr, pred_idx, succ_ptr, succ_idx: Dependencies both ways, CSR; successor row n holds the ops without predecessors.
    pred_ptr: Int32s
    pred_idx: Int32s
    succ_ptr: Int32s
    succ_idx: Int32s
    needs: Int32s  # Predecessors of each op; 1 (the start of the iteration) for one without.
    policy: Int8s
    # slot_ptr, program: Each device's stretch of a list of ops, [devices + 1]; those of devices in program order are filled in,
    # [n].
    slot_ptr: Int32s
    program: Int32s
    # collective, part_ptr, part: Collective of each op (empty if none exist), numbered from 0, and the parts of each, CSR.
    collective: Int32s
    part_ptr: Int32s
    part: Int32s

    @property
    def collectives(self) -> int:
        """Number of collectives."""
        return len(self.part_ptr) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(column.nbytes for column in self)

    def label_of(self) -> Int32s:
        """Label of each op, [n]."""
        return inverse(self.op_of)


def lay_out(graph: ReplayGraph, op_of: Int32s | None = None) -> Layout:
    """The layout of a valid graph, in its own order of ops or in the one given, [n]."""
    count = len(graph)
    order = np.arange(count, dtype=np.int32) if op_of is None else op_of
    label = order if op_of is None else inverse(order)
    pred_ptr, pred_idx = _reordered(graph.pred_ptr, graph.pred_idx, order, label)
    succ_ptr, succ_idx, needs = _successors(pred_ptr, pred_idx)
    device = graph.device[order].astype(np.int32, copy=False)
    slot_ptr = np.zeros(graph.devices + 1, np.int32)
    np.cumsum(np.bincount(device, minlength=graph.devices), out=slot_ptr[1:])
    program = np.full(count, -1, np.int32)
    in_program = graph.policy == OrderPolicy.PROGRAM
    if in_program.any():
        narrow = np.int16 if graph.devices <= np.iinfo(np.int16).max else np.int32  # numpy sorts 16 bits by radix
        by_device = np.argsort(graph.device.astype(narrow), kind="stable")  # within a device by op number
        filled = in_program[graph.device[by_device]]
        program[filled] = label[by_device[filled]]
    collective, part_ptr, part = _collectives(graph, order)
    return Layout(
        op_of=order,
        duration_us=graph.duration_us[order],
        device=device,
        key=_key(graph)[order],
        priority=_priority(graph)[order] if (graph.policy == OrderPolicy.PRIORITY).any() else np.zeros(0, np.int32),
        pred_ptr=pred_ptr,
        pred_idx=pred_idx,
        succ_ptr=succ_ptr,
        succ_idx=succ_idx,
        needs=needs,
        policy=graph.policy.astype(np.int8, copy=False),
        slot_ptr=slot_ptr,
        program=program,
        collective=collective,
        part_ptr=part_ptr,
        part=part,
    )


def inverse(order: npt.NDArray[np.integer]) -> Int32s:
    """The permutation that undoes another, [n]."""
    undone = np.empty(len(order), np.int32)
    undone[order] = np.arange(len(order), dtype=np.int32)
    return undone


def _priority(graph: ReplayGraph) -> Int32s:
    return graph.priority.astype(np.int32, copy=False) if len(graph.priority) else np.zeros(len(graph), np.int32)


def _key(graph: ReplayGraph) -> Int32s:
    if not len(graph.priority):
        return np.arange(len(graph), dtype=np.int32)
    return inverse(np.argsort(_priority(graph), kind="stable"))


def _reordered(ptr: Int32s, idx: Int32s, order: Int32s, label: Int32s) -> tuple[Int32s, Int32s]:
    """CSR rows in another order, with their entries renamed."""
    lengths = np.diff(ptr)[order]
    new_ptr = np.zeros(len(order) + 1, np.int32)
    np.cumsum(lengths, out=new_ptr[1:])
    taken = np.repeat(ptr[:-1][order] - new_ptr[:-1], lengths) + np.arange(len(idx), dtype=np.int32)
    return new_ptr, label[idx[taken]].astype(np.int32, copy=False)


def _successors(pred_ptr: Int32s, pred_idx: Int32s) -> tuple[Int32s, Int32s, Int32s]:
    count = len(pred_ptr) - 1
    needs = np.diff(pred_ptr)
    roots = np.flatnonzero(needs == 0).astype(np.int32)
    ptr, idx = csr(pred_idx, np.repeat(np.arange(count, dtype=np.int32), needs), count)
    return np.append(ptr, ptr[-1] + len(roots)).astype(np.int32), np.concatenate((idx, roots)), np.maximum(needs, 1)


def _collectives(graph: ReplayGraph, order: Int32s) -> tuple[Int32s, Int32s, Int32s]:
    none = np.zeros(0, np.int32)
    if not len(graph.collective) or graph.collective.max() < 0:
        return none, np.zeros(1, np.int32), none
    collective = graph.collective[order].astype(np.int32)
    parts = np.flatnonzero(collective >= 0)
    names, number = np.unique(collective[parts], return_inverse=True)
    collective[parts] = number
    part_ptr, part = csr(number, parts, len(names))
    return collective, part_ptr, part
