"""How flows share links: max-min fairly."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats
from dpro_search.space.replay_graph import Int32s


@njit(nogil=True)
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
