"""New times for a known order: one pass over the executed graph, no queue."""

from __future__ import annotations

import numpy as np
from numba import njit

from dpro_search.collect.trace import Floats
from dpro_search.space.replay_graph import Int32s


@njit(cache=True, nogil=True)
def retime(
    duration_us: Floats,
    pred_ptr: Int32s,
    pred_idx: Int32s,
    collective: Int32s,
    part_ptr: Int32s,
    part: Int32s,
    start_us: Floats,
    end_us: Floats,
    moved_us: Floats,
) -> float:
    """Start and end of each op, [n], filled; returns the makespan.

    Parameters
    ----------
    pred_ptr, pred_idx
        Of the executed graph, which includes the op that the same device served before, CSR; every op follows what it needs.
    moved_us
        When each collective began to move data, filled, [collectives].
    """
    makespan = 0.0
    if len(moved_us) == 0:
        for op in range(len(duration_us)):
            start = 0.0
            for edge in range(pred_ptr[op], pred_ptr[op + 1]):
                start = max(start, end_us[pred_idx[edge]])
            start_us[op] = start
            end = start + duration_us[op]
            end_us[op] = end
            makespan = max(makespan, end)
        return makespan
    posted = np.zeros(len(moved_us), np.int32)
    moved_us[:] = 0.0
    for op in range(len(duration_us)):
        start = 0.0
        for edge in range(pred_ptr[op], pred_ptr[op + 1]):
            start = max(start, end_us[pred_idx[edge]])
        start_us[op] = start
        c = collective[op]
        if c < 0:
            end_us[op] = start + duration_us[op]
            makespan = max(makespan, end_us[op])
            continue
        moved_us[c] = max(moved_us[c], start)
        posted[c] += 1
        if posted[c] < part_ptr[c + 1] - part_ptr[c]:
            continue
        work = 0.0
        for k in range(part_ptr[c], part_ptr[c + 1]):
            work = max(work, duration_us[part[k]])
        for k in range(part_ptr[c], part_ptr[c + 1]):
            end_us[part[k]] = moved_us[c] + work
        makespan = max(makespan, moved_us[c] + work)
    return makespan
