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

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats, Ints
from dpro_search.replay.kernels.rules import collective_work, goes_first
from dpro_search.space.replay_graph import Int8s, Int32s, OrderPolicy

_FIFO, _UNBOUNDED = int(OrderPolicy.FIFO), int(OrderPolicy.UNBOUNDED)
_DENSE_SHARE = 8  # sweep where one in so many of the ops passed was mended

GAVE_UP = -1
BLOCK = 512


@njit(nogil=True)
def repair(
    changed: Int32s,
    rewired: Int32s,
    duration_us: Floats,
    device: Int32s,
    key: Int32s,
    pred_begin: Int32s,
    pred_end: Int32s,
    pred_idx: Int32s,
    succ_begin: Int32s,
    succ_end: Int32s,
    succ_idx: Int32s,
    policy: Int8s,
    collective: Int32s,
    part_ptr: Int32s,
    part: Int32s,
    ready_us: Floats,
    start_us: Floats,
    end_us: Floats,
    moved_us: Floats,
    work_us: Floats,
    latest: Int32s,
    before: Int32s,
    behind: Int32s,
    last: Int32s,
    dirty: npt.NDArray[np.uint8],
    blocks: npt.NDArray[np.uint8],
    sweep_after: int,
    limit: int,
) -> int:
    """Mend the times after the durations or the predecessors of some ops changed.

    Parameters
    ----------
    changed
        Labels of the ops whose duration in `duration_us` is new; without these and `rewired` all ops are looked at.
    rewired
        Labels of the ops whose predecessors or successors are new.
    pred_begin, pred_end, pred_idx, succ_begin, succ_end, succ_idx
        Dependencies both ways: rows ``idx[begin[op]:end[op]]``. For a sweep every op's label is above its predecessors'.
    ready_us, start_us, end_us, moved_us
        Times of the replay before, mended in place.
    work_us, latest
        How long each collective moves data, and how many of its parts start when it begins to, mended, [collectives].
    before, behind, last
        The op that the same device serves before and after each, -1 for none, [n]; the last op of each device, [devices]; mended.
    dirty, blocks
        Marks of ops, and of blocks of `BLOCK` ops that may hold marks; all 0, and so again at the end; whole blocks, at least n.
    sweep_after
        Ops to mend before a sweep is considered.
    limit
        Mend at most so many ops one by one; a sweep does not count.

    Returns
    -------
    int
        How many ops were mended; `GAVE_UP` if that was not enough, or if an op on a device, which others need, came to take no time
        (then the order within an instant does not follow from the rules). Times and lines are then worthless.
    """
    count = len(duration_us)
    words = dirty.view(np.uint64)
    lowest, front, block = count, count, len(blocks)
    for k in range(len(changed)):
        op = changed[k]
        if len(moved_us) > 0 and collective[op] >= 0:  # a collective is as long as its longest part: one stands for all
            op = part[part_ptr[collective[op]]]
            if dirty[op] != 0:
                continue
            work_us[collective[op]] = collective_work(collective[op], part_ptr, part, duration_us)
        lowest = min(lowest, op)
        block = _mark(op, dirty, blocks, block)
    for k in range(len(rewired)):
        lowest = min(lowest, rewired[k])
        block = _mark(rewired[k], dirty, blocks, block)
    if len(changed) + len(rewired) == 0:
        front = 0
        _take_out(0, device, before, behind, last, dirty, blocks, block)
    mended = 0
    while True:
        op = -1
        while block < len(blocks) and op < 0:
            if blocks[block] != 0:
                for word in range(block * (BLOCK >> 3), (block + 1) * (BLOCK >> 3)):
                    if words[word] != 0:
                        op = word << 3
                        while dirty[op] == 0:
                            op += 1
                        dirty[op] = 0
                        break
                else:
                    blocks[block] = 0
            if op < 0:
                block += 1
        sweeps = op < 0
        if sweeps:
            swept = _sweep(
                front, duration_us, device, key, pred_begin, pred_end, pred_idx, succ_begin, succ_end, succ_idx, policy, collective,
                ready_us, start_us, end_us, before, behind, last,
            )  # fmt: skip
            mended += swept - front
            limit += swept - front
            front = swept
            if front == count:
                return mended
            op = front
            front += 1
        mended += 1
        if mended > limit:
            dirty[:] = 0
            blocks[:] = 0
            return GAVE_UP

        ready = 0.0
        for edge in range(pred_begin[op], pred_end[op]):
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
                while right >= 0 and goes_first(right, ready_us[right], op, ready, key):
                    left, right = right, behind[right]
                while left >= 0 and goes_first(op, ready, left, ready_us[left], key):
                    left, right = before[left], left
            if sweeps or left != before[op]:
                if not sweeps:  # out of the old place
                    if before[op] >= 0:
                        behind[before[op]] = behind[op]
                    if behind[op] >= 0:
                        before[behind[op]] = before[op]
                        block = _mark(behind[op], dirty, blocks, block)
                    else:
                        last[d] = before[op]
                before[op], behind[op] = left, right
                if left >= 0:
                    behind[left] = op
                if right >= 0:
                    before[right] = op
                    block = _mark(right, dirty, blocks, block)
                else:
                    last[d] = op
            if left >= 0:
                start = max(start, end_us[left])
        c = collective[op] if len(moved_us) > 0 else -1
        if c < 0:
            end = start + duration_us[op]
        else:
            _post(c, start_us[op], start, op, part_ptr, part, start_us, moved_us, latest)
            end = moved_us[c] + work_us[c]
        ready_us[op] = ready
        start_us[op] = start
        if how != _UNBOUNDED and end == start and succ_begin[op] < succ_end[op]:
            dirty[:] = 0
            blocks[:] = 0
            return GAVE_UP
        if end_us[op] != end:
            end_us[op] = end
            if not sweeps:
                block = _mark_after(op, front, behind, succ_begin, succ_end, succ_idx, dirty, blocks, block)
            if c >= 0:
                for k in range(part_ptr[c], part_ptr[c + 1]):
                    one = part[k]
                    if end_us[one] != end:
                        end_us[one] = end
                        if one < front:
                            block = _mark_after(one, front, behind, succ_begin, succ_end, succ_idx, dirty, blocks, block)
        if front == count and not sweeps and mended >= sweep_after and mended * _DENSE_SHARE > op - lowest:
            front = op + 1
            block = _take_out(front, device, before, behind, last, dirty, blocks, block)


