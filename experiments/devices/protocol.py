"""Devices left out: trees fitted without them, then corrected by probes and samples of the device that is judged.

A target is one device under one way to run ops. Its architecture is left out with all of its devices and sources (or, as most
papers do, that device alone). How much a correction counts, and how wide intervals are, comes from errors on other left-out
devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro_search.costmodel.devices.choice import nearest_to_centres
from dpro_search.costmodel.devices.correction import Similarity
from dpro_search.costmodel.devices.model import BUDGETS, Forests, log_ratio
from dpro_search.costmodel.devices.ops import Floats
from experiments.devices.data import Target
from experiments.devices.fit import Measured, fit_similarity, fit_trees, interval_width


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A target and what trees say that saw no device of its group."""

    target: Target
    group: str  # That was left out together.
    ratio: Floats  # Predicted log(latency / base), [n].
    of_base: Floats  # Likewise, of the trees alone that see all features, [n].
    forests: Forests

    @property
    def errors(self) -> Floats:
        """log(measured / predicted), [n]."""
        return np.asarray(self.target.measured.ratio - self.ratio)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Predictions for the ops of a target that were neither probes nor samples."""

    target: str
    group: str
    budget: int
    log_error: Floats  # log(predicted / measured), [n].
    deviation: Floats  # Expected of it, [n].

    @property
    def score(self) -> Floats:
        """Errors over what was expected, [n]."""
        return np.asarray(np.abs(self.log_error) / self.deviation)


def by_family(target: Target) -> str:
    """Architectures are left out."""
    return target.family


def by_device(target: Target) -> str:
    """Devices are left out, with all of their sources."""
    return target.measured.profile.device.name


def left_out(targets: Sequence[Target], seed: int, group: Callable[[Target], str]) -> list[LeftOut]:
    """Predictions for all targets, each by a fit without its group."""
    found: dict[str, LeftOut] = {}
    for name in sorted({group(target) for target in targets}):
        forests = fit_trees([fitted(target) for target in targets if group(target) != name], seed)
        for target in targets:
            if group(target) == name:
                found[target.name] = _predicted(target, name, forests)
    return [found[target.name] for target in targets]


def _predicted(target: Target, group: str, forests: Forests) -> LeftOut:
    seen = target.measured.features
    return LeftOut(target=target, group=group, ratio=log_ratio(forests, seen), of_base=forests[0].predict(seen), forests=forests)


def fitted(target: Target) -> Measured:
    """What a fit takes of a target."""
    return target.measured[target.fit]


def similarity_of(found: Sequence[LeftOut], seed: int) -> Similarity:
    """How alike errors on left-out devices are."""
    return fit_similarity(
        [(one.target.measured.points[one.target.judge], one.errors[one.target.judge]) for one in found], seed=seed
    )


def judged(found: Sequence[LeftOut], seed: int, budgets: Sequence[int] = BUDGETS) -> list[Judged]:
    """All targets with all budgets; targets of a group share nothing with what decides of their corrections."""
    result = []
    for group in sorted({one.group for one in found}):
        similarity = similarity_of([one for one in found if one.group != group], seed)
        for one in found:
            if one.group == group:
                result += [judge(one, similarity, budget, seed) for budget in budgets]
    return result


def judge(one: LeftOut, similarity: Similarity, budget: int, seed: int) -> Judged:
    """A target of which `budget` ops were measured, its probes among them; 0: these are used as probes only."""
    target = one.target
    part, points, errors = target.measured, target.measured.points, one.errors
    chosen = samples(part, budget, seed, np.flatnonzero(target.judge))
    rest = target.judge.copy()
    rest[chosen] = False
    shift = np.zeros(int(rest.sum()))
    deviation = np.full(len(shift), np.sqrt(similarity.variance))
    if budget:
        shift, deviation = similarity.correction(similarity.residual(points[chosen], errors[chosen]), points[rest])
    return Judged(target=target.name, group=one.group, budget=budget, log_error=shift - errors[rest], deviation=deviation)


def widths(found: Sequence[Judged]) -> dict[tuple[str, int], float]:
    """By group and budget, from the errors on all other groups."""
    return {
        (group, budget): interval_width([one.score for one in found if one.group != group and one.budget == budget])
        for group in {one.group for one in found}
        for budget in {one.budget for one in found}
    }


def samples(part: Measured, count: int, seed: int, pool: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Ops to measure beside the probes, `count` in all: those of a pool nearest to the centres of clusters of ops (KMeans)."""
    rest = np.setdiff1d(pool, part.probes)
    more = count - len(part.probes)
    if more <= 0:
        return part.probes
    return np.concatenate([part.probes, rest[nearest_to_centres(part.points[rest], more, seed)]])
