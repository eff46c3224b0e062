"""What a search asks: the price of a plan."""

from __future__ import annotations

from typing import Protocol, cast

from dpro_search.collect.trace import CommSettings, TensorInfo
from dpro_search.space.plan import Plan, Prediction


class Objective(Protocol):
    """Prices plans of one recorded job. `predict` is deterministic: equal plans get equal predictions.

    An objective may also have a `space`, the `PlanSpace` of what its job can follow (else it is a Horovod job), be a `Guide` of
    samplers: have `exchanges`, and be a `Judge` of the plans that a search lists.
    """

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """The communicated tensors, in the order in which they become ready in the recorded step."""

    @property
    def recorded(self) -> CommSettings:
        """The knobs of the recording, which the empty plan keeps."""

    def predict(self, plan: Plan) -> Prediction:
        """What one iteration would cost under a plan."""


class Judge(Protocol):
    """Prices plans more carefully than `predict`, and more slowly."""

    def judged(self, plan: Plan) -> Prediction:
        """What one iteration would cost under a plan."""


def judge_of(objective: Objective) -> Judge | None:
    """The objective, if it is one."""
    return cast("Judge", objective) if callable(getattr(objective, "judged", None)) else None
