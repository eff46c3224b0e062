"""New times for other durations, from an order that is nearly right: what changed is mended, not simulated.

The times of a replay are the one solution of three rules: an op is ready when its last predecessor ends; a first-in-first-out
device serves in the order of (ready time, key); an op starts when it is ready and its device has served the op before it. An op
that may break a rule is *dirty*. Dirty ops are mended in order of their labels, which is nearly the order of time; that may make
successors, neighbours on the device and the other parts of a collective dirty.

While few ops change, only dirty ones are looked at. Where most do, all ops from a *front* on are taken out of their devices' lines
and put back one by one: no marks are needed then, since nothing before the front depends on them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from dpro_search.collect.trace import Floats
from dpro_search.space.replay_graph import Int8s, Int32s, OrderPolicy

_FIFO, _UNBOUNDED = int(OrderPolicy.FIFO), int(OrderPolicy.UNBOUNDED)
_DENSE_FROM, _DENSE_SHARE = 512, 8  # sweep once so many ops were mended, and one in so many of those passed

GAVE_UP = -1


@njit(cache=True, nogil=True)
def repair(
    changed: Int32s,
    duration_us: Floats,
    device: Int32s,
    key: Int32s,
    pred_ptr: Int32s,
    pred_idx: Int32s,
    succ_ptr: Int32s,
    succ_idx: Int32s,
    policy: Int8s,
    collective: Int32s,
    part_ptr: Int32s,
    part: Int32s,
    ready_us: Floats,
    start_us: Floats,
    end_us: Floats,
    moved_us: Floats,
    before: Int32s,
    behind: Int32s,
    last: Int32s,
    dirty: npt.NDArray[np.uint8],
    limit: int,
) -> int:
    """Mend the times after the durations of some ops changed.

    Parameters
    ----------
    changed
        Labels of the ops whose duration in `duration_us` is new; empty: all of them may be.
    ready_us, start_us, end_us, moved_us
        Times of the replay before, mended in place.
    before, behind, last
        The op that the same device serves before and after each, -1 for none, [n]; the last op of each device, [devices]; mended.
    dirty
        All 0, and so again at the end; a multiple of 8 bytes, at least n.
    limit
        Mend at most so many ops.

    Returns
    -------
    int
        How many ops were mended; `GAVE_UP` if that was not enough, or if an op on a device came to take no time (then the order
        within an instant does not follow from the rules). Times and lines are then worthless.
    """
    count = len(duration_us)
    words = dirty.view(np.uint64)
    word, lowest, front = len(words), count, count
    for k in range(len(changed)):
        dirty[changed[k]] = 1
        lowest = min(lowest, changed[k])
        word = min(word, changed[k] >> 3)
    if len(changed) == 0:
        front, word = 0, 0
        _take_out(0, device, before, behind, last)
    mended = 0
    while True:
        beyond = (front + 7) >> 3
        while word < beyond and words[word] == 0:
            word += 1
        sweeps = word >= beyond
        if sweeps:
            if front == count:
                return mended
            op = front
            front += 1
        else:
            op = word << 3
            while dirty[op] == 0:
                op += 1
            dirty[op] = 0
        mended += 1
        if mended > limit:
            dirty[:] = 0
            return GAVE_UP

        ready = 0.0
        for edge in range(pred_ptr[op], pred_ptr[op + 1]):
            ready = max(ready, end_us[pred_idx[edge]])
        d = device[op]
        how = policy[d]
        start = ready
        if how != _UNBOUNDED:
            if sweeps:
                left, right = last[d], -1
            else:
                left, right = before[op], behind[op]
            if how == _FIFO and (sweeps or ready != ready_us[op]):
                while right >= 0 and _precedes(right, ready_us[right], op, ready, key):
                    left, right = right, behind[right]
                while left >= 0 and _precedes(op, ready, left, ready_us[left], key):
                    left, right = before[left], left
            if sweeps or left != before[op]:
                if not sweeps:  # out of the old place
                    if before[op] >= 0:
                        behind[before[op]] = behind[op]
                    if behind[op] >= 0:
                        before[behind[op]] = before[op]
                        dirty[behind[op]] = 1
                        word = min(word, behind[op] >> 3)
                    else:
                        last[d] = before[op]
                before[op], behind[op] = left, right
                if left >= 0:
                    behind[left] = op
                if right >= 0:
                    before[right] = op
                    dirty[right] = 1
                    word = min(word, right >> 3)
                else:
                    last[d] = op
            if left >= 0:
                start = max(start, end_us[left])
        ready_us[op] = ready
        start_us[op] = start
        end = start + duration_us[op]
        if len(moved_us) > 0 and collective[op] >= 0:
            c = collective[op]
            move, work = 0.0, 0.0
            for k in range(part_ptr[c], part_ptr[c + 1]):
                move = max(move, start_us[part[k]])
                work = max(work, duration_us[part[k]])
            moved_us[c] = move
            end = move + work
            for k in range(part_ptr[c], part_ptr[c + 1]):
                one = part[k]
                if one != op and end_us[one] != end and one < front:
                    end_us[one] = end
                    word = _mark(one, front, behind, succ_ptr, succ_idx, dirty, word)
        if how != _UNBOUNDED and end == start:
            dirty[:] = 0
            return GAVE_UP
        if end_us[op] != end:
            end_us[op] = end
            if not sweeps:
                word = _mark(op, front, behind, succ_ptr, succ_idx, dirty, word)
        if front == count and not sweeps and mended >= _DENSE_FROM and mended * _DENSE_SHARE > op - lowest:
            front = op + 1
            _take_out(front, device, before, behind, last)
            dirty[front:] = 0


@njit(cache=True, nogil=True)
def _precedes(a: int, ready_a_us: float, b: int, ready_b_us: float, key: Int32s) -> bool:
    """Whether a device serves op a before op b."""
    return ready_a_us < ready_b_us or (ready_a_us == ready_b_us and key[a] < key[b])


@njit(cache=True, nogil=True)
def _mark(op: int, front: int, behind: Int32s, succ_ptr: Int32s, succ_idx: Int32s, dirty: npt.NDArray[np.uint8], word: int) -> int:
    """Make those dirty that wait for an op and lie before the front; returns the first word that may hold a mark."""
    if behind[op] >= 0:
        dirty[behind[op]] = 1
        word = min(word, behind[op] >> 3)
    for edge in range(succ_ptr[op], succ_ptr[op + 1]):
        to = succ_idx[edge]
        if to < front:
            dirty[to] = 1
            word = min(word, to >> 3)
    return word


@njit(cache=True, nogil=True)
def _take_out(front: int, device: Int32s, before: Int32s, behind: Int32s, last: Int32s) -> None:
    """Take all ops from the front on out of their devices' lines."""
    for op in range(len(device) - 1, front - 1, -1):
        left, right = before[op], behind[op]
        if right >= 0:
            before[right] = left
        else:
            last[device[op]] = left
        if left >= 0:
            behind[left] = right
