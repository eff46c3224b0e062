"""A queue of (time, code), earliest first: a sorted array while it is short (no jumps to guess wrong), else a heap."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats

Codes = npt.NDArray[np.int32]

SHORT = 64  # longest queue that is kept sorted


@njit(nogil=True)
def push(due_us: Floats, due: Codes, count: int, time_us: float, code: int, short: bool) -> None:
    """Put an entry into a queue of `count`; a short queue is sorted with the earliest last."""
    at = count
    if short:
        while at > 0 and due_us[at - 1] < time_us:
            due_us[at] = due_us[at - 1]
            due[at] = due[at - 1]
            at -= 1
    else:
        while at > 0:
            above = (at - 1) >> 1
            if due_us[above] <= time_us:
                break
            due_us[at] = due_us[above]
            due[at] = due[above]
            at = above
    due_us[at] = time_us
    due[at] = code


@njit(nogil=True)
def earliest(due_us: Floats, count: int, short: bool) -> float:
    """Time of the first entry."""
    return float(due_us[count - 1] if short else due_us[0])


@njit(nogil=True)
def pop(due_us: Floats, due: Codes, count: int, short: bool) -> int:
    """Take the first entry of a queue of `count`; returns its code."""
    if short:
        return int(due[count - 1])
    code = due[0]
    last = count - 1
    time_us, moved = due_us[last], due[last]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= last:
            break
        if child + 1 < last and due_us[child + 1] < due_us[child]:
            child += 1
        if due_us[child] >= time_us:
            break
        due_us[at] = due_us[child]
        due[at] = due[child]
        at = child
    due_us[at] = time_us
    due[at] = moved
    return int(code)
