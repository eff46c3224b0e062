"""The executed graph of a timeline: what came before what, by dependency, by the order on the devices, and within collectives."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search.replay.timeline import Timeline
from dpro_search.space.replay_graph import Int32s, csr


class Executed(NamedTuple):
    """Order in which the N = iterations * n ops of a timeline happened, [N] each."""

    # Ops such that each follows all that it needs and the op that its device served before; parts of a collective are neighbours,
    # at the place of the last that was posted.
    order: npt.NDArray[np.int64]
    unit: Int32s  # The first part of each op's collective; of all other ops the op itself.
    previous: Int32s  # The op that each op's device served just before it, -1 where none exists.


def executed(timeline: Timeline) -> Executed:
    """The executed ops, in order."""
    started = timeline.times.order
    unit = _units(timeline)
    order = started.astype(np.int64)
    if len(timeline.graph.collective):
        place = np.zeros(len(unit), np.int64)
        np.maximum.at(place, unit[started], np.arange(len(unit)))
        order = np.argsort(place[unit], kind="stable")
    return Executed(order, unit, timeline.previous_on_device)


def dependencies(timeline: Timeline) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Dependencies of all iterations, the carried ones included, as (source, destination) arrays."""
    graph, count = timeline.graph, len(timeline.graph)
    source, destination = graph.edges()
    first = np.arange(timeline.iterations)[:, None] * count
    carried = first[1:] + graph.carry_src - count, first[1:] + graph.carry_dst
    return (
        np.concatenate(((first + source).ravel(), carried[0].ravel())),
        np.concatenate(((first + destination).ravel(), carried[1].ravel())),
    )


def carried_csr(timeline: Timeline) -> tuple[Int32s, Int32s]:
    """Carried dependencies in CSR form, by the op that needs the previous iteration's."""
    return csr(timeline.graph.carry_dst, timeline.graph.carry_src, len(timeline.graph))


def _units(timeline: Timeline) -> Int32s:
    graph, count = timeline.graph, len(timeline.graph)
    unit = np.arange(count, dtype=np.int32)
    if len(graph.collective):
        parts = np.flatnonzero(graph.collective >= 0)
        _, first, number = np.unique(graph.collective[parts], return_index=True, return_inverse=True)
        unit[parts] = parts[first][number]
    later = np.arange(timeline.iterations, dtype=np.int32)[:, None] * count
    units: Int32s = (later + unit).ravel()
    return units
