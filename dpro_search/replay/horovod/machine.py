"""The simulator: a `HorovodJob` through several iterations, event by event.

Every core is a fluid that its users share; between two events all speeds are constant. A rank has a main stream (the script,
forward and backward, in recorded order) and an update stream (what came back). Ranks that behave alike are one class; one of them
is followed, as "rank" in what is below, and its core carries the others of its class that are there. Horovod is one machine for all
ranks, because each of its cycles begins with a negotiation among all:

    SLEEP -> NEGOTIATE -> for each fused collective: COPY_IN -> LATENCY -> TRANSFER -> COPY_OUT -> SLEEP

A cycle agrees on the units that every rank had posted when it began; they are fused in listing order up to the threshold, and
run one at a time. How long a negotiation and a latency take is decided when they begin, by what the ranks do then. A post changes
no speed, so it is no event: what was posted is looked up at the events, and its instant follows from the speed. A link that has
rested is ahead of its rate by that time, at most by its burst, and the next transfers are spared it. Compiled with numba; the same
function runs uncompiled as `simulate.py_func`.
"""

from __future__ import annotations

import numpy as np

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats, Ints

SLEEP, NEGOTIATE, COPY_IN, LATENCY, TRANSFER, COPY_OUT = range(6)

# Columns of `costs`
ALPHA_BUSY, ALPHA_MORE, ALPHA_TAIL, DISPATCH, BETA_BUSY, BETA_TAIL = range(6)
IN_PER_BYTE, OUT_PER_BYTE, CPU_PER_BYTE, CYCLE_CPU, COLLECTIVE_CPU, SATURATION, THRESHOLD = range(6, 13)
CYCLE, POLL_SHARE, BURST, LEAST_BETA = range(13, 17)

# Columns of the log
LOG_KIND, LOG_RANK, LOG_UNIT, LOG_COLLECTIVE, LOG_ITERATION, LOG_START, LOG_END = range(7)
LOG_POST, LOG_MAIN, LOG_STEP = 10, 11, 12  # kinds beside the machine's states

# Rows of the breakdown
COMPUTE, CONTENTION, EXPOSED = range(3)

_EPSILON = 1e-6
_OVER = 1e-9  # what is left of a state that has ended
_NONE_LEFT = -np.inf  # core time that is never left: there is no unit to post
# Events in a row without the end of an iteration, after which a replay is given up: those of more than an hour of cycles of 0.5 ms.
# Of finite costs, every state is finite and the ranks get a tenth of a core or more in it, but a step may be too long for its
# cycles, or times so long that adding a short one changes nothing.
MOST_EVENTS = 20_000_000


@njit()
def fuse(unit_bytes: Floats, threshold: float, exact: bool, group: Ints) -> int:
    """Number the fused collective of each agreed unit in `group`, all -1 before; returns their number.

    Horovod's rule: a collective starts with the first unit that is left and takes later ones that fit; one that does not fit is
    skipped as long as the skipped ones would fit as well, else the collective is closed.
    """
    count = 0
    for first in range(len(unit_bytes)):
        if group[first] >= 0:
            continue
        group[first] = count
        size = unit_bytes[first]
        skipped = 0.0
        if not exact:
            for other in range(first + 1, len(unit_bytes)):
                if group[other] >= 0:
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


@njit(inline="always")
def _write(row: Floats, kind: int, rank: int, unit: int, collective: int, iteration: int, start: float, end: float) -> None:
    row[0], row[1], row[2], row[3], row[4], row[5], row[6] = kind, rank, unit, collective, iteration, start, end


@njit(inline="always")
def _drawn(samples: Floats, draws: Floats, number: int) -> float:
    return float(samples[int(draws[number % len(draws)] * len(samples))])


@njit()
def _least(values: Ints) -> int:
    least = values[0]
    for value in values:
        least = min(least, value)
    return int(least)


@njit()
def _rows_by(value: Ints, owner: Ints, rows: int) -> tuple[Ints, Ints]:
    """Pairs (owner, value) as CSR rows, each row in the order of the pairs."""
    ptr = np.zeros(rows + 1, np.int64)
    for one in owner:
        ptr[one + 1] += 1
    for row in range(rows):
        ptr[row + 1] += ptr[row]
    free = ptr[:-1].copy()
    idx = np.empty(len(value), np.int64)
    for k in range(len(value)):
        idx[free[owner[k]]] = value[k]
        free[owner[k]] += 1
    return ptr, idx


@njit(inline="always")
def _agree(waiting: Ints, count: int, posted: Ints, ranks: int, agreed: Ints) -> int:
    """Units that all ranks have posted, in listing order, into `agreed`; returns how many."""
    units = 0
    for k in range(count):
        unit = waiting[k]
        if posted[unit] != ranks:
            continue
        at = units
        while at > 0 and agreed[at - 1] > unit:
            agreed[at] = agreed[at - 1]
            at -= 1
        agreed[at] = unit
        units += 1
    return units


