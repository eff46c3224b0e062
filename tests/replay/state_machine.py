"""A second implementation of what replaying a program means: ranks, cores and Gloo's threads as a state machine, in plain Python.

A program's graph must have its times (`ddp/test_programs.py`). Every core is a fluid that its users share; between two events all
speeds are constant. A rank's main thread runs the program: segments of work, each with a post of a collective or a wait for one at
its end. Collectives start in the order of posting, once every rank has posted and fewer than `threads` run:

    LATENCY -> TRANSFER -> FINISH
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats, Ints

Bools = npt.NDArray[np.bool_]

# Columns of `costs`
ALPHA_BUSY, ALPHA_MORE, ALPHA_TAIL, BETA_BUSY, BETA_TAIL, CPU_PER_BYTE, COLLECTIVE_CPU, SATURATION = range(8)

# Rows of the breakdown
COMPUTE, CONTENTION, EXPOSED = range(3)

_POST, _WAIT = 1, 2  # of `space.programs.ddp_job.Action`
_EPSILON = 1e-6


def simulate(
    core: Ints,
    work_us: Floats,
    action: Ints,
    collective: Ints,
    size_bytes: Floats,
    is_broadcast: Bools,
    finish_us: Floats,
    threads: int,
    costs: Floats,
    sample_of: Ints,
    draws: Floats,
) -> tuple[Floats, Floats, Floats, Floats]:
    """Replay ``len(sample_of)`` iterations.

    Parameters
    ----------
    sample_of
        Sample of each iteration, [iterations]; the other arrays are those of `DdpJob`.
    draws
        Numbers in [0, 1) that choose latencies, used in turn and again from the start.

    Returns
    -------
    tuple
        End of each iteration on each rank, [iterations, ranks]; breakdown of the whole run, [3, ranks]; start and end of every
        collective, [iterations * C, 2]; start and end of every segment's work, [iterations, ranks, S, 2].
    """
    ranks, iterations, segments = len(core), len(sample_of), len(action)
    per_step = len(size_bytes)
    total = iterations * per_step
    end_us = np.zeros((iterations, ranks))
    breakdown = np.zeros((3, ranks))
    moved = np.full((total, 2), np.inf)
    worked = np.zeros((iterations, ranks, segments, 2))
    cores = core.max() + 1
    on_core = np.zeros(cores)
    for r in range(ranks):
        on_core[core[r]] += 1

    iteration = np.zeros(ranks, np.int64)
    segment = np.zeros(ranks, np.int64)
    left = np.zeros(ranks)
    for r in range(ranks):
        left[r] = work_us[sample_of[0], r, 0]
    waits_for = np.full(ranks, -1, np.int64)  # a collective, counted through all iterations
    posted = np.zeros(ranks, np.int64)

    started = 0
    running = np.full(threads, -1, np.int64)
    latency_left = np.zeros(threads)  # in latencies of the present state of the ranks
    latency_us = np.ones(threads)
    bytes_left = np.zeros(threads)
    finish_left = np.zeros(threads)
    draw = 0

    active_on = np.zeros(cores)
    free_on = np.ones(cores)
    speed = np.zeros(ranks)
    now = 0.0
    finished = 0
    while finished < ranks:
        # Main threads: whatever takes no time.
        for r in range(ranks):
            while iteration[r] < iterations and waits_for[r] < 0 and left[r] <= _EPSILON:
                which = iteration[r] * per_step + collective[segment[r]]
                if worked[iteration[r], r, segment[r], 1] == 0.0:  # else it comes back from a wait
                    worked[iteration[r], r, segment[r], 1] = now
                if action[segment[r]] == _POST:
                    posted[r] = which + 1
                elif action[segment[r]] == _WAIT:
                    broadcasts = r == 0 and is_broadcast[collective[segment[r]]]
                    if not broadcasts and moved[which, 1] > now:
                        waits_for[r] = which
                        break
                segment[r] += 1
                if segment[r] == segments:
                    end_us[iteration[r], r] = now
                    iteration[r] += 1
                    segment[r] = 0
                    if iteration[r] == iterations:
                        finished += 1
                        break
                left[r] = work_us[sample_of[iteration[r]], r, segment[r]]
                worked[iteration[r], r, segment[r], 0] = now
        if finished == ranks:
            break
        main_runs = False
        active_on[:] = 0
        for r in range(ranks):
            if iteration[r] < iterations and waits_for[r] < 0:
                main_runs = True
                active_on[core[r]] += 1

        # Collectives that every rank has posted start on free threads.
        first_missing = posted.min()
        for t in range(threads):
            if running[t] >= 0 or started >= first_missing:
                continue
            running[t] = started
            moved[started, 0] = now
            bytes_left[t] = size_bytes[started % per_step]
            finish_left[t] = finish_us[started % per_step]
            latency_left[t] = 1.0
            if main_runs:  # waiting for the core: as variable as an exponential distribution
                latency_left[t] = max(-np.log(1 - draws[draw % len(draws)]), 1e-3)
                draw += 1
            started += 1

        # Who uses the cores, and how fast everything goes.
        beta = costs[BETA_BUSY] if main_runs else costs[BETA_TAIL]
        transfers = 0
        finishing = 0
        taken = 0.0
        for t in range(threads):
            if running[t] >= 0:
                if latency_left[t] > 0:
                    more = costs[ALPHA_MORE] * (1 - np.exp(-bytes_left[t] / costs[SATURATION]))
                    latency_us[t] = max(costs[ALPHA_BUSY] + more if main_runs else costs[ALPHA_TAIL], 1.0)
                    taken += min(costs[COLLECTIVE_CPU] / latency_us[t], 0.5)
                elif bytes_left[t] > 0:
                    transfers += 1
                else:
                    finishing += 1
        if transfers > 0:
            taken += min(costs[CPU_PER_BYTE] / beta, 1.0)
        finish_speed = 1.0  # of the slowest rank
        for c in range(cores):
            free = max(1.0 - min(taken * on_core[c], 0.95), 0.0)
            free_on[c] = free / max(active_on[c] + finishing * on_core[c], 1.0)
            finish_speed = min(finish_speed, free_on[c])
        for r in range(ranks):
            speed[r] = 0.0
            if iteration[r] < iterations and waits_for[r] < 0:
                speed[r] = free_on[core[r]]

        # The next event, and the way to it.
        step = np.inf
        for r in range(ranks):
            if speed[r] > 0:
                step = min(step, left[r] / speed[r])
        for t in range(threads):
            if running[t] >= 0:
                if latency_left[t] > 0:
                    step = min(step, latency_left[t] * latency_us[t])
                elif bytes_left[t] > 0:
                    step = min(step, bytes_left[t] * beta * transfers)
                else:
                    step = min(step, finish_left[t] / finish_speed)
        if not np.isfinite(step):
            return end_us, breakdown, moved[:0], worked  # nothing can go on: a collective that some rank never posts
        now += step
        for r in range(ranks):
            if iteration[r] >= iterations:
                continue
            if waits_for[r] >= 0:
                breakdown[EXPOSED, r] += step
            else:
                used = speed[r] * step
                breakdown[COMPUTE, r] += used
                breakdown[CONTENTION, r] += step - used
                left[r] -= used
        for t in range(threads):
            if running[t] < 0:
                continue
            if latency_left[t] > 0:
                latency_left[t] -= step / latency_us[t]
                if latency_left[t] <= _EPSILON:
                    latency_left[t] = 0.0
            elif bytes_left[t] > 0:
                bytes_left[t] -= step / (beta * transfers)
                if bytes_left[t] <= _EPSILON:
                    bytes_left[t] = 0.0
            else:
                finish_left[t] -= step * finish_speed
            if latency_left[t] == 0.0 and bytes_left[t] <= 0.0 and finish_left[t] <= _EPSILON:
                moved[running[t], 1] = now
                for r in range(ranks):
                    if waits_for[r] == running[t]:
                        waits_for[r] = -1
                running[t] = -1
    return end_us, breakdown, moved, worked
