"""Replay of a graph with everything: slow-downs, flows that share links, shared cores, devices of several servers.

The same rules as `fixed.py` and `flows.py`, which are many times faster on large graphs; `replay/reference.py` says what must come
out. An op keeps what is left of its work, its speed and since when; only a changed speed touches them, so that all implementations
round alike.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from dpro_search.collect.trace import Floats, Ints
from dpro_search.replay.kernels.fixed import enqueue, enqueue_by_priority
from dpro_search.replay.kernels.flows import share_links
from dpro_search.space.replay_graph import Int8s, Int32s, OrderPolicy

_PROGRAM, _FIFO, _PRIORITY, _UNBOUNDED = (int(policy) for policy in OrderPolicy)
LATENCY_TAKES_MOST, TAKEN_MOST = 0.5, 0.95  # of a core: by the latency of one message, by all communication of its processes


@njit(cache=True, nogil=True)
def simulate_fluid(
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
    kind: Int8s,
    rank: Int32s,
    flow_bytes: Floats,
    link_ptr: Int32s,
    link_idx: Int32s,
    link_bytes_per_us: Floats,
    slowdown: Floats,
    servers: Int32s,
    core: Int32s,
    row: Int32s,
    idle_us: Floats,
    core_us: Floats,
    finish_us: Floats,
    idle_bytes_per_us: Floats,
    core_us_per_byte: Floats,
    latency_factors: Floats,
    ready_us: Floats,
    start_us: Floats,
    end_us: Floats,
    moved_us: Floats,
    order: Int32s,
) -> int:
    """Replay n ops; arrays, results and the meaning of op n as in `fixed.simulate`.

    Parameters
    ----------
    rank
        Of each device, [devices].
    flow_bytes
        Of each op, [n]; empty: there are no flows.
    slowdown
        Factors by kind of the op and kind of the other, [kinds, kinds]; empty: there are none.
    servers
        Of each device, [devices].
    core, idle_us, core_us, finish_us, idle_bytes_per_us, core_us_per_byte, latency_factors
        Those of `SharedCores`; `core` is empty: there are none.
    row
        Where each op's `idle_us`, `core_us` and `finish_us` stand, [n]; empty: there are no shared cores.
    """
    count, devices, collectives = len(duration_us), len(policy), len(moved_us)
    waits = needs.copy()
    slot = program.copy()
    head = slot_ptr[:-1].copy()
    tail = slot_ptr[:-1].copy()
    serves = np.zeros(devices, np.int32)
    posted = np.zeros(collectives, np.int32)
    stack = np.empty(count + 1, np.int32)

    running = np.empty(count + 1, np.int32)  # ops that run, in the order in which they started
    left = np.empty(count)
    speed = np.empty(count)
    since = np.empty(count)
    due_us = np.empty(count)
    moves_bytes = np.zeros(count, np.bool_)
    rate = np.zeros(count)
    kinds = len(slowdown)
    slowing = np.array([other for other in range(kinds) if slowdown[:, other].max() > 1.0], np.int64)
    active = np.zeros((rank.max() + 1, max(kinds, 1)), np.int64)  # running ops by rank and kind
    flows_changed = False

    shares = len(core) > 0
    cores = core.max() + 1 if shares else 0
    processes = np.zeros(cores)  # of each core
    for d in range(len(core)):
        if core[d] >= 0:
            processes[core[d]] += 1
    users, speed_on = np.zeros(cores), np.ones(cores)
    finishes = np.zeros(count if shares else 0, np.bool_)
    carries = np.zeros(len(link_bytes_per_us), np.bool_)
    busy, draws = True, 0
    finish_speed = 1.0
    link_rate = link_bytes_per_us

    stack[0] = count
    ended, runs, started, now = 1, 0, 0, 0.0
    while True:
        while True:
            while ended > 0:
                ended -= 1
                op = stack[ended]
                end_us[op] = now
                if op < count:
                    serves[device[op]] -= 1
                    if kinds > 0:
                        active[rank[device[op]], kind[op]] -= 1
                for edge in range(succ_ptr[op], succ_ptr[op + 1]):
                    to = succ_idx[edge]
                    waits[to] -= 1
                    if waits[to] > 0:
                        continue
                    ready_us[to] = now
                    d = device[to]
                    if policy[d] == _UNBOUNDED:
                        order[started] = to
                        started += 1
                        serves[d] += 1
                        runs = _start(
                            to, now, runs, duration_us, device, collective, part_ptr, part, kind, rank, posted, start_us, moved_us,
                            running, left, speed, since, due_us, active, row, idle_us,
                        )  # fmt: skip
                    elif policy[d] == _FIFO:
                        enqueue(to, now, ready_us, key, slot, head[d], tail[d])
                        tail[d] += 1
                    elif policy[d] == _PRIORITY:
                        begin = enqueue_by_priority(to, ready_us, key, priority, slot, slot_ptr[d], head[d], tail[d])
                        tail[d] += 1 if begin == head[d] else 0
                        head[d] = begin
            kept = 0
            for k in range(runs):
                op = running[k]
                if due_us[op] > now:
                    running[kept] = op
                    kept += 1
                elif len(flow_bytes) > 0 and flow_bytes[op] > 0 and not moves_bytes[op] and not (shares and finishes[op]):
                    running[kept] = op
                    kept += 1
                    moves_bytes[op] = True
                    left[op], speed[op], since[op], due_us[op] = flow_bytes[op], 0.0, now, np.inf
                    flows_changed = True
                elif shares and finish_us[row[op]] > 0 and not finishes[op]:
                    running[kept] = op
                    kept += 1
                    flows_changed |= moves_bytes[op]
                    moves_bytes[op], finishes[op] = False, True
                    left[op], speed[op], since[op], due_us[op] = finish_us[row[op]], 0.0, now, np.inf
                else:
                    flows_changed |= moves_bytes[op]
                    stack[ended] = op
                    ended += 1
            runs = kept
            if ended == 0:
                break
        before = runs
        for d in range(devices):
            while serves[d] < servers[d] and policy[d] != _UNBOUNDED:
                at = head[d]
                if at == (slot_ptr[d + 1] if policy[d] == _PROGRAM else tail[d]):
                    break
                op = slot[at]
                if waits[op] > 0:
                    break
                head[d] = at + 1
                serves[d] += 1
                order[started] = op
                started += 1
                runs = _start(
                    op, now, runs, duration_us, device, collective, part_ptr, part, kind, rank, posted, start_us, moved_us,
                    running, left, speed, since, due_us, active, row, idle_us,
                )  # fmt: skip
        at_once = False
        for k in range(before, runs):
            at_once |= due_us[running[k]] <= now
        if at_once:
            continue
        if shares:
            users[:] = 0
            finishing, computing = 0, False
            for k in range(runs):
                op = running[k]
                if core[device[op]] >= 0:
                    users[core[device[op]]] += 1
                    computing = True
                elif finishes[op]:
                    finishing += 1
            if computing != busy:
                busy, flows_changed = computing, True
                link_rate = link_bytes_per_us if busy else idle_bytes_per_us
            taken = 0.0
            carries[:] = False
            for k in range(runs):
                op = running[k]
                if moves_bytes[op]:
                    for edge in range(link_ptr[op], link_ptr[op + 1]):
                        carries[link_idx[edge]] = True
                elif idle_us[row[op]] > 0 and not finishes[op]:
                    if busy and speed[op] == 0.0 and len(latency_factors) > 0:  # it begins
                        left[op] *= latency_factors[draws % len(latency_factors)]
                        draws += 1
                    taken += min(core_us[row[op]] / (duration_us[op] if busy else idle_us[row[op]]), LATENCY_TAKES_MOST)
            for link in range(len(carries)):
                if carries[link]:
                    taken += min(core_us_per_byte[link] * link_rate[link], 1.0)
            finish_speed = 1.0
            for c in range(cores):
                free = 1.0 - min(taken * processes[c], TAKEN_MOST)
                speed_on[c] = free / max(users[c] + finishing * processes[c], 1.0)
                finish_speed = min(finish_speed, speed_on[c])
        if flows_changed:
            share_links(running[:runs], moves_bytes, link_ptr, link_idx, link_rate, rate)
            flows_changed = False
        now_next = np.inf
        for k in range(runs):
            op = running[k]
            wanted = speed[op]
            if moves_bytes[op]:
                wanted = rate[op]
            elif shares and finishes[op]:
                wanted = finish_speed
            elif shares and idle_us[row[op]] > 0:
                wanted = 1.0 if busy else duration_us[op] / idle_us[row[op]]
            elif kinds > 0 and not (len(flow_bytes) > 0 and flow_bytes[op] > 0) and not (collectives > 0 and collective[op] >= 0):
                factor = 1.0
                for other in slowing:
                    if active[rank[device[op]], other] > (1 if other == kind[op] else 0):
                        factor = max(factor, slowdown[kind[op], other])
                wanted = (speed_on[core[device[op]]] if shares and core[device[op]] >= 0 else 1.0) / factor
            elif shares and core[device[op]] >= 0:
                wanted = speed_on[core[device[op]]]
            if wanted != speed[op]:
                left[op] = max(left[op] - (now - since[op]) * speed[op], 0.0)
                since[op] = now
                speed[op] = wanted
                due_us[op] = now + left[op] / wanted
            now_next = min(now_next, due_us[op])
        if runs == 0:
            return started
        now = now_next


@njit(cache=True, nogil=True)
def _start(
    op: int,
    now: float,
    runs: int,
    duration_us: Floats,
    device: Int32s,
    collective: Int32s,
    part_ptr: Int32s,
    part: Int32s,
    kind: Int8s,
    rank: Int32s,
    posted: Int32s,
    start_us: Floats,
    moved_us: Floats,
    running: Int32s,
    left: Floats,
    speed: Floats,
    since: Floats,
    due_us: Floats,
    active: Ints,
    row: Int32s,
    idle_us: Floats,
) -> int:
    """An op starts: it runs, unless it is a part of a collective that others have not posted. Returns how many ops run."""
    start_us[op] = now
    if len(posted) == 0 or collective[op] < 0:
        running[runs] = op
        if len(row) > 0 and idle_us[row[op]] > 0:  # the latency of a message: how fast it passes is seen when the instant is over
            left[op], speed[op], since[op], due_us[op] = duration_us[op], 0.0, now, np.inf
        else:
            left[op], speed[op], since[op], due_us[op] = duration_us[op], 1.0, now, now + duration_us[op]
        active[rank[device[op]], kind[op] % active.shape[1]] += 1
        return runs + 1
    c = collective[op]
    posted[c] += 1
    if posted[c] < part_ptr[c + 1] - part_ptr[c]:
        return runs
    moved_us[c] = now
    work = 0.0
    for k in range(part_ptr[c], part_ptr[c + 1]):
        work = max(work, duration_us[part[k]])
    for k in range(part_ptr[c], part_ptr[c + 1]):
        one = part[k]
        running[runs] = one
        runs += 1
        left[one], speed[one], since[one], due_us[one] = work, 1.0, now, now + work
        active[rank[device[one]], kind[one] % active.shape[1]] += 1
    return runs
