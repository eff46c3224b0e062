"""The best groups of neighbours, if collectives run one after the other: dynamic programming over a guide's times."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats
from dpro_search.search.samplers._guide import SyncTime, TensorGroupPart
from dpro_search.space.tensorflow.fusion_moves import Grouping

MOST_CUTS = 32  # groups
LATE_CUTS = 8
_STARTS = 48  # start times of the first collective that are tried
_MOST_WORK = 20_000_000  # steps of the recursion: a few hundredths of a second


class Cut(NamedTuple):
    """Groups of neighbours, and when the last collective ends under them."""

    end_us: float
    groups: Grouping


def best_cuts(parts: Sequence[TensorGroupPart], sync: SyncTime, most: int = MOST_CUTS) -> list[Cut]:
    """For each number of groups up to `most`, the grouping whose last collective ends first; the earliest end comes first.

    Unlike dPRO's theorems, which are greedy, this is optimal: a group may end later than necessary to make later groups fewer.

    Parameters
    ----------
    parts
        At least one, in the order in which they become ready; each stays whole.
    """
    count = len(parts)
    most = max(min(most, count, _MOST_WORK // count**2), 1)
    ready_us = np.maximum.accumulate(np.array([part.ready_us for part in parts]))
    upto_bytes = np.concatenate(([0.0], np.cumsum([part.size_bytes for part in parts])))
    end_us, first = np.full((most + 1, count + 1), np.inf), np.zeros((most + 1, count + 1), np.int64)
    _earliest(ready_us, upto_bytes, sync.alpha_us, sync.beta_us, end_us, first)
    cuts = []
    for groups in range(1, most + 1):
        ranges, stop = [], count
        for left in range(groups, 0, -1):
            ranges.append((int(first[left, stop]), stop))
            stop = ranges[-1][0]
        joined = tuple(tuple(name for part in parts[a:b] for name in part.tensors) for a, b in reversed(ranges))
        cuts.append(Cut(float(end_us[groups, count]), joined))
    return sorted(cuts, key=lambda cut: cut.end_us)  # stable: of equal ends, the one with fewer groups


def late_cuts(parts: Sequence[TensorGroupPart], sync: SyncTime, most: int = LATE_CUTS) -> list[Grouping]:
    """Groupings of neighbours whose collectives begin late and then follow each other without a pause, the latest first.

    Groupings that end about as early, but deliver their results late: the processing of results slows the remaining computation,
    unless it happens while a rank waits for the last collective. The linear cost does not include this effect, so several are
    tried.

    Parameters
    ----------
    parts
        At least one, in the order in which they become ready; each stays whole.
    """
    ready_us = np.maximum.accumulate(np.array([part.ready_us for part in parts])).tolist()
    cuts = [_from(start_us, parts, ready_us, sync) for start_us in np.linspace(ready_us[0], ready_us[-1], _STARTS).tolist()]
    latest_us = min(cut.end_us for cut in cuts) + sync.alpha_us
    in_time = max(number for number, cut in enumerate(cuts) if cut.end_us <= latest_us)
    upto = min(in_time + most // 2, len(cuts) - 1)
    return list(dict.fromkeys(cuts[number].groups for number in range(upto, max(upto - most, -1), -1)))


def _from(start_us: float, parts: Sequence[TensorGroupPart], ready_us: Sequence[float], sync: SyncTime) -> Cut:
    """Each collective takes all tensors that are ready when the previous one ends; the first, all that are ready at a time."""
    groups, first, now_us = list[tuple[str, ...]](), 0, start_us
    while first < len(parts):
        stop = max(bisect_right(ready_us, now_us), first + 1)
        free_us = now_us if first else 0.0
        now_us = max(free_us, ready_us[stop - 1]) + sync(sum(part.size_bytes for part in parts[first:stop]))
        groups.append(tuple(name for part in parts[first:stop] for name in part.tensors))
        first = stop
    return Cut(now_us, tuple(groups))


@njit()
def _earliest(
    ready_us: Floats, upto_bytes: Floats, alpha_us: float, beta_us: float, end_us: Floats, first: npt.NDArray[np.int64]
) -> None:
    """Earliest end of the first j parts in k groups, and the first part of the last of these, [most + 1, parts + 1] each.

    Both are filled; before, all ends are infinite.
    """
    end_us[0, 0] = 0.0
    for groups in range(1, len(end_us)):
        for stop in range(groups, len(ready_us) + 1):
            for start in range(groups - 1, stop):
                free_us = end_us[groups - 1, start]
                if free_us < ready_us[stop - 1]:
                    free_us = ready_us[stop - 1]
                us = free_us + alpha_us + beta_us * (upto_bytes[stop] - upto_bytes[start])
                if us < end_us[groups, stop]:
                    end_us[groups, stop] = us
                    first[groups, stop] = start
