"""Plans as Optuna's named parameters, for its dashboard, plots and importances. Searches do not read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from dpro_search.space.plan import Plan
from dpro_search.space.transformations import PlanSpace

_NONE = "none"
_MOST_NAMED = 4096  # groups, ops or modules that a parameter counts
_LOG_FROM = 16.0  # ratio of the largest to the smallest value, from which a parameter is logarithmic


class PlanParams:
    """The parameters of a job's plans: one for each field, in every trial, because Optuna compares only parameters that all have.

    A field that a plan leaves as recorded has the recorded value. Fields that name tensors, ops or modules are counted. A number
    outside the values that the space offers is shown as the nearest of them.

    Attributes
    ----------
    distributions
        By name; equal for all plans of the space.
    """

    def __init__(self, space: PlanSpace) -> None:
        self._recorded = space.job.values
        offered: dict[str, list[Any]] = {name: [] for name in space.fields}
        for choice in space.choices:
            for point in (point for points in choice.grids.values() for point in points):
                for name, value in point.items():
                    offered[name].append(value)
        self.distributions: Mapping[str, BaseDistribution] = {
            name: _distribution([*values, *([self._recorded[name]] if self._recorded.get(name) is not None else [])])
            for name, values in offered.items()
        }

    def of(self, plan: Plan) -> dict[str, Any]:
        """Values of all parameters for a plan."""
        return {name: self._value(name, plan.get(name)) for name in self.distributions}

    def _value(self, name: str, value: Any) -> Any:
        value = self._recorded.get(name) if value is None else value
        distribution = self.distributions[name]
        if isinstance(distribution, CategoricalDistribution):
            return value if value in distribution.choices else distribution.choices[0]
        assert isinstance(distribution, IntDistribution | FloatDistribution)
        number = len(value) if isinstance(value, tuple) else value or 0
        return min(max(number, distribution.low), distribution.high)


def _distribution(values: list[Any]) -> BaseDistribution:
    """The distribution that holds the values of a field."""
    if any(isinstance(value, str) for value in values):
        return CategoricalDistribution((_NONE, *sorted({value for value in values if isinstance(value, str)})))
    if any(isinstance(value, bool) for value in values):
        return CategoricalDistribution((False, True))
    numbers: list[int | float] = [value for value in values if isinstance(value, int | float)]
    if not numbers:
        return IntDistribution(0, _MOST_NAMED)
    low, high = min(numbers), max(numbers)
    log = low > 0 and high / low >= _LOG_FROM
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=log)
    return FloatDistribution(low, high, log=log)
