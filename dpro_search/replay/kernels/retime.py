"""New times for a known order: one pass over the executed graph, no queue."""

from __future__ import annotations

import numpy as np

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats
from dpro_search.replay.kernels.layout import Layout
from dpro_search.replay.kernels.rules import collective_work
from dpro_search.replay.kernels.times import Filled
from dpro_search.space.replay_graph import Int32s


@njit(nogil=True)
def retime(duration_us: Floats, layout: Layout, pred_ptr: Int32s, pred_idx: Int32s, filled: Filled) -> None:
    """Fill in start and end of each op, [n], and when each collective began to move data.

    Parameters
    ----------
    pred_ptr, pred_idx
        Of the executed graph, which includes the op that the same device served before, CSR; every op follows what it needs.
    """
    collective, part_ptr, part = layout.collective, layout.part_ptr, layout.part
    _, start_us, end_us, moved_us, _ = filled
    if len(moved_us) == 0:
        for op in range(len(duration_us)):
            start = 0.0
            for edge in range(pred_ptr[op], pred_ptr[op + 1]):
                start = max(start, end_us[pred_idx[edge]])
            start_us[op] = start
            end_us[op] = start + duration_us[op]
        return
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
            continue
        moved_us[c] = max(moved_us[c], start)
        posted[c] += 1
        if posted[c] < part_ptr[c + 1] - part_ptr[c]:
            continue
        work = collective_work(c, part_ptr, part, duration_us)
        for k in range(part_ptr[c], part_ptr[c + 1]):
            end_us[part[k]] = moved_us[c] + work
