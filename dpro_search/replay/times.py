"""`OpTimes`: when each op of a replay was ready, started, moved and ended."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats
from dpro_search.space.replay_graph import Int32s


class OpTimes(NamedTuple):
    """Times of n ops in microseconds, [n] each.

    ``start_us - ready_us`` is spent in the device's queue, ``moved_us - start_us`` waiting for the other ranks of a collective
    (0 for every other op), ``end_us - moved_us`` at work.
    """

    ready_us: Floats
    start_us: Floats
    moved_us: Floats
    end_us: Floats


def device_order(device: npt.NDArray[np.integer], start_us: Floats, end_us: Floats, unbounded: npt.NDArray[np.bool_]) -> Int32s:
    """The op that each op's device served just before it, -1 where there is none, [n]; unbounded devices have no order.

    Parameters
    ----------
    unbounded
        Of each device, [devices].
    """
    order = np.lexsort((end_us, start_us, device))
    behind = (device[order][1:] == device[order][:-1]) & ~unbounded[device[order][1:]]
    before = np.full(len(device), -1, np.int32)
    before[order[1:][behind]] = order[:-1][behind]
    return before
