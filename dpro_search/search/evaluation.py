"""Evaluation of plans, and the predictions that are known."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Protocol, Self

from dpro_search.search.objective import Objective
from dpro_search.space.plan import Plan, Prediction


class Evaluator(Protocol):
    """Evaluates plans, several at a time where it can, in any order. A context manager: leaving it ends its workers."""

    @property
    def lost(self) -> int:
        """Workers that ended too early; others evaluated their plans."""

    def submit(self, plan: Plan) -> None:
        """Take a plan that is not being evaluated already; raises what `done` raises."""

    def done(self) -> tuple[Plan, Prediction]:
        """Wait for one of the plans taken, whichever ends first.

        Raises
        ------
        DproSearchError
            What the objective raised.
        MissingCapabilityError
            No worker is left, or a plan has ended every worker that tried it.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None: ...


class InlineEvaluator:
    """Evaluates plans in this process, one after the other, when a result is waited for."""

    lost = 0

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._waiting: deque[Plan] = deque()

    def submit(self, plan: Plan) -> None:
        self._waiting.append(plan)

    def done(self) -> tuple[Plan, Prediction]:
        plan = self._waiting.popleft()
        return plan, self._objective.predict(plan)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._waiting.clear()


class Evaluations:
    """Predictions of plans: each plan is evaluated once, however often it is requested."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._pricer = evaluator
        self._known: dict[Plan, Prediction] = {}
        self._requested: set[Plan] = set()

    def __contains__(self, plan: Plan) -> bool:
        return plan in self._known

    def __len__(self) -> int:
        return len(self._known)

    def remember(self, plan: Plan, prediction: Prediction) -> None:
        """Take a prediction that was found elsewhere."""
        self._known[plan] = prediction

    def request(self, plan: Plan) -> None:
        """Start the evaluation of a plan, unless its prediction is known or requested."""
        if plan not in self._known and plan not in self._requested:
            self._requested.add(plan)
            self._pricer.submit(plan)

    def wait(self, plan: Plan) -> Prediction:
        """The prediction of a plan that was requested or remembered."""
        while plan not in self._known:
            done, prediction = self._pricer.done()
            self._requested.discard(done)
            self._known[done] = prediction
        return self._known[plan]