@njit(nogil=True)
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
    ratio_from_bytes: Floats,
    ratio: Floats,
    sample_of: Ints,
    draws: Floats,
    log: Floats,
    most_events: int,
) -> tuple[Floats, Floats, int, int]:
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
    most_events
        Events in a row without the end of an iteration, after which the replay is given up.

    Returns
    -------
    tuple
        End of each iteration in each class, [iterations, classes]; breakdown of the whole run, [3, classes]; log rows written;
        the class that has ended the fewest iterations if the replay was given up, else -1.
    """
    ranks, units, iterations = len(core), len(unit_bytes), len(sample_of)
    end_us = np.zeros((iterations, ranks))
    breakdown = np.zeros((3, ranks))
    logged = 0
    cores = 0  # NumPy's reductions would take numba a second to compile
    for r in range(ranks):
        cores = max(cores, core[r] + 1)
    on_core = np.zeros(cores)
    for r in range(ranks):
        on_core[core[r]] += alike[r]
    crowd = 0.0
    for c in range(cores):
        crowd = max(crowd, on_core[c])

    releases = len(release_class)
    release_waits = release_ptr[1:] - release_ptr[:-1]
    class_ptr, class_release = _rows_by(np.arange(releases), release_class, ranks)
    waits_of = np.empty(len(release_unit), np.int64)
    for i in range(releases):
        waits_of[release_ptr[i] : release_ptr[i + 1]] = i
    unit_ptr, unit_release = _rows_by(waits_of, release_unit, units)

    iteration = np.zeros(ranks, np.int64)
    main_left = np.zeros(ranks)  # core time until the main stream ends
    update_left = np.zeros(ranks)
    next_post = np.zeros(ranks, np.int64)
    left_at_post = np.zeros(ranks)  # of the main stream, when the next unit is posted
    to_release = np.zeros(ranks, np.int64)
    begun = np.zeros(ranks)
    for r in range(ranks):
        main_left[r] = work_us[sample_of[0], r]
        left_at_post[r] = max(main_left[r] - post_us[sample_of[0], r, 0], 0.0) if units else _NONE_LEFT
        to_release[r] = class_ptr[r + 1] - class_ptr[r]

    posted = np.zeros(units, np.int64)
    waiting, waits = np.empty(units + 1, np.int64), 0  # posted by all ranks
    agreed, group = np.empty(units + 1, np.int64), np.empty(units + 1, np.int64)
    members, member_ptr = np.empty(0, np.int64), np.zeros(1, np.int64)  # units of each collective of a cycle
    post_time = np.zeros((ranks, units))
    state, left, cycle_start, state_start = SLEEP, 0.0, 0.0, 0.0
    negotiation, latency = 1.0, 1.0
    groups, current, draw, collective = 0, 0, 0, 0
    size, tensors = 0.0, 0
    slower = 1.0  # what the all-reduce under way takes over what `costs` say
    sent_by = -costs[BURST]  # when the link would have sent all so far, had it not rested: it is ahead by what has passed since
    spared_per_byte = 0.0
    speed_main, speed_update = np.zeros(ranks), np.zeros(ranks)
    active_on = np.zeros(cores)
    free_of = np.zeros(cores)
    now = 0.0
    finished = 0
    busy = main_runs = False
    settled = False  # whether `busy` and `main_runs` are those of the time up to now
    events = 0  # since an iteration ended
    while True:
        # What happens at this instant: posts, ends of streams and iterations, and the machine leaves states that have ended.
        while True:
            for r in range(ranks):
                while iteration[r] < iterations:
                    while main_left[r] <= left_at_post[r] + _EPSILON:
                        s = sample_of[iteration[r]]
                        u = post_order[s, r, next_post[r]]
                        posted[u] += 1
                        if posted[u] == ranks:
                            waiting[waits] = u
                            waits += 1
                        if len(log) > 0:
                            since = (left_at_post[r] - main_left[r]) / speed_main[r] if speed_main[r] > 0 else 0.0
                            post_time[r, u] = now - max(since, 0.0)
                        next_post[r] += 1
                        if next_post[r] < units:
                            left_at_post[r] = max(work_us[s, r] - post_us[s, r, next_post[r]], 0.0)
                        else:
                            left_at_post[r] = _NONE_LEFT
                    if main_left[r] <= _EPSILON and main_left[r] != 0.0:
                        main_left[r] = 0.0
                        if logged < len(log):
                            _write(log[logged], LOG_MAIN, r, -1, -1, iteration[r], begun[r], now)
                            logged += 1
                    if update_left[r] <= _EPSILON:
                        update_left[r] = 0.0
                    if main_left[r] > 0.0 or update_left[r] > 0.0 or to_release[r] > 0 or next_post[r] < units:
                        break
                    end_us[iteration[r], r] = now
                    if logged < len(log):
                        _write(log[logged], LOG_STEP, r, -1, -1, iteration[r], begun[r], now)
                        logged += 1
                    iteration[r] += 1
                    events = 0
                    begun[r] = now
                    if iteration[r] == iterations:
                        finished += 1
                        break
                    s = sample_of[iteration[r]]
                    main_left[r] = work_us[s, r]
                    next_post[r] = 0
                    left_at_post[r] = max(work_us[s, r] - post_us[s, r, 0], 0.0) if units else _NONE_LEFT
                    to_release[r] = class_ptr[r + 1] - class_ptr[r]
                    for k in range(class_ptr[r], class_ptr[r + 1]):
                        i = class_release[k]
                        release_waits[i] = release_ptr[i + 1] - release_ptr[i]
            if finished == ranks or left > _OVER or events > most_events:
                break
            events += 1

            if not settled:  # a state without length has begun since
                busy = main_runs = False
                for r in range(ranks):
                    if iteration[r] < iterations and (main_left[r] > 0 or update_left[r] > 0):
                        busy = True
                        main_runs |= main_left[r] > 0
            settled = False
            if state != SLEEP and logged < len(log) and size > 0 and state != NEGOTIATE:
                _write(log[logged], state, -1, tensors, collective, _least(iteration), state_start, now)
                logged += 1
            state_start_old = state_start
            state_start = now
            if state == SLEEP:
                cycle_start = now
                groups = 0
                if waits > 0:
                    count = _agree(waiting, waits, posted, ranks, agreed)
                    waits = 0
                    group[:count] = -1
                    groups = fuse(unit_bytes[agreed[:count]], costs[THRESHOLD], exact, group[:count])
                    member_ptr, members = _rows_by(agreed[:count], group[:count], groups)
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
                slower = ratio[np.searchsorted(ratio_from_bytes, size, side="right") - 1]
                latency = max(latency * slower, 1.0)
                state, left = LATENCY, latency
                continue
            if state == LATENCY:
                sent_by = max(sent_by, now - costs[BURST])
                spared_per_byte = (now - sent_by) / max(size, 1.0)
                state, left = TRANSFER, size
                continue
            if state == TRANSFER:
                sent_by = min(sent_by + size * costs[BETA_TAIL] * slower, now)
                state, left = COPY_OUT, size * costs[OUT_PER_BYTE] * crowd
                continue
            if state == COPY_OUT:
                for m in range(member_ptr[current], member_ptr[current + 1]):
                    u = members[m]
                    posted[u] = 0
                    if logged + ranks < len(log):
                        for r in range(ranks):
                            _write(log[logged], LOG_POST, r, u, collective, iteration[r], post_time[r, u], now)
                            logged += 1
                    for k in range(unit_ptr[u], unit_ptr[u + 1]):
                        i = unit_release[k]
                        release_waits[i] -= 1
                        if release_waits[i] == 0:
                            r = release_class[i]
                            update_left[r] += release_work_us[sample_of[iteration[r]], i]
                            to_release[r] -= 1
                current += 1
                collective += 1
            if current < groups:  # after NEGOTIATE or COPY_OUT: the next collective of this cycle
                size, tensors = 0.0, 0
                for m in range(member_ptr[current], member_ptr[current + 1]):
                    size += unit_bytes[members[m]]
                    tensors += unit_tensors[members[m]]
                state, left = COPY_IN, (costs[DISPATCH] + size * costs[IN_PER_BYTE]) * crowd
                continue
            size = 0.0
            state, left = SLEEP, max(cycle_start + costs[CYCLE] - now, 0.0)
            if state_start_old == now and left == 0.0:
                left = 1.0  # a cycle cannot take no time at all
        if finished == ranks or events > most_events:
            break
        events += 1

        # Who uses the cores, and how fast each stream goes.
        busy = main_runs = False
        settled = True
        active_on[:] = 0
        for r in range(ranks):
            if iteration[r] < iterations and (main_left[r] > 0 or update_left[r] > 0):
                busy = True
                main_runs |= main_left[r] > 0
                active_on[core[r]] += alike[r]
        beta = (costs[BETA_BUSY] if main_runs else costs[BETA_TAIL]) * slower
        if spared_per_byte > 0:
            beta = max(beta - spared_per_byte, costs[CPU_PER_BYTE], costs[LEAST_BETA])
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
            # Negotiations may follow each other without a pause, and would stop the ranks that they wait for.
            free_of[c] = max(1.0 - (min(used, 0.9) if state == NEGOTIATE else used), 0.0)

        # The next event.
        step = left * beta if state == TRANSFER else left
        for r in range(ranks):
            speed_main[r] = 0.0
            speed_update[r] = 0.0
            if iteration[r] < iterations and (main_left[r] > 0 or update_left[r] > 0):
                share = free_of[core[r]] / active_on[core[r]]
                if main_left[r] > 0 and update_left[r] > 0:
                    speed_main[r] = share / 2
                    speed_update[r] = share / 2
                elif main_left[r] > 0:
                    speed_main[r] = share
                else:
                    speed_update[r] = share
            if speed_main[r] > 0:
                step = min(step, main_left[r] / speed_main[r])
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
    unfinished = -1
    if finished < ranks:
        unfinished = 0
        for r in range(ranks):
            if iteration[r] < iteration[unfinished]:
                unfinished = r
    return end_us, breakdown, logged, unfinished
