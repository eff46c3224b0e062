"""What a search asks: the price of a plan."""

from __future__ import annotations

from typing import Protocol

from dpro_search.collect.trace import CommSettings, TensorInfo
from dpro_search.space.plan import Plan, Prediction


class Objective(Protocol):
    """Prices plans of one recorded job. `predict` is deterministic: equal plans get equal predictions."""

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """The communicated tensors, in the order in which they become ready in the recorded step."""

    @property
    def recorded(self) -> CommSettings:
        """The knobs of the recording, which the empty plan keeps."""

    def predict(self, plan: Plan) -> Prediction:
        """What one iteration would cost under a plan."""


class CachedObjective:
    """An objective that prices each plan once.

    Attributes
    ----------
    calls
        Predictions that had to be made.
    """

    def __init__(self, inner: Objective) -> None:
        self.tensors = inner.tensors
        self.recorded = inner.recorded
        self.calls = 0
        self._inner = inner
        self._prices: dict[Plan, Prediction] = {}

    def predict(self, plan: Plan) -> Prediction:
        """The price of a plan, from memory where it is known."""
        price = self._prices.get(plan)
        if price is None:
            self.calls += 1
            price = self._prices[plan] = self._inner.predict(plan)
        return price

    def remember(self, plan: Plan, prediction: Prediction) -> None:
        """Take a price that was found earlier, in a run that is resumed."""
        self._prices[plan] = prediction
