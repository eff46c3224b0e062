"""`ordered`: how often pairs of runs that differ in the strategy only are in the predicted order, by domain and predicted gap."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dpro_search.parallel.costs.domain import Domain, domain_of, harder
from dpro_search.parallel.strategy import Strategy
from experiments.truth.jobs import workload_of
from experiments.truth.score import Scored, group_of

GAPS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5)
SAME = 0.01  # measured times that differ by less have no order
PRIOR_GROUPS = 10
"""Groups of pairs that the share of all domains counts for in a domain of its own (assumed)."""

Group = tuple[str, ...]


class Pair(NamedTuple):
    """Two runs of a group."""

    group: Group
    domain: Domain
    gap: float  # predicted, slower over faster less 1
    right: bool


def ordered(scored: Sequence[Scored]) -> Mapping[Domain, tuple[float, ...]]:
    """Shares in the predicted order by domain, from each of `GAPS` on; they do not fall, and are a half at least.

    Groups count alike. A domain of which few groups are known takes most of its share from all domains.
    """
    found = list(pairs(scored))
    base = [_share(pairs_of)[0] for pairs_of in _by_gap(found)]
    shares = {}
    for domain in Domain:
        own = [_share(pairs_of) for pairs_of in _by_gap([pair for pair in found if pair.domain is domain])]
        drawn = [
            (count * share + PRIOR_GROUPS * of_all) / (count + PRIOR_GROUPS)
            for (share, count), of_all in zip(own, base, strict=True)
        ]
        shares[domain] = tuple(float(share) for share in np.maximum.accumulate(np.maximum(drawn, 0.5)))
    return shares


def pairs(scored: Sequence[Scored]) -> Iterator[Pair]:
    """Pairs of runs with different strategies whose measured times differ."""
    groups: dict[Group, list[tuple[Scored, Strategy, Domain]]] = defaultdict(list)
    for found in scored:
        workload = workload_of(found.row)
        groups[group_of(found.row)].append((found, workload.strategy, domain_of(workload)))
    for group, members in groups.items():
        for (one, plan, domain), (other, other_plan, other_domain) in itertools.combinations(members, 2):
            faster, slower = sorted((one, other), key=lambda found: found.prediction.step_s)
            ratio = float(slower.row.values["step_time_s"]) / float(faster.row.values["step_time_s"])
            if plan != other_plan and abs(ratio - 1) > SAME:
                gap = slower.prediction.step_s / faster.prediction.step_s - 1
                yield Pair(group, harder(domain, other_domain), gap, ratio > 1)


def _by_gap(found: Sequence[Pair]) -> list[list[Pair]]:
    places: list[list[Pair]] = [[] for _ in GAPS]
    for pair in found:
        places[int(np.searchsorted(GAPS, pair.gap, side="right")) - 1].append(pair)
    return places


def _share(found: Sequence[Pair]) -> tuple[float, int]:
    """In the predicted order, groups alike, and how many groups there are."""
    right: dict[Group, list[bool]] = defaultdict(list)
    for pair in found:
        right[pair.group].append(pair.right)
    return (float(np.mean([np.mean(each) for each in right.values()])), len(right)) if right else (0.5, 0)
