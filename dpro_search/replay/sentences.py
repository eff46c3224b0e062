"""Sentences of findings."""

from __future__ import annotations

from dpro_search.quantities import time_text

WORTH_PCT = 3.0  # of an iteration; less is not reported


def differs_from_median(mean_us: float, median_us: float) -> bool:
    """Whether steps that stall make the mean of the steps noticeably longer than their median."""
    return mean_us > (1 + WORTH_PCT / 100) * median_us


def share(value_us: float, iteration_us: float) -> str:
    """A time, and its part of an iteration."""
    return f"{time_text(value_us)} ({value_us / iteration_us * 100:.0f} % of an iteration)"
