"""Breakdown of the time of each rank's devices in a replayed iteration. The parts add up to it.

Each instant between a rank's last device end of one iteration and that of the next is one of

* **compute**: a kernel or a copy runs;
* **exposed communication**: only collectives run, and all ranks have enqueued one of them;
* **waiting for ranks**: only collectives run, and each still waits for a rank;
* **unknown**: only ops of `OpKind.UNKNOWN` run: nothing in the recording explains what the device did;
* **idle**, of which **host-bound**: what ran next had not been launched when the device fell idle.

Where only one rank was recorded, it is unknown when the others enqueued: waiting is then inside exposed communication.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats
from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.timeline import Timeline
from dpro_search.space.replay_graph import OrderPolicy, ReplayGraph

_COMPUTE = (OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE, OpKind.IO, OpKind.SERVER)


class RankTime(msgspec.Struct, frozen=True, kw_only=True):
    """Time of a rank's devices in an iteration by activity, in us."""

    rank: int
    compute_us: float
    exposed_communication_us: float
    waiting_for_ranks_us: float
    unknown_us: float
    idle_us: float
    host_bound_us: float  # Part of `idle_us`.
    transfer_us: float  # Time in which data moves, whether or not the rank computes meanwhile.

    @property
    def breakdown_us(self) -> dict[str, float]:
        """The parts of the iteration."""
        names = ("compute", "exposed_communication", "waiting_for_ranks", "unknown", "idle")
        return {name: getattr(self, f"{name}_us") for name in names}


def rank_times(timeline: Timeline) -> tuple[RankTime, ...]:
    """Every rank's time in a settled iteration of a replay, mean over the ranks' own windows scaled to the iteration time."""
    graph, times, count = timeline.graph, timeline.times, len(timeline.graph)
    this = (timeline.iterations - 1) // 2
    rows = slice(max(this - 1, 0) * count, min(this + 2, timeline.iterations) * count)  # neighbours may reach into the window
    repeats = (rows.stop - rows.start) // count
    kind, rank = np.tile(graph.op_kind, repeats), np.tile(graph.rank_of_op, repeats)
    works = np.isin(kind, (*_COMPUTE, OpKind.COMM, OpKind.UNKNOWN))
    launched = np.tile(_launches(graph), repeats)
    offset = np.repeat(np.arange(rows.start, rows.stop, count), count)
    launched_us = np.where(launched >= 0, times.start_us[np.maximum(launched, 0) + offset], -np.inf)
    start_us, moved_us, end_us = times.start_us[rows], times.moved_us[rows], times.end_us[rows]
    ends_us = times.end_us.reshape(timeline.iterations, count)
    rows_of_ranks = []
    for one in range(graph.ranks):
        ops_of_rank = (rank == one) & works
        working = (graph.rank_of_op == one) & np.isin(graph.op_kind, (*_COMPUTE, OpKind.COMM, OpKind.UNKNOWN))
        if not working.any():
            continue
        end = float(ends_us[this][working].max())
        begin = float(ends_us[this - 1][working].max()) if this else min(float(times.start_us[:count].min()), 0.0)
        parts = _parts(kind[ops_of_rank], np.clip(start_us[ops_of_rank], begin, end), np.clip(moved_us[ops_of_rank], begin, end),
                       np.clip(end_us[ops_of_rank], begin, end), launched_us[ops_of_rank], begin, end)  # fmt: skip
        scale = timeline.iteration_us / (end - begin) if end > begin else 1.0
        compute, exposed, waiting, unknown, idle, host_bound, transfer = (us * scale for us in parts)
        rows_of_ranks.append(
            RankTime(
                rank=one,
                compute_us=compute,
                exposed_communication_us=exposed,
                waiting_for_ranks_us=waiting,
                unknown_us=unknown,
                idle_us=idle,
                host_bound_us=host_bound,
                transfer_us=transfer,
            )
        )
    return tuple(rows_of_ranks)


def busiest_us(graph: ReplayGraph, idle_us: Floats) -> float:
    """The most that a device which runs one op at a time computes in an iteration of a graph: no iteration can be shorter.

    `idle_us` is the part of each op's duration in which its device is idle, [n].
    """
    one_by_one = graph.policy[graph.device] == OrderPolicy.PROGRAM
    chosen = one_by_one & np.isin(graph.op_kind, _COMPUTE)
    busy_us = np.maximum(graph.duration_us - idle_us, 0.0)[chosen]
    return float(np.bincount(graph.device[chosen], busy_us).max(initial=0.0))


