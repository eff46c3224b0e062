"""How long an all-reduce takes that was not measured: the formula of its algorithm, corrected by what it missed, with an interval.

The formula (`costmodel/all_reduce_cost.py`) carries a prediction beyond the measured sizes, ranks and rates; what it is wrong by is
learned from the points around (`costmodel/communication_residual.py`). Intervals are split-conformal: their width comes from whole
sizes that a fit had not seen, and, for more ranks or other rates, also from how well the largest of these followed from the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, RegressorMixin

from dpro_search.collect.trace import Floats, Ints
from dpro_search.costmodel.all_reduce_cost import AllReduceCost
from dpro_search.costmodel.all_reduce_fit import fit_all_reduce
from dpro_search.costmodel.collectives import POINT_COLUMNS, Algorithm, Points
from dpro_search.costmodel.communication_residual import FASTEST, Residual
from dpro_search.costmodel.learned.regressor import Origin, conformal_quantile
from dpro_search.errors import InputError

_FEWEST, _MOST = 4, 1000  # points that a formula needs, and that its constants are fitted to
_ENOUGH, _ENOUGH_SIZES = 16, 5  # points, and sizes among them, from which on a residual is learned
_FOLDS = 5
_CARRIED = "ranks", "link_bytes_per_us"  # along these it is learned how well predictions carry
_LEAST_US = 1e-3
_REFUSED = 6.0  # octaves of time from the nearest measured point: nothing is predicted


@dataclass(frozen=True, kw_only=True)
class Range:
    """What was measured: the least and the largest of every column of `POINT_COLUMNS`, [5] each."""

    low: Floats
    high: Floats

    @staticmethod
    def of(points: Points) -> Range:
        """The range of measured points."""
        matrix = points.matrix()
        return Range(low=matrix.min(axis=0), high=matrix.max(axis=0))

    def nearest(self, points: Points) -> Points:
        """The points, each moved into the range."""
        return Points.of_matrix(np.clip(points.matrix(), self.low, self.high))


@dataclass(frozen=True, kw_only=True)
class AllReduceTimes:
    """Predicted durations of n all-reduces, us, with their intervals and origins."""

    us: Floats
    low_us: Floats
    high_us: Floats
    origin: Ints  # Origin


class AllReduceRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Duration of an all-reduce on one backend.

    Parameters
    ----------
    algorithms
        What the backend may be doing; the one whose formula fits best is taken.
    correct
        Whether to learn what the formula is wrong by; else the formula alone predicts.
    seed
        Of what is drawn of many points, and of what is left out together.
    meets
        Whether ranks met before each measured call, so that their links had rested.
    ranks_per_host
        Of all all-reduces that are measured, and predicted.

    Attributes
    ----------
    cost_ : AllReduceCost
    residual_ : Residual or None
        None where there were too few points to learn more than the formula's constants.
    range_ : Range
    scores_ : array [n], sorted
        Absolute errors of the logarithm, of each point predicted without its size; empty with points of one size only.
    carried_ : dict of arrays, sorted
        Absolute errors of the logarithm for each octave beyond the others, of the points with the most ranks or the highest rate
        predicted without them, by the name of the column; not of a column that has one value.
    left_out_ : array [n] or None
        Of each point, by a fit without its size: log(predicted / y).
    formula_left_out_ : array [n] or None
        Likewise, by the formula alone.
    """

    def __init__(
        self,
        *,
        algorithms: Sequence[Algorithm] = (Algorithm.RING,),
        correct: bool = True,
        seed: int = 0,
        meets: bool = False,
        ranks_per_host: int = 1,
    ) -> None:
        self.algorithms = algorithms
        self.correct = correct
        self.seed = seed
        self.meets = meets
        self.ranks_per_host = ranks_per_host

    def fit(
        self,
        X: Floats,  # noqa: N803
        y: Floats,
        groups: npt.NDArray[Any] | None = None,
        busy_us: Floats | None = None,
    ) -> AllReduceRegressor:
        """Fit on n measured all-reduces.

        Parameters
        ----------
        X
            `Points.matrix` of them, [n, 5].
        y
            Their durations, us, [n].
        groups
            What is left out together to learn how wrong predictions are, [n]; None: all points of a size, or single points where
            there are hardly any sizes.
        busy_us
            How long the busiest core was used in each, [n], NaN where that was not measured; None: nowhere.

        Raises
        ------
        InputError
            There are too few points, or impossible ones.
        """
        points, y = Points.of_matrix(X), np.asarray(y, dtype=np.float64)
        busy = np.full(len(y), np.nan) if busy_us is None else np.asarray(busy_us, dtype=np.float64)
        self.cost_, self.residual_ = self._fitted(points, y, busy)
        self.range_ = Range.of(points)
        self.left_out_ = self.formula_left_out_ = None
        self.scores_ = np.zeros(0)
        self.carried_: dict[str, Floats] = {}
        groups = default_groups(points) if groups is None else groups
        if len(np.unique(groups)) > 1 and len(y) > _FEWEST:
            self.formula_left_out_, self.left_out_ = self._left_out(points, y, busy, groups)
            self.scores_ = np.sort(np.abs(self.left_out_[np.isfinite(self.left_out_)]))
            self.carried_ = self._carried(points, y, busy)
        return self

    def predict(self, X: Floats) -> Floats:  # noqa: N803
        """Durations, us, [n]; also of all-reduces outside what was measured."""
        return corrected_us(self.cost_, self.residual_, Points.of_matrix(X))

    def predict_interval(self, X: Floats, coverage: float = 0.9) -> AllReduceTimes:  # noqa: N803
        """Durations with intervals that hold the true one with the given probability.

        Raises
        ------
        InputError
            All points of the fit had one size, so that nothing is known about others.
        """
        if not len(self.scores_):
            raise InputError("intervals need measurements of at least two sizes of tensors")
        points = Points.of_matrix(X)
        distance = self._distance(points)
        us = corrected_us(self.cost_, self.residual_, points)
        near = conformal_quantile(self.scores_, coverage) * (1 + distance)
        half = np.maximum(near, self._carried_too_far(points, distance, coverage))
        refused = distance > _REFUSED
        origin = np.where(refused, Origin.REFUSED, np.where(distance > 0, Origin.EXTRAPOLATED, Origin.INTERPOLATED))
        values = [np.where(refused, np.nan, column) for column in (us, us * np.exp(-half), us * np.exp(half))]
        return AllReduceTimes(us=values[0], low_us=values[1], high_us=values[2], origin=origin.astype(np.int64))

    def _distance(self, points: Points) -> Floats:
        """How far the formula has to carry: octaves between a point's time and that of the nearest measured one, [n]."""
        inside = self.range_.nearest(points)
        here, there = (np.maximum(self.cost_.predict(each), _LEAST_US) for each in (points, inside))
        outside = (points.matrix() != inside.matrix()).any(axis=1)
        return np.where(outside, np.maximum(np.abs(np.log2(here / there)), 1e-6), 0.0)

    def _carried_too_far(self, points: Points, distance: Floats, coverage: float) -> Floats:
        """How wrong the logarithm may be beyond the measured ranks, rates, servers and cores; 0 inside, [n].

        For each octave as much as was learned. Where nothing was, for one value of a column was measured, all that the formula adds
        is uncertain.
        """
        inside = self.range_.nearest(points)
        found = np.zeros(len(points))
        for name in POINT_COLUMNS[1:]:  # the distance is enough for sizes
            octaves = np.abs(_octaves(getattr(points, name)) - _octaves(getattr(inside, name)))
            scores = self.carried_.get(name)
            if scores is None:
                found += np.where(octaves > 0, distance * np.log(2), 0.0)
            else:
                found += octaves * conformal_quantile(scores, coverage)
        return found

    def _fitted(self, points: Points, y: Floats, busy: Floats) -> tuple[AllReduceCost, Residual | None]:
        few = np.random.default_rng(self.seed).permutation(len(y))[:_MOST]
        cost = fit_all_reduce(
            self.algorithms, points.select(few), y[few], busy[few], meets=self.meets, ranks_per_host=self.ranks_per_host
        )
        taken = points.ranks > 1  # one rank takes no time
        if not self.correct or taken.sum() < _ENOUGH or len(np.unique(points.size_bytes[taken])) < _ENOUGH_SIZES:
            return cost, None
        taken_points = points.select(taken)
        return cost, Residual.learned(taken_points, np.log(y[taken] / np.maximum(cost.predict(taken_points), _LEAST_US)), self.seed)

    def _left_out(self, points: Points, y: Floats, busy: Floats, groups: npt.NDArray[Any]) -> tuple[Floats, Floats]:
        """log(predicted / y) of every point by a fit without its group: the formula's, and that of all, [n] each."""
        formula, found = np.full(len(y), np.nan), np.full(len(y), np.nan)
        for out in folds(groups, self.seed):
            if (~out).sum() < _FEWEST:
                continue
            cost, residual = self._fitted(points.select(~out), y[~out], busy[~out])
            held = points.select(out)
            formula[out] = np.log(cost.predict(held) / y[out])
            found[out] = np.log(corrected_us(cost, residual, held) / y[out])
        return formula, found

    def _carried(self, points: Points, y: Floats, busy: Floats) -> dict[str, Floats]:
        """How wrong predictions are for each octave beyond the measured ranks and rates: of the largest from the others."""
        found: dict[str, Floats] = {}
        for name in _CARRIED:
            column = _octaves(getattr(points, name))
            *_, second, largest = (-np.inf, -np.inf, *np.unique(column[points.ranks > 1]))
            out = (column == largest) & (points.ranks > 1)
            kept = ~out
            if not np.isfinite(second) or (kept & (points.ranks > 1)).sum() < _FEWEST:
                continue
            cost, residual = self._fitted(points.select(kept), y[kept], busy[kept])
            errors = np.log(corrected_us(cost, residual, points.select(out)) / y[out])
            found[name] = np.sort(np.abs(errors)) / (largest - second)
        return found


def _octaves(column: Floats) -> Floats:
    """The logarithm to base 2 of a column of points, without sizes."""
    found: Floats = np.log2(np.where(np.isinf(column), FASTEST, column))
    return found


def corrected_us(cost: AllReduceCost, residual: Residual | None, points: Points) -> Floats:
    """The formula's times, corrected by what was learned of its errors, [points]."""
    us = cost.predict(points)
    return us if residual is None else us * np.exp(residual.predict(points))


def default_groups(points: Points) -> npt.NDArray[Any]:
    """The size of each point, [n]; its own number where there are fewer than five sizes."""
    if len(np.unique(points.size_bytes)) >= _FOLDS:
        return points.size_bytes
    return np.arange(len(points))


def folds(groups: npt.NDArray[Any], seed: int) -> list[npt.NDArray[np.bool_]]:
    """Which points are left out together, fold by fold: whole groups, drawn at random."""
    names, row = np.unique(groups, return_inverse=True)
    count = min(_FOLDS, len(names))
    fold = np.random.default_rng(seed).permutation(np.arange(len(names)) % count)
    return [fold[row] == number for number in range(count)]
