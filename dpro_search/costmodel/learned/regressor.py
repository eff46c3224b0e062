"""How long a cluster takes as one fused op: an ensemble of two experts, with an interval.

An expert is a non-negative linear base, which carries a prediction beyond the measured sizes, and boosted trees, which learn the
logarithm of what the base is wrong by. The base of one adds up what each class of ops costs per microsecond unfused, per byte and
per floating-point operation; the other's is little more than the sum of the members, and its trees learn the ratio of fused to
unfused time. How much each counts is chosen by grouped cross-validation. Intervals are split-conformal by groups (Vovk et al. 2005;
Barber et al. 2021): the residuals are those of whole models that a fit, and its choice of weights, had not seen, for a new model is
what a prediction is asked for.
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
from dpro_search.costmodel.learned.features import CLASS_FLOPS, CLASS_US, FEATURES, KIND_US, STREAMED_BYTES, TIMED_FEATURES
from dpro_search.errors import InputError

_FEATURES = {"shapes": FEATURES, "times": TIMED_FEATURES}
_CALL = ("ops", "inputs", "outputs", "in_bytes", "out_bytes", "variable_bytes")
_BASES = {  # of the experts, by what they see
    "shapes": ((*_CALL, *CLASS_US, *STREAMED_BYTES, *CLASS_FLOPS), (*_CALL, "members_us")),
    "times": (("ops", "inputs", "outputs", *KIND_US), ("ops", "inputs", "outputs", "members_us")),
}
EXPERTS = 2
# More of these at the same unfused time is more work for the compiled cluster too.
_GROWING = ("flops", "in_bytes", "out_bytes", "variable_bytes")
# Of the sum of some features over the members' time, by what the trees see: whether more of it is more work for the cluster.
_RATIOS: dict[str, dict[tuple[str, ...], int]] = {
    "shapes": {("flops",): 1, ("in_bytes", "out_bytes", "variable_bytes"): 1, ("ops",): 0},
    "times": {("ops",): 0},
}
_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the first expert
_FOLDS = 3
_BINS = 64  # of a feature; more take longer and are no better
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
    sees
        "shapes": the columns of X are `FEATURES`; "times": they are `TIMED_FEATURES`.
    trees, depth, learning_rate
        Of the boosted trees.
    seed
        Of their random subsamples.

    Attributes
    ----------
    bases_ : arrays [1 + terms], us per unit, one for each expert
    boosters_ : xgboost.Booster, one for each expert
    weight_ : float
        Of the first expert in the mean of the logarithms.
    scores_ : array [n], sorted
        Absolute errors of the logarithm over `widening`, of each row predicted without its group; empty with one group only.
    left_out_ : (array [n], array [n]) or None
        Of each row, by a fit without its group: log(predicted / y), and the distance from that fit's domain.
    domain_ : Domain
    """

    def __init__(
        self, *, sees: str = "shapes", trees: int = 150, depth: int = 4, learning_rate: float = 0.06, seed: int = 0
    ) -> None:
        self.sees = sees
        self.trees = trees
        self.depth = depth
        self.learning_rate = learning_rate
        self.seed = seed

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the columns of X."""
        return _FEATURES[self.sees]

    def fit(self, X: Floats, y: Floats, groups: npt.NDArray[Any] | None = None) -> FusedTimeRegressor:  # noqa: N803
        """Fit on n clusters.

        Parameters
        ----------
        X
            `feature_matrix` (or `timed_matrix`) of them, [n, len(self.features)].
        y
            Their durations, us, [n].
        groups
            The model that each comes from, [n]; None: all from one, and there is no interval.

        Raises
        ------
        InputError
            There are fewer than 20 rows, or the columns are not the features.
        """
        features = self._checked(X)
        if len(features) < 20:
            raise InputError(f"{len(features)} measured clusters are too few to learn from; collect at least 20, better 3,000")
        groups = np.zeros(len(y)) if groups is None else np.asarray(groups)
        experts = self._experts(features, y)
        self.bases_, self.boosters_ = [base for base, _ in experts], [booster for _, booster in experts]
        self.weight_ = self._chosen_weight(features, y, groups)
        self.domain_ = Domain.fit(features, self.seed)
        self.left_out_ = self._left_out(features, y, groups) if len(np.unique(groups)) > 1 else None
        self.scores_ = np.zeros(0)
        if self.left_out_ is not None:
            self.scores_ = np.sort(np.abs(self.left_out_[0]) / widening(self.left_out_[1]))
        return self

    def predict(self, X: Floats) -> Floats:  # noqa: N803
        """Durations, us, [n]; also of clusters outside the domain."""
        features = self._checked(X)
        matrix = self._tree_matrix(features)
        logs = np.zeros(len(features))
        for i, weight in enumerate((self.weight_, 1 - self.weight_)):
            if weight > 0:
                logs += weight * self._log(i, (self.bases_[i], self.boosters_[i]), features, matrix)
        return np.asarray(np.exp(logs), dtype=np.float64)

    def predict_interval(self, X: Floats, coverage: float = 0.9) -> FusedTimes:  # noqa: N803
        """Durations with intervals that hold the true one with the given probability, for clusters of a model not seen before.

        Raises
        ------
        InputError
            The fit had one group only, so that nothing is known about other models.
        """
        if not len(self.scores_):
            raise InputError("intervals need measurements of at least two models; collect clusters of more models")
        features = self._checked(X)
        us, distance = self.predict(features), self.domain_.distance(features)
        half = conformal_quantile(self.scores_, coverage) * widening(distance)
        refused = self.domain_.refuses(distance)
        origin = np.where(refused, Origin.REFUSED, np.where(distance > 1, Origin.EXTRAPOLATED, Origin.INTERPOLATED))
        values = [np.where(refused, np.nan, column) for column in (us, us * np.exp(-half), us * np.exp(half))]
        return FusedTimes(us=values[0], low_us=values[1], high_us=values[2], origin=origin.astype(np.int64))

    def _left_out(self, X: Floats, y: Floats, groups: npt.NDArray[Any]) -> tuple[Floats, Floats]:  # noqa: N803
        """Of every row, by a fit without its group: log(predicted / y), and the distance from the fit's domain, [n] each."""
        errors, distance = np.zeros(len(y)), np.zeros(len(y))
        for group in np.unique(groups):
            out = groups == group
            weight = self._chosen_weight(X[~out], y[~out], groups[~out])
            logs = self._logs(self._experts(X[~out], y[~out]), X[out])
            errors[out] = _mixed(logs, weight) - np.log(y[out])
            distance[out] = Domain.fit(X[~out], self.seed).distance(X[out])
        return errors, distance

    def _chosen_weight(self, X: Floats, y: Floats, groups: npt.NDArray[Any]) -> float:  # noqa: N803
        """The weight of the first expert whose errors on left-out groups are the least; equal weights with one group only."""
        names, counts = np.unique(groups, return_counts=True)
        if len(names) < 2:
            return 0.5
        fold_of = dict(zip(names[np.argsort(-counts, kind="stable")].tolist(), np.arange(len(names)) % _FOLDS, strict=True))
        fold = np.array([fold_of[group] for group in groups.tolist()])
        logs = np.zeros((len(y), EXPERTS))
        for number in np.unique(fold):
            out = fold == number
            logs[out] = self._logs(self._experts(X[~out], y[~out]), X[out])
        truth = np.log(y)
        return min(_WEIGHTS, key=lambda weight: (float(np.abs(_mixed(logs, weight) - truth).mean()), abs(weight - 0.5)))

    def _experts(self, features: Floats, y: Floats) -> list[tuple[Floats, xgboost.Booster]]:
        return [self._expert(features, y, names) for names in _BASES[self.sees]]

    def _expert(self, features: Floats, y: Floats, names: tuple[str, ...]) -> tuple[Floats, xgboost.Booster]:
        terms = features[:, self._columns(names)]
        base = _fit_base(terms, y, np.array([name.endswith("_us") for name in names]))
        start = _base_us(base, terms)
        data = xgboost.DMatrix(self._tree_matrix(features), label=np.log(y / start))
        growing = [int(name in _GROWING) for name in self.features] + [0] * len(KIND_US) + list(_RATIOS[self.sees].values())
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
            "max_bin": _BINS,
            "monotone_constraints": f"({','.join(map(str, growing))})",
            "seed": self.seed,
            "nthread": 1,
        }
        return base, xgboost.train(settings, data, num_boost_round=self.trees)

    def _logs(self, experts: list[tuple[Floats, xgboost.Booster]], features: Floats) -> Floats:
        """Logarithm of the durations that each expert predicts, [n, EXPERTS]."""
        matrix = self._tree_matrix(features)
        return np.stack([self._log(i, expert, features, matrix) for i, expert in enumerate(experts)], axis=1)

    def _log(
        self, number: int, expert: tuple[Floats, xgboost.Booster], features: Floats, matrix: npt.NDArray[np.float32]
    ) -> Floats:
        """Of one expert, [n]."""
        base, booster = expert
        start = _base_us(base, features[:, self._columns(_BASES[self.sees][number])])
        return np.asarray(np.log(start) + booster.inplace_predict(matrix), dtype=np.float64)

    def _columns(self, names: tuple[str, ...]) -> list[int]:
        return [self.features.index(name) for name in names]

    def _tree_matrix(self, features: Floats) -> npt.NDArray[np.float32]:
        """Logarithms of the features, the share of each kind in the members' time, and logarithms of ratios."""
        members = np.maximum(features[:, [self.features.index("members_us")]], 0.1)
        shares = features[:, self._columns(KIND_US)] / members
        ratios = [features[:, self._columns(names)].sum(axis=1, keepdims=True) / members for names in _RATIOS[self.sees]]
        return np.hstack([np.log1p(features), shares, *map(np.log1p, ratios)]).astype(np.float32)

    def _checked(self, X: Floats) -> Floats:  # noqa: N803
        features = np.asarray(X, dtype=np.float64)
        if features.ndim != 2 or features.shape[1] != len(self.features):
            source = "feature_matrix" if self.sees == "shapes" else "timed_matrix"
            raise InputError(f"features of shape {features.shape}, expected [n, {len(self.features)}] from {source}()")
        if not (np.isfinite(features).all() and (features >= 0).all()):
            raise InputError("a feature is negative or not finite")
        return features


