"""What a search asks: the price of a plan."""

from __future__ import annotations

from typing import Protocol, cast

from dpro_search.collect.trace import CommSettings, TensorInfo
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import PlanSpace


class Objective(Protocol):
    """Prices plans of one recorded job. `predict` is deterministic: equal plans get equal predictions.

    An objective may also be a `Guide` of samplers (have `exchanges`, unless its attribute `guides` is False), and a `Judge` of the
    plans that a search lists.
    """

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """The communicated tensors, in the order in which they become ready in the recorded step."""

    @property
    def recorded(self) -> CommSettings | None:
        """Horovod's knobs in the recording, which the empty plan keeps; None for other kinds of jobs."""

    @property
    def space(self) -> PlanSpace:
        """The plans that the job can follow."""

    def predict(self, plan: Plan) -> Prediction:
        """What one iteration would cost under a plan."""


class Judge(Protocol):
    """Prices plans more carefully than `predict`, and more slowly."""

    def judged(self, plan: Plan) -> Prediction:
        """What one iteration would cost under a plan."""


def judge_of(objective: Objective) -> Judge | None:
    """The objective, if it is one."""
    return cast("Judge", objective) if callable(getattr(objective, "judged", None)) else None
