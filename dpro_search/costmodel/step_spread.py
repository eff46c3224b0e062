"""``interval_us``: where the next measurement of a step should lie, from a few recorded ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

from dpro_search.machine import machine_constants

_COVERED = 0.9


def interval_us(steps_us: Sequence[float], iteration_us: float) -> tuple[float, float]:
    """The interval around a prediction that should hold another step's iteration time in 9 of 10 cases.

    The variance between steps is that of the recorded ones, with that of other profiles as a prior which weighs as much as a few
    steps (scaled inverse chi-square: Gelman et al., Bayesian Data Analysis, 3rd edition, section 2.6); so one step has a width too.
    The quantile is Student's. The replay's own error adds to it.

    Parameters
    ----------
    steps_us
        Of each recorded step, replayed; at least one.
    iteration_us
        The prediction.
    """
    constants = machine_constants().gpu
    steps = np.asarray(steps_us)
    observations = constants.step_spread_steps + len(steps) - 1
    squares = constants.step_spread_steps * (constants.step_spread * iteration_us) ** 2 + float(((steps - iteration_us) ** 2).sum())
    deviation = np.sqrt(squares / observations * (1 + 1 / len(steps)) + (constants.replay_error * iteration_us) ** 2)
    half = float(stdtrit(observations, (1 + _COVERED) / 2)) * float(deviation)
    return max(iteration_us - half, 0.0), iteration_us + half
