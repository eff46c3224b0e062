"""Horovod's cycle: the shortest distance between two wake-ups of its communication thread."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import numpy as np

from dpro_search.space.plan import Plan
from dpro_search.space.schemes import HorovodSettings
from dpro_search.space.transformations._base import RECORDED, Choice, Transformation, grid

CYCLE_RANGE_US = (500.0, 50_000.0)
DEFAULT_CYCLE_US = 1000.0  # Horovod's own
_BACK_SHARE = 0.2  # of the moves go back to the recorded cycle time


class CycleTime(Transformation):
    """Any time within `CYCLE_RANGE_US`, or the recorded one."""

    name = "cycle-time"
    fields = ("cycle_time_us",)

    def legal(self, plan: Plan) -> str | None:
        return None

    def propose(self, plan: Plan, rng: np.random.Generator, hot: Mapping[str, float]) -> Plan:
        own_us = HorovodSettings.of(plan).cycle_time_us
        if own_us is not None and rng.random() < _BACK_SHARE:
            return plan.changed(cycle_time_us=None)
        now_us = max(own_us or self.job.values.get("cycle_time_us") or DEFAULT_CYCLE_US, CYCLE_RANGE_US[0])
        return plan.changed(cycle_time_us=rounded_cycle_us(now_us * math.exp(rng.normal(0.0, 1.0))))

    def start(self, plan: Plan, number: int, count: int) -> Plan:
        """Alternately the library's default and the recorded one."""
        return self.simplest(plan.changed(cycle_time_us=DEFAULT_CYCLE_US)) if number % 2 == 0 else plan

    @cached_property
    def choice(self) -> Choice:
        low, high = CYCLE_RANGE_US
        values = sorted({rounded_cycle_us(us) for us in np.arange(low, high + 1, 10.0).tolist()})
        # Evenly spread over the logarithm, like the differences that matter.
        evenly_spaced_us = np.geomspace(low, high, 48)
        spread = sorted({min(values, key=lambda value: abs(math.log(value / us))) for us in evenly_spaced_us.tolist()})
        return Choice(name=self.name, fields=self.fields, grids={RECORDED: ({},), "set": grid("cycle_time_us", spread)})


def rounded_cycle_us(cycle_us: float) -> float:
    """A cycle time within range and with two significant digits: finer differences drown in the jitter of a wake-up."""
    low, high = CYCLE_RANGE_US
    return float(f"{min(max(cycle_us, low), high):.2g}")
