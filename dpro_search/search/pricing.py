"""Who prices plans, and what is known of their prices."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Protocol, Self

from dpro_search.search.objective import Objective
from dpro_search.space.plan import Plan, Prediction


class Pricer(Protocol):
    """Prices plans, several at a time where it can, and ends them in any order. A context manager: leaving it ends its workers."""

    @property
    def lost(self) -> int:
        """Workers that ended before their time; what they were pricing went to others."""

    def submit(self, plan: Plan) -> None:
        """Take a plan that is not being priced already; raises what `done` raises."""

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


class InlinePricer:
    """Prices plans in this process, one after the other, when they are waited for."""

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


class Prices:
    """Prices of plans: each is found once, however often it is asked for."""

    def __init__(self, pricer: Pricer) -> None:
        self._pricer = pricer
        self._known: dict[Plan, Prediction] = {}
        self._requested: set[Plan] = set()

    def __contains__(self, plan: Plan) -> bool:
        return plan in self._known

    def __len__(self) -> int:
        return len(self._known)

    def remember(self, plan: Plan, prediction: Prediction) -> None:
        """Take a price that was found elsewhere."""
        self._known[plan] = prediction

    def request(self, plan: Plan) -> None:
        """Have a plan priced, unless it is known or on its way."""
        if plan not in self._known and plan not in self._requested:
            self._requested.add(plan)
            self._pricer.submit(plan)

    def wait(self, plan: Plan) -> Prediction:
        """The price of a plan that was requested or remembered."""
        while plan not in self._known:
            done, prediction = self._pricer.done()
            self._requested.discard(done)
            self._known[done] = prediction
        return self._known[plan]
