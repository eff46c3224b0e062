"""Predicted durations with their intervals, and the ways to tell how wide an interval is."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from dpro_search.collect.trace import Floats, Ints
from dpro_search.machine import machine_constants

_COVERED = 0.9
_MOST_LOG = 100.0  # beyond any error of a logarithm


class PredictionOrigin(IntEnum):
    """The origin of a predicted number."""

    INTERPOLATED = 0
    EXTRAPOLATED = 1  # outside what was measured: the interval is wider
    REFUSED = 2  # so far outside that nothing is predicted: the values are NaN


@dataclass(frozen=True, kw_only=True)
class Durations:
    """n predicted durations, us, with their intervals and origins."""

    us: Floats
    low_us: Floats
    high_us: Floats
    origin: Ints  # `PredictionOrigin`

    @staticmethod
    def of(us: Floats, half: Floats, *, outside: npt.NDArray[np.bool_], refused: npt.NDArray[np.bool_]) -> Durations:
        """Durations whose logarithms have intervals of these half widths, where they are not refused, [n] each."""
        answered = np.where(outside, PredictionOrigin.EXTRAPOLATED, PredictionOrigin.INTERPOLATED)
        origin = np.where(refused, PredictionOrigin.REFUSED, answered)
        us, low_us, high_us = (np.where(refused, np.nan, column) for column in (us, us * np.exp(-half), us * np.exp(half)))
        return Durations(us=us, low_us=low_us, high_us=high_us, origin=origin.astype(np.int64))


def conformal_quantile(scores: Floats, coverage: float) -> float:
    """The least width that holds for `coverage` of the sorted scores, with the correction for their number."""
    rank = int(np.ceil((len(scores) + 1) * coverage)) - 1
    return float(scores[min(rank, len(scores) - 1)])


def are_scores(errors: Sequence[float]) -> bool:
    """Whether `conformal_quantile` can use numbers of a file: sorted, none negative, and none beyond any error of a logarithm."""
    return list(errors) == sorted(errors) and all(0 <= error <= _MOST_LOG for error in errors)


@functools.lru_cache(1024)
def student_quantile(coverage: float, degrees: float) -> float:
    """Half width that holds `coverage` of Student's t, in standard deviations; cached, because degrees of freedom recur."""
    return float(stdtrit(degrees, (1 + coverage) / 2))


def step_interval_us(steps_us: Sequence[float], iteration_us: float) -> tuple[float, float]:
    """The interval around a prediction that should hold another step's iteration time in 9 of 10 cases.

    The variance between steps is that of the recorded ones, with that of other profiles as a prior which weighs as much as a few
    steps (scaled inverse chi-square: Gelman et al., Bayesian Data Analysis, 3rd edition, section 2.6); so one step has a width too.
    The quantile is Student's. The replay's own error adds to it.

    Parameters
    ----------
    steps_us
        Replayed iteration time of each recorded step; at least one.
    iteration_us
        The prediction.
    """
    constants = machine_constants().gpu
    steps = np.asarray(steps_us)
    observations = constants.step_spread_steps + len(steps) - 1
    squares = constants.step_spread_steps * (constants.step_spread * iteration_us) ** 2 + float(((steps - iteration_us) ** 2).sum())
    deviation = np.sqrt(squares / observations * (1 + 1 / len(steps)) + (constants.replay_error * iteration_us) ** 2)
    half = student_quantile(_COVERED, float(observations)) * float(deviation)
    return max(iteration_us - half, 0.0), iteration_us + half
