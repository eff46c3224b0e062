"""Duration of an all-reduce on CPU hosts that was not measured: its formula, corrected by a learned residual, with an interval.

The formula (`all_reduce_formula`) carries a prediction beyond the measured sizes, ranks and rates. Its error is learned from the
points around (`residual`) over size, ranks, rate and servers: protocols that change with the size, libraries that cut
tensors, cores that ranks share all shift the time of neighbouring sizes alike, and of neighbouring ranks, rates and servers more or
less. How far points correlate along each axis, and how much of the error is chance, are learned with it (the likelihood's maximum).
Between measured points the process runs smoothly; away from them it goes to zero, so that the formula alone carries there.

Intervals are split-conformal: their width comes from whole sizes that a fit had not seen, and, for more ranks or other rates, also
from how well the largest of these followed from the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.spatial.distance import cdist

from dpro_search.collect.trace import Floats
from dpro_search.costmodel.collectives.all_reduce_formula import FEWEST_POINTS, AllReduceCost, fit_all_reduce
from dpro_search.costmodel.collectives.counts import POINT_COLUMNS, Algorithm, Points
from dpro_search.costmodel.intervals import Durations, conformal_quantile
from dpro_search.costmodel.residual import Residual
from dpro_search.errors import InputError

Mask = npt.NDArray[np.bool_]

_MOST_FOR_FORMULA, _MOST_FOR_RESIDUAL = 1000, 500  # points; of more, some are drawn at random
_ENOUGH, _ENOUGH_SIZES = 16, 5  # points, and sizes among them, from which on a residual is learned
_FOLDS = 5
_EXTRAPOLATED_COLUMNS = "ranks", "link_bytes_per_us"  # along these it is learned how well predictions carry
_LEAST_US = 1e-3
_REFUSED = 6.0  # octaves of time from the nearest measured point: nothing is predicted
_FASTEST_BYTES_PER_US = 2.0**20  # a link without a limit counts as this fast
# Bounds of the residual's variance, of its reach along each input in octaves, and of the variance of its noise.
_VARIANCE_BOUNDS, _REACH_BOUNDS, _NOISE_BOUNDS = (1e-4, 1.0), ((0.5, 20.0),) * 4, (1e-6, 0.1)
_JITTER = 1e-10  # variance that scikit-learn adds to the noise when it fits
_LARGEST = 64.0  # of any input of the residual, an octave of size, ranks, rate or servers; and of any value


@dataclass(frozen=True, kw_only=True)
class CollectiveCost:
    """Duration of an all-reduce on one backend: a formula, a learned residual, and the errors that give intervals."""

    formula: AllReduceCost
    residual: FormulaErrors | None  # None: there were too few points to learn more than the formula's constants.
    # low, high: Least and largest measured value of every column of `POINT_COLUMNS`, [5] each.
    low: Floats
    high: Floats
    # Absolute errors of the logarithm of each point predicted without its size, [n], sorted; empty with points of one size only.
    scores: Floats = field(default_factory=lambda: np.zeros(0))
    # Absolute errors of the logarithm for each octave beyond the others, of the points with the most ranks or the highest rate
    # predicted without them, sorted, by the name of the column; a column that has one value is missing.
    carried: Mapping[str, Floats] = field(default_factory=dict)
    # log(predicted / measured) of each point by a fit without its size, [n], and the same by the formula alone; None: not known.
    left_out: Floats | None = None
    formula_left_out: Floats | None = None

    def predict(self, points: Points) -> Floats:
        """Durations, us, [points]; also of all-reduces outside what was measured."""
        us = self.formula.predict(points)
        return us if self.residual is None else us * np.exp(self.residual.predict(points))

    def predict_interval(self, points: Points, coverage: float = 0.9) -> Durations:
        """Durations with intervals that hold the true one with the given probability.

        Raises
        ------
        InputError
            All points of the fit had one size, so that nothing is known about others.
        """
        if not len(self.scores):
            raise InputError("intervals need measurements of at least two sizes of tensors")
        distance = self._distance(points)
        near = conformal_quantile(self.scores, coverage) * (1 + distance)
        half = np.maximum(near, self._extrapolation_error(points, distance, coverage))
        return Durations.of(self.predict(points), half, outside=distance > 0, refused=distance > _REFUSED)

    def _nearest(self, points: Points) -> Points:
        """The points, each moved into the measured range."""
        return Points(**dict(zip(POINT_COLUMNS, np.clip(points.matrix(), self.low, self.high).T, strict=True)))

    def _distance(self, points: Points) -> Floats:
        """How far the formula has to carry: octaves between a point's time and that of the nearest measured one, [points]."""
        inside = self._nearest(points)
        time_us, inside_us = (np.maximum(self.formula.predict(some), _LEAST_US) for some in (points, inside))
        outside = (points.matrix() != inside.matrix()).any(axis=1)
        return np.where(outside, np.maximum(np.abs(np.log2(time_us / inside_us)), 1e-6), 0.0)

    def _extrapolation_error(self, points: Points, distance: Floats, coverage: float) -> Floats:
        """How wrong the logarithm may be beyond the measured ranks, rates, servers and cores; 0 inside, [points].

        For each octave as much as was learned. Where nothing was, because one value of a column was measured, all that the formula
        adds is uncertain.
        """
        inside = self._nearest(points)
        error = np.zeros(len(points))
        for name in POINT_COLUMNS[1:]:  # the distance is enough for sizes
            octaves = np.abs(_octaves(getattr(points, name)) - _octaves(getattr(inside, name)))
            scores = self.carried.get(name)
            if scores is None:
                error += np.where(octaves > 0, distance * np.log(2), 0.0)
            else:
                error += octaves * conformal_quantile(scores, coverage)
        return error


