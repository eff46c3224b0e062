"""Partial pooling: what a group with few measurements is taken for, from its own and from those of the groups that it belongs to.

    pools = Pools.fit(values={"light": family, "add": kind}, parent={"add": "light"})
    pools.of("add")        # near its own mean if it was measured often, near that of "light" if not
    pools.unseen("light")  # a group of that family that was never measured

A normal hierarchical model with plug-in variances (Gelman & Hill 2006, chapter 12): groups of one depth share how much their
members differ, and how much groups differ from what they belong to.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.costmodel.intervals import student_quantile

_SHARED = 4.0  # members that what is shared of their spread counts for, beside a group's own
_LEAST_VARIANCE = 0.03**2


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """One more member of a group, as far as it is known."""

    centre: float  # Expected value.
    # mean_variance, member_variance: How uncertain the group's mean is, and how members differ from that.
    mean_variance: float
    member_variance: float
    degrees: float  # Degrees of freedom of these variances.

    def half_width(self, coverage: float) -> float:
        """Half the interval that holds one more member in that share of all cases."""
        variance = self.mean_variance + self.member_variance
        return student_quantile(coverage, self.degrees) * math.sqrt(variance)


@dataclass(frozen=True, kw_only=True)
class Pools:
    """Groups by name, and by depth what groups share: (variance of members, variance of groups around what they belong to)."""

    groups: Mapping[str, Pooled]
    depth: Mapping[str, int]
    shared: tuple[tuple[float, float], ...]

    @staticmethod
    def fit(values: Mapping[str, Floats], parent: Mapping[str, str]) -> Pools:
        """Pool the members of groups.

        Parameters
        ----------
        values
            Members of each group, at least one each.
        parent
            The group that a group belongs to, itself in `values`; a group without one stands for itself.
        """
        depth = {name: _depth(name, parent) for name in values}
        by_depth: dict[int, list[str]] = defaultdict(list)
        for name in values:
            by_depth[depth[name]].append(name)
        shared: list[tuple[float, float]] = []
        groups: dict[str, Pooled] = {}
        for level in range(len(by_depth)):
            names = by_depth[level]
            member_variance = _member_variance([values[name] for name in names])
            between = _between(names, values, parent, member_variance)
            shared.append((member_variance, between))
            for name in names:
                above = groups[parent[name]] if level else None
                groups[name] = _pooled(values[name], member_variance, between, above)
        return Pools(groups=groups, depth=depth, shared=tuple(shared))

    def of(self, name: str) -> Pooled | None:
        """A group that was measured."""
        return self.groups.get(name)

    def unseen(self, parent: str) -> Pooled | None:
        """A group that was never measured, and belongs to one that was; None if that was not either."""
        above = self.groups.get(parent)
        if above is None:
            return None
        level = min(self.depth[parent] + 1, len(self.shared) - 1)
        member_variance, between = self.shared[level]
        return _pooled(np.zeros(0), member_variance, between, above)


def _depth(name: str, parent: Mapping[str, str]) -> int:
    return 1 + _depth(parent[name], parent) if name in parent else 0


def _member_variance(groups: list[Floats]) -> float:
    """Variance of members around their group's mean, over all groups of a depth."""
    degrees = sum(len(group) - 1 for group in groups)
    if not degrees:
        return _LEAST_VARIANCE
    return max(sum(float(((group - group.mean()) ** 2).sum()) for group in groups) / degrees, _LEAST_VARIANCE)


def _between(names: list[str], values: Mapping[str, Floats], parent: Mapping[str, str], member_variance: float) -> float:
    """Variance of groups of a depth around those that they belong to, less that which chance makes of their few members."""
    spreads = [
        (float(values[name].mean() - values[parent[name]].mean()) ** 2, member_variance / len(values[name]))
        for name in names
        if name in parent
    ]
    if not spreads:
        return 0.0
    squares, chance = np.array(spreads).T
    return max(float((squares - chance).mean()), _LEAST_VARIANCE)


def _pooled(members: Floats, member_variance: float, between: float, above: Pooled | None) -> Pooled:
    count = len(members)
    around = float(((members - members.mean()) ** 2).sum()) if count else 0.0
    variance = (_SHARED * member_variance + around) / (_SHARED + max(count - 1, 0))
    degrees = _SHARED + max(count - 1, 0)
    if above is None:
        return Pooled(centre=float(members.mean()), mean_variance=variance / count, member_variance=variance, degrees=degrees)
    prior = between + above.mean_variance
    precision = count / variance + 1 / prior
    centre = (float(members.sum()) / variance + above.centre / prior) / precision
    return Pooled(centre=centre, mean_variance=1 / precision, member_variance=variance, degrees=degrees)
