"""Times of tensor programs on a device of which a few were measured: `ProgramLatency`.

    columns = np.column_stack([program_columns(programs), occupancy_columns(programs, limits)])
    places = chosen(columns, others_us, 50, seed=0)                    # which programs to measure on the new device
    model = ProgramLatency.fit(columns, others_us, places, us[places])
    durations = model.predict()                                        # of all programs, us, with 90 % intervals

A program is seen by its columns (`features`) and by its times on other devices, where it was measured there. Extremely randomised
trees (Geurts et al. 2006) catch conditions, a Gaussian process (Rasmussen and Williams 2006, chapter 5) what is smooth; the
measured programs, predicted from the others of them, decide how much each counts. Without measured programs `order_of` sorts
programs by their times on the devices that are most alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
from sklearn.model_selection import KFold
from sklearn.preprocessing import StandardScaler

from dpro_search.costmodel.intervals import Durations, conformal_quantile
from dpro_search.errors import InputError

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
COVERAGE = 0.9
FEWEST = 10
"""Measured programs below which nothing is fitted: two conditions and a scale are more than they tell."""
WIDER = 1.0
"""Factor of the widths of intervals, by which left-out devices had nine of ten programs inside (`experiments/tensor_programs`)."""
_TREES, _FOLDS = 100, 5
_BEYOND = 0.3  # of the logarithm: how far a prediction may lie outside of all measured times
_SMOOTH, _LONGEST = 5.0, 300.0  # start and bound of the distances over which times resemble each other, in deviations


@dataclass(frozen=True, kw_only=True)
class ProgramLatency:
    """A predictor of programs on one device.

    Attributes
    ----------
    log_us
        Expected logarithm of the time, [programs].
    variance
        Variance of its error, [programs].
    width
        Half width of the 90 % intervals in deviations.
    process_share
        Weight of the Gaussian process; the rest is the trees'.
    measured, us
        Places of the measured programs and their times.
    """

    log_us: Floats
    variance: Floats
    width: float
    process_share: float
    measured: Places
    us: Floats

    @staticmethod
    def fit(columns: Floats, others_us: Floats, measured: Places, us: Floats, *, seed: int = 0) -> ProgramLatency:
        """A predictor of n programs of which k were measured.

        Parameters
        ----------
        columns : array [n, columns]
        others_us : array [n, devices]
            Times on other devices; NaN where a program does not run there. No devices: [n, 0].
        measured : array [k]
            Places of the programs that were measured.
        us : array [k]

        Raises
        ------
        InputError
            Fewer than `FEWEST` programs were measured, or a time is no positive number.
        """
        if len(measured) < FEWEST:
            raise InputError(f"{len(measured)} measured programs are too few to predict others: measure at least {FEWEST}")
        if len(measured) != len(us) or not (np.isfinite(us) & (us > 0)).all():
            raise InputError("each measured program needs a time above 0; leave out those that failed to compile or to run")
        seen, log = inputs(columns, others_us), np.log(us)
        points = seen[measured]
        process = _process(points, log, seed)
        held_trees, held_process, held_spread = np.zeros(len(us)), np.zeros(len(us)), np.zeros(len(us))
        for rest, held in KFold(_FOLDS, shuffle=True, random_state=seed).split(points):
            forest = _Forest.fit(points[rest], log[rest], seed)
            held_trees[held], held_spread[held] = forest.predict(points[held])
            held_process[held] = _process(points[rest], log[rest], seed).predict(points[held])
        share = _share(held_trees - log, held_process - log)
        forest = _Forest.fit(points, log, seed)
        by_trees, spread = forest.predict(seen)
        expected = (1 - share) * by_trees + share * process.predict(seen)
        errors = (1 - share) * held_trees + share * held_process - log
        floor = 0.1 * float(np.mean(held_spread)) + 1e-6
        scale = float(np.mean(errors**2) / np.mean(held_spread + floor))
        scores = np.sort(np.abs(errors) / np.sqrt(scale * (held_spread + floor)))
        return ProgramLatency(
            log_us=np.clip(expected, log.min() - _BEYOND, log.max() + _BEYOND),
            variance=scale * (spread + floor),
            width=WIDER * conformal_quantile(scores, COVERAGE),
            process_share=share,
            measured=measured,
            us=us,
        )

    def predict(self) -> Durations:
        """Times of all programs, us, with 90 % intervals; those that were measured are as they were measured."""
        half = self.width * np.sqrt(self.variance)
        log, low, high = self.log_us.copy(), self.log_us - half, self.log_us + half
        log[self.measured] = low[self.measured] = high[self.measured] = np.log(self.us)
        return Durations(us=np.exp(log), low_us=np.exp(low), high_us=np.exp(high), origin=np.zeros(len(log), dtype=np.int64))


def inputs(columns: Floats, others_us: Floats) -> Floats:
    """Standardised columns and logarithms of times on other devices, [n, columns + devices]."""
    return np.asarray(StandardScaler().fit_transform(np.column_stack([columns, logs(others_us)])))


def logs(others_us: Floats) -> Floats:
    """Logarithms of times on other devices; a program that does not run on one has that device's median, [n, devices]."""
    log = np.log(others_us)
    return np.asarray(np.where(np.isnan(log), np.nanmedian(log, axis=0, keepdims=True), log)) if log.size else log


