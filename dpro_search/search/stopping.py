"""When a search has found what it is going to find."""

from __future__ import annotations

from collections.abc import Sequence

from dpro_search.search.finished import FinishedTrial

LEAST_TRIALS = 64


def expected_gain(prices_us: Sequence[float]) -> float:
    """What as many trials again as the later half are expected to gain, relative to the best: at most what that half gained.

    A search gains ever less, as it improves ever less of what is left; so a half's gain bounds that of the next trials.
    """
    half = len(prices_us) // 2
    best = min(prices_us)
    return (min(prices_us[:half]) - best) / best


def is_settled(trials: Sequence[FinishedTrial]) -> bool:
    """Whether the expected gain is below what the prediction of the best plan may be wrong by."""
    feasible = [trial.prediction for trial in trials if trial.prediction.infeasible is None]
    if len(feasible) < LEAST_TRIALS:
        return False
    best = min(feasible, key=lambda prediction: prediction.iteration_us)
    low, high = best.interval_us
    return expected_gain([prediction.iteration_us for prediction in feasible]) < (high - low) / 2 / best.iteration_us
