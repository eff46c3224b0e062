"""Replay of a graph with everything: slow-downs, flows that share links, shared cores, devices of several servers.

The same rules as `fixed.py`, which is about twice as fast; `replay/reference.py` says what must come out. An op keeps what is
left of its work, its speed and since when; only a changed speed touches them, so that all implementations round alike.

The loop calls a function with arrays only where flows change: numba counts references to each array that a call takes, and a helper
for the start of an op took more than half of the time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats
from dpro_search.replay.kernels.fixed import enqueue, enqueue_by_priority
from dpro_search.replay.kernels.layout import Layout
from dpro_search.replay.kernels.links import share_links
from dpro_search.replay.kernels.rules import collective_work
from dpro_search.replay.kernels.times import Filled
from dpro_search.space.replay_graph import Int8s, Int32s, OrderPolicy

_PROGRAM, _FIFO, _PRIORITY, _UNBOUNDED = (int(policy) for policy in OrderPolicy)
Bools = npt.NDArray[np.bool_]

LATENCY_TAKES_MOST, TAKEN_MOST = 0.5, 0.95  # of a core: by the latency of one message, by all communication of its processes


class Fluid(NamedTuple):
    """Inputs of this replay beside the layout of n ops.

    Attributes
    ----------
    kind
        Of each op, [n].
    rank
        Of each device, [devices].
    flow_bytes
        Of each op, [n]; empty: there are no flows.
    link_ptr, link_idx, link_bytes_per_us
        The links that each op crosses, CSR, and the rate of each link.
    slowdown
        Factors by kind of the op and kind of the other, [kinds, kinds]; empty: none.
    servers
        Of each device, [devices].
    core, idle_us, core_us, finish_us, idle_bytes_per_us, core_us_per_byte, latency_factors
        Those of `SharedCores`; `core` is empty: none.
    row
        Where each op's `idle_us`, `core_us` and `finish_us` stand, [n]; empty: there are no shared cores.
    """

    kind: Int8s
    rank: Int32s
    flow_bytes: Floats
    link_ptr: Int32s
    link_idx: Int32s
    link_bytes_per_us: Floats
    slowdown: Floats
    servers: Int32s
    core: Int32s
    row: Int32s
    idle_us: Floats
    core_us: Floats
    finish_us: Floats
    idle_bytes_per_us: Floats
    core_us_per_byte: Floats
    latency_factors: Floats


@njit(nogil=True)
def simulate_fluid(layout: Layout, fluid: Fluid, duration_us: Floats, filled: Filled) -> int:
    """Replay n ops; the other arguments, the result and the meaning of op n are those of `fixed.simulate`."""
    device, key, priority, policy, slot_ptr = layout.device, layout.key, layout.priority, layout.policy, layout.slot_ptr
    succ_ptr, succ_idx, collective, part_ptr, part = (
        layout.succ_ptr,
        layout.succ_idx,
        layout.collective,
        layout.part_ptr,
        layout.part,
    )
    (
        kind, rank, flow_bytes, link_ptr, link_idx, link_bytes_per_us, slowdown, servers,
        core, row, idle_us, core_us, finish_us, idle_bytes_per_us, core_us_per_byte, latency_factors,
    ) = fluid  # fmt: skip
    ready_us, start_us, end_us, moved_us, order = filled
    count, devices, collectives = len(duration_us), len(policy), len(moved_us)
    waits = layout.needs.copy()
    slot = layout.program.copy()
    head = slot_ptr[:-1].copy()
    tail = slot_ptr[:-1].copy()
    serves = np.zeros(devices, np.int32)
    touched = np.empty(devices, np.int32)
    is_touched = np.zeros(devices, np.bool_)
    posted = np.zeros(collectives, np.int32)
    stack = np.empty(count + 1, np.int32)  # ops that end now

    running = np.empty(count, np.int32)
    left = np.empty(count)
    speed = np.empty(count)
    since = np.empty(count)
    due_us = np.empty(count)
    rate = np.empty(count)
    moves_bytes = np.zeros(count, np.bool_)
    kinds = len(slowdown)
    slows = np.zeros(kinds, np.bool_)
    for a in range(kinds):
        for other in range(kinds):
            slows[other] |= slowdown[a, other] > 1.0
    ranks = 0
    if kinds > 0:
        for at in range(len(rank)):
            ranks = max(ranks, rank[at] + 1)
    active = np.zeros((ranks, kinds), np.int64)  # running ops by rank and kind

    shares = len(core) > 0
    cores = 0
    for at in range(len(core)):
        cores = max(cores, core[at] + 1)
    processes = np.zeros(cores)  # of each core
    for at in range(len(core)):
        if core[at] >= 0:
            processes[core[at]] += 1
    users, speed_on, finish_speed = np.zeros(cores), np.ones(cores), 1.0
    finishes = np.zeros(count if shares else 0, np.bool_)
    waiting = np.empty(count if shares else 0, np.int32)  # messages in their latency, sorted by key
    carries = np.zeros(len(link_bytes_per_us), np.bool_)
    computing, finishing, draws = 0, 0, 0
    busy, taken_by_links = True, 0.0

    one_link = len(link_bytes_per_us) == 1  # then flows share it equally, and no call is needed
    for at in range(len(link_ptr) - 1):
        one_link &= link_ptr[at + 1] - link_ptr[at] <= 1
    rate_of_one, flowing = link_bytes_per_us[0] if one_link else 0.0, 0
    begins = np.empty(count, np.int32)  # ops that start now
    stack[0] = count
    ended, beginning, runs, latencies, flows_changed = 1, 0, 0, 0, False
    started, touches, now = 0, 0, 0.0
    while True:
        while True:
            while ended > 0:
                ended -= 1
                op = stack[ended]
                end_us[op] = now
                if op < count:
                    d = device[op]
                    if kinds > 0:
                        active[rank[d], kind[op]] -= 1
                    if shares and core[d] >= 0:
                        users[core[d]] -= 1
                        computing -= 1
                    if policy[d] != _UNBOUNDED:
                        serves[d] -= 1
                        if not is_touched[d]:
                            is_touched[d] = True
                            touched[touches] = d
                            touches += 1
                for edge in range(succ_ptr[op], succ_ptr[op + 1]):
                    to = succ_idx[edge]
                    waits[to] -= 1
                    if waits[to] > 0:
                        continue
                    ready_us[to] = now
                    d = device[to]
                    if policy[d] == _UNBOUNDED:
                        begins[beginning] = to
                        beginning += 1
                        continue
                    if policy[d] == _FIFO:
                        enqueue(to, now, ready_us, key, slot, head[d], tail[d])
                        tail[d] += 1
                    elif policy[d] == _PRIORITY:
                        begin = enqueue_by_priority(to, ready_us, key, priority, slot, slot_ptr[d], head[d], tail[d])
                        tail[d] += 1 if begin == head[d] else 0
                        head[d] = begin
                    if not is_touched[d]:
                        is_touched[d] = True
                        touched[touches] = d
                        touches += 1
            if beginning == 0:  # nothing ends any more: each device with a free server takes its next op
                for k in range(touches):
                    d = touched[k]
                    is_touched[d] = False
                    until = slot_ptr[d + 1] if policy[d] == _PROGRAM else tail[d]
                    while serves[d] < servers[d] and head[d] < until:
                        op = slot[head[d]]
                        if waits[op] > 0:
                            break  # in program order, and not ready
                        head[d] += 1
                        serves[d] += 1
                        begins[beginning] = op
                        beginning += 1
                touches = 0
                if beginning == 0:
                    break
            for k in range(beginning):
                op = begins[k]
                d = device[op]
                start_us[op] = now
                order[started] = op
                started += 1
                if shares and core[d] >= 0:
                    users[core[d]] += 1
                    computing += 1
                first, last, work = 0, 1, duration_us[op]
                c = collective[op] if collectives > 0 else -1
                if c >= 0:
                    posted[c] += 1
                    first, last = part_ptr[c], part_ptr[c + 1]
                    if posted[c] < last - first:
                        continue
                    moved_us[c] = now
                    work = collective_work(c, part_ptr, part, duration_us)
                for at in range(first, last):
                    one = part[at] if c >= 0 else op
                    if kinds > 0:
                        active[rank[device[one]], kind[one]] += 1
                    left[one], speed[one], since[one], due_us[one] = work, 1.0, now, now + work
                    if shares and idle_us[row[one]] > 0.0:  # how fast its latency passes is seen when the instant is over
                        speed[one], due_us[one] = 0.0, np.inf
                        place = latencies
                        while place > 0 and key[waiting[place - 1]] > key[one]:
                            waiting[place] = waiting[place - 1]
                            place -= 1
                        waiting[place] = one
                        latencies += 1
                    elif now + work <= now and len(flow_bytes) > 0 and flow_bytes[one] > 0.0:
                        left[one], speed[one], due_us[one] = flow_bytes[one], 0.0, np.inf
                        moves_bytes[one] = flows_changed = True
                        flowing += 1
                    elif now + work <= now:
                        stack[ended] = one
                        ended += 1
                        continue
                    running[runs] = one
                    runs += 1
            beginning = 0
        # The instant is over: speeds are set.
        if runs == 0:
            return started
        if shares:
            if busy != (computing > 0):
                busy = computing > 0
                flows_changed = True
            taken = 0.0
            for k in range(latencies):
                op = waiting[k]
                if busy and speed[op] == 0.0 and len(latency_factors) > 0:  # it begins
                    left[op] *= latency_factors[draws % len(latency_factors)]
                    draws += 1
                taken += min(core_us[row[op]] / (duration_us[op] if busy else idle_us[row[op]]), LATENCY_TAKES_MOST)
            if flows_changed and one_link:
                rate_of_one = link_bytes_per_us[0] if busy else idle_bytes_per_us[0]
                taken_by_links = min(core_us_per_byte[0] * rate_of_one, 1.0) if flowing > 0 else 0.0
            elif flows_changed:
                taken_by_links = _taken_by_links(
                    running[:runs], moves_bytes, link_ptr, link_idx,
                    link_bytes_per_us if busy else idle_bytes_per_us, core_us_per_byte, carries,
                )  # fmt: skip
            taken += taken_by_links
            finish_speed = 1.0
            for c in range(cores):
                free = 1.0 - min(taken * processes[c], TAKEN_MOST)
                speed_on[c] = free / max(users[c] + finishing * processes[c], 1.0)
                finish_speed = min(finish_speed, speed_on[c])
        if flows_changed and not one_link:
            share_links(
                running[:runs], moves_bytes, link_ptr, link_idx, link_bytes_per_us if busy else idle_bytes_per_us, rate
            )  # fmt: skip
        flows_changed = False
        now_next = np.inf
        for k in range(runs):
            op = running[k]
            d = device[op]
            if moves_bytes[op]:
                new_speed = rate_of_one / flowing if one_link else rate[op]
            elif shares and core[d] < 0 and finishes[op]:
                new_speed = finish_speed
            elif shares and core[d] < 0 and idle_us[row[op]] > 0.0:
                new_speed = 1.0 if busy else duration_us[op] / idle_us[row[op]]
            else:
                new_speed = speed_on[core[d]] if shares and core[d] >= 0 else 1.0
                if kinds > 0 and not (len(flow_bytes) > 0 and flow_bytes[op] > 0) and not (collectives > 0 and collective[op] >= 0):
                    factor = 1.0
                    for other in range(kinds):
                        if slows[other] and active[rank[d], other] > (1 if other == kind[op] else 0):
                            factor = max(factor, slowdown[kind[op], other])
                    new_speed /= factor
            if new_speed != speed[op]:
                left[op] = max(left[op] - (now - since[op]) * speed[op], 0.0)
                since[op] = now
                speed[op] = new_speed
                due_us[op] = now + left[op] / new_speed
            now_next = min(now_next, due_us[op])
        now = now_next
        # What is due goes on to its bytes, to its finish, or ends.
        kept = 0
        for k in range(runs):
            op = running[k]
            if due_us[op] > now:
                running[kept] = op
                kept += 1
                continue
            is_message = shares and idle_us[row[op]] > 0.0
            finished, moved = is_message and finishes[op], moves_bytes[op]
            if is_message and not moved and not finished:
                place = 0
                while waiting[place] != op:
                    place += 1
                latencies -= 1
                for at in range(place, latencies):
                    waiting[at] = waiting[at + 1]
            flows_changed |= moved
            flowing -= moved
            if len(flow_bytes) > 0 and flow_bytes[op] > 0.0 and not moved and not finished:
                moves_bytes[op] = flows_changed = True
                flowing += 1
                left[op] = flow_bytes[op]
            elif is_message and finish_us[row[op]] > 0.0 and not finished:
                moves_bytes[op], finishes[op] = False, True
                finishing += 1
                left[op] = finish_us[row[op]]
            else:
                finishing -= finished
                stack[ended] = op
                ended += 1
                continue
            speed[op], since[op], due_us[op] = 0.0, now, np.inf
            running[kept] = op
            kept += 1
        runs = kept


@njit(nogil=True)
def _taken_by_links(
    running: Int32s,
    moves_bytes: Bools,
    link_ptr: Int32s,
    link_idx: Int32s,
    link_rate: Floats,
    core_us_per_byte: Floats,
    carries: Bools,
) -> float:
    """The part that links which carry bytes take of each process's core."""
    carries[:] = False
    for op in running:
        if moves_bytes[op]:
            for edge in range(link_ptr[op], link_ptr[op + 1]):
                carries[link_idx[edge]] = True
    taken = 0.0
    for link in range(len(carries)):
        if carries[link]:
            taken += min(core_us_per_byte[link] * link_rate[link], 1.0)
    return taken
