"""A duration as the sum over parts: each a non-negative base by class, times boosted trees on the part's own features.

The trees are grown on the error of whole sums, for nobody measured a part alone: a part's gradient is the sum's, by the part's
share in it. So a convolution that takes nearly all of a hundred clusters, each with other ops around it, is learned from all of
them, and a cluster of ten convolutions is the sum of ten predictions, whether or not any cluster like it was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats, Ints
from dpro_search.costmodel.forest import Forest

_HUBER = 0.3  # errors of the logarithm beyond this count linearly
_LEAST_HESSIAN = 1e-6
_BINS = 64  # of a feature; more take longer and are no better
_ROUNDS, _USUAL_ERROR = 6, 0.15  # of reweighting
_LEAN = 0.5  # how many measurements the usual cost of a class stands for, as a square root
_LEAST_US = 0.05
_MOST_FACTOR = 3.0  # logarithm of what trees may multiply a base by, or divide


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Parts of n sums."""

    columns: Floats  # Quantities that the base is linear in, [parts, columns]; not negative.
    classes: Ints  # The class of each part, [parts].
    term_of: Ints  # Which of the base's terms a column is for a class, [classes, columns]; -1: none.
    trees: npt.NDArray[np.float32]  # Features of the trees, [parts, features].
    of: Ints  # The sum that each part belongs to, [parts], ascending; each sum has at least one part.


@dataclass(frozen=True, kw_only=True)
class TreeSettings:
    """Number, size and learning rate of boosted trees, and the seed of their random subsamples."""

    trees: int = 80
    depth: int = 4
    learning_rate: float = 0.06
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class AdditiveModel:
    """A fitted sum. `base`: us for each unit of a term."""

    base: Floats
    forest: Forest

    @staticmethod
    def fit(parts: Parts, y: Floats, usual: Floats, growing: tuple[int, ...], settings: TreeSettings) -> AdditiveModel:
        """Fit to n sums.

        Parameters
        ----------
        y
            The sums, us, [n].
        usual
            Cost of a unit of each term where hardly any was measured, us, [terms]; 0 where nothing is known.
        growing
            For each of the trees' features, 1 where more of it is never less time, else 0.
        """
        import xgboost  # only fits need it

        starts = np.searchsorted(parts.of, np.arange(len(y)))
        base = _fit_base(_summed_terms(parts, len(y), len(usual)), y, usual)
        start = _base_us(base, parts)
        logs = np.log(y)

        def errors(margins: npt.NDArray[np.float32], _: Any) -> tuple[Floats, Floats]:
            us = start * np.exp(np.clip(margins, -_MOST_FACTOR, _MOST_FACTOR))
            total = np.add.reduceat(us, starts)
            error = np.log(total) - logs
            weight = 1 / np.sqrt(1 + (error / _HUBER) ** 2)
            share = us / total[parts.of]
            # The whole sum's curvature is at most the sum of its parts' shares.
            return (weight * error)[parts.of] * share, np.maximum(weight[parts.of] * share, _LEAST_HESSIAN)

        booster = xgboost.train(
            {
                "max_depth": settings.depth,
                "eta": settings.learning_rate,
                "subsample": 0.7,
                "colsample_bytree": 0.4,
                "min_child_weight": 4,
                "lambda": 4.0,
                "base_score": 0.0,
                "tree_method": "hist",
                "max_bin": _BINS,
                "monotone_constraints": f"({','.join(map(str, growing))})",
                "seed": settings.seed,
                "nthread": 1,
            },
            xgboost.DMatrix(parts.trees, label=np.zeros(len(parts.of))),
            num_boost_round=settings.trees,
            obj=errors,
        )
        return AdditiveModel(base=base, forest=Forest.of_booster(booster, settings.depth))

    def parts_us(self, parts: Parts) -> Floats:
        """Duration of each part, us, [parts]."""
        margins = np.clip(self.forest.predict(parts.trees), -_MOST_FACTOR, _MOST_FACTOR)
        return np.asarray(_base_us(self.base, parts) * np.exp(margins), dtype=np.float64)

    def predict(self, parts: Parts, count: int) -> Floats:
        """The sums, us, [count]."""
        return np.asarray(np.bincount(parts.of, weights=self.parts_us(parts), minlength=count), dtype=np.float64)


def _fit_base(terms: Floats, y: Floats, usual: Floats) -> Floats:
    """Non-negative coefficients that make the errors of the logarithm small, large errors counting linearly.

    A term shrinks towards its prior, where one exists.
    """
    seen = np.flatnonzero(terms.max(axis=0) > 0)
    design, known = terms[:, seen], usual[seen]
    # Columns of like size: the solver is not indifferent to units.
    scale = np.where(known > 0, 1 / np.maximum(known, 1e-12), np.maximum((design / y[:, None]).max(axis=0), 1e-12))
    leaning = np.flatnonzero(known > 0)
    predicted, robust = y, np.ones(len(y))
    coefficients = np.zeros(len(seen))
    for _ in range(_ROUNDS):
        # (p - y) / sqrt(p y) is 2 sinh(log(p / y) / 2): it punishes half as much as twice.
        weight = robust / np.sqrt(y * predicted)
        rows = np.vstack([design / scale * weight[:, None], _LEAN * np.eye(len(scale))[leaning]])
        coefficients, _ = nnls(rows, np.concatenate((y * weight, np.full(len(leaning), _LEAN))), maxiter=50 * len(scale))
        predicted = np.maximum(design / scale @ coefficients, _LEAST_US)
        robust = 1 / np.sqrt(np.maximum(np.abs(np.log(predicted / y)), _USUAL_ERROR))
    base = usual.copy()
    base[seen] = coefficients / scale
    return np.asarray(base, dtype=np.float64)


def _summed_terms(parts: Parts, count: int, terms: int) -> Floats:
    """The terms of each sum, [count, terms]."""
    sums = np.zeros(count * (terms + 1))  # the last: columns that are no terms
    for at, column in enumerate(parts.columns.T):
        key = parts.of * (terms + 1) + parts.term_of[parts.classes, at] % (terms + 1)
        sums += np.bincount(key, column, len(sums))
    return sums.reshape(count, terms + 1)[:, :terms]


def _base_us(base: Floats, parts: Parts) -> Floats:
    coefficients = np.append(base, 0.0)[parts.term_of]
    return np.asarray(np.maximum(_weighed(parts.columns, parts.classes, coefficients), _LEAST_US))


@njit(nogil=True)
def _weighed(columns: Floats, classes: Ints, coefficients: Floats) -> Floats:
    """Sum of each row times the coefficients of its class, [rows]."""
    sums = np.zeros(len(columns))
    for row in range(len(columns)):
        for at in range(columns.shape[1]):
            sums[row] += columns[row, at] * coefficients[classes[row], at]
    return sums
