"""The trees of the predictor: log(latency / base) from features, each device and each kind of op with the same weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xgboost

from dpro_search.costmodel.devices.features import DEVICE_FEATURES, FEATURES
from dpro_search.costmodel.devices.ops import Floats

PORTABLE = tuple(place for place, name in enumerate(FEATURES) if name not in DEVICE_FEATURES and not name.startswith("log_flops"))
EVERYTHING = tuple(range(len(FEATURES)))


@dataclass(frozen=True, kw_only=True)
class TreeSettings:
    """Of boosted trees."""

    trees: int = 350
    depth: int = 7
    learning_rate: float = 0.06
    rows: float = 0.7  # Of a tree.
    columns: float = 0.5  # Of a tree.
    leaf_weight: float = 8.0
    slope: float = 0.3  # Errors of the logarithm beyond it count linearly.
    threads: int = 1  # Two that share a core wait for each other longer than they compute.


@dataclass(frozen=True, kw_only=True)
class Member:
    """Trees that see some of the features."""

    booster: xgboost.Booster
    columns: tuple[int, ...]

    @staticmethod
    def fit(
        features: Floats, ratio: Floats, weight: Floats, *, columns: tuple[int, ...], settings: TreeSettings, seed: int
    ) -> Member:
        """Fit to log(latency / base), [n]."""
        data = xgboost.QuantileDMatrix(features[:, list(columns)], label=ratio, weight=weight, nthread=settings.threads)
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
            "nthread": settings.threads,
            "seed": seed,
        }
        return Member(booster=xgboost.train(options, data, num_boost_round=settings.trees), columns=columns)

    def predict(self, features: Floats) -> Floats:
        """log(latency / base), [n]."""
        chosen = np.ascontiguousarray(features[:, list(self.columns)])
        return np.asarray(self.booster.inplace_predict(chosen), dtype=np.float64)


def even_weights(*labels: npt.NDArray[np.generic]) -> Floats:
    """Weights under which each combination of labels counts alike within each value of the first, and these alike; mean 1."""
    numbers = [np.unique(label, return_inverse=True)[1].reshape(-1) for label in labels]
    joint = np.unique(np.stack(numbers), axis=1, return_inverse=True)[1].reshape(-1)
    cell_rows = np.bincount(joint)[joint]
    first = numbers[0]
    cells = np.array([len(np.unique(joint[first == place])) for place in range(first.max() + 1)])[first]
    weight = 1.0 / cell_rows / cells
    return np.asarray(weight * len(weight) / weight.sum())


def stacked(predictions: Sequence[Floats]) -> Floats:
    """Predictions side by side, [n, members]."""
    return np.stack(predictions, axis=1)
