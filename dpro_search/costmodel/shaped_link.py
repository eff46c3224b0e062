"""What transfers were spared on a shaped link, a token bucket that accumulates a burst while it is idle (`collect.launch.link`).

A transfer of n bytes that begins when the link is ahead of its rate by r takes ``l + n w - min(r + l, b)``: its latency l, in which
the link rests too, the wire's time, and what it is spared, at most the burst b. So a latency that ends before the link has saved a
burst takes no time at all, and cannot be seen.
"""

from __future__ import annotations

import numpy as np

from dpro_search.collect.trace import Floats


def rested_us(start_us: Floats, end_us: Floats, wire_us: Floats, burst_us: float) -> Floats:
    """How far the link was ahead of its rate when each transfer began, at most `burst_us`.

    Parameters
    ----------
    start_us, end_us
        Of the transfers, latency included, [n], in order of time.
    wire_us
        What the link needs for each, [n].
    """
    rested = np.zeros(len(start_us))
    sent_by = -np.inf
    for i, (start, end, wire) in enumerate(zip(start_us, end_us, wire_us, strict=True)):
        rested[i] = max(start - max(sent_by, start - burst_us), 0.0)
        sent_by = min(max(sent_by, end - burst_us) + wire, end)
    return rested


def spared_us(wire_us: Floats, duration_us: Floats, rested: Floats, most_us: Floats) -> Floats:
    """What each transfer was spared; where that hid its latency, as if this had been half of the longest that could be hidden.

    Parameters
    ----------
    wire_us, duration_us
        What the link needs, and what the transfer took, [n].
    rested
        How far the link was ahead (`rested_us`), [n].
    most_us
        What it may be spared, [n]: the burst, or less where processors need most of the time.
    """
    latency_us = np.maximum(duration_us + most_us - wire_us, 0.0)  # had it been spared that
    return np.where(rested + latency_us <= most_us, (rested + most_us) / 2, most_us)