class FormulaErrors(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Errors of the formula at n measured all-reduces, as a file has them, with the constants of their covariance."""

    inputs: tuple[tuple[float, float, float, float], ...]  # Octaves of size, ranks, rate and servers of each point, [n][4].
    values: tuple[float, ...]  # log(measured / formula), [n].
    constants: tuple[float, ...]  # Constants of the covariance, as logarithms: variance, reach along each input, noise.

    @staticmethod
    def fit(points: Points, values: Floats, seed: int = 0) -> FormulaErrors:
        """Learn from n points and their log(measured / formula), [n]; of many points some are drawn at random."""
        # Only fits need scikit-learn, which takes a second to import.
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

        few = np.random.default_rng(seed).permutation(len(values))[:_MOST_FOR_RESIDUAL]
        inputs, values = np.round(_residual_inputs(points.select(few)), 9), np.round(values[few], 6)
        reach = Matern(length_scale=(2.0,) * 4, length_scale_bounds=_REACH_BOUNDS, nu=1.5)
        kernel = ConstantKernel(0.05, _VARIANCE_BOUNDS) * reach + WhiteKernel(1e-3, _NOISE_BOUNDS)
        process = GaussianProcessRegressor(kernel=kernel, random_state=seed)
        with warnings.catch_warnings():
            # A length scale at its bound means that an axis has no influence, or all of it.
            warnings.simplefilter("ignore", ConvergenceWarning)
            process.fit(inputs, values)
        return FormulaErrors(
            inputs=tuple((size, ranks, rate, servers) for size, ranks, rate, servers in inputs.tolist()),
            values=tuple(values.tolist()),
            constants=tuple(process.kernel_.theta.tolist()),
        )

    @property
    def problem(self) -> str:
        """The reason why no fit gives these numbers; empty: one may."""
        inputs, constants = np.array(self.inputs), np.array(self.constants)
        low, high = np.log((_VARIANCE_BOUNDS, *_REACH_BOUNDS, _NOISE_BOUNDS)).T
        possible = inputs.ndim == 2 and 0 < len(inputs) == len(self.values) <= _MOST_FOR_RESIDUAL
        if not possible or not (np.abs(inputs) <= _LARGEST).all():
            return "points of a residual are missing or impossible"
        if not (np.abs(self.values) <= _LARGEST).all():
            return "errors of a residual are impossible"
        if constants.shape != low.shape or not ((constants >= low - 1e-6) & (constants <= high + 1e-6)).all():
            return "constants of a residual are missing or impossible"
        try:
            _ = self._residual.weights
        except np.linalg.LinAlgError as error:
            return f"points of a residual that contradict each other ({error})"
        return ""

    @cached_property
    def _residual(self) -> Residual[Floats]:
        noise = float(np.exp(self.constants[-1])) + _JITTER
        return Residual(covariance=self._covariance, points=np.array(self.inputs), errors=np.array(self.values), noise=noise)

    def _covariance(self, left: Floats, right: Floats) -> Floats:
        """Matern covariance of degree 3/2 between the errors at inputs, [left, right]."""
        variance, *reach = np.exp(self.constants[:-1])
        distance = np.sqrt(3.0) * cdist(left / reach, right / reach)
        return np.asarray(variance * (1.0 + distance) * np.exp(-distance), dtype=np.float64)

    def predict(self, points: Points) -> Floats:
        """Expected log(time / formula), [points]."""
        return self._residual.expected(_residual_inputs(points)) if len(points) else np.zeros(0)


def fit_collective_cost(
    points: Points,
    duration_us: Floats,
    *,
    algorithms: Sequence[Algorithm] = (Algorithm.RING,),
    busy_us: Floats | None = None,
    groups: npt.NDArray[Any] | None = None,
    correct: bool = True,
    meets: bool = False,
    ranks_per_host: int = 1,
    seed: int = 0,
) -> CollectiveCost:
    """Fit the cost of all-reduces on one backend to n measured ones.

    Parameters
    ----------
    duration_us
        Their durations, [n].
    algorithms
        The algorithms that the backend may use; the one whose formula fits best is taken.
    busy_us
        Time for which the busiest core was used in each, [n], NaN where that was not measured; None: nowhere.
    groups
        Points with one label are left out together to learn how wrong predictions are, [n]; None: all points of a size, or single
        points where there are hardly any sizes.
    correct
        Whether to learn the formula's errors; else the formula alone predicts.
    meets
        Whether ranks met before each measured call, so that their links had rested.
    ranks_per_host
        Ranks on each host, in all measured and predicted all-reduces.
    seed
        Seed of the points that are drawn of many, and of those that are left out together.

    Raises
    ------
    InputError
        There are too few points, or impossible ones.
    """
    duration_us = np.asarray(duration_us, dtype=np.float64)
    core_us = np.full(len(duration_us), np.nan) if busy_us is None else np.asarray(busy_us, dtype=np.float64)

    def fit(kept: Mask) -> CollectiveCost:
        """Fit the formula and its residual to some of the points, without errors on others."""
        some, us = points.select(kept), duration_us[kept]
        few = np.random.default_rng(seed).permutation(len(us))[:_MOST_FOR_FORMULA]
        formula = fit_all_reduce(
            algorithms, some.select(few), us[few], core_us[kept][few], meets=meets, ranks_per_host=ranks_per_host
        )
        matrix, residual = some.matrix(), None
        several = some.ranks > 1  # one rank takes no time
        if correct and several.sum() >= _ENOUGH and len(np.unique(some.size_bytes[several])) >= _ENOUGH_SIZES:
            learned = some.select(several)
            log_ratio = np.log(us[several] / np.maximum(formula.predict(learned), _LEAST_US))
            residual = FormulaErrors.fit(learned, log_ratio, seed)
        return CollectiveCost(formula=formula, residual=residual, low=matrix.min(axis=0), high=matrix.max(axis=0))

    cost = fit(np.ones(len(duration_us), dtype=np.bool_))
    groups = default_groups(points) if groups is None else groups
    if len(np.unique(groups)) < 2 or len(duration_us) <= FEWEST_POINTS:
        return cost
    formula_errors, errors = np.full(len(duration_us), np.nan), np.full(len(duration_us), np.nan)
    for out in folds(groups, seed):
        if (~out).sum() >= FEWEST_POINTS:
            others, held = fit(~out), points.select(out)
            formula_errors[out] = np.log(others.formula.predict(held) / duration_us[out])
            errors[out] = np.log(others.predict(held) / duration_us[out])
    return CollectiveCost(
        formula=cost.formula,
        residual=cost.residual,
        low=cost.low,
        high=cost.high,
        scores=np.sort(np.abs(errors[np.isfinite(errors)])),
        carried=_extrapolation_scores(fit, points, duration_us),
        left_out=errors,
        formula_left_out=formula_errors,
    )


def _extrapolation_scores(fit: Callable[[Mask], CollectiveCost], points: Points, duration_us: Floats) -> dict[str, Floats]:
    """Absolute errors for each octave of ranks and rate, of the points with the largest value predicted from the others."""
    several = points.ranks > 1
    scores: dict[str, Floats] = {}
    for name in _EXTRAPOLATED_COLUMNS:
        column = _octaves(getattr(points, name))
        *_, second, largest = (-np.inf, -np.inf, *np.unique(column[several]))
        out = (column == largest) & several
        if np.isfinite(second) and (~out & several).sum() >= FEWEST_POINTS:
            errors = np.log(fit(~out).predict(points.select(out)) / duration_us[out])
            scores[name] = np.sort(np.abs(errors)) / (largest - second)
    return scores


def default_groups(points: Points) -> npt.NDArray[Any]:
    """The size of each point, [n]; its own number where there are fewer than five sizes."""
    if len(np.unique(points.size_bytes)) >= _FOLDS:
        return points.size_bytes
    return np.arange(len(points))


def folds(groups: npt.NDArray[Any], seed: int) -> list[Mask]:
    """Masks of the points that are left out together, fold by fold: whole groups, drawn at random."""
    names, row = np.unique(groups, return_inverse=True)
    count = min(_FOLDS, len(names))
    fold = np.random.default_rng(seed).permutation(np.arange(len(names)) % count)
    return [fold[row] == number for number in range(count)]


def _octaves(column: Floats) -> Floats:
    """The logarithm to base 2 of a column of points, without sizes."""
    octaves: Floats = np.log2(np.where(np.isinf(column), _FASTEST_BYTES_PER_US, column))
    return octaves


def _residual_inputs(points: Points) -> Floats:
    """Octaves of size, ranks, rate and servers, [points, 4]."""
    rate = np.minimum(points.link_bytes_per_us, _FASTEST_BYTES_PER_US)
    columns = [np.maximum(points.size_bytes, 1.0), points.ranks, rate, points.servers]
    return np.stack([np.log2(column) for column in columns], axis=1)
