"""Devices left out by family: trees fitted without a family, then corrected by probes and samples of the device that is judged.

A target is one device under one way to run ops. Its family (architecture) is left out with all of its sources. What decides how much
a correction counts, which members are averaged and how wide intervals are comes from errors on the other left-out families.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sklearn.cluster import KMeans

from dpro_search.costmodel.devices.measured import Measured
from dpro_search.costmodel.devices.ops import Floats
from dpro_search.costmodel.devices.trees import EVERYTHING, PORTABLE, Member, TreeSettings, even_weights

MEMBERS = {"all features": EVERYTHING, "ratios only": PORTABLE}


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Predictions for a target by trees that saw no device of its family."""

    measured: Measured
    ratios: dict[str, Floats]  # log(latency / base) by member, [n] each.

    def errors(self, weights: dict[str, float]) -> Floats:
        """log(measured / predicted) of a mean of members, [n]."""
        return np.asarray(self.measured.ratio - self.mean(weights))

    def mean(self, weights: dict[str, float]) -> Floats:
        """Of the members' predictions, [n]."""
        return np.asarray(sum(weight * self.ratios[name] for name, weight in weights.items()))


def left_out(parts: Sequence[Measured], settings: TreeSettings, seed: int) -> list[LeftOut]:
    """Predictions for all targets, each by a fit without its family."""
    found: dict[str, LeftOut] = {}
    for family in sorted({part.family for part in parts}):
        members = fitted([part for part in parts if part.family != family], settings, seed)
        for part in parts:
            if part.family == family:
                ratios = {name: member.predict(part.features) for name, member in members.items()}
                found[part.name] = LeftOut(measured=part, ratios=ratios)
    return [found[part.name] for part in parts]


def fitted(parts: Sequence[Measured], settings: TreeSettings, seed: int) -> dict[str, Member]:
    """All members, fitted to some targets."""
    features = np.concatenate([part.features for part in parts])
    ratio = np.concatenate([part.ratio for part in parts])
    weight = weights_of(parts)
    return {
        name: Member.fit(features, ratio, weight, columns=columns, settings=settings, seed=seed + place)
        for place, (name, columns) in enumerate(MEMBERS.items())
    }


def weights_of(parts: Sequence[Measured]) -> Floats:
    """Targets alike, and within a target kinds alike."""
    targets = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    kinds = np.concatenate([part.ops.kind for part in parts])
    return even_weights(targets, kinds)


def samples(part: Measured, count: int, seed: int) -> npt.NDArray[np.int64]:
    """Ops to measure beside the probes, `count` in all: those nearest to the centres of clusters of ops (KMeans)."""
    rest = np.setdiff1d(np.arange(len(part)), part.probes)
    more = count - len(part.probes)
    if more <= 0:
        return part.probes
    at = part.points.at
    scaled = (at - at.mean(axis=0)) / np.maximum(at.std(axis=0), 0.1)
    scaled = np.column_stack([scaled, 3.0 * _one_hot(part.points.category)])
    means = KMeans(n_clusters=more, n_init=1, random_state=seed).fit(scaled[rest])
    distance = means.transform(scaled[rest])
    chosen: list[int] = []
    for cluster in np.argsort(-np.bincount(means.labels_, minlength=more)):
        free = np.argsort(distance[:, cluster])
        chosen.append(next(int(rest[place]) for place in free if int(rest[place]) not in chosen))
    return np.concatenate([part.probes, np.array(chosen, dtype=np.int64)])


def _one_hot(labels: Floats) -> Floats:
    return (labels[:, None] == np.unique(labels)[None, :]).astype(float)
