"""The critical path in words: what an iteration of any kind of job waited for, from its begin to its end.

The verbs and the report show rows of one type for every kind of job: stretches in order of time (`path_segments`), or sums by rank
and kind of op (`path_totals`), which stay short on graphs of many ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.path.critical_path import PathStep, critical_path, path_columns, path_shares
from dpro_search.replay.timeline import Timeline

COMPUTE, LATE_RANK, NEGOTIATION, COMMUNICATION = "compute", "late_rank", "negotiation", "communication"


class PathSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of the critical path."""

    # Of `path_segments`: "compute"; "late_rank": the same while all other ranks had enqueued the collective that comes next;
    # "negotiation": ranks agree what comes next (a collective that is no communication); "communication". Of `path_totals`: the
    # name of an `OpKind`.
    kind: str
    rank: int  # The rank whose ops they are, -1 for what all ranks of a collective do together.
    name: str  # Of the collective; for "late_rank" of the one that the others waited for; empty for "compute" and for sums.
    start_us: float  # From the begin of the first iteration; of a sum, when its first op begins.
    duration_us: float  # Of a sum over several iterations: per iteration.
    share_pct: float  # Of the whole path.


def path_segments(timeline: Timeline) -> tuple[PathSegment, ...]:
    """The path in order of time; stretches of one kind, rank and name that follow each other are one."""
    path = critical_path(timeline)
    total_us = sum(step.end_us - step.start_us for step in path) or 1.0
    joined: list[tuple[tuple[str, int, str], float, float]] = []
    for what, start_us, end_us in _stretches(timeline, path):
        if end_us <= start_us:
            continue
        if joined and joined[-1][0] == what:
            start_us = joined.pop()[1]
        joined.append((what, start_us, end_us))
    return tuple(
        PathSegment(
            kind=kind,
            rank=rank,
            name=name,
            start_us=start_us,
            duration_us=end_us - start_us,
            share_pct=(end_us - start_us) / total_us * 100,
        )
        for (kind, rank, name), start_us, end_us in joined
    )


def path_totals(timeline: Timeline) -> tuple[PathSegment, ...]:
    """Time on the path by rank and kind of op, largest first."""
    graph, path = timeline.graph, path_columns(timeline)
    op = path.op % len(graph)
    keys, first = np.unique(graph.rank_of_op[op].astype(np.int64) * len(OpKind) + graph.op_kind[op], return_index=True)
    first_us = {
        (key // len(OpKind), OpKind(key % len(OpKind)).name): start_us
        for key, start_us in zip(keys.tolist(), path.start_us[first].tolist(), strict=True)
    }
    shares = path_shares(timeline).by_rank_and_kind
    total_us = sum(shares.values()) or 1.0
    return tuple(
        PathSegment(
            kind=kind,
            rank=rank,
            name="",
            start_us=first_us[rank, kind],
            duration_us=spent_us / timeline.iterations,
            share_pct=spent_us / total_us * 100,
        )
        for (rank, kind), spent_us in shares.items()
    )


def _stretches(timeline: Timeline, path: Sequence[PathStep]) -> Iterator[tuple[tuple[str, int, str], float, float]]:
    """(kind, rank, name), begin and end of each step of a path; compute is cut where the others began to wait for it."""
    graph, ops = timeline.graph, len(timeline.graph)
    late = _late(timeline, path)
    for step in path:
        op = step.op % ops
        rank, collective = int(graph.rank_of_op[op]), _collective(timeline, op)
        if collective >= 0:
            kind = COMMUNICATION if graph.op_kind[op] == OpKind.COMM else NEGOTIATION
            yield (kind, -1, _collective_name(timeline, op)), step.start_us, step.end_us
            continue
        if graph.op_kind[op] == OpKind.COMM:
            yield (COMMUNICATION, rank, graph.name(op)), step.start_us, step.end_us
            continue
        since_us, waited_for = step.end_us, ""
        for late_rank, begin_us, end_us, name in late:
            if late_rank == rank and begin_us < step.end_us <= end_us:
                since_us, waited_for = max(begin_us, step.start_us), name
                break
        yield (COMPUTE, rank, ""), step.start_us, since_us
        yield (LATE_RANK, rank, waited_for), since_us, step.end_us


def _late(timeline: Timeline, path: Sequence[PathStep]) -> list[tuple[int, float, float, str]]:
    """Late ranks of the collectives on the path: the rank that enqueued last, begin and end of the others' wait, and the name."""
    graph, ops = timeline.graph, len(timeline.graph)
    late = []
    parts_of = _parts(timeline)
    for step in path:
        op, first = step.op % ops, step.op - step.op % ops
        parts = parts_of.get(_collective(timeline, op), np.zeros(0, np.int64))
        if len(parts) < 2 or len({int(rank) for rank in graph.rank_of_op[parts]}) < 2:
            continue
        started_us = timeline.times.start_us[first + parts]
        *_, second_us, last_us = np.sort(started_us).tolist()
        last = int(graph.rank_of_op[parts[started_us.argmax()]])
        late.append((last, second_us, last_us, _collective_name(timeline, op)))
    return late


def _collective(timeline: Timeline, op: int) -> int:
    return int(timeline.graph.collective[op]) if len(timeline.graph.collective) else -1


def _collective_name(timeline: Timeline, op: int) -> str:
    """The common part of the names of a collective's parts, "collective@rank"."""
    name = timeline.graph.name(op)
    return name.rpartition("@")[0] or name


def _parts(timeline: Timeline) -> dict[int, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    """Ops that are the parts of each collective."""
    collective = timeline.graph.collective
    parts = np.flatnonzero(collective >= 0)
    ordered = parts[np.argsort(collective[parts], kind="stable")]
    numbers, first = np.unique(collective[ordered], return_index=True)
    return dict(zip(numbers.tolist(), np.split(ordered, first[1:]), strict=True)) if len(numbers) else {}
