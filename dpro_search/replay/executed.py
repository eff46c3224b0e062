"""The executed graph of a timeline: what came before what, by dependency, by the order on the devices, and within collectives."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from dpro_search.replay.timeline import Timeline
from dpro_search.replay.times import device_order
from dpro_search.space.replay_graph import Int32s, OrderPolicy, csr


class Executed(NamedTuple):
    """Order in which the N = iterations * n ops of a timeline happened, [N] each.

    Attributes
    ----------
    order
        Ops such that each follows all that it needs and the op that its device served before; parts of a collective are neighbours.
    unit
        The first part of each op's collective; of all other ops the op itself.
    previous
        The op that each op's device served just before it, -1 where there is none.
    """

    order: npt.NDArray[np.int64]
    unit: Int32s
    previous: Int32s


def executed(timeline: Timeline) -> Executed:
    """What the times say of the order.

    Times alone do not order ops that took no time at the same instant: those are ordered by their dependencies, then by number.
    """
    times = timeline.times
    unit = _units(timeline)
    instant = times.moved_us == times.end_us
    if not instant.any():
        order = (
            np.argsort(times.moved_us, kind="stable") if timeline.graph.collective.size == 0 else np.lexsort((unit, times.moved_us))
        )
        return Executed(order, unit, timeline.previous_on_device)
    # At one instant, what takes no time comes before what begins to move then.
    level = np.where(instant, _levels(timeline, unit, instant), len(unit))
    order = np.lexsort((unit, level, times.moved_us))
    device = np.tile(timeline.graph.device, timeline.iterations)[order]
    before = device_order(device, times.start_us[order], times.end_us[order], timeline.graph.policy == OrderPolicy.UNBOUNDED)
    previous = np.full(len(unit), -1, np.int32)
    previous[order] = np.where(before >= 0, order[before], -1)
    return Executed(order, unit, previous)


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


def _levels(timeline: Timeline, unit: Int32s, instant: npt.NDArray[np.bool_]) -> Int32s:
    """Length of the longest chain, within an instant and of ops that took no time, that leads to each op, [N]."""
    moved = timeline.times.moved_us
    pairs = [dependencies(timeline), *_served_in_turn(timeline)]
    source, destination = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
    tied = instant[source] & instant[destination] & (moved[source] == moved[destination])
    if not tied.any():
        return np.zeros(len(unit), np.int32)
    source, destination = unit[source[tied]], unit[destination[tied]]
    succ_ptr, succ_idx = csr(source, destination, len(unit))
    level: Int32s = _longest_chains(succ_ptr, succ_idx, np.bincount(destination, minlength=len(unit)))
    return level[unit].astype(np.int32, copy=False)


def _served_in_turn(timeline: Timeline) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Pairs of ops whose order on a device is sure: they started at different times, or the device keeps the recorded order."""
    times, policy = timeline.times, timeline.graph.policy
    device = np.tile(timeline.graph.device, timeline.iterations)
    served = np.lexsort((times.end_us, times.start_us, device))
    served = served[policy[device[served]] != OrderPolicy.UNBOUNDED]
    on, start = device[served], times.start_us[served]
    place = np.arange(len(served))
    new = np.append(True, (on[1:] != on[:-1]) | (start[1:] != start[:-1]))[: len(served)]
    ahead = np.maximum.accumulate(np.where(new, place, 0)) - 1  # the last op that started earlier
    earlier = (ahead >= 0) & (on[ahead] == on)
    recorded = np.flatnonzero((on[1:] == on[:-1]) & (policy[on[1:]] == OrderPolicy.PROGRAM))
    return [(served[ahead[earlier]], served[earlier]), (served[recorded], served[recorded + 1])]


@njit(cache=True, nogil=True)
def _longest_chains(succ_ptr, succ_idx, waiting):  # type: ignore[no-untyped-def]
    count = len(waiting)
    level = np.zeros(count, np.int32)
    free = np.empty(count, np.int32)
    found = 0
    for op in range(count):
        if waiting[op] == 0:
            free[found] = op
            found += 1
    taken = 0
    while taken < found:
        op = free[taken]
        taken += 1
        for successor in succ_idx[succ_ptr[op] : succ_ptr[op + 1]]:
            level[successor] = max(level[successor], level[op] + 1)
            waiting[successor] -= 1
            if waiting[successor] == 0:
                free[found] = successor
                found += 1
    return level
