"""Efficiencies of a GPU and framework that are other than predicted: how they move plans, and what measured plans say of them.

The logarithm of a plan's measured step is that of its prediction plus ``slopes x errors of efficiencies`` plus the rest, which
belongs to the plan alone. The standard deviations of the efficiencies are those of published runs (``accuracy.toml``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.parallel.answers.accuracy import accuracy
from dpro_search.parallel.costs.scales import MEASURED, Scales
from dpro_search.parallel.steps.step_prices import StepPrices
from dpro_search.parallel.strategy import Strategy

STEP = 0.1  # Change of an efficiency's logarithm by which slopes are found.
NOISE = 0.02  # Standard deviation of a measured step's logarithm: most published runs that were repeated differ by 1 to 3 %.
REST = 0.1
"""Standard deviation of each plan's own error. All published runs have 0.063; this was chosen on those of vTrain, for which the
order of runs that `PlanBeliefs` proposes was best (experiments/truth/next_plan.py)."""
_ROUNDS = 4  # Linearisations: predictions are no straight lines of the efficiencies.

Steps = Sequence[tuple[StepPrices, Strategy]]


def scaled(scales: Scales, logs: Floats) -> Scales:
    """Scales times factors whose logarithms are in the order of `MEASURED`, [efficiencies]."""
    factors = {name: getattr(scales, name) * float(np.exp(log)) for name, log in zip(MEASURED, logs, strict=True)}
    return replace(scales, **factors)


def log_steps_us(steps: Steps, logs: Floats) -> Floats:
    """Logarithms of predicted steps in us, [plans], with efficiencies of their own, [plans, efficiencies]."""
    pairs = zip(steps, logs, strict=True)
    return np.log([prices.scaled(scaled(prices.workload.scales, row)).step_us(strategy) for (prices, strategy), row in pairs])


def slopes_at(steps: Steps, logs: Floats) -> Floats:
    """Growth of the logarithm of each step with each efficiency, [plans, efficiencies], at `logs`, [plans, efficiencies]."""
    base = log_steps_us(steps, logs)
    return (np.array([log_steps_us(steps, logs + step) for step in STEP * np.eye(len(MEASURED))]).T - base[:, None]) / STEP


def plan_errors(steps: Steps) -> Floats:
    """Covariance of the errors of predicted plans, as logarithms, [plans, plans]."""
    moved = slopes_at(steps, np.zeros((len(steps), len(MEASURED)))) * _spread()
    return np.asarray(moved @ moved.T + REST**2 * np.eye(len(steps)))


def learned(steps: Steps, measured: Floats, noise: Floats, *, same_job: bool) -> Mapping[str, float]:
    """Factors on the times of parts of a step, by name, that measured plans of one job make most probable.

    Parameters
    ----------
    measured
        Logarithms of the measured steps in us, [plans].
    noise
        Their standard deviations, [plans].
    same_job
        Whether the factors are for plans of the same job, so that the part of the error is included that all its plans share.
    """
    known = accuracy().spread
    shared, single = known["group"] ** 2 * np.ones((len(steps), len(steps))), np.diag(REST**2 + noise**2)
    logs = np.zeros(len(MEASURED))
    for _ in range(_ROUNDS):
        at = np.tile(logs, (len(steps), 1))
        slopes = slopes_at(steps, at)
        errors = measured - log_steps_us(steps, at) + slopes @ logs
        moved = slopes * _spread()
        solved = np.linalg.solve(moved @ moved.T + shared + single, errors)
        logs = _spread() * (moved.T @ solved)
    group = known["group"] ** 2 * solved.sum() if same_job else 0.0
    return {name: float(np.exp(log + group)) for name, log in zip(MEASURED, logs, strict=True)}


def _spread() -> Floats:
    return np.array([accuracy().spread[name] for name in MEASURED])
