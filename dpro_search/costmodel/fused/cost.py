"""How long a cluster takes as one fused op: the sum of what its parts take, with an interval.

The parts are the kernels that XLA makes of the cluster, and the call (`kernels`); where shapes are not known, the ops of each kind.
What each takes is a base, which carries a prediction beyond the measured sizes, times boosted trees (`additive`). Intervals are
split-conformal by groups (Vovk et al. 2005; Barber et al. 2021): the residuals are those of whole models that a fit had not seen,
for a new model is what a prediction is made for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, RegressorMixin

from dpro_search.collect.trace import Floats
from dpro_search.costmodel.fused.additive import AdditiveModel, TreeSettings
from dpro_search.costmodel.fused.domain import Domain
from dpro_search.costmodel.fused.features import ClusterFeatures, feature_names
from dpro_search.costmodel.fused.parts import NAMES_OF, growing, parts_of, usual_us
from dpro_search.costmodel.intervals import Durations, conformal_quantile
from dpro_search.errors import InputError

_FEWEST = 20  # clusters


class FusedTimeRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Duration of a fused cluster.

    Parameters
    ----------
    sees
        "shapes": X is from `shaped_features`; "times": from `timed_features`.
    trees, depth, learning_rate
        Of the boosted trees.
    seed
        Of their random subsamples.

    Attributes
    ----------
    model_ : AdditiveModel
    scores_ : array [n], sorted
        Absolute errors of the logarithm over `widening`, of each row predicted without its group; empty with one group only.
    left_out_ : (array [n], array [n]) or None
        Of each row, by a fit without its group: log(predicted / y), and the distance from that fit's domain.
    domain_ : Domain
    """

    def __init__(
        self, *, sees: str = "shapes", trees: int = 80, depth: int = 4, learning_rate: float = 0.06, seed: int = 0
    ) -> None:
        self.sees = sees
        self.trees = trees
        self.depth = depth
        self.learning_rate = learning_rate
        self.seed = seed

    def fit(self, X: ClusterFeatures, y: Floats, groups: npt.NDArray[Any] | None = None) -> FusedTimeRegressor:  # noqa: N803
        """Fit on n clusters.

        Parameters
        ----------
        y
            Their durations, us, [n].
        groups
            The model that each comes from, [n]; None: all from one, and there is no interval.

        Raises
        ------
        InputError
            There are fewer than 20 rows, or X has other columns than this estimator's.
        """
        self._check(X)
        if len(X) < _FEWEST:
            raise InputError(f"{len(X)} measured clusters are too few to learn from; collect at least {_FEWEST}, better 3,000")
        groups = np.zeros(len(y)) if groups is None else np.asarray(groups)
        self.model_ = self._fitted(X, y)
        self.domain_ = Domain.fit(X.whole, self.seed)
        self.left_out_ = self._left_out(X, y, groups) if len(np.unique(groups)) > 1 else None
        self.scores_ = np.zeros(0)
        if self.left_out_ is not None:
            self.scores_ = np.sort(np.abs(self.left_out_[0]) / widening(self.left_out_[1]))
        return self

    def predict(self, X: ClusterFeatures) -> Floats:  # noqa: N803
        """Durations, us, [n]; also of clusters outside the domain."""
        self._check(X)
        return self.model_.predict(parts_of(self.sees, X.parts, X.of), len(X))

    def predict_interval(self, X: ClusterFeatures, coverage: float = 0.9) -> Durations:  # noqa: N803
        """Durations with intervals that hold the true one with the given probability, for clusters of a model not seen before.

        Raises
        ------
        InputError
            The fit had one group only, so that nothing is known about other models.
        """
        if not len(self.scores_):
            raise InputError("intervals need measurements of at least two models; collect clusters of more models")
        us, distance = self.predict(X), self.domain_.distance(X.whole)
        half = conformal_quantile(self.scores_, coverage) * widening(distance)
        return Durations.of(us, half, outside=distance > 1, refused=self.domain_.refuses(distance))

    def _fitted(self, X: ClusterFeatures, y: Floats) -> AdditiveModel:  # noqa: N803
        settings = TreeSettings(
            trees=self.trees, depth=self.depth, learning_rate=self.learning_rate, seed=self.seed, growing=growing(self.sees)
        )
        return AdditiveModel.fit(parts_of(self.sees, X.parts, X.of), y, usual_us(self.sees), settings)

    def _left_out(self, X: ClusterFeatures, y: Floats, groups: npt.NDArray[Any]) -> tuple[Floats, Floats]:  # noqa: N803
        """Of every row, by a fit without its group: log(predicted / y), and the distance from the fit's domain, [n] each."""
        errors, distance = np.zeros(len(y)), np.zeros(len(y))
        for group in np.unique(groups):
            out = groups == group
            mine = X[out]
            model = self._fitted(X[~out], y[~out])
            errors[out] = np.log(model.predict(parts_of(self.sees, mine.parts, mine.of), len(mine)) / y[out])
            distance[out] = Domain.fit(X[~out].whole, self.seed).distance(mine.whole)
        return errors, distance

    def _check(self, X: ClusterFeatures) -> None:  # noqa: N803
        names = feature_names(self.sees), NAMES_OF[self.sees]
        if (X.whole.shape[1], X.parts.shape[1]) != tuple(map(len, names)):
            source = "shaped_features" if self.sees == "shapes" else "timed_features"
            raise InputError(f"X has {X.whole.shape[1]} and {X.parts.shape[1]} columns, expected those of {source}()")
        if not all(np.isfinite(values).all() and (values >= 0).all() for values in (X.whole, X.parts)):
            raise InputError("a feature is negative or not finite")


def widening(distance: Floats) -> Floats:
    """How much wider an interval is at a distance from what was measured, [n]."""
    return np.maximum(distance, 1.0)
