"""Which ranks do the same work, and how much longer one of them takes than the others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from dpro_search.analysis.ranks.steps import Floats
from dpro_search.collect.readers.stamps import RankStamps
from dpro_search.collect.readers.stamps.records import FIRST_COLLECTIVE

_LEAST_HISTORY = 20
_LEAST_PEERS = 3
_MANY_PEERS = 32


def peer_classes(stamps: Sequence[RankStamps]) -> tuple[tuple[int, ...], ...]:
    """Places of ranks that issue the same operations on as many bytes in a step, class by class."""
    classes: dict[tuple[tuple[int, int, int], ...], list[int]] = defaultdict(list)
    for place, each in enumerate(stamps):
        records = each.records[each.records["operation"] >= FIRST_COLLECTIVE]
        steps = np.unique(records["step"])
        part = records[records["step"] == steps[len(steps) // 2]] if len(steps) else records
        signature = Counter(zip(part["operation"].tolist(), part["size_bytes"].tolist(), strict=True))
        classes[tuple(sorted((*key, count) for key, count in signature.items()))].append(place)
    return tuple(map(tuple, classes.values()))


def has_small_classes(classes: Sequence[Sequence[int]]) -> bool:
    """Whether any class has too few ranks to compare them with each other."""
    return any(len(places) < _LEAST_PEERS for places in classes)


def peer_excess_us(own_us: Floats, classes: Sequence[Sequence[int]], hosts: Sequence[str], usual_us: Floats | None) -> Floats:
    """How much longer each rank takes than its peers, [R], of its own times in one step, [R].

    The reference is the lower median of the peers on other hosts, or, where there are none, of the other peers. Two ranks alone are
    often the ends of a pipeline, which differ for good; therefore one and two ranks are compared with their own usual times,
    `usual_us` [R], as soon as those are known, less what the other ranks take beyond theirs: all may be slowed by something else.
    """
    excess = np.zeros(len(own_us))
    usual_us = np.full(len(own_us), np.nan) if usual_us is None else usual_us
    beyond_us = own_us - usual_us
    for places in classes:
        if len(places) > _MANY_PEERS:  # one host more or less does not move the median
            excess[list(places)] = own_us[list(places)] - _lower_median(own_us[list(places)])
            continue
        for place in places:
            others = [other for other in places if other != place]
            elsewhere = [other for other in others if hosts[other] != hosts[place]]
            if len(places) < _LEAST_PEERS and not np.isnan(usual_us[place]):
                excess[place] = beyond_us[place] - _lower_median(np.delete(beyond_us, place))
            elif others:
                excess[place] = own_us[place] - _lower_median(own_us[elsewhere or others])
    return excess


def _lower_median(values: Floats) -> float:
    """The lower of the two middle values, without those that are NaN; 0 for none."""
    known = np.sort(values[~np.isnan(values)])
    return float(known[(len(known) - 1) // 2]) if len(known) else 0.0


def median_of(history: Floats) -> Floats:
    """Median of each column, [C], of values, [n, C]; NaN where too few are known."""
    enough = (~np.isnan(history)).sum(axis=0) >= _LEAST_HISTORY
    median = np.full(history.shape[1], np.nan)
    if enough.any():
        median[enough] = np.nanmedian(history[:, enough], axis=0)
    return median
