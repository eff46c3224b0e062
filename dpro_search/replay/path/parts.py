"""``path_parts``: what an iteration of a replay is made of, op by op, so that two jobs can be compared: the parts add up to it."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.path.critical_path import critical_path
from dpro_search.replay.timeline import Timeline


class PathPart(NamedTuple):
    """Ops of one kind and name, on whatever rank."""

    kind: str
    name: str


def path_parts(timeline: Timeline) -> dict[PathPart, float]:
    """Time of each part on the critical path of the last iteration, in us.

    Nothing waits on the path, so the parts add up to the distance between the ends of the last two iterations, or to the only one.
    """
    graph = timeline.graph
    ends_us = timeline.iteration_end_us()
    begin_us = float(ends_us[-2]) if timeline.iterations > 1 else 0.0
    spent_us_of: defaultdict[PathPart, float] = defaultdict(float)
    for step in critical_path(timeline):
        spent_us = step.end_us - max(step.start_us, begin_us)
        if spent_us > 0:
            op = step.op % len(graph)
            name = graph.name(op).removesuffix(f"@{int(graph.rank_of_op[op])}")
            spent_us_of[PathPart(OpKind(graph.op_kind[op]).name, name)] += spent_us
    return dict(spent_us_of)