def mean_times(times: Sequence[Sequence[RankTime]]) -> tuple[RankTime, ...]:
    """Every rank's mean over those of several replays in which it does something."""
    columns = [name for name in RankTime.__struct_fields__ if name != "rank"]
    of_rank: dict[int, list[RankTime]] = defaultdict(list)
    for row in itertools.chain.from_iterable(times):
        of_rank[row.rank].append(row)
    return tuple(
        RankTime(rank=rank, **{name: float(np.mean([getattr(row, name) for row in of_rank[rank]])) for name in columns})
        for rank in sorted(of_rank)
    )


def mean_breakdown_us(times: Sequence[RankTime]) -> dict[str, float]:
    """The parts of an iteration, mean over ranks."""
    return {name: float(np.mean([row.breakdown_us[name] for row in times])) for name in (times[0].breakdown_us if times else ())}


def _launches(graph: ReplayGraph) -> npt.NDArray[np.int64]:
    """The launch of each op, -1 where it has none, [n]: what it needs on a device that launches; through a pause before it too."""
    source, target = graph.edges()
    launching = (graph.policy[graph.device] == OrderPolicy.UNBOUNDED) & (graph.op_kind == OpKind.HOST)
    launched_by = np.full(len(graph), -1, np.int64)
    direct = launching[source]
    launched_by[target[direct]] = source[direct]
    through = (launched_by[source] >= 0) & (launched_by[target] < 0) & np.isin(graph.op_kind[source], (OpKind.COMM, OpKind.UNKNOWN))
    launched_by[target[through]] = launched_by[source[through]]
    return launched_by


def _parts(
    kind: npt.NDArray[np.int8],
    start_us: Floats,
    moved_us: Floats,
    end_us: Floats,
    launched_us: Floats,
    begin: float,
    end: float,
) -> tuple[float, ...]:
    computes, moves, unknown = np.isin(kind, _COMPUTE), kind == OpKind.COMM, kind == OpKind.UNKNOWN
    known = ~unknown
    moving_us = np.minimum(np.maximum(moved_us, start_us), end_us)
    compute_us = covered(start_us[computes], end_us[computes])
    with_transfer_us = covered(np.where(moves, moving_us, start_us)[known], end_us[known])
    explained_us = covered(start_us[known], end_us[known])
    busy_us = covered(start_us, end_us)
    idle_us = max(end - begin - busy_us, 0.0)
    host_us = _host_bound_us(start_us, end_us, launched_us, begin)
    transfer_us = covered(moving_us[moves], end_us[moves])
    exposed_us, waiting_us, unknown_us = with_transfer_us - compute_us, explained_us - with_transfer_us, busy_us - explained_us
    return compute_us, exposed_us, waiting_us, unknown_us, idle_us, min(host_us, idle_us), transfer_us


def _host_bound_us(start_us: Floats, end_us: Floats, launched_us: Floats, begin_us: float) -> float:
    """Idle time that ends with an op that was launched only after the device had fallen idle."""
    lasts = end_us > start_us  # what was clipped away is no reason
    start_us, end_us, launched_us = start_us[lasts], end_us[lasts], launched_us[lasts]
    order = np.argsort(start_us, kind="stable")
    busy_until_us = np.maximum(np.concatenate(([begin_us], np.maximum.accumulate(end_us[order])[:-1])), begin_us)
    gap_us = start_us[order] - busy_until_us
    late = (gap_us > 0) & (launched_us[order] > busy_until_us)
    return float(gap_us[late].sum())


def covered(start_us: Floats, end_us: Floats) -> float:
    """Time that is inside at least one of some spans."""
    if not len(start_us):
        return 0.0
    order = np.argsort(start_us, kind="stable")
    start_us, reach_us = start_us[order], np.maximum.accumulate(end_us[order])
    before_us = np.concatenate(([-np.inf], reach_us[:-1]))
    return float(np.maximum(reach_us - np.maximum(start_us, before_us), 0.0).sum())
