"""How long a cluster takes as one fused op: a non-negative linear base, corrected by boosted trees, with an interval.

The base adds up what each class of ops costs per microsecond unfused, per byte and per floating-point operation, and a start-up; it
carries a prediction beyond the measured sizes. The trees learn the logarithm of what the base is wrong by. Intervals are
split-conformal by groups (Vovk et al. 2005; Barber et al. 2021): the residuals are those of whole models that a fit had not seen,
for a new model is what a prediction is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import xgboost
from scipy.optimize import nnls
from sklearn.base import BaseEstimator, RegressorMixin

from dpro_search.collect.trace import Floats, Ints
from dpro_search.costmodel.learned.domain import Domain
from dpro_search.costmodel.learned.features import CLASS_BYTES, CLASS_FLOPS, CLASS_US, FEATURES
from dpro_search.errors import InputError

# More of these at the same unfused time is more work for the compiled cluster too.
_GROWING = ("flops", "in_bytes", "out_bytes", "variable_bytes")
_BASE = ("ops", "inputs", "outputs", "in_bytes", "out_bytes", "variable_bytes", *CLASS_US, *CLASS_BYTES, *CLASS_FLOPS)
_COLUMN = {name: i for i, name in enumerate(FEATURES)}
_BASE_COLUMNS = [_COLUMN[name] for name in _BASE]
_US_COLUMNS = [_COLUMN[name] for name in CLASS_US]
_MEMBERS = _COLUMN["members_us"]
# Not the base itself: more bytes raise it, and must not lower the correction.
TREE_FEATURES = (*FEATURES, *(f"{name} share" for name in CLASS_US))
_ROUNDS, _USUAL_ERROR = 12, 0.15  # of reweighting
_LEAN = 0.5  # how many measurements the usual cost of a class stands for, as a square root
_LEAST_US = 1.0


class Origin(IntEnum):
    """Where a predicted number comes from."""

    INTERPOLATED = 0
    EXTRAPOLATED = 1  # outside what was measured: the interval is wider
    REFUSED = 2  # so far outside that nothing is said: the values are NaN


@dataclass(frozen=True, kw_only=True)
class FusedTimes:
    """Predicted durations of n clusters, us, with their intervals and origins."""

    us: Floats
    low_us: Floats
    high_us: Floats
    origin: Ints  # Origin


class FusedTimeRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Duration of a fused cluster.

    Parameters
    ----------
    trees, depth, learning_rate
        Of the boosted trees.
    seed
        Of their random subsamples.

    Attributes
    ----------
    base_ : array [1 + base terms], us per unit
    booster_ : xgboost.Booster
    scores_ : array [n], sorted
        Absolute errors of the logarithm over `widening`, of each row predicted without its group; empty with one group only.
    left_out_ : (array [n], array [n]) or None
        Of each row, by a fit without its group: log(predicted / y), and the distance from that fit's domain.
    domain_ : Domain
    """

    def __init__(self, *, trees: int = 150, depth: int = 4, learning_rate: float = 0.06, seed: int = 0) -> None:
        self.trees = trees
        self.depth = depth
        self.learning_rate = learning_rate
        self.seed = seed

    def fit(self, X: Floats, y: Floats, groups: npt.NDArray[Any] | None = None) -> FusedTimeRegressor:  # noqa: N803
        """Fit on n clusters.

        Parameters
        ----------
        X
            `feature_matrix` of them, [n, len(FEATURES)].
        y
            Their durations, us, [n].
        groups
            The model that each comes from, [n]; None: all from one, and there is no interval.

        Raises
        ------
        InputError
            There are fewer than 20 rows, or the columns are not `FEATURES`.
        """
        features = _checked(X)
        if len(features) < 20:
            raise InputError(f"{len(features)} measured clusters are too few to learn from; collect at least 20, better 3,000")
        self.base_, self.booster_ = self._fitted(features, y)
        self.domain_ = Domain.fit(features, self.seed)
        self.left_out_ = None
        self.scores_ = np.zeros(0)
        if groups is not None and len(np.unique(groups)) > 1:
            self.left_out_ = self._left_out(features, y, np.asarray(groups))
            self.scores_ = np.sort(np.abs(self.left_out_[0]) / widening(self.left_out_[1]))
        return self

    def _left_out(self, X: Floats, y: Floats, groups: npt.NDArray[Any]) -> tuple[Floats, Floats]:  # noqa: N803
        """Of every row, by a fit without its group: log(predicted / y), and the distance from the fit's domain, [n] each."""
        errors, distance = np.zeros(len(y)), np.zeros(len(y))
        for group in np.unique(groups):
            out = groups == group
            base, booster = self._fitted(X[~out], y[~out])
            errors[out] = np.log(_predicted(base, booster, X[out]) / y[out])
            distance[out] = Domain.fit(X[~out], self.seed).distance(X[out])
        return errors, distance

    def predict(self, X: Floats) -> Floats:  # noqa: N803
        """Durations, us, [n]; also of clusters outside the domain."""
        return _predicted(self.base_, self.booster_, _checked(X))

    def predict_interval(self, X: Floats, coverage: float = 0.9) -> FusedTimes:  # noqa: N803
        """Durations with intervals that hold the true one with the given probability, for clusters of a model not seen before.

        Raises
        ------
        InputError
            The fit had one group only, so that nothing is known about other models.
        """
        if not len(self.scores_):
            raise InputError("intervals need measurements of at least two models; collect clusters of more models")
        features = _checked(X)
        us, distance = self.predict(features), self.domain_.distance(features)
        half = conformal_quantile(self.scores_, coverage) * widening(distance)
        refused = self.domain_.refuses(distance)
        origin = np.where(refused, Origin.REFUSED, np.where(distance > 1, Origin.EXTRAPOLATED, Origin.INTERPOLATED))
        values = [np.where(refused, np.nan, column) for column in (us, us * np.exp(-half), us * np.exp(half))]
        return FusedTimes(us=values[0], low_us=values[1], high_us=values[2], origin=origin.astype(np.int64))

    def _fitted(self, features: Floats, y: Floats) -> tuple[Floats, xgboost.Booster]:
        base = _fit_base(features, y)
        start = _base_us(base, features)
        data = xgboost.DMatrix(_tree_matrix(features), label=np.log(y / start))
        growing = ",".join(str(int(name in _GROWING)) for name in TREE_FEATURES)
        settings = {
            "max_depth": self.depth,
            "eta": self.learning_rate,
            "subsample": 0.7,
            "colsample_bytree": 0.4,
            "min_child_weight": 4,
            "lambda": 4.0,
            "objective": "reg:pseudohubererror",
            "huber_slope": 0.3,
            "base_score": 0.0,
            "tree_method": "hist",
            "monotone_constraints": f"({growing})",
            "seed": self.seed,
            "nthread": 1,
        }
        return base, xgboost.train(settings, data, num_boost_round=self.trees)


