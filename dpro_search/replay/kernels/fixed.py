"""Replay of a graph whose ops run at one speed, event by event; `replay/reference.py` says what must come out.

The queue of events holds one entry for each busy device, each moving collective and each running op of an unbounded device. Ready
ops wait in their device's stretch of `slot`, sorted as the device's policy says. First in, first out, a new one goes to the end
or close to it, for ops become ready in order of time.
"""

from __future__ import annotations

import numpy as np

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats
from dpro_search.replay.kernels.events import SHORT, earliest, pop, push
from dpro_search.replay.kernels.layout import Layout
from dpro_search.replay.kernels.rules import collective_work, goes_first
from dpro_search.replay.kernels.times import Filled
from dpro_search.space.replay_graph import Int32s, OrderPolicy

_PROGRAM, _FIFO, _PRIORITY, _UNBOUNDED = (int(policy) for policy in OrderPolicy)


@njit(nogil=True)
def enqueue(op: int, now: float, ready_us: Floats, key: Int32s, slot: Int32s, first: int, end: int) -> None:
    """Put a ready op into its device's waiting ops ``slot[first:end]``, which grow by one: first in, first out."""
    at = end
    while at > first and ready_us[slot[at - 1]] == now and key[slot[at - 1]] > key[op]:
        slot[at] = slot[at - 1]
        at -= 1
    slot[at] = op


@njit(nogil=True)
def _goes_first(a: int, b: int, ready_us: Floats, key: Int32s, priority: Int32s) -> bool:
    if priority[a] != priority[b]:
        return bool(priority[a] < priority[b])
    return goes_first(a, ready_us[a], b, ready_us[b], key)


@njit(nogil=True)
def enqueue_by_priority(
    op: int, ready_us: Floats, key: Int32s, priority: Int32s, slot: Int32s, base: int, first: int, end: int
) -> int:
    """The same on a device that serves by priority; returns where the waiting ops begin then: at `first`, or one before.

    Its place is searched from both ends. What moves up is the shorter side: left of `first`, from `base` on, there is room.
    """
    low, high, step = first, end, 1
    if end > first and not _goes_first(op, slot[end - 1], ready_us, key, priority):
        low = end
    while low + step <= high:
        if _goes_first(op, slot[low + step - 1], ready_us, key, priority):
            high = low + step - 1
            break
        low += step
        step *= 2
    while low < high:
        middle = (low + high) >> 1
        if _goes_first(op, slot[middle], ready_us, key, priority):
            high = middle
        else:
            low = middle + 1
    if low - first < end - low and first > base:
        for at in range(first, low):
            slot[at - 1] = slot[at]
        slot[low - 1] = op
        return first - 1
    for at in range(end, low, -1):
        slot[at] = slot[at - 1]
    slot[low] = op
    return first


