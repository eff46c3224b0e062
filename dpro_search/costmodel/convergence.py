"""`Convergence`: how far updates bring a model, by their local steps and staleness; fitted on short runs of a few schemes.

An update of n local steps that is applied with weight w to a model that made b steps since its worker received it counts

    w n (1 + drift (n - 1) + staleness b)^-1                                                    effective steps

and a loss is reached after the same number of effective steps by every scheme. `drift` and `staleness` are those with which the
runs agree best about these numbers. They may be negative: stale updates act like momentum (Mitliagkas et al., 2016), which helps
where the job has too little of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.stats import t as student

from dpro_search.collect.trace import Floats
from dpro_search.errors import InputError

_LEAST_FACTOR = 0.05  # of an update, so that a fit cannot make one count for nothing or less
_MOST = 0.5  # of drift and staleness for one step: bounds of the fit
# Both are taken to be within 0.02 of 0 where runs of log error 0.03 say nothing about them. Empirical: small models on digits, text
# and tables (experiments/adsp).
_USUAL, _NOISE = 0.02, 0.03


@dataclass(frozen=True, kw_only=True)
class FittedRun:
    """Data of one run for the fit.

    Attributes
    ----------
    commit_s, steps, weights, behind_steps
        Of each applied update, in order of time, [n]: when, its local steps, its weight, and the steps of others that it missed.
    reached_s
        When the loss fell to each of `Convergence.levels`, [k]; NaN where it never did.
    scheme
        What runs that differ by their seed only have in common.
    """

    commit_s: Floats
    steps: Floats
    weights: Floats
    behind_steps: Floats
    reached_s: Floats
    scheme: str = ""


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """A fitted model.

    Attributes
    ----------
    drift, staleness
        What a further local step, and a missed step, takes off an update.
    start_loss
        The loss of the untrained model.
    levels, needed
        Losses, falling, [k], and the effective steps that each takes, [k].
    log_error
        Standard deviation of the logarithm of the effective steps to the last level among runs.
    runs
        How many runs it was fitted on.
    scheme_log_error
        Root mean square of that logarithm's error for schemes that were left out of the fit, one at a time; 0: one scheme.
    """

    drift: float
    staleness: float
    start_loss: float
    levels: tuple[float, ...]
    needed: tuple[float, ...]
    log_error: float
    runs: int
    scheme_log_error: float = 0.0

    def gain(self, steps: float, weight: float, behind_steps: float) -> float:
        """Effective steps of an update."""
        return weight * steps / max(1.0 + self.drift * (steps - 1.0) + self.staleness * behind_steps, _LEAST_FACTOR)

    def loss_after(self, effective_steps: float) -> float:
        """The loss after so many effective steps, interpolated between the levels; the last one beyond it."""
        return float(np.interp(effective_steps, (0.0, *self.needed), (self.start_loss, *self.levels)))

    @property
    def factor_interval(self) -> tuple[float, float]:
        """Factors of the effective steps between which 9 of 10 runs of another scheme should be (Student's t)."""
        if self.runs < 2:
            return (0.5, 2.0)  # one run says nothing about the spread
        spread = math.hypot(self.log_error * (1 + 1 / self.runs) ** 0.5, self.scheme_log_error)
        half = float(student.ppf(0.95, self.runs - 1)) * spread
        return (float(np.exp(-half)), float(np.exp(half)))


def fit_convergence(start_loss: float, levels: Sequence[float], runs: Sequence[FittedRun]) -> Convergence:
    """The model that makes the runs agree best about the effective steps to each level.

    Parameters
    ----------
    start_loss, levels
        The loss of the untrained model, and the falling losses of `FittedRun.reached_s`, [k]; the last one is the target.

    Raises `InputError` if no run reached the last level.
    """
    last = [run for run in runs if np.isfinite(run.reached_s[-1])]
    if not last:
        raise InputError(f"convergence: none of {len(runs)} runs reached a loss of {levels[-1]:g}; train longer or ask for less")

    drift, staleness = values = _factors(last)
    needed = _log_needed(values, last)
    means = np.maximum.accumulate(np.exp(np.nanmean(needed, axis=0)))
    return Convergence(
        drift=float(drift),
        staleness=float(staleness),
        start_loss=start_loss,
        levels=tuple(map(float, levels)),
        needed=tuple(map(float, means)),
        log_error=float(np.std(needed[:, -1], ddof=1)) if len(last) > 1 else 0.0,
        runs=len(last),
        scheme_log_error=_scheme_log_error(last),
    )


def _factors(runs: Sequence[FittedRun]) -> Floats:
    """Drift and staleness with which runs agree best."""

    def error(values: Floats) -> float:
        spread = float(weights @ np.nanvar(_log_needed(values, runs), axis=0))
        return spread + (_NOISE / _USUAL) ** 2 / len(runs) * float(np.sum(np.square(values)))

    # A time is known to within the distance of two looks at the loss, which matters the less the later it is.
    weights = np.nanmean([run.reached_s for run in runs], axis=0) ** 2
    weights /= weights.sum()
    starts = [(0.0, 0.0), (0.05, 0.05), (-0.02, -0.02)]
    bounds = [(-0.05, _MOST)] * 2
    best = min((minimize(error, start, method="Nelder-Mead", bounds=bounds) for start in starts), key=lambda result: result.fun)
    return np.asarray(best.x)


def _scheme_log_error(runs: Sequence[FittedRun]) -> float:
    schemes = {run.scheme for run in runs}
    if len(schemes) < 2:
        return 0.0
    errors = []
    for scheme in schemes:
        others = [run for run in runs if run.scheme != scheme]
        values = _factors(others)
        left_out = _log_needed(values, [run for run in runs if run.scheme == scheme])[:, -1]
        errors.append(float(np.mean(_log_needed(values, others)[:, -1]) - np.mean(left_out)))
    return float(np.sqrt(np.mean(np.square(errors))))


def falling_levels(start_loss: float, target_loss: float, count: int = 10) -> tuple[float, ...]:
    """Losses from the first one below the start to the target, [count], in equal ratios where both are positive.

    Raises `InputError` if the target is not below the start.
    """
    if not target_loss < start_loss:
        raise InputError(f"convergence: a target loss of {target_loss:g} is not below the loss at the start, {start_loss:g}")
    spaced = np.geomspace if target_loss > 0 else np.linspace
    return tuple(float(loss) for loss in spaced(start_loss, target_loss, count + 1)[1:])


def reached_at(times_s: Floats, losses: Floats, levels: Sequence[float]) -> Floats:
    """When a curve first was at or below each level, [levels]; NaN where it never was.

    Parameters
    ----------
    times_s, losses
        The curve in order of time, [n].
    """
    below = [np.flatnonzero(losses <= level) for level in levels]
    return np.array([times_s[result[0]] if len(result) else np.nan for result in below])


def _log_needed(values: Floats, runs: Sequence[FittedRun]) -> Floats:
    """Logarithms of the effective steps that runs made until they reached each level, [runs, levels]."""
    drift, staleness = values
    rows = []
    for run in runs:
        factors = np.maximum(1.0 + drift * (run.steps - 1.0) + staleness * run.behind_steps, _LEAST_FACTOR)
        made = np.concatenate([[0.0], np.cumsum(run.weights * run.steps / factors)])
        times = np.concatenate([[0.0], run.commit_s])
        rows.append(np.log(np.maximum(np.interp(run.reached_s, times, made), 1e-9)))
    return np.array(rows)
