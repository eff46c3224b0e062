"""Devices left out: trees fitted without them, then corrected by probes and samples of the device that is judged.

A target is one device under one way to run ops. Its architecture is left out with all of its devices and sources (or, as most
papers do, that device alone). How much a correction counts, and how wide intervals are, comes from errors on other left-out
devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dpro_search.costmodel.devices.choice import nearest_to_centres
from dpro_search.costmodel.devices.correction import OpPoints, Similarity
from dpro_search.costmodel.devices.families import FamilyTrees
from dpro_search.costmodel.devices.features import base_us, features
from dpro_search.costmodel.devices.model import BUDGETS, Trees, points_of
from dpro_search.costmodel.devices.ops import Floats, Ops, Singles
from dpro_search.costmodel.devices.profile import DeviceProfile
from experiments.devices.data import USUAL, Target
from experiments.devices.fit import Measured, fit_families, fit_similarity, fit_trees, interval_width


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A target and what trees say that saw no device of its group."""

    target: Target
    group: str  # That was left out together.
    ratio: Floats  # Predicted log(latency / base), [n].
    of_base: Floats  # Likewise, of the trees alone that see all features, [n].
    trees: Trees
    families: FamilyTrees  # Trees of the families of other groups.

    @property
    def errors(self) -> Floats:
        """log(measured / predicted), [n]."""
        return np.asarray(self.target.measured.ratio - self.ratio)

    @cached_property
    def points(self) -> OpPoints:
        """The target's ops as a correction sees them."""
        return self.points_of(self.target.measured.ops, self.target.measured.features)

    def points_of(self, ops: Ops, features: Singles) -> OpPoints:
        """Ops on the target as a correction sees them."""
        return points_of(ops, features, self.trees, self.families)


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
    """Predictions for all targets of which ops are judged, each by a fit without its group."""
    predictions: dict[str, LeftOut] = {}
    families, names = fit_families(by_family_and_source(targets), seed)
    judged_targets = [target for target in targets if target.judge.any()]
    for name in sorted({group(target) for target in judged_targets}):
        trees = fit_trees([fitted(target) for target in targets if group(target) != name], seed)
        touched = {family_and_source(target) for target in targets if group(target) == name}
        others = families.chosen(np.array([one not in touched for one in names], dtype=bool))
        for target in judged_targets:
            if group(target) == name:
                predictions[target.name] = _predicted(target, name, trees, others)
    return [predictions[target.name] for target in judged_targets]


def by_source(target: Target) -> str:
    """Whole sources are left out, with the way in which they run ops."""
    return target.name.split(" ")[0]


def family_and_source(target: Target) -> str:
    """The rows that trees of a family are fitted to: an architecture under one way to run ops."""
    return f"{by_source(target)} {target.family}"


def by_family_and_source(targets: Sequence[Target]) -> dict[str, list[Measured]]:
    """Measured ops of targets for `fit_families`."""
    parts: dict[str, list[Measured]] = {}
    for target in targets:
        parts.setdefault(family_and_source(target), []).append(fitted(target))
    return parts


def _predicted(target: Target, group: str, trees: Trees, families: FamilyTrees) -> LeftOut:
    seen = target.measured.features
    return LeftOut(
        target=target,
        group=group,
        ratio=trees.log_ratio(seen),
        of_base=trees.base.predict(seen),
        trees=trees,
        families=families,
    )


def fitted(target: Target) -> Measured:
    """What a fit takes of a target."""
    return target.measured[target.fit]


def similarity_of(found: Sequence[LeftOut], seed: int) -> Similarity:
    """How alike errors on left-out devices are."""
    return fit_similarity([(one.points[one.target.judge], one.errors[one.target.judge]) for one in found], seed=seed)


def judged(found: Sequence[LeftOut], seed: int, budgets: Sequence[int] = BUDGETS) -> list[Judged]:
    """All targets with all budgets; targets of a group share nothing with what decides of their corrections."""
    result = []
    for group in sorted({one.group for one in found}):
        similarity = similarity_of([one for one in found if one.group != group], seed)
        for one in found:
            if one.group == group:
                result += [judge(one, similarity, budget, seed) for budget in budgets]
    return result


def from_data_sheets(found: Sequence[LeftOut]) -> list[Judged]:
    """Targets of which nothing was measured, by trees that were fitted to devices with probes, as the package ships them."""
    result = []
    for one in found:
        part = one.target.measured
        bare = DeviceProfile(device=part.profile.device)
        log = np.log(base_us(part.ops, bare, USUAL)) + one.trees.log_ratio(features(part.ops, bare, USUAL))
        error = (log - np.log(part.us))[one.target.judge]
        result.append(Judged(target=one.target.name, group=one.group, budget=0, log_error=error, deviation=np.ones(len(error))))
    return result


def judge(one: LeftOut, similarity: Similarity, budget: int, seed: int) -> Judged:
    """A target of which `budget` ops were measured, its probes among them; 0: these are used as probes only."""
    target = one.target
    part, points, errors = target.measured, one.points, one.errors
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
