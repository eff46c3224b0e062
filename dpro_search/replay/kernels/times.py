"""When each op of a replay was ready, started, moved and ended: `OpTimes` by op number, `Filled` by label of a layout."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search._compiled import njit
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


class Filled(NamedTuple):
    """Times by label: ready, start and end, [n]; when each collective began to move data; labels in the order of their starts.

    While a compiled replay fills them in, the first three have one entry more, for the start of the iteration.
    """

    ready_us: Floats
    start_us: Floats
    end_us: Floats
    moved_us: Floats
    order: Int32s


@njit(nogil=True)
def device_order(device: Int32s, order: Int32s, unbounded: npt.NDArray[np.bool_]) -> tuple[Int32s, Int32s]:
    """The op that each op's device served just before it, -1 where none exists, [n], and the last op of each device, [devices].

    Unbounded devices serve in no order: -1 for all their ops, and for them.

    Parameters
    ----------
    order
        Ops in the order in which they started, [n].
    unbounded
        Of each device, [devices].
    """
    before = np.full(len(device), -1, np.int32)
    last = np.full(len(unbounded), -1, np.int32)
    for op in order:
        d = device[op]
        if not unbounded[d]:
            before[op] = last[d]
            last[d] = op
    return before, last
