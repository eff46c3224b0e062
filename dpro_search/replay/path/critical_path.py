"""The critical path of a replay: what, from the start to the makespan, nothing could have ended earlier than."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats
from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.kernels.executed import carried_csr, executed
from dpro_search.replay.timeline import Timeline
from dpro_search.space.replay_graph import Int32s


class Reason(enum.StrEnum):
    """Why a step of the path could not begin earlier."""

    START = "start"  # nothing came before
    DEPENDENCY = "dependency"  # it needs the step before
    DEVICE = "device"  # its device was busy with the step before
    COLLECTIVE = "collective"  # the part in the step before was posted last


REASONS = tuple(Reason)
_START, _DEPENDENCY, _DEVICE, _COLLECTIVE = range(4)


class PathStep(NamedTuple):
    """A stretch of the critical path, during which an op works; nothing waits on it: it goes on where a wait came from."""

    op: int  # Number in `Timeline.times`: op i of iteration k is ``k * n + i``.
    # start_us, end_us: Of its work; the part of a collective that was posted last is a step of no length before the collective's
    # work.
    start_us: float
    end_us: float
    reason: Reason  # Why it could not begin earlier.


@dataclass(frozen=True, kw_only=True)
class PathShares:
    """Time on a critical path in microseconds, largest first."""

    by_rank_and_kind: Mapping[tuple[int, str], float]  # Of each (rank, name of its `OpKind`).
    by_op: Mapping[int, float]  # Of each op of the graph, over all iterations.


class PathColumns(NamedTuple):
    """The fields of the steps of a path, [steps] each; `reason` numbers the members of `Reason`."""

    op: Int32s
    reason: npt.NDArray[np.int8]
    start_us: Floats
    end_us: Floats


def critical_path(timeline: Timeline) -> tuple[PathStep, ...]:
    """The path in order of time. It begins at 0 and ends at the makespan, and each step begins, exactly, where the one before ends.

    Of several causes of one start, a dependency is preferred to the device, and the first in the graph to later ones.
    """
    path = path_columns(timeline)
    reasons = [REASONS[code] for code in path.reason.tolist()]
    return tuple(map(PathStep, path.op.tolist(), path.start_us.tolist(), path.end_us.tolist(), reasons))


def path_columns(timeline: Timeline) -> PathColumns:
    """As `critical_path`, for graphs of many ops."""
    times, graph = timeline.times, timeline.graph
    columns = _walk(
        int(times.end_us.argmax()),
        *times[1:4],
        executed(timeline).previous,
        graph.pred_ptr,
        graph.pred_idx,
        *carried_csr(timeline),
        _last_posted(timeline),
    )
    return PathColumns(*columns)


def path_shares(timeline: Timeline) -> PathShares:
    """Who the time on the critical path belongs to."""
    graph, path = timeline.graph, path_columns(timeline)
    op = path.op.astype(np.int64) % len(graph)
    length_us = path.end_us - path.start_us
    kinds = len(OpKind)
    group, group_us = _sums(graph.rank_of_op[op].astype(np.int64) * kinds + graph.op_kind[op], length_us)
    ops, ops_us = _sums(op, length_us)
    keys = [(number // kinds, OpKind(number % kinds).name) for number in group.tolist()]
    return PathShares(
        by_rank_and_kind=dict(zip(keys, group_us.tolist(), strict=True)),
        by_op=dict(zip(ops.tolist(), ops_us.tolist(), strict=True)),
    )


def _sums(key: npt.NDArray[np.int64], value: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
    """Distinct keys and the sum of each one's values, largest sum first, without sums of 0."""
    keys, number = np.unique(key, return_inverse=True)
    total = np.bincount(number, value, len(keys)).astype(np.float64)
    order = np.argsort(-total, kind="stable")
    order = order[total[order] > 0]
    return keys[order], total[order]


def _last_posted(timeline: Timeline) -> Int32s:
    """The part of each op's collective that was posted last; the op itself if it is no part, [iterations * n]."""
    graph, start = timeline.graph, timeline.times.start_us
    last = np.arange(len(start), dtype=np.int32)
    if len(graph.collective):
        parts = np.flatnonzero(graph.collective >= 0)
        for first in range(0, len(start), len(graph)):
            by_start = parts[np.lexsort((start[first + parts], graph.collective[parts]))]
            of = graph.collective[by_start]
            end_of_run = np.searchsorted(of, of, side="right") - 1
            last[first + by_start] = first + by_start[end_of_run]
    return last


@njit(nogil=True)
def _walk(op, start, moved, end, previous, pred_ptr, pred_idx, carry_ptr, carry_idx, last_posted):  # type: ignore[no-untyped-def]
    """Steps from an op back to the start, returned in order of time."""
    count = len(pred_ptr) - 1
    ops, reasons = np.empty(len(end), np.int32), np.empty(len(end), np.int8)
    begins, ends = np.empty(len(end)), np.empty(len(end))
    steps = 0
    until = end[op]
    while op >= 0:
        cause = -1
        if start[op] < moved[op] and last_posted[op] != op:
            reason, cause, begin = _COLLECTIVE, last_posted[op], moved[op]
        else:
            begin = start[op]
            reason, cause = _cause(op, count, start, end, previous, pred_ptr, pred_idx, carry_ptr, carry_idx)
        ops[steps], reasons[steps], begins[steps], ends[steps] = op, reason, begin, until
        steps += 1
        op, until = cause, begin
    return ops[:steps][::-1], reasons[:steps][::-1], begins[:steps][::-1], ends[:steps][::-1]


@njit(nogil=True)
def _cause(op, count, start, end, previous, pred_ptr, pred_idx, carry_ptr, carry_idx):  # type: ignore[no-untyped-def]
    """The code of the reason why an op started no earlier, and the op that ended just then, -1 if none did."""
    iteration, op_of_iteration = op // count, op % count
    for needed in pred_idx[pred_ptr[op_of_iteration] : pred_ptr[op_of_iteration + 1]]:
        if end[iteration * count + needed] == start[op]:
            return _DEPENDENCY, iteration * count + needed
    if iteration > 0:
        for needed in carry_idx[carry_ptr[op_of_iteration] : carry_ptr[op_of_iteration + 1]]:
            if end[(iteration - 1) * count + needed] == start[op]:
                return _DEPENDENCY, (iteration - 1) * count + needed
    before = previous[op]
    if before >= 0 and end[before] == start[op]:
        return _DEVICE, before
    return _START, -1
