"""What one replayed iteration waited for, from its end backwards: compute, agreements, collectives."""

from __future__ import annotations

import msgspec
import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.replay.horovod import machine
from dpro_search.replay.horovod.timeline import HorovodTimeline

_SAME_US = 1.0  # instants closer than this are one


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of the critical path.

    Attributes
    ----------
    kind
        "compute" (until a rank posted what the next collective needs), "agreement" (waiting for Horovod's next cycle and its
        agreement), "collective" (copies and all-reduce), "update" (what is computed after the last collective).
    rank
        The rank that computed, -1 for communication.
    tensors
        Number of tensors of the collective, else 0.
    """

    kind: str
    rank: int
    start_us: float
    duration_us: float
    tensors: int = 0


def critical_path(timeline: HorovodTimeline) -> tuple[Segment, ...]:
    """The path through an iteration in the middle of a logged timeline, in order of time; it starts at 0.

    A collective began when its last unit had been posted, or when the one before it was done, whichever was later: the path goes on
    there.
    """
    log = timeline.log
    steps = log[log[:, machine.LOG_KIND] == machine.LOG_STEP]
    iteration = int(steps[:, machine.LOG_ITERATION].max()) // 2
    mine = steps[steps[:, machine.LOG_ITERATION] == iteration]
    begin, end = float(mine[:, machine.LOG_START].min()), float(mine[:, machine.LOG_END].max())
    last_rank = int(mine[mine[:, machine.LOG_END].argmax(), machine.LOG_RANK])
    collectives = _collectives(log, begin, end)
    path: list[Segment] = []
    if not collectives:
        return (Segment(kind="compute", rank=last_rank, start_us=0.0, duration_us=end - begin),)
    now = collectives[-1]["end"]
    path.append(Segment(kind="update", rank=last_rank, start_us=now - begin, duration_us=end - now))
    for number in range(len(collectives) - 1, -1, -1):
        current = collectives[number]
        path.append(_segment("collective", -1, current["start"], current["end"], begin, int(current["tensors"])))
        before = collectives[number - 1]["end"] if number else -np.inf
        cause = max(before, current["posted"], begin)
        if current["start"] - cause > _SAME_US:
            path.append(_segment("agreement", -1, cause, current["start"], begin))
        if current["posted"] >= before:
            path.append(_segment("compute", int(current["rank"]), begin, max(current["posted"], begin), begin))
            break
    return tuple(reversed([segment for segment in path if segment.duration_us > 0]))


def _segment(kind: str, rank: int, start: float, end: float, begin: float, tensors: int = 0) -> Segment:
    return Segment(kind=kind, rank=rank, start_us=start - begin, duration_us=end - start, tensors=tensors)


def _collectives(log: Floats, begin: float, end: float) -> list[dict[str, float]]:
    """Collectives that ended within the iteration, in order: start, end, tensors, and when which rank posted the last unit."""
    kind = log[:, machine.LOG_KIND]
    inside = (log[:, machine.LOG_END] > begin) & (log[:, machine.LOG_END] <= end + _SAME_US)
    phases = log[inside & (kind >= machine.COPY_IN) & (kind <= machine.COPY_OUT)]
    posts = log[inside & (kind == machine.LOG_POST)]
    found = []
    for number in np.unique(posts[:, machine.LOG_COLLECTIVE]):
        rows = phases[phases[:, machine.LOG_COLLECTIVE] == number]
        own = posts[posts[:, machine.LOG_COLLECTIVE] == number]
        last = own[own[:, machine.LOG_START].argmax()]
        found.append(
            {
                "start": float(rows[:, machine.LOG_START].min()) if len(rows) else float(own[:, machine.LOG_END].min()),
                "end": float(own[:, machine.LOG_END].max()),
                "tensors": float(rows[0, machine.LOG_UNIT]) if len(rows) else 0.0,
                "posted": float(last[machine.LOG_START]),
                "rank": float(last[machine.LOG_RANK]),
            }
        )
    return sorted(found, key=lambda row: row["end"])