def order_of(others_us: Floats, likeness: Floats) -> Floats:
    """Numbers by which programs can be sorted where nothing was measured: mean logarithms over the devices on which each runs, [n].

    Parameters
    ----------
    others_us : array [n, devices]
        Times on other devices, NaN where a program does not run there; one that runs nowhere comes last.
    likeness : array [devices]
        How much each device counts, above 0.
    """
    log = np.log(others_us)
    centred = log - np.nanmedian(log, axis=0)
    weight = np.where(np.isnan(log), 0.0, likeness)
    total = weight.sum(axis=1)
    mean = (np.nan_to_num(centred) * weight).sum(axis=1) / np.maximum(total, 1e-12)
    return np.asarray(np.where(total > 0, mean, np.inf))


def to_try(orders: Sequence[Floats], count: int) -> Places:
    """Programs to try for the fastest one: the first of each order in turn, [count].

    A predictor of few measured programs smooths over the fastest ones, which devices that are alike have in common: both orders
    together lose less than either.

    Parameters
    ----------
    orders
        Numbers by which programs can be sorted, [n] each, as predicted times and `order_of`.
    """
    turns = np.stack([np.argsort(order, kind="stable") for order in orders], axis=1).ravel()
    _, first = np.unique(turns, return_index=True)
    return np.asarray(turns[np.sort(first)][:count], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class _Forest:
    """Extremely randomised trees with the spread of the measured values that they average."""

    model: ExtraTreesRegressor
    leaves: npt.NDArray[np.int64]  # of the measured programs, [k, trees]
    log: Floats

    @staticmethod
    def fit(points: Floats, log: Floats, seed: int) -> _Forest:
        model = ExtraTreesRegressor(_TREES, random_state=seed, n_jobs=1).fit(points, log)
        return _Forest(model=model, leaves=model.apply(points), log=log)

    def predict(self, points: Floats) -> tuple[Floats, Floats]:
        """Means and variances of the measured values, weighted by how many trees put them beside a point, [n] each."""
        leaves = self.model.apply(points)
        weight = np.zeros((len(points), len(self.log)))
        for tree in range(leaves.shape[1]):
            beside = leaves[:, tree][:, None] == self.leaves[:, tree][None, :]
            weight += beside / beside.sum(axis=1, keepdims=True)
        weight /= leaves.shape[1]
        mean = weight @ self.log
        return mean, np.maximum(weight @ self.log**2 - mean**2, 0.0)


def _process(points: Floats, log: Floats, seed: int) -> GaussianProcessRegressor:
    lengths = Matern(np.full(points.shape[1], _SMOOTH), (1.0, _LONGEST), nu=1.5)
    kernel = ConstantKernel(1.0, (0.01, 100.0)) * lengths + WhiteKernel(0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # A length at its bound says that a column does not matter.
        return GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed).fit(points, log)


def _share(of_trees: Floats, of_process: Floats) -> float:
    """Weight of the second of two predictors by their errors: half-way between equal weights and least squares.

    Weights that few errors choose are uncertain, and equal ones are seldom far from the best (Clemen 1989).
    """
    difference = of_trees - of_process
    size = float(difference @ difference)
    best = float(np.clip(difference @ of_trees / size, 0.0, 1.0)) if size > 0 else 0.5
    return (0.5 + best) / 2
