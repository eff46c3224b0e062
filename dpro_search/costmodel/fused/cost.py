"""Duration of a cluster as one fused op: the sum over its parts, with an interval.

The parts are the call, loops and other ops (`op_parts`); where shapes are not known, the ops of each kind. The duration of each is
a base, which carries a prediction beyond the measured sizes, times boosted trees (`additive`). Intervals are split-conformal by
groups (Vovk et al. 2005; Barber et al. 2021): the errors are those of whole models that a fit had not seen, because a prediction is
made for a new model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats
from dpro_search.costmodel.fused.additive import AdditiveModel, TreeSettings
from dpro_search.costmodel.fused.features import ClusterFeatures, feature_names
from dpro_search.costmodel.fused.parts import NAMES_OF, growing, parts_of, usual_us
from dpro_search.costmodel.intervals import Durations, conformal_quantile
from dpro_search.errors import InputError

_FEWEST = 20  # clusters
MOST_POINTS = 300  # of the measured clusters in a domain; more would slow predictions down and say little more
LEAST_SPREAD, LEAST_DISTANCE = 0.1, 1e-6  # of a feature's logarithm, and between points
_USUAL = 0.97  # share of the measured clusters that lie within the usual distance of another one
_REFUSED = 4.0  # times the usual distance


@dataclass(frozen=True, kw_only=True)
class ClusterDomain:
    """Measured clusters as points: logarithms of their features, scaled to the spread of each.

    Attributes
    ----------
    centre, spread : arrays [features]
    points : array [m, features]
    usual : float
        Distance to the nearest other point within which nearly all measured clusters lie.
    """

    centre: Floats
    spread: Floats
    points: Floats
    usual: float

    @staticmethod
    def fit(features: Floats, seed: int) -> ClusterDomain:
        """The domain of measured clusters, [n, features]."""
        logs = np.log1p(features)
        centre, spread = logs.mean(axis=0), np.maximum(logs.std(axis=0), LEAST_SPREAD)
        scaled = (logs - centre) / spread
        chosen = np.random.default_rng(seed).permutation(len(scaled))[:MOST_POINTS]
        points = np.round(scaled[np.sort(chosen)], 3)
        squared = _squared(points, points)
        np.fill_diagonal(squared, np.inf)
        nearest = np.sqrt(squared.min(axis=1))
        return ClusterDomain(
            centre=centre, spread=spread, points=points, usual=max(float(np.quantile(nearest, _USUAL)), LEAST_DISTANCE)
        )

    def distance(self, features: Floats) -> Floats:
        """Distance of clusters to the nearest measured one over the usual distance, [n]: above 1 is extrapolation."""
        scaled = (np.log1p(features.astype(np.float32)) - self.centre.astype(np.float32)) / self.spread.astype(np.float32)
        return np.asarray(np.sqrt(_squared(scaled, self.points).min(axis=1)) / self.usual, dtype=np.float64)

    @staticmethod
    def refuses(distance: Floats) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Mask of distances that are too large to predict anything."""
        return np.asarray(distance > _REFUSED)


@dataclass(frozen=True, kw_only=True)
class FusedCost:
    """Duration of fused clusters: a fitted sum over parts, and the errors that give intervals."""

    sees: str  # "shapes": features are from `shaped_features`; "times": from `timed_features`.
    model: AdditiveModel
    domain: ClusterDomain
    # Absolute errors of the logarithm over `widening`, of each cluster predicted without its group, [n], sorted; empty with one
    # group.
    scores: Floats = field(default_factory=lambda: np.zeros(0))
    # log(predicted / measured) of each cluster by a fit without its group, and its distance from that fit's domain, [n] each.
    left_out: tuple[Floats, Floats] | None = None

    def predict(self, features: ClusterFeatures) -> Floats:
        """Durations, us, [n]; also of clusters outside the domain."""
        _check(features, self.sees)
        return _predicted_us(self.model, features, self.sees)

    def predict_interval(self, features: ClusterFeatures, coverage: float = 0.9) -> Durations:
        """Durations with intervals that hold the true one with the given probability, for clusters of a model not seen before.

        Raises
        ------
        InputError
            The fit had one group only, so that nothing is known about other models.
        """
        if not len(self.scores):
            raise InputError("intervals need measurements of at least two models; collect clusters of more models")
        us, distance = self.predict(features), self.domain.distance(features.whole)
        half = conformal_quantile(self.scores, coverage) * widening(distance)
        return Durations.of(us, half, outside=distance > 1, refused=self.domain.refuses(distance))


def fit_fused_cost(
    features: ClusterFeatures,
    fused_us: Floats,
    groups: npt.NDArray[Any] | None = None,
    *,
    sees: str = "shapes",
    settings: TreeSettings | None = None,
) -> FusedCost:
    """Fit the duration of fused clusters to n measured ones.

    Parameters
    ----------
    fused_us
        Their durations, [n].
    groups
        The model that each comes from, [n]; None: all from one, and there is no interval.
    sees
        "shapes": features are from `shaped_features`; "times": from `timed_features`.

    Raises
    ------
    InputError
        There are fewer than 20 clusters, or the features have other columns.
    """
    settings = settings or TreeSettings()
    _check(features, sees)
    if len(features) < _FEWEST:
        raise InputError(f"{len(features)} measured clusters are too few to learn from; collect at least {_FEWEST}, better 3,000")

    def fit(kept: npt.NDArray[np.bool_]) -> FusedCost:
        some = features[kept]
        parts = parts_of(sees, some.parts, some.of)
        model = AdditiveModel.fit(parts, fused_us[kept], usual_us(sees), growing(sees), settings)
        return FusedCost(sees=sees, model=model, domain=ClusterDomain.fit(some.whole, settings.seed))

    cost = fit(np.ones(len(features), dtype=np.bool_))
    names = np.unique(np.zeros(0) if groups is None else groups)
    if len(names) < 2:
        return cost
    errors, distance = np.zeros(len(features)), np.zeros(len(features))
    for name in names:
        out = groups == name
        others, held = fit(~out), features[out]
        errors[out] = np.log(_predicted_us(others.model, held, sees) / fused_us[out])
        distance[out] = others.domain.distance(held.whole)
    scores = np.sort(np.abs(errors) / widening(distance))
    return FusedCost(sees=sees, model=cost.model, domain=cost.domain, scores=scores, left_out=(errors, distance))


def widening(distance: Floats) -> Floats:
    """Factor by which an interval is wider at a distance from what was measured, [n]."""
    return np.maximum(distance, 1.0)


def _predicted_us(model: AdditiveModel, features: ClusterFeatures, sees: str) -> Floats:
    return model.predict(parts_of(sees, features.parts, features.of), len(features))


def _check(features: ClusterFeatures, sees: str) -> None:
    names = feature_names(sees), NAMES_OF[sees]
    if (features.whole.shape[1], features.parts.shape[1]) != tuple(map(len, names)):
        source = "shaped_features" if sees == "shapes" else "timed_features"
        widths = f"{features.whole.shape[1]} and {features.parts.shape[1]}"
        raise InputError(f"the features have {widths} columns, expected those of {source}()")
    if not all(np.isfinite(values).all() and (values >= 0).all() for values in (features.whole, features.parts)):
        raise InputError("a feature is negative or not finite")


def _squared(left: Floats, right: Floats) -> Floats:
    """Squared distances between rows, [n, m], by one matrix product."""
    right = right.astype(left.dtype)
    size = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None, :]
    return np.asarray(np.maximum(size - 2 * left @ right.T, 0.0) / left.shape[1])
