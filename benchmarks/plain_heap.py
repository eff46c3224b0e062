"""The yardstick: a plain numba simulator with a binary heap of (ready time, priority, op), as one would write it first."""

from __future__ import annotations

import numpy as np
from numba import njit

from dpro_search.collect.trace import Floats
from dpro_search.space.replay_graph import Int32s


@njit(cache=True)
def simulate_plainly(
    duration_us: Floats, device: Int32s, priority: Int32s, succ_ptr: Int32s, succ_idx: Int32s, needs: Int32s, devices: int
) -> Floats:
    """End of every op: the first by (ready time, priority, op) is served at ``max(ready, device free)``."""
    count = len(duration_us)
    waits, ready, end, free = needs.copy(), np.zeros(count), np.zeros(count), np.zeros(devices)
    heap = np.empty(count, np.int32)
    size = 0
    for op in range(count):
        if waits[op] == 0:
            size = _push(heap, size, op, ready, priority)
    while size > 0:
        op = heap[0]
        size = _pop(heap, size, ready, priority)
        d = device[op]
        end[op] = free[d] = max(ready[op], free[d]) + duration_us[op]
        for edge in range(succ_ptr[op], succ_ptr[op + 1]):
            to = succ_idx[edge]
            ready[to] = max(ready[to], end[op])
            waits[to] -= 1
            if waits[to] == 0:
                size = _push(heap, size, to, ready, priority)
    return end


@njit(cache=True)
def _first(a: int, b: int, ready: Floats, priority: Int32s) -> bool:
    if ready[a] != ready[b]:
        return ready[a] < ready[b]
    return priority[a] < priority[b] or (priority[a] == priority[b] and a < b)


@njit(cache=True)
def _push(heap: Int32s, size: int, op: int, ready: Floats, priority: Int32s) -> int:
    at = size
    while at > 0 and _first(op, heap[(at - 1) >> 1], ready, priority):
        heap[at] = heap[(at - 1) >> 1]
        at = (at - 1) >> 1
    heap[at] = op
    return size + 1


@njit(cache=True)
def _pop(heap: Int32s, size: int, ready: Floats, priority: Int32s) -> int:
    size -= 1
    op, at, child = heap[size], 0, 1
    while child < size:
        if child + 1 < size and _first(heap[child + 1], heap[child], ready, priority):
            child += 1
        if not _first(heap[child], op, ready, priority):
            break
        heap[at] = heap[child]
        at, child = child, 2 * child + 1
    heap[at] = op
    return size
