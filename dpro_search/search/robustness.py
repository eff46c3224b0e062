"""How sure the order of plans is: their iteration times in other luck, the same for every plan."""

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
    """Replays plans with the order of steps, latencies and agreements drawn anew."""

    def sampled(self, plan: Plan, *, samples: int, seed: int = 0) -> Floats:
        """Iteration times, [samples]; the i-th of every plan is of the same luck."""


def sampled_us(prices: Sampled, plans: Sequence[Plan], samples: int = SAMPLES, seed: int = 0) -> Floats:
    """Iteration times of plans in the same luck, [plans, samples]."""
    return np.stack([prices.sampled(plan, samples=samples, seed=seed) for plan in plans])


def beats(times_us: Floats) -> Floats:
    """In which share of the samples a plan (row) is faster than another (column); ties count half, [plans, plans].

    Parameters
    ----------
    times_us
        [plans, samples].
    """
    faster = times_us[:, None, :] < times_us[None, :, :]
    equal = times_us[:, None, :] == times_us[None, :, :]
    found: Floats = (faster + equal / 2).mean(axis=2)
    return found


def check_quantile(objective: Objective, quantile: float) -> None:
    """Raise `InputError` if a quantile to rank by is none, or the objective's replays know no luck: before a search, not after."""
    if not 0 < quantile < 1:
        raise InputError(f"--quantile must be between 0 and 1, not {quantile}")
    sampled_of(objective).sampled(Plan(), samples=1)


def sampled_of(objective: Objective) -> Sampled:
    """The objective as one that replays plans in other luck; raises `InputError` if it does not."""
    if not callable(getattr(objective, "sampled", None)):
        raise InputError("--quantile: this objective does not replay plans in different luck")
    return cast("Sampled", objective)
