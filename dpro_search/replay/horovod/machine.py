"""The simulator: a `HorovodJob` through several iterations, event by event.

Every core is a fluid that its users share; between two events all speeds are constant. A rank has a main stream (the script,
forward and backward, in recorded order) and an update stream (what came back). Ranks that behave alike are one class; one of them
is followed, as "rank" in what is below, and its core carries the others of its class that are there. Horovod is one machine for all
ranks, because each of its cycles begins with an agreement among all:

    SLEEP -> NEGOTIATE -> for each fused collective: COPY_IN -> LATENCY -> TRANSFER -> COPY_OUT -> SLEEP

A cycle agrees on the units that every rank had posted when it began; they are fused in listing order up to the threshold, and
run one at a time. How long an agreement and a latency take is decided when they begin, by what the ranks do then. Compiled with
numba; the same function runs uncompiled as `simulate.py_func`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from dpro_search.collect.trace import Floats, Ints

Bools = npt.NDArray[np.bool_]

SLEEP, NEGOTIATE, COPY_IN, LATENCY, TRANSFER, COPY_OUT = range(6)

# Columns of `costs`
ALPHA_BUSY, ALPHA_MORE, ALPHA_TAIL, DISPATCH, BETA_BUSY, BETA_TAIL = range(6)
IN_PER_BYTE, OUT_PER_BYTE, CPU_PER_BYTE, CYCLE_CPU, COLLECTIVE_CPU, SATURATION, THRESHOLD, CYCLE, POLL_SHARE = range(6, 15)

# Columns of the log
LOG_KIND, LOG_RANK, LOG_UNIT, LOG_COLLECTIVE, LOG_ITERATION, LOG_START, LOG_END = range(7)
LOG_POST, LOG_MAIN, LOG_STEP = 10, 11, 12  # kinds beside the machine's states

# Rows of the breakdown
COMPUTE, CONTENTION, EXPOSED = range(3)

_EPSILON = 1e-6


@njit(cache=True)
def fuse(ready: Bools, unit_bytes: Floats, threshold: float, exact: bool, group: Ints) -> int:
    """Number the fused collective of each ready unit in `group`; returns how many there are.

    Horovod's rule: a collective starts with the first unit that is left and takes later ones that fit; one that does not fit is
    skipped as long as the skipped ones would fit as well, else the collective is closed.
    """
    count = 0
    for first in range(len(ready)):
        if not ready[first] or group[first] >= 0:
            continue
        group[first] = count
        size = unit_bytes[first]
        skipped = 0.0
        if not exact:
            for other in range(first + 1, len(ready)):
                if not ready[other] or group[other] >= 0:
                    continue
                if size + unit_bytes[other] <= threshold:
                    size += unit_bytes[other]
                    group[other] = count
                else:
                    skipped += unit_bytes[other]
                    if size + skipped > threshold:
                        break
        count += 1
    return count


@njit(cache=True)
def _write(row: Floats, kind: int, rank: int, unit: int, collective: int, iteration: int, start: float, end: float) -> None:
    row[0], row[1], row[2], row[3], row[4], row[5], row[6] = kind, rank, unit, collective, iteration, start, end


@njit(cache=True)
def _drawn(samples: Floats, draws: Floats, number: int) -> float:
    return float(samples[int(draws[number % len(draws)] * len(samples))])


@njit(cache=True, nogil=True)
def simulate(
    core: Ints,
    alike: Ints,
    work_us: Floats,
    post_us: Floats,
    post_order: Ints,
    unit_bytes: Floats,
    unit_tensors: Ints,
    release_class: Ints,
    release_work_us: Floats,
    release_ptr: Ints,
    release_unit: Ints,
    exact: bool,
    costs: Floats,
    negotiate_busy_us: Floats,
    negotiate_idle_us: Floats,
    sample_of: Ints,
    draws: Floats,
    log: Floats,
) -> tuple[Floats, Floats, int]:
    """Replay ``len(sample_of)`` iterations.

    Parameters
    ----------
    work_us
        Core time of script and main stream, [samples, classes]; the other arrays are those of `HorovodJob`.
    alike
        Ranks of each class on each of its cores, [classes].
    sample_of
        Sample of each iteration, [iterations].
    draws
        Numbers in [0, 1) that choose latencies and negotiation times, used in turn and again from the start.
    log
        Rows to fill, [rows, 7]; none are written when it is empty.

    Returns
    -------
    tuple
        End of each iteration in each class, [iterations, classes]; breakdown of the whole run, [3, classes]; log rows written.
    """
    ranks, units, iterations = len(core), len(unit_bytes), len(sample_of)
    end_us = np.zeros((iterations, ranks))
    breakdown = np.zeros((3, ranks))
    logged = 0
    cores = core.max() + 1
    on_core = np.zeros(cores)
    for r in range(ranks):
        on_core[core[r]] += alike[r]
    crowd = on_core.max()

    iteration = np.zeros(ranks, np.int64)
    main_left = np.zeros(ranks)  # core time until the main stream ends
    update_left = np.zeros(ranks)
    next_post = np.zeros(ranks, np.int64)
    to_release = np.zeros(ranks, np.int64)
    begun = np.zeros(ranks)
    release_waits = np.zeros(len(release_class), np.int64)
    for r in range(ranks):
        main_left[r] = work_us[sample_of[0], r]
    for i in range(len(release_class)):
        release_waits[i] = release_ptr[i + 1] - release_ptr[i]
        to_release[release_class[i]] += 1
    releases_of_rank = to_release.copy()

    posted = np.zeros(units, np.int64)
    ready = np.zeros(units, np.bool_)
    group = np.full(units, -1, np.int64)
    post_time = np.zeros((ranks, units))
    state, left, cycle_start, state_start = SLEEP, 0.0, 0.0, 0.0
    negotiation, latency = 1.0, 1.0
    groups, current, draw, collective = 0, 0, 0, 0
    size, tensors = 0.0, 0
    speed_main, speed_update = np.zeros(ranks), np.zeros(ranks)
    active_on = np.zeros(cores)
    free_of = np.zeros(cores)
    now = 0.0
    finished = 0
    while finished < ranks:
        # Who uses the cores, and how fast each stream goes.
        busy = main_runs = False
        active_on[:] = 0
        for r in range(ranks):
            if iteration[r] < iterations and (main_left[r] > 0 or update_left[r] > 0):
                busy = True
                main_runs |= main_left[r] > 0
                active_on[core[r]] += alike[r]
        beta = costs[BETA_BUSY] if main_runs else costs[BETA_TAIL]
        if state == NEGOTIATE:
            taken = min(costs[CYCLE_CPU] / negotiation, 0.9)
        elif state in (COPY_IN, COPY_OUT):
            taken = 1.0
        elif state == LATENCY:
            taken = min(costs[COLLECTIVE_CPU] / latency, 0.5)
        elif state == TRANSFER:
            taken = min(costs[CPU_PER_BYTE] / beta, 1.0)
        else:
            taken = 0.0
        if costs[POLL_SHARE] > 0 and state in (NEGOTIATE, LATENCY, TRANSFER):
            taken = costs[POLL_SHARE]  # waiting keeps the core, whatever the work in it
        for c in range(cores):
            used = taken * (1.0 if state in (COPY_IN, COPY_OUT) else on_core[c])
            # Agreements may follow each other without a pause, and would stop the ranks that they wait for.
            free_of[c] = max(1.0 - (min(used, 0.9) if state == NEGOTIATE else used), 0.0)
        for r in range(ranks):
            speed_main[r] = 0.0
            speed_update[r] = 0.0
            if iteration[r] < iterations and (main_left[r] > 0 or update_left[r] > 0):
                mine = free_of[core[r]] / active_on[core[r]]
                if main_left[r] > 0 and update_left[r] > 0:
                    speed_main[r] = mine / 2
                    speed_update[r] = mine / 2
                elif main_left[r] > 0:
                    speed_main[r] = mine
                else:
                    speed_update[r] = mine

        # The next event.
        step = left * beta if state == TRANSFER else left
        for r in range(ranks):
            if speed_main[r] > 0:
                until = main_left[r]
                if next_post[r] < units:
                    s = sample_of[iteration[r]]
                    until = main_left[r] - (work_us[s, r] - post_us[s, r, next_post[r]])
                step = min(step, max(until, 0.0) / speed_main[r])
            if speed_update[r] > 0:
                step = min(step, update_left[r] / speed_update[r])

        # Advance to it.
        now += step
        left -= step / beta if state == TRANSFER else step
        for r in range(ranks):
            used = (speed_main[r] + speed_update[r]) * step
            if main_left[r] > 0 or update_left[r] > 0:
                breakdown[COMPUTE, r] += used
                breakdown[CONTENTION, r] += step - used
            elif iteration[r] < iterations:
                breakdown[EXPOSED, r] += step
            main_left[r] -= speed_main[r] * step
            update_left[r] -= speed_update[r] * step

        # Ranks: posts, ends of streams, ends of iterations.
        for r in range(ranks):
            if iteration[r] >= iterations:
                continue
            s = sample_of[iteration[r]]
            while next_post[r] < units and main_left[r] <= work_us[s, r] - post_us[s, r, next_post[r]] + _EPSILON:
                u = post_order[s, r, next_post[r]]
                posted[u] += 1
                post_time[r, u] = now
                next_post[r] += 1
            if main_left[r] <= _EPSILON and main_left[r] != 0.0:
                main_left[r] = 0.0
                if logged < len(log):
                    _write(log[logged], LOG_MAIN, r, -1, -1, iteration[r], begun[r], now)
                    logged += 1
            if update_left[r] <= _EPSILON:
                update_left[r] = 0.0
            if main_left[r] == 0.0 and update_left[r] == 0.0 and to_release[r] == 0 and next_post[r] == units:
                end_us[iteration[r], r] = now
                if logged < len(log):
                    _write(log[logged], LOG_STEP, r, -1, -1, iteration[r], begun[r], now)
                    logged += 1
                iteration[r] += 1
                begun[r] = now
                next_post[r] = 0
                if iteration[r] == iterations:
                    finished += 1
                    continue
                main_left[r] = work_us[sample_of[iteration[r]], r]
                to_release[r] = releases_of_rank[r]
                for i in range(len(release_class)):
                    if release_class[i] == r:
                        release_waits[i] = release_ptr[i + 1] - release_ptr[i]

        # Horovod's machine: leave the state that has ended.
        if left > _EPSILON * 1e-3:
            continue
        if state != SLEEP and logged < len(log) and size > 0 and state != NEGOTIATE:
            _write(log[logged], state, -1, tensors, collective, iteration.min(), state_start, now)
            logged += 1
        state_start_old = state_start
        state_start = now
        if state == SLEEP:
            cycle_start = now
            for u in range(units):
                ready[u] = posted[u] == ranks
                group[u] = -1
            groups = fuse(ready, unit_bytes, costs[THRESHOLD], exact, group)
            current = 0
            negotiation = max(_drawn(negotiate_busy_us if busy else negotiate_idle_us, draws, draw), 1.0)
            draw += 1
            state, left = NEGOTIATE, negotiation
            continue
        if state == COPY_IN:
            latency = costs[ALPHA_TAIL]
            if main_runs:  # waiting for the core: as variable as an exponential distribution
                mean = costs[ALPHA_BUSY] + costs[ALPHA_MORE] * (1 - np.exp(-size / costs[SATURATION]))
                latency = -mean * np.log(1 - draws[draw % len(draws)])
                draw += 1
            latency = max(latency, 1.0)
            state, left = LATENCY, latency
            continue
        if state == LATENCY:
            state, left = TRANSFER, size
            continue
        if state == TRANSFER:
            state, left = COPY_OUT, size * costs[OUT_PER_BYTE] * crowd
            continue
        if state == COPY_OUT:
            for u in range(units):
                if group[u] != current:
                    continue
                posted[u] = 0
                if logged + ranks < len(log):
                    for r in range(ranks):
                        _write(log[logged], LOG_POST, r, u, collective, iteration[r], post_time[r, u], now)
                        logged += 1
                for i in range(len(release_class)):
                    for k in range(release_ptr[i], release_ptr[i + 1]):
                        if release_unit[k] == u:
                            release_waits[i] -= 1
                            if release_waits[i] == 0:
                                update_left[release_class[i]] += release_work_us[sample_of[iteration[release_class[i]]], i]
                                to_release[release_class[i]] -= 1
            current += 1
            collective += 1
        if current < groups:  # after NEGOTIATE or COPY_OUT: the next collective of this cycle
            size, tensors = 0.0, 0
            for u in range(units):
                if group[u] == current:
                    size += unit_bytes[u]
                    tensors += unit_tensors[u]
            state, left = COPY_IN, (costs[DISPATCH] + size * costs[IN_PER_BYTE]) * crowd
            continue
        size = 0.0
        state, left = SLEEP, max(cycle_start + costs[CYCLE] - now, 0.0)
        if state_start_old == now and left == 0.0:
            left = 1.0  # a cycle cannot take no time at all
    return end_us, breakdown, logged