def base_terms(sees: str) -> tuple[int, ...]:
    """Number of coefficients of each expert's base."""
    return tuple(1 + len(names) for names in _BASES[sees])


def tree_features(sees: str) -> int:
    """Number of columns that the trees see."""
    return len(_FEATURES[sees]) + len(KIND_US) + len(_RATIOS[sees])


def widening(distance: Floats) -> Floats:
    """How much wider an interval is at a distance from what was measured, [n]."""
    return np.maximum(distance, 1.0)


def conformal_quantile(scores: Floats, coverage: float) -> float:
    """The least width that holds for `coverage` of the sorted scores, with the correction for their number."""
    rank = int(np.ceil((len(scores) + 1) * coverage)) - 1
    return float(scores[min(rank, len(scores) - 1)])


def _mixed(logs: Floats, weight: float) -> Floats:
    return np.asarray(weight * logs[:, 0] + (1 - weight) * logs[:, 1], dtype=np.float64)


def _fit_base(terms: Floats, y: Floats, is_time: npt.NDArray[np.bool_]) -> Floats:
    """Non-negative coefficients that make the errors of the logarithm small, large errors counting linearly.

    Where hardly any time was measured, a time (`is_time`, [terms]) leans to counting as it is: as long fused as unfused.
    """
    design = _base_design(terms)
    usual = np.array([0.0, *is_time.astype(float)])
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


def _base_design(terms: Floats) -> Floats:
    return np.hstack([np.ones((len(terms), 1)), terms])


def _base_us(base: Floats, terms: Floats) -> Floats:
    return np.asarray(np.maximum(_base_design(terms) @ base, _LEAST_US), dtype=np.float64)
