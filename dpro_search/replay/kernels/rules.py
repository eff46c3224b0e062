"""Rules of a replay that several compiled passes apply."""

from __future__ import annotations

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats
from dpro_search.space.replay_graph import Int32s


@njit(nogil=True)
def goes_first(a: int, ready_a_us: float, b: int, ready_b_us: float, key: Int32s) -> bool:
    """Whether a device that serves first in, first out serves op a before op b."""
    return ready_a_us < ready_b_us or (ready_a_us == ready_b_us and key[a] < key[b])


@njit(nogil=True)
def collective_work(c: int, part_ptr: Int32s, part: Int32s, duration_us: Floats) -> float:
    """How long a collective moves data: the longest of its parts."""
    work = 0.0
    for k in range(part_ptr[c], part_ptr[c + 1]):
        work = max(work, duration_us[part[k]])
    return work