@njit(nogil=True)
def _post(
    c: int,
    old_us: float,
    new_us: float,
    op: int,
    part_ptr: Int32s,
    part: Int32s,
    start_us: Floats,
    moved_us: Floats,
    latest: Int32s,
) -> None:
    """A part of a collective starts at another time: data move when the latest part starts."""
    if new_us == old_us:
        return
    if new_us > moved_us[c]:
        moved_us[c], latest[c] = new_us, 1
        return
    if new_us == moved_us[c]:
        latest[c] += 1
        return
    if old_us != moved_us[c]:
        return
    latest[c] -= 1
    if latest[c] == 0:
        start_us[op] = new_us
        moved_us[c], latest[c] = _latest_start(c, part_ptr, part, start_us)


@njit(nogil=True)
def _latest_start(c: int, part_ptr: Int32s, part: Int32s, start_us: Floats) -> tuple[float, int]:
    """When the last part of a collective starts, and how many start then."""
    moved, latest = -1.0, 0
    for k in range(part_ptr[c], part_ptr[c + 1]):
        at = start_us[part[k]]
        if at > moved:
            moved, latest = at, 0
        if at == moved:
            latest += 1
    return moved, latest


@njit(nogil=True)
def collective_state(
    duration_us: Floats, part_ptr: Int32s, part: Int32s, start_us: Floats, work_us: Floats, latest: Int32s
) -> None:
    """How long each collective moves data, and how many of its parts start last, both filled, [collectives]."""
    for c in range(len(work_us)):
        work_us[c] = collective_work(c, part_ptr, part, duration_us)
        _, latest[c] = _latest_start(c, part_ptr, part, start_us)


@njit(nogil=True)
def latest_end(end_us: Floats, last: Int32s, sinks: Ints) -> float:
    """The makespan: the latest end of the devices' last ops, [devices], -1 for none, and of some others, [any]."""
    latest = 0.0
    for op in last:
        if op >= 0:
            latest = max(latest, end_us[op])
    for op in sinks:
        latest = max(latest, end_us[op])
    return latest


