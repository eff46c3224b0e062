"""`OpTimes`: when each op of a replay was ready, started, moved and ended."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats
from dpro_search.space.replay_graph import Int32s


class OpTimes(NamedTuple):
    """Times of n ops in microseconds, and the order in which they started, [n] each.

    ``start_us - ready_us`` is spent in the device's queue, ``moved_us - start_us`` waiting for the other ranks of a collective
    (0 for every other op), ``end_us - moved_us`` at work. `order` tells what times cannot: which of two ops that took no time came
    first. It follows every dependency and every device; ops that started at one instant have no other order.
    """

    ready_us: Floats
    start_us: Floats
    moved_us: Floats
    end_us: Floats
    order: Int32s


def device_order(device: npt.NDArray[np.integer], order: Int32s, unbounded: npt.NDArray[np.bool_]) -> Int32s:
    """The op that each op's device served just before it, -1 where there is none, [n]; unbounded devices serve in no order.

    Parameters
    ----------
    order
        Ops in the order in which they started, [n].
    unbounded
        Of each device, [devices].
    """
    served = order[np.argsort(device[order], kind="stable")]
    on = device[served]
    follows = (on[1:] == on[:-1]) & ~unbounded[on[1:]]
    before = np.full(len(device), -1, np.int32)
    before[served[1:][follows]] = served[:-1][follows]
    return before
