"""What an iteration of a PyTorch job waited for: the compute of a rank, a late rank, a collective."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from dpro_search.replay import critical_path as ops_path
from dpro_search.replay.timeline import Timeline
from dpro_search.space.ddp_job import DdpJob


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of the critical path.

    Attributes
    ----------
    kind
        "compute"; "late_rank": the same while all other ranks had posted the collective that comes next; "communication": a
        collective that the path had to wait for.
    rank
        The rank that computed, -1 for communication.
    name
        Of the collective, "bucket 2"; for "late_rank" of the one that the others waited for; empty for "compute".
    """

    kind: str
    rank: int
    start_us: float
    duration_us: float
    name: str = ""


def critical_path(job: DdpJob, ops: Timeline) -> tuple[Segment, ...]:
    """The path through the iteration that `iteration_ops` made ops of, in order of time; stretches of one kind are joined."""
    joined: list[Segment] = []
    for segment in _segments(job, ops):
        last = joined[-1] if joined else None
        if segment.duration_us <= 0:
            continue
        if last is not None and (last.kind, last.rank, last.name) == (segment.kind, segment.rank, segment.name):
            joined[-1] = msgspec.structs.replace(last, duration_us=segment.start_us + segment.duration_us - last.start_us)
        else:
            joined.append(segment)
    return tuple(joined)


def _segments(job: DdpJob, ops: Timeline) -> Iterator[Segment]:
    ranks, collectives = len(job.core), len(job.size_bytes)
    first_part = len(ops.graph) - ranks * collectives
    posted_us = ops.times.start_us[first_part:].reshape(ranks, collectives)
    names = job.collective_names
    path = ops_path.critical_path(ops)
    late: list[tuple[int, float, float, str]] = []  # rank, from when to when it kept the others waiting, and for what
    for step in path:
        if step.op >= first_part and ranks > 1:
            collective = (step.op - first_part) % collectives
            *_, second, last = np.sort(posted_us[:, collective]).tolist()
            late.append((int(posted_us[:, collective].argmax()), second, last, names[collective]))
    for step in path:
        if step.op >= first_part:
            name = names[(step.op - first_part) % collectives]
            yield Segment(kind="communication", rank=-1, start_us=step.start_us, duration_us=step.end_us - step.start_us, name=name)
            continue
        rank = int(ops.graph.rank_of_op[step.op])
        since, name = step.end_us, ""
        for late_rank, begin, end, waited_for in late:
            if late_rank == rank and begin < step.end_us <= end:
                since, name = max(begin, step.start_us), waited_for
                break
        yield Segment(kind="compute", rank=rank, start_us=step.start_us, duration_us=since - step.start_us)
        yield Segment(kind="late_rank", rank=rank, start_us=since, duration_us=step.end_us - since, name=name)
