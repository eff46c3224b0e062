"""Evaluation of plans, here or by workers, and the predictions that are known."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections import Counter, deque
from typing import NoReturn, Protocol

import msgspec

from dpro_search import errors
from dpro_search.errors import DproSearchError, MissingCapabilityError
from dpro_search.search.objective import Objective
from dpro_search.space.plan import Plan, Prediction

SHOWN_BYTES = 200  # of a plan that ended workers
_MOST_LOSSES = 2  # a plan that ended so many workers gets no further one


class Evaluator(Protocol):
    """Evaluates plans, several at a time where it can, in any order."""

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


class InlineEvaluator:
    """Evaluates plans in this process, one after the other, when a result is waited for."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._waiting: deque[Plan] = deque()

    def submit(self, plan: Plan) -> None:
        self._waiting.append(plan)

    def done(self) -> tuple[Plan, Prediction]:
        plan = self._waiting.popleft()
        return plan, self._objective.predict(plan)


class Losses:
    """Workers of a search that ended too early; other workers evaluate their plans.

    Attributes
    ----------
    workers
        How many have ended.
    """

    def __init__(self) -> None:
        self.workers = 0
        self._of_plan: Counter[int] = Counter()

    def add(self, plan_hash: int, plan: str) -> None:
        """Count a worker.

        Parameters
        ----------
        plan_hash, plan
            The plan that it was evaluating: its hash, and its JSON or the beginning of that; empty: it was evaluating none.

        Raises
        ------
        MissingCapabilityError
            The plan has ended several workers.
        """
        self.workers += 1
        if not plan:
            return
        self._of_plan[plan_hash] += 1
        if self._of_plan[plan_hash] >= _MOST_LOSSES:
            text = plan.replace("\n", "")
            raise MissingCapabilityError(
                f"--workers: {_MOST_LOSSES} workers were lost while evaluating one plan (out of memory?); give them more memory, "
                "or report it: " + (text if len(text) <= SHOWN_BYTES else f"{text[:SHOWN_BYTES]}...")
            )


class WorkerEvaluator(ABC):
    """Evaluates plans by workers in other processes, which answer in JSON (`answer_to`). Closing it ends the workers.

    A subclass starts the evaluation of a plan where a worker is free, and receives answers. If a worker is lost, it calls `_lose`:
    another worker evaluates the plans.
    """

    def __init__(self, losses: Losses) -> None:
        self._losses = losses
        self._waiting: deque[Plan] = deque()

    @abstractmethod
    def close(self) -> None:
        """End the workers."""

    @abstractmethod
    def _start(self, plan: Plan) -> bool:
        """Hand a plan to a worker; False if all have enough."""

    @abstractmethod
    def _receive(self) -> tuple[Plan, bytes] | None:
        """Wait for a worker's answer, or for the end of a worker: None."""

    def submit(self, plan: Plan) -> None:
        self._waiting.append(plan)
        self._start_waiting()

    def done(self) -> tuple[Plan, Prediction]:
        answered = None
        while answered is None:
            answered = self._receive()
            self._start_waiting()
        plan, answer = answered
        return plan, prediction_in(answer)

    def _start_waiting(self) -> None:
        while self._waiting and self._start(self._waiting[0]):
            self._waiting.popleft()

    def _lose(self, *plans: Plan) -> None:
        """Count a worker that has ended, and take back its plans. It was evaluating the first of them."""
        self._losses.add(hash(plans[0]) if plans else 0, plans[0].to_json().decode() if plans else "")
        self._waiting.extendleft(reversed(plans))


class Evaluated(msgspec.Struct, frozen=True, tag=True):
    """A worker's answer: the prediction."""

    prediction: Prediction


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A worker's answer if the objective raised: the error's class and message."""

    kind: str
    message: str


_ANSWER = msgspec.json.Decoder(Evaluated | Failed)


def answer_to(objective: Objective, plan: bytes) -> bytes:
    """A worker's answer for a plan in JSON."""
    try:
        return msgspec.json.encode(Evaluated(objective.predict(msgspec.json.decode(plan, type=Plan))))
    except Exception as error:
        return msgspec.json.encode(failed(error))


def failed(error: Exception) -> Failed:
    """A worker's answer for an error."""
    if isinstance(error, DproSearchError):
        return Failed(type(error).__name__, str(error))
    return Failed("", traceback.format_exc())


def prediction_in(answer: bytes) -> Prediction:
    """The prediction in a worker's answer; raises the objective's error."""
    decoded: Evaluated | Failed = _ANSWER.decode(answer)
    if isinstance(decoded, Failed):
        raise_failed(decoded)
    return decoded.prediction


def raise_failed(answer: Failed) -> NoReturn:
    """Raise the error that the objective raised in a worker."""
    kind = getattr(errors, answer.kind, None)
    if isinstance(kind, type) and issubclass(kind, DproSearchError):
        raise kind(answer.message)
    raise RuntimeError(f"a worker failed: {answer.message}")


class Evaluations:
    """Predictions of plans: each plan is evaluated once, however often it is requested."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._known: dict[Plan, Prediction] = {}
        self._requested: set[Plan] = set()

    def remember(self, plan: Plan, prediction: Prediction) -> None:
        """Take a prediction that was found elsewhere."""
        self._known[plan] = prediction

    def request(self, plan: Plan) -> None:
        """Start the evaluation of a plan, unless its prediction is known or requested."""
        if plan not in self._known and plan not in self._requested:
            self._requested.add(plan)
            self._evaluator.submit(plan)

    def wait(self, plan: Plan) -> Prediction:
        """The prediction of a plan that was requested or remembered."""
        while plan not in self._known:
            done, prediction = self._evaluator.done()
            self._requested.discard(done)
            self._known[done] = prediction
        return self._known[plan]
