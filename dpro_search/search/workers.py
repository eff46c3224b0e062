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
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any, NoReturn, Self

import msgspec

from dpro_search.errors import MissingCapabilityError
from dpro_search.search.evaluation import Losses, WorkerEvaluator, answer_to
from dpro_search.search.objective import Objective
from dpro_search.space.plan import Plan

_AHEAD = 2  # plans of a worker: one that it evaluates, one that it takes next while the search proposes


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


class ProcessEvaluator(WorkerEvaluator):
    """Evaluates plans in `workers` processes."""

    def __init__(self, objective: Objective, workers: int, losses: Losses) -> None:
        super().__init__(losses)
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

    def close(self) -> None:
        self._answers.close()
        end_forks(self._workers)
        self._workers.clear()

    def _start(self, plan: Plan) -> bool:
        """Give the plan to the worker with the fewest."""
        worker = min(self._workers, key=lambda worker: len(worker.plans))
        if len(worker.plans) >= _AHEAD:
            return False
        worker.plans.append(plan)
        with suppress(OSError):  # the worker has ended, and `_receive` will take its plans back
            worker.connection.send_bytes(msgspec.json.encode(plan))
        return True

    def _receive(self) -> tuple[Plan, bytes] | None:
        key, _ = self._answers.select()[0]
        worker: _PlanWorker = key.data
        try:
            answer = worker.connection.recv_bytes()
        except (EOFError, OSError):
            self._drop(worker)
            return None
        return worker.plans.popleft(), answer

    def _drop(self, worker: _PlanWorker) -> None:
        """Take back the plans of a worker that has ended."""
        self._answers.unregister(worker.connection)
        how = worker.ended()
        self._workers.remove(worker)
        self._lose(*worker.plans)
        if not self._workers:
            raise MissingCapabilityError(
                f"--workers: all {self._losses.workers} worker processes have ended (the last: {how}); run the same command to"
                " continue"
            )


def _work(connection: Connection, objective: Objective) -> None:
    """Evaluate plans until the search closes the socket or ends."""
    while True:
        connection.send_bytes(answer_to(objective, connection.recv_bytes()))
