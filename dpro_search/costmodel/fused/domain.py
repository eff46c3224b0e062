"""`ClusterDomain`: the measured clusters, near which a cost model may be trusted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import Floats

MOST_POINTS = 300  # of the measured clusters; more would slow predictions down and say little more
LEAST_SPREAD, LEAST_DISTANCE = 0.1, 1e-6  # of a feature's logarithm, and between points
_USUAL = 0.97  # share of the measured clusters that are at home among the others
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


def _squared(left: Floats, right: Floats) -> Floats:
    """Squared distances between rows, [n, m], by one matrix product."""
    right = right.astype(left.dtype)
    size = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None, :]
    return np.asarray(np.maximum(size - 2 * left @ right.T, 0.0) / left.shape[1])
