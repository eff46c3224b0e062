"""When to stop a search: the expected further gain is below the prediction error."""

from __future__ import annotations

from collections.abc import Sequence

from dpro_search.search.finished import FinishedTrial

LEAST_TRIALS = 64


def expected_gain(costs_us: Sequence[float]) -> float:
    """Expected gain of as many further trials as the later half of these, relative to the best: the gain of that half.

    The gain per trial falls in the course of a search, so the gain of the later half is an upper bound.
    """
    half = len(costs_us) // 2
    best = min(costs_us)
    return (min(costs_us[:half]) - best) / best


def is_settled(trials: Sequence[FinishedTrial]) -> bool:
    """Whether the expected further gain is below the prediction error: half the width of the best plan's interval."""
    feasible = [trial.prediction for trial in trials if trial.prediction.infeasible is None]
    if len(feasible) < LEAST_TRIALS:
        return False
    best = min(feasible, key=lambda prediction: prediction.iteration_us)
    low, high = best.interval_us
    return expected_gain([prediction.iteration_us for prediction in feasible]) < (high - low) / 2 / best.iteration_us