@njit(nogil=True)
def simulate(layout: Layout, duration_us: Floats, filled: Filled) -> int:
    """Replay n ops; op n stands for the start of the iteration: all ops without predecessors are its successors.

    Parameters
    ----------
    duration_us
        Of each op, [n], in place of the layout's.
    filled
        Filled in.

    Returns
    -------
    int
        Number of ops that started; fewer than n: the replay got stuck.
    """
    device, key, priority, policy, slot_ptr = layout.device, layout.key, layout.priority, layout.policy, layout.slot_ptr
    succ_ptr, succ_idx, collective, part_ptr, part = (
        layout.succ_ptr,
        layout.succ_idx,
        layout.collective,
        layout.part_ptr,
        layout.part,
    )
    ready_us, start_us, end_us, moved_us, order = filled
    count, devices, collectives = len(duration_us), len(policy), len(moved_us)
    waits = layout.needs.copy()
    slot = layout.program.copy()
    head = slot_ptr[:-1].copy()
    tail = slot_ptr[:-1].copy()
    for d in range(devices):
        if policy[d] == _PROGRAM:
            tail[d] = slot_ptr[d + 1]
    current = np.full(devices, -1, np.int32)
    touched = np.empty(devices, np.int32)
    is_touched = np.zeros(devices, np.bool_)
    posted = np.zeros(collectives, np.int32)
    unbounded = 0
    if (policy == _UNBOUNDED).any():
        for op in range(count):
            if policy[device[op]] == _UNBOUNDED and duration_us[op] > 0.0:
                unbounded += 1
    capacity = devices + collectives + unbounded + 1
    short = devices + unbounded <= SHORT
    due_us = np.empty(capacity)
    due = np.empty(capacity, np.int32)
    stack = np.empty(count + 1, np.int32)
    ended, events, touches, started, now = 0, 0, 0, 0, 0.0
    stack[0] = count
    ended = 1
    while True:
        # What is due ends, and what became ready on an unbounded device starts, until nothing changes.
        while True:
            while ended > 0:
                ended -= 1
                op = stack[ended]
                end_us[op] = now
                for edge in range(succ_ptr[op], succ_ptr[op + 1]):
                    to = succ_idx[edge]
                    left = waits[to] - 1
                    waits[to] = left
                    if left > 0:
                        continue
                    ready_us[to] = now
                    d = device[to]
                    how = policy[d]
                    if how == _UNBOUNDED:
                        start_us[to] = now
                        order[started] = to
                        started += 1
                        if collectives > 0 and collective[to] >= 0:
                            c = collective[to]
                            posted[c] += 1
                            if posted[c] == part_ptr[c + 1] - part_ptr[c]:
                                moved_us[c] = now
                                push(due_us, due, events, now + collective_work(c, part_ptr, part, duration_us), devices + c, short)
                                events += 1
                        elif duration_us[to] == 0.0:
                            stack[ended] = to
                            ended += 1
                        else:
                            push(due_us, due, events, now + duration_us[to], devices + collectives + to, short)
                            events += 1
                        continue
                    if how == _FIFO:
                        enqueue(to, now, ready_us, key, slot, head[d], tail[d])
                        tail[d] += 1
                    elif how == _PRIORITY:
                        begin = enqueue_by_priority(to, ready_us, key, priority, slot, slot_ptr[d], head[d], tail[d])
                        tail[d] += 1 if begin == head[d] else 0
                        head[d] = begin
                    if current[d] < 0 and not is_touched[d]:
                        is_touched[d] = True
                        touched[touches] = d
                        touches += 1
            if events == 0 or earliest(due_us, events, short) != now:
                break
            code = pop(due_us, due, events, short)
            events -= 1
            if code < devices:
                stack[0] = current[code]
                ended = 1
                current[code] = -1
                if not is_touched[code]:
                    is_touched[code] = True
                    touched[touches] = code
                    touches += 1
                continue
            if code < devices + collectives:
                c = code - devices
                for k in range(part_ptr[c], part_ptr[c + 1]):
                    stack[ended] = part[k]
                    ended += 1
            else:
                stack[0] = code - devices - collectives
                ended = 1
            for k in range(ended):
                d = device[stack[k]]
                if policy[d] == _UNBOUNDED:
                    continue
                current[d] = -1
                if not is_touched[d]:
                    is_touched[d] = True
                    touched[touches] = d
                    touches += 1
        # Each free device takes its next op.
        for k in range(touches):
            d = touched[k]
            is_touched[d] = False
            if current[d] >= 0:
                continue
            at = head[d]
            if at == tail[d]:
                continue
            op = slot[at]
            if policy[d] == _PROGRAM and waits[op] > 0:
                continue  # in program order, and not ready
            head[d] = at + 1
            current[d] = op
            start_us[op] = now
            order[started] = op
            started += 1
            code, work = d, duration_us[op]
            if collectives > 0 and collective[op] >= 0:
                c = collective[op]
                posted[c] += 1
                if posted[c] < part_ptr[c + 1] - part_ptr[c]:
                    continue
                moved_us[c] = now
                code, work = devices + c, collective_work(c, part_ptr, part, duration_us)
            push(due_us, due, events, now + work, code, short)
            events += 1
        touches = 0
        if events == 0:
            return started
        now = earliest(due_us, events, short)
