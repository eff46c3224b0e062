"""Sentences of findings."""

from __future__ import annotations

from dpro_search.quantities import time_text

WORTH_PCT = 3.0  # of an iteration; less is not reported


def share(value_us: float, iteration_us: float) -> str:
    """A time, and its part of an iteration."""
    return f"{time_text(value_us)} ({value_us / iteration_us * 100:.0f} % of an iteration)"
