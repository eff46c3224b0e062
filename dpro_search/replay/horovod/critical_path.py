"""What an iteration of a Horovod job waited for: the path of its ops."""

from __future__ import annotations

from dpro_search.replay.horovod.ops import iteration_ops
from dpro_search.replay.horovod.timeline import HorovodTimeline
from dpro_search.replay.path_segments import Segment, path_segments

__all__ = ["Segment", "critical_path"]


def critical_path(timeline: HorovodTimeline) -> tuple[Segment, ...]:
    """The path through an iteration in the middle of a logged timeline."""
    return path_segments(iteration_ops(timeline))
