"""How certain the order of plans is: their iteration times over resampled durations, the same draws for every plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.errors import InputError
from dpro_search.search.objective import Objective
from dpro_search.space.plan import Plan

SAMPLES = 64


class Sampled(Protocol):
    """Replays plans with the order of steps, latencies and negotiations drawn anew."""

    def sampled(self, plan: Plan, *, samples: int, seed: int = 0) -> Floats:
        """Iteration times, [samples]; the i-th of every plan uses the same draws (common random numbers)."""


def sampled_us(objective: Sampled, plans: Sequence[Plan], samples: int = SAMPLES, seed: int = 0) -> Floats:
    """Iteration times of plans over the same draws, [plans, samples]."""
    return np.stack([objective.sampled(plan, samples=samples, seed=seed) for plan in plans])


def beats(times_us: Floats) -> Floats:
    """In which share of the samples a plan (row) is faster than another (column); ties count half, [plans, plans].

    Parameters
    ----------
    times_us
        [plans, samples].
    """
    faster = times_us[:, None, :] < times_us[None, :, :]
    equal = times_us[:, None, :] == times_us[None, :, :]
    share: Floats = (faster + equal / 2).mean(axis=2)
    return share


def check_quantile(objective: Objective, quantile: float) -> None:
    """Raise `InputError` before a search if the quantile is out of range, or the objective cannot resample durations."""
    if not 0 < quantile < 1:
        raise InputError(f"--quantile must be between 0 and 1, not {quantile}")
    sampled_of(objective).sampled(Plan(), samples=1)


def sampled_of(objective: Objective) -> Sampled:
    """The objective, if it replays plans with resampled durations; else raises `InputError`."""
    if not callable(getattr(objective, "sampled", None)):
        raise InputError("--quantile: this job cannot be replayed with resampled durations; leave the option out")
    return cast("Sampled", objective)
