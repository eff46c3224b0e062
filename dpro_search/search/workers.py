"""Processes on this machine that evaluate plans for a search.

A worker is a fork of the search with a socket of its own, which carries plans and predictions as JSON. A fork shares the trace and
the compiled replay, and so starts at once (a fresh interpreter needs seconds to import and to read the trace again). The objective
must therefore not need threads that the search has started. No lock is shared, and a fork owns nothing that could be left
half-done: it may be killed at any time. Then only the plans that it was given are lost, and other workers get them. A pool of
`concurrent.futures` would end with the first worker that is killed, and its processes would outlive a search that is killed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import selectors
import signal
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from types import TracebackType
from typing import Any, NoReturn, Self

import msgspec

from dpro_search import errors
from dpro_search.errors import DproSearchError, MissingCapabilityError
from dpro_search.search.objective import Objective
from dpro_search.space.plan import Plan, Prediction

_AHEAD = 2  # plans of a worker: one that it evaluates, one that it takes next while the search proposes
MOST_LOSSES = 2  # a plan that ended so many workers gets no further one
SHOWN_BYTES = 200  # of such a plan


class Evaluated(msgspec.Struct, frozen=True, tag=True):
    """A worker's answer: the prediction."""

    prediction: Prediction


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A worker's answer if the objective raised: the error's class and message."""

    kind: str
    message: str


_ANSWER = msgspec.json.Decoder(Evaluated | Failed)


@dataclass(eq=False)
class Fork:
    """A process, and the search's end of its socket."""

    process: ForkProcess
    connection: Connection

    @classmethod
    def start(cls, work: Callable[..., None], *arguments: Any, foreign: Sequence[int]) -> Self:
        """Call ``work(connection, *arguments)`` in a fork, which ends with it, or with the search.

        Parameters
        ----------
        foreign
            File descriptors of the search that the fork closes: sockets of other forks, which would not notice the end of the
            search otherwise, and files that the search locks.
        """
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        foreign = [*foreign, ours.fileno()]
        process = context.Process(target=_in_fork, args=(work, theirs, arguments, foreign), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours)

    def ended(self) -> str:
        """How the process has ended; its socket is closed."""
        self.connection.close()
        self.process.join()
        how = self.process.exitcode
        return f"killed by signal {-how}" if how is not None and how < 0 else f"exit code {how}"


def end_forks(forks: Sequence[Fork]) -> None:
    """Kill processes and close their sockets."""
    for fork in forks:
        fork.process.kill()
    for fork in forks:
        fork.process.join()
        fork.process.close()
        fork.connection.close()


def _in_fork(work: Callable[..., None], connection: Connection, arguments: Sequence[Any], foreign: Sequence[int]) -> NoReturn:
    """Ctrl-C is handled by the search; its end is no error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for descriptor in foreign:
        os.close(descriptor)
    gc.freeze()  # the collector skips inherited objects: visiting them would copy their pages
    try:
        with suppress(EOFError, OSError):
            work(connection, *arguments)
    finally:
        os._exit(0)  # without clean-up: inherited progress bars and files belong to the search


@dataclass(eq=False)
class _PlanWorker(Fork):
    plans: deque[Plan] = field(default_factory=deque)  # the first is being evaluated


class ProcessEvaluator:
    """Evaluates plans in `workers` processes.

    Attributes
    ----------
    lost
        Workers that ended too early.
    """

    def __init__(self, objective: Objective, workers: int) -> None:
        self.lost = 0
        self._waiting: deque[Plan] = deque()
        self._losses: Counter[Plan] = Counter()
        self._workers: list[_PlanWorker] = []
        for _ in range(workers):
            foreign = [worker.connection.fileno() for worker in self._workers]
            self._workers.append(_PlanWorker.start(_work, objective, foreign=foreign))
        self._answers = selectors.DefaultSelector()
        for worker in self._workers:
            self._answers.register(worker.connection, selectors.EVENT_READ, worker)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that are left."""
        return tuple(worker.process.pid for worker in self._workers if worker.process.pid is not None)

    def submit(self, plan: Plan) -> None:
        self._waiting.append(plan)
        self._hand_out()

    def done(self) -> tuple[Plan, Prediction]:
        while True:
            self._hand_out()
            for key, _ in self._answers.select():
                worker: _PlanWorker = key.data
                try:
                    answer = worker.connection.recv_bytes()
                except (EOFError, OSError):
                    self._drop(worker)
                    continue
                plan = worker.plans.popleft()
                self._hand_out()
                return plan, prediction_in(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._answers.close()
        end_forks(self._workers)
        self._workers.clear()

    def _hand_out(self) -> None:
        """Give waiting plans to the workers with the fewest."""
        while self._waiting:
            worker = min(self._workers, key=lambda worker: len(worker.plans))
            if len(worker.plans) >= _AHEAD:
                return
            plan = self._waiting.popleft()
            worker.plans.append(plan)
            try:
                worker.connection.send_bytes(msgspec.json.encode(plan))
            except OSError:
                self._drop(worker)

    def _drop(self, worker: _PlanWorker) -> None:
        """Take back the plans of a worker that has ended."""
        self._answers.unregister(worker.connection)
        how = worker.ended()
        self._workers.remove(worker)
        self.lost += 1
        if worker.plans:
            self._losses[worker.plans[0]] += 1
            refuse_fatal(worker.plans[0].to_json().decode(), self._losses[worker.plans[0]])
        if not self._workers:
            raise MissingCapabilityError(
                f"--workers: all {self.lost} worker processes have ended (the last: {how}); run the same command to continue"
            )
        self._waiting.extendleft(reversed(worker.plans))


def refuse_fatal(plan: str, losses: int) -> None:
    """Raise `MissingCapabilityError` for a plan that has ended `MOST_LOSSES` workers; of its JSON the beginning is shown."""
    if losses >= MOST_LOSSES:
        text = plan.replace("\n", "")
        raise MissingCapabilityError(
            f"--workers: {losses} workers were lost while evaluating one plan (out of memory?); give them more memory, "
            "or report it: " + (text if len(text) <= SHOWN_BYTES else f"{text[:SHOWN_BYTES]}...")
        )


def raise_failed(answer: Failed) -> NoReturn:
    """Raise the error that the objective raised in a worker."""
    kind = getattr(errors, answer.kind, None)
    if isinstance(kind, type) and issubclass(kind, DproSearchError):
        raise kind(answer.message)
    raise RuntimeError(f"a worker failed: {answer.message}")


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


def answer_to(objective: Objective, plan: bytes) -> bytes:
    """A worker's answer for a plan in JSON."""
    try:
        return msgspec.json.encode(Evaluated(objective.predict(msgspec.json.decode(plan, type=Plan))))
    except Exception as error:
        return msgspec.json.encode(failed(error))


def _work(connection: Connection, objective: Objective) -> None:
    """Evaluate plans until the search closes the socket or ends."""
    while True:
        connection.send_bytes(answer_to(objective, connection.recv_bytes()))
