"""`Trees`: log(latency / base) from features, each device and each kind of op with the same weight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro_search.costmodel.devices.features import FEATURES, OP_FEATURES
from dpro_search.costmodel.devices.ops import Floats, Singles
from dpro_search.costmodel.forest import Forest

EVERYTHING = tuple(range(len(FEATURES)))
OF_OPS = tuple(place for place, name in enumerate(FEATURES) if name in OP_FEATURES)


@dataclass(frozen=True, kw_only=True)
class TreeSettings:
    """Of boosted trees."""

    trees: int = 200
    depth: int = 7
    learning_rate: float = 0.06
    rows: float = 0.7  # Of a tree.
    columns: float = 0.5  # Of a tree.
    leaf_weight: float = 8.0
    slope: float = 0.3  # Errors of the logarithm beyond it count linearly.


BASE = TreeSettings()
SHAPES = TreeSettings(trees=150, depth=9, learning_rate=0.08, leaf_weight=3.0)
"""Deep, for shapes have quirks; these trees see nothing of the device, so that they cannot learn devices by heart."""


@dataclass(frozen=True, kw_only=True)
class Trees:
    """log(latency / base) of ops on devices: trees that see all features, and trees for what they leave over that see ops only."""

    base: Forest
    shapes: Forest

    @staticmethod
    def fit(features: Singles, ratio: Floats, weight: Floats, *, seed: int, threads: int = 1) -> Trees:
        """Fit to log(latency / base), [n]."""
        base = _boosted(features, ratio, weight, EVERYTHING, BASE, seed, threads)
        left = ratio - base.predict(features)
        return Trees(base=base, shapes=_boosted(features, left, weight, OF_OPS, SHAPES, seed + 1, threads))

    def predict(self, features: Singles) -> Floats:
        """log(latency / base), [n]."""
        return self.base.predict(features) + self.shapes.predict(features)


def _boosted(
    features: Singles, ratio: Floats, weight: Floats, columns: tuple[int, ...], settings: TreeSettings, seed: int, threads: int
) -> Forest:
    import xgboost  # only fits need it

    chosen = np.ascontiguousarray(features[:, list(columns)])
    data = xgboost.QuantileDMatrix(chosen, label=ratio, weight=weight, nthread=threads)
    options = {
        "objective": "reg:pseudohubererror",
        "huber_slope": settings.slope,
        "base_score": float(np.median(ratio)),
        "max_depth": settings.depth,
        "eta": settings.learning_rate,
        "subsample": settings.rows,
        "colsample_bytree": settings.columns,
        "min_child_weight": settings.leaf_weight,
        "tree_method": "hist",
        "nthread": threads,
        "seed": seed,
    }
    return Forest.of_booster(xgboost.train(options, data, num_boost_round=settings.trees), settings.depth, columns)


def even_weights(*labels: npt.NDArray[np.generic]) -> Floats:
    """Weights under which each combination of labels counts alike within each value of the first, and these alike; mean 1."""
    numbers = [np.unique(label, return_inverse=True)[1].reshape(-1) for label in labels]
    joint = np.unique(np.stack(numbers), axis=1, return_inverse=True)[1].reshape(-1)
    cell_rows = np.bincount(joint)[joint]
    first = numbers[0]
    cells = np.array([len(np.unique(joint[first == place])) for place in range(first.max() + 1)])[first]
    weight = 1.0 / cell_rows / cells
    return np.asarray(weight * len(weight) / weight.sum())
