"""Replay of a graph with flows that share links, event by event; `replay/reference.py` says what must come out.

As in `fixed.py`, the queue of events holds what ends at a known time: an op, a collective, the latency of a flow. Flows that move
bytes are a list beside it, for the ends of all of them shift whenever one begins or ends, and at no other instant.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from dpro_search.collect.trace import Floats
from dpro_search.replay.kernels.events import SHORT, earliest, pop, push
from dpro_search.replay.kernels.fixed import collective_work, enqueue, enqueue_by_priority
from dpro_search.space.replay_graph import Int8s, Int32s, OrderPolicy

_PROGRAM, _FIFO, _PRIORITY, _UNBOUNDED = (int(policy) for policy in OrderPolicy)


@njit(cache=True, nogil=True)
def simulate_flows(
    duration_us: Floats,
    device: Int32s,
    key: Int32s,
    priority: Int32s,
    succ_ptr: Int32s,
    succ_idx: Int32s,
    needs: Int32s,
    policy: Int8s,
    slot_ptr: Int32s,
    program: Int32s,
    collective: Int32s,
    part_ptr: Int32s,
    part: Int32s,
    flow_bytes: Floats,
    link_ptr: Int32s,
    link_idx: Int32s,
    link_bytes_per_us: Floats,
    ready_us: Floats,
    start_us: Floats,
    end_us: Floats,
    moved_us: Floats,
    order: Int32s,
) -> int:
    """Replay n ops; arrays, results and the meaning of op n as in `fixed.simulate`.

    Parameters
    ----------
    flow_bytes
        Of each op, [n].
    """
    count, devices, collectives = len(duration_us), len(policy), len(moved_us)
    waits = needs.copy()
    slot = program.copy()
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

    moving = np.empty(count + 1, np.int32)  # flows that move bytes
    is_moving = np.zeros(count, np.bool_)  # or have moved them
    left = np.empty(count)
    speed = np.empty(count)
    since = np.empty(count)
    arrives_us = np.empty(count)
    rate = np.zeros(count)
    flows, flows_changed, next_arrival_us = 0, False, np.inf

    stack[0] = count
    ended, events, touches, started, now = 1, 0, 0, 0, 0.0
    while True:
        # What is due ends, and what became ready on an unbounded device starts, until nothing changes.
        while True:
            while ended > 0:
                ended -= 1
                op = stack[ended]
                end_us[op] = now
                for edge in range(succ_ptr[op], succ_ptr[op + 1]):
                    to = succ_idx[edge]
                    needed = waits[to] - 1
                    waits[to] = needed
                    if needed > 0:
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
                                work = collective_work(c, part_ptr, part, duration_us)
                                push(due_us, due, events, now + work, devices + c, short)
                                events += 1
                        elif duration_us[to] > 0.0:
                            push(due_us, due, events, now + duration_us[to], devices + collectives + to, short)
                            events += 1
                        elif flow_bytes[to] > 0.0:
                            is_moving[to] = flows_changed = True
                            left[to], speed[to], since[to], arrives_us[to] = flow_bytes[to], 0.0, now, np.inf
                            moving[flows] = to
                            flows += 1
                        else:
                            stack[ended] = to
                            ended += 1
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
            if events > 0 and earliest(due_us, events, short) <= now:
                code = pop(due_us, due, events, short)
                events -= 1
                if devices <= code < devices + collectives:
                    c = code - devices
                    for k in range(part_ptr[c], part_ptr[c + 1]):
                        stack[ended] = part[k]
                        ended += 1
                else:
                    op = current[code] if code < devices else code - devices - collectives
                    if flow_bytes[op] > 0.0:  # its latency is over
                        is_moving[op] = flows_changed = True
                        left[op], speed[op], since[op], arrives_us[op] = flow_bytes[op], 0.0, now, np.inf
                        moving[flows] = op
                        flows += 1
                        continue
                    stack[0] = op
                    ended = 1
            elif next_arrival_us <= now:
                kept = 0
                for k in range(flows):
                    op = moving[k]
                    if arrives_us[op] <= now:
                        stack[ended] = op
                        ended += 1
                    else:
                        moving[kept] = op
                        kept += 1
                flows, flows_changed, next_arrival_us = kept, True, np.inf
            else:
                break
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
        if events > 0 and earliest(due_us, events, short) <= now:
            continue  # speeds are set when an instant is over
        if flows_changed:
            share_links(moving[:flows], is_moving, link_ptr, link_idx, link_bytes_per_us, rate)
            next_arrival_us = np.inf
            for k in range(flows):
                op = moving[k]
                if rate[op] != speed[op]:
                    left[op] = max(left[op] - (now - since[op]) * speed[op], 0.0)
                    since[op] = now
                    speed[op] = rate[op]
                    arrives_us[op] = now + left[op] / rate[op]
                next_arrival_us = min(next_arrival_us, arrives_us[op])
            flows_changed = False
        if events == 0 and flows == 0:
            return started
        now = next_arrival_us if events == 0 else min(next_arrival_us, earliest(due_us, events, short))


@njit(cache=True, nogil=True)
def share_links(
    running: Int32s,
    moves_bytes: npt.NDArray[np.bool_],
    link_ptr: Int32s,
    link_idx: Int32s,
    link_bytes_per_us: Floats,
    rate: Floats,
) -> None:
    """Max-min fair rates of the flows among the running ops, by progressive filling."""
    left = link_bytes_per_us.copy()
    users = np.zeros(len(left), np.int64)
    unfixed = np.empty(len(running), np.int32)
    count = 0
    for op in running:
        if moves_bytes[op]:
            unfixed[count] = op
            count += 1
            for edge in range(link_ptr[op], link_ptr[op + 1]):
                users[link_idx[edge]] += 1
    while count > 0:
        bottleneck, share = -1, np.inf
        for link in range(len(left)):
            if users[link] > 0 and left[link] / users[link] < share:
                bottleneck, share = link, left[link] / users[link]
        kept = 0
        for k in range(count):
            op = unfixed[k]
            uses = False
            for edge in range(link_ptr[op], link_ptr[op + 1]):
                uses |= link_idx[edge] == bottleneck
            if not uses:
                unfixed[kept] = op
                kept += 1
                continue
            rate[op] = share
            for edge in range(link_ptr[op], link_ptr[op + 1]):
                left[link_idx[edge]] -= share
                users[link_idx[edge]] -= 1
        count = kept