@njit(nogil=True)
def _sweep(
    front: int,
    duration_us: Floats,
    device: Int32s,
    key: Int32s,
    pred_begin: Int32s,
    pred_end: Int32s,
    pred_idx: Int32s,
    succ_begin: Int32s,
    succ_end: Int32s,
    succ_idx: Int32s,
    policy: Int8s,
    collective: Int32s,
    ready_us: Floats,
    start_us: Floats,
    end_us: Floats,
    before: Int32s,
    behind: Int32s,
    last: Int32s,
) -> int:
    """Put ops back into their devices' lines; the new front is the first one with which something before it would change."""
    parts = len(collective) > 0
    for op in range(front, len(duration_us)):
        ready = 0.0
        for edge in range(pred_begin[op], pred_end[op]):
            ready = max(ready, end_us[pred_idx[edge]])
        d = device[op]
        how = policy[d]
        start = ready
        if parts and collective[op] >= 0:
            return op
        if how != _UNBOUNDED:
            left = last[d]
            if duration_us[op] == 0.0:
                return op
            if left >= 0:
                if how == _FIFO and goes_first(op, ready, left, ready_us[left], key):
                    if parts or not _insert(
                        op,
                        ready,
                        duration_us,
                        key,
                        succ_begin,
                        succ_end,
                        succ_idx,
                        ready_us,
                        start_us,
                        end_us,
                        before,
                        behind,
                        left,
                    ):
                        return op
                    continue
                start = max(start, end_us[left])
                behind[left] = op
            before[op], behind[op], last[d] = left, -1, op
        ready_us[op] = ready
        start_us[op] = start
        end_us[op] = start + duration_us[op]
    return len(duration_us)


@njit(nogil=True)
def _insert(
    op: int,
    ready: float,
    duration_us: Floats,
    key: Int32s,
    succ_begin: Int32s,
    succ_end: Int32s,
    succ_idx: Int32s,
    ready_us: Floats,
    start_us: Floats,
    end_us: Floats,
    before: Int32s,
    behind: Int32s,
    tail: int,
) -> bool:
    """Put an op into its device's line before others, which come later then.

    False, and nothing done, if an op before it needs one of them.
    """
    left, right = tail, -1
    while left >= 0 and goes_first(op, ready, left, ready_us[left], key):
        for edge in range(succ_begin[left], succ_end[left]):
            if succ_idx[edge] < op:
                return False
        left, right = before[left], left
    before[op], behind[op], before[right] = left, right, op
    start = ready
    if left >= 0:
        behind[left] = op
        start = max(start, end_us[left])
    ready_us[op] = ready
    start_us[op] = start
    end_us[op] = start + duration_us[op]
    while right >= 0:
        start_us[right] = max(ready_us[right], end_us[before[right]])
        end_us[right] = start_us[right] + duration_us[right]
        right = behind[right]
    return True


@njit(nogil=True)
def _mark(op: int, dirty: npt.NDArray[np.uint8], blocks: npt.NDArray[np.uint8], block: int) -> int:
    """Make an op dirty; returns the first block that may hold a mark."""
    dirty[op] = 1
    own = op // BLOCK
    blocks[own] = 1
    return min(block, own)


@njit(nogil=True)
def _mark_after(
    op: int,
    front: int,
    behind: Int32s,
    succ_begin: Int32s,
    succ_end: Int32s,
    succ_idx: Int32s,
    dirty: npt.NDArray[np.uint8],
    blocks: npt.NDArray[np.uint8],
    block: int,
) -> int:
    """Make those dirty that wait for an op and lie before the front; returns the first block that may hold a mark."""
    if behind[op] >= 0:
        block = _mark(behind[op], dirty, blocks, block)
    for edge in range(succ_begin[op], succ_end[op]):
        to = succ_idx[edge]
        if to < front:
            block = _mark(to, dirty, blocks, block)
    return block


@njit(nogil=True)
def _take_out(
    front: int,
    device: Int32s,
    before: Int32s,
    behind: Int32s,
    last: Int32s,
    dirty: npt.NDArray[np.uint8],
    blocks: npt.NDArray[np.uint8],
    block: int,
) -> int:
    """Take all ops from the front on out of their devices' lines, and the marks off them; returns the first block with a mark."""
    for op in range(len(device) - 1, front - 1, -1):
        left, right = before[op], behind[op]
        dirty[op] = 0
        if right >= 0:
            before[right] = left
            if right < front:
                block = _mark(right, dirty, blocks, block)
        else:
            last[device[op]] = left
        if left >= 0:
            behind[left] = right
    return block
