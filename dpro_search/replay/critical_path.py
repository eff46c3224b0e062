"""What one replayed iteration waited for, from its end backwards: compute, agreements, collectives."""

from __future__ import annotations

import msgspec
import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.replay import simulator
from dpro_search.replay.timeline import Timeline

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


def critical_path(timeline: Timeline) -> tuple[Segment, ...]:
    """The path through an iteration in the middle of a logged timeline, in order of time; it starts at 0.

    A collective began when its last unit had been posted, or when the one before it was done, whichever was later: the path goes on
    there.
    """
    log = timeline.log
    steps = log[log[:, simulator.LOG_KIND] == simulator.LOG_STEP]
    iteration = int(steps[:, simulator.LOG_ITERATION].max()) // 2
    mine = steps[steps[:, simulator.LOG_ITERATION] == iteration]
    begin, end = float(mine[:, simulator.LOG_START].min()), float(mine[:, simulator.LOG_END].max())
    last_rank = int(mine[mine[:, simulator.LOG_END].argmax(), simulator.LOG_RANK])
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
    kind = log[:, simulator.LOG_KIND]
    inside = (log[:, simulator.LOG_END] > begin) & (log[:, simulator.LOG_END] <= end + _SAME_US)
    phases = log[inside & (kind >= simulator.COPY_IN) & (kind <= simulator.COPY_OUT)]
    posts = log[inside & (kind == simulator.LOG_POST)]
    found = []
    for number in np.unique(posts[:, simulator.LOG_COLLECTIVE]):
        rows = phases[phases[:, simulator.LOG_COLLECTIVE] == number]
        own = posts[posts[:, simulator.LOG_COLLECTIVE] == number]
        last = own[own[:, simulator.LOG_START].argmax()]
        found.append(
            {
                "start": float(rows[:, simulator.LOG_START].min()) if len(rows) else float(own[:, simulator.LOG_END].min()),
                "end": float(own[:, simulator.LOG_END].max()),
                "tensors": float(rows[0, simulator.LOG_UNIT]) if len(rows) else 0.0,
                "posted": float(last[simulator.LOG_START]),
                "rank": float(last[simulator.LOG_RANK]),
            }
        )
    return sorted(found, key=lambda row: row["end"])