def widening(distance: Floats) -> Floats:
    """How much wider an interval is at a distance from what was measured, [n]."""
    return np.maximum(distance, 1.0)


def conformal_quantile(scores: Floats, coverage: float) -> float:
    """The least width that holds for `coverage` of the sorted scores, with the correction for their number."""
    rank = int(np.ceil((len(scores) + 1) * coverage)) - 1
    return float(scores[min(rank, len(scores) - 1)])


def _fit_base(features: Floats, y: Floats) -> Floats:
    """Non-negative coefficients that make the errors of the logarithm small, large errors counting linearly.

    A class of ops that was hardly measured leans to taking as long as unfused.
    """
    design = _base_design(features)
    usual = np.array([0.0, *(float(name in CLASS_US) for name in _BASE)])
    leaning = np.flatnonzero(usual)
    # Columns of like size: the solver is not indifferent to units.
    scale = np.where(usual > 0, 1.0, np.maximum((design / y[:, None]).max(axis=0), 1e-12))
    predicted, robust = y, np.ones(len(y))
    coefficients = usual
    for _ in range(_ROUNDS):
        # (p - y) / sqrt(p y) is 2 sinh(log(p / y) / 2): it punishes half as much as twice.
        weight = robust / np.sqrt(y * predicted)
        rows = np.vstack([design / scale * weight[:, None], _LEAN * np.eye(len(scale))[leaning]])
        coefficients, _ = nnls(rows, np.concatenate((y * weight, np.full(len(leaning), _LEAN))), maxiter=50 * len(scale))
        predicted = np.maximum(design / scale @ coefficients, _LEAST_US)
        robust = 1 / np.sqrt(np.maximum(np.abs(np.log(predicted / y)), _USUAL_ERROR))
    return np.asarray(coefficients / scale, dtype=np.float64)


def _base_design(features: Floats) -> Floats:
    return np.hstack([np.ones((len(features), 1)), features[:, _BASE_COLUMNS]])


def _base_us(base: Floats, features: Floats) -> Floats:
    return np.asarray(np.maximum(_base_design(features) @ base, _LEAST_US), dtype=np.float64)


def _tree_matrix(features: Floats) -> npt.NDArray[np.float32]:
    members = np.maximum(features[:, [_MEMBERS]], 0.1)
    matrix = np.empty((len(features), len(TREE_FEATURES)), np.float32)
    matrix[:, : len(FEATURES)] = np.log1p(features.astype(np.float32))
    matrix[:, len(FEATURES) :] = features[:, _US_COLUMNS] / members
    return matrix


def _predicted(base: Floats, booster: xgboost.Booster, features: Floats) -> Floats:
    start = _base_us(base, features)
    correction = booster.inplace_predict(_tree_matrix(features))
    return np.asarray(start * np.exp(correction), dtype=np.float64)


def _checked(X: Floats) -> Floats:  # noqa: N803
    features = np.asarray(X, dtype=np.float64)
    if features.ndim != 2 or features.shape[1] != len(FEATURES):
        raise InputError(f"features of shape {features.shape}, expected [n, {len(FEATURES)}] from feature_matrix()")
    if not (np.isfinite(features).all() and (features >= 0).all()):
        raise InputError("a feature is negative or not finite")
    return features
