"""How much slower each host's link is than the others', from when collectives and messages end.

A ring passes data from neighbour to neighbour. Behind a slow link the two ranks that receive over it see the end of an all-reduce
last: the one behind the link, and the one that the rank with the link sends to. Messages of pipelines tell the same directly: the
time of an edge is the sum of what its two ends add (least squares with non-negative parts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from dpro_search.analysis.ranks.steps import Floats

_FAST_EDGES = 0.25  # quantile of the edges that is taken as the time of a healthy one


@dataclass(frozen=True, kw_only=True)
class Links:
    """Candidates for a slow link: hosts, or ranks where the job has one host.

    Attributes
    ----------
    units
        Places of the ranks of each candidate, in the order of ranks.
    """

    units: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(hosts: Sequence[str]) -> Links:
        """Candidates of a job with these hosts, one a rank."""
        names = list(dict.fromkeys(hosts))
        if len(names) == 1:
            return Links(units=tuple((place,) for place in range(len(hosts))))
        return Links(units=tuple(tuple(place for place, host in enumerate(hosts) if host == name) for name in names))

    def ring_excess_us(self, ended_us: Floats) -> Floats:
        """How much later collectives end behind each candidate, [n, U], than elsewhere, of `ended_us`, [2, n, R]; 0: no ring."""
        _, count, ranks = ended_us.shape
        unit = np.empty(ranks, np.int64)
        for number, places in enumerate(self.units):
            unit[list(places)] = number
        excess = np.zeros((count, len(self.units)))
        if len(self.units) < 3 or np.isnan(ended_us).all():
            return excess
        for ended, sender in zip(ended_us, (np.roll(np.arange(ranks), 1), np.roll(np.arange(ranks), -1)), strict=True):
            receivers = np.flatnonzero(unit != unit[sender])
            for number in range(len(self.units)):
                touches = (unit[receivers] == number) | (unit[sender[receivers]] == number)
                if 0 < touches.sum() < len(receivers):
                    behind, elsewhere = ended[:, receivers[touches]], ended[:, receivers[~touches]]
                    excess[:, number] += behind.min(axis=1) - elsewhere.mean(axis=1)
        return np.nan_to_num(excess)

    def message_excess_us(self, edges: Mapping[tuple[int, int], Floats], ranks: Sequence[int], count: int) -> Floats:
        """Time that each candidate adds to the messages over its link, in us, [n, U]."""
        unit = {ranks[place]: number for number, places in enumerate(self.units) for place in places}
        crossing = [(source, destination) for source, destination in edges if unit[source] != unit[destination]]
        excess = np.zeros((count, len(self.units)))
        if len(crossing) < 3:
            return excess
        ends = np.zeros((len(crossing), len(self.units)))
        for row, (source, destination) in enumerate(crossing):
            ends[row, unit[source]] = ends[row, unit[destination]] = 1
        times_us = np.stack([edges[edge] for edge in crossing], axis=1)
        beyond = np.maximum(times_us - np.quantile(times_us, _FAST_EDGES, axis=1, keepdims=True), 0)
        for step in np.flatnonzero(beyond.max(axis=1) > 0):
            excess[step] = 2 * nnls(ends, beyond[step])[0]
        return excess
