"""What an iteration of a PyTorch job waited for: the path of its ops."""

from __future__ import annotations

from dpro_search.replay.path_segments import Segment, path_segments
from dpro_search.replay.timeline import Timeline
from dpro_search.space.ddp_job import DdpJob

__all__ = ["Segment", "critical_path"]


def critical_path(job: DdpJob, ops: Timeline) -> tuple[Segment, ...]:
    """The path through the iteration that `iteration_ops` made ops of."""
    return path_segments(ops)
