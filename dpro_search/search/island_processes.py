"""Islands in processes on this machine; the search only collects their trials.

A process runs one island or several: it asks, evaluates, tells, and sends finished trials as lines of the journal. It reads the
results of other islands in the journal's file, and the search tells it when a round is there. If a process is killed, another fork
replaces it, repeats the proposals of the finished trials, and continues.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import msgspec

from dpro_search.errors import MissingCapabilityError
from dpro_search.search.evaluation import SHOWN_BYTES, Evaluations, Failed, InlineEvaluator, Losses, failed, raise_failed
from dpro_search.search.islands import ROUND, Island, islands_trials, plan_json
from dpro_search.search.objective import Objective
from dpro_search.search.run_folder import Journal, Trial, line_of
from dpro_search.search.workers import Fork, end_forks
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.plan_json import decoded

_MOST_LOSSES_IN_A_ROW = 8  # without a finished trial between them
_SEND_EVERY_S = 0.025  # a killed worker loses the trials of this time, and the current one
_MESSAGE = msgspec.msgpack.Decoder(Failed | list[bytes])


class IslandProcesses:
    """The trials of islands that run in processes.

    Parameters
    ----------
    make
        Makes an island, given its number; called in the process that runs it.
    journal
        Its trials are not evaluated again; the caller of `trials` appends each new one.
    trials
        How many trials the search has, with the recorded setting.
    islands, workers
        Islands are distributed to at most so many processes.
    """

    def __init__(
        self,
        objective: Objective,
        make: Callable[[int], Island],
        journal: Journal,
        trials: int,
        *,
        islands: int,
        workers: int,
        losses: Losses,
    ) -> None:
        self._objective, self._make = objective, make
        self._journal, self._trials, self._islands = journal, trials, islands
        self._rounds = max(len(journal.trials) - 1, 0) // (ROUND * islands)  # that are in the journal's file
        self._received: dict[int, Trial] = {}  # trials that the journal does not have, by number
        self._losses = losses
        self._losses_in_a_row = 0
        self._processes = min(workers, islands, trials - 1)
        self._workers: list[_IslandWorker] = []
        for place in range(self._processes):
            due = self._numbers(place)
            self._workers.append(self._started(place, next(due), due, _Mark()))

    def trials(self) -> Iterator[Trial]:
        """Finished trials in order, from number 1 on.

        Raises
        ------
        DproSearchError
            What an objective or a sampler raised in a worker.
        MissingCapabilityError
            A plan ends every worker that evaluates it, or workers end repeatedly before a trial is finished.
        """
        for number in range(1, self._trials):
            while self._awaits(number):
                self._receive()
            trial = self._finished(number)
            assert trial is not None, "a trial whose number its worker has passed is finished"
            yield trial
            if number == (self._rounds + 1) * ROUND * self._islands:
                self._announce_round()

    def close(self) -> None:
        """End the processes."""
        end_forks([worker.fork for worker in self._workers])
        self._workers.clear()

    def _awaits(self, number: int) -> bool:
        """Whether a trial has not arrived; a worker sends its trials in order."""
        next_number = self._workers[self._place(number)].number
        return next_number is not None and next_number <= number

    def _place(self, number: int) -> int:
        """The worker that runs the island of a trial."""
        return (number - 1) % self._islands % self._processes

    def _numbers(self, place: int) -> Iterator[int]:
        """The trials of a worker's islands."""
        return (number for number in range(1, self._trials) if self._place(number) == place)

    def _finished(self, number: int) -> Trial | None:
        known = self._journal.trials
        return known[number] if number < len(known) else self._received.get(number)

    def _started(self, place: int, number: int, due: Iterator[int], mark: _Mark) -> _IslandWorker:
        """Start the process of a worker that sends the trials from a number on."""
        others = [worker.fork.connection.fileno() for at, worker in enumerate(self._workers) if at != place]
        fork = Fork.start(self._run, place, number, mark, foreign=[*others, self._journal.fileno()])
        return _IslandWorker(fork, mark, due, number)

    def _announce_round(self) -> None:
        """Tell the workers that a further round is in the journal's file."""
        self._journal.flush()
        self._rounds += 1
        for worker in self._workers:
            if worker.number is not None:
                with suppress(OSError):  # it was killed: its successor starts with the number of rounds
                    worker.fork.connection.send_bytes(b"")

    def _receive(self) -> None:
        """Take what has arrived: at least one message, or the end of a worker."""
        connections = [worker.fork.connection for worker in self._workers if worker.number is not None]
        ready = wait(connections)
        for place, worker in enumerate(self._workers):
            if worker.fork.connection not in ready:
                continue
            try:
                message = _MESSAGE.decode(worker.fork.connection.recv_bytes())
            except (EOFError, OSError):
                self._replace(place)
                continue
            if isinstance(message, Failed):
                raise_failed(message)
            for line in message:
                assert worker.number is not None, "a worker sends no more trials than are its own"
                if line:
                    self._received[worker.number] = decoded(line, Trial)
                    self._losses_in_a_row = 0
                worker.number = next(worker.due, None)

    def _replace(self, place: int) -> None:
        """Start another process in place of one that ended before it had sent all its trials."""
        worker = self._workers[place]
        how = worker.fork.ended()
        assert worker.number is not None, "a worker is waited for until it has sent all its trials"
        self._losses_in_a_row += 1
        self._losses.add(*worker.mark.read())
        if self._losses_in_a_row >= _MOST_LOSSES_IN_A_ROW:
            raise MissingCapabilityError(
                f"--workers: {self._losses_in_a_row} worker processes have ended one after the other before a trial was finished"
                f" (the last: {how}); run the same command to continue"
            )
        worker.mark.clear()
        self._workers[place] = self._started(place, worker.number, worker.due, worker.mark)

    def _run(self, connection: Connection, place: int, first: int, mark: _Mark) -> None:
        """Run the islands of a worker, in its process, and send its trials from number `first` on.

        A trial that the journal had is sent as an empty line, when its island has proposed it again.
        """
        evaluations, known = Evaluations(_MarkingEvaluator(self._objective, mark)), len(self._journal.trials)
        islands = {number: self._make(number) for number in range(place, self._islands, self._processes)}

        def await_round(round_: int) -> None:
            while self._rounds <= round_:
                connection.recv_bytes()
                self._rounds += 1

        trials = islands_trials(
            evaluations, islands, self._finished, self._journal, self._trials, count=self._islands, await_round=await_round
        )
        lines: list[bytes] = []
        sent_s = time.monotonic()
        try:
            for trial in trials:
                if trial.number >= first:
                    lines.append(line_of(trial) if trial.number >= known else b"")
                is_last = (trial.number - 1) // self._islands % ROUND == ROUND - 1  # of its round: others may wait for it
                if is_last or time.monotonic() - sent_s >= _SEND_EVERY_S:
                    connection.send_bytes(msgspec.msgpack.encode(lines))
                    lines, sent_s = [], time.monotonic()
            connection.send_bytes(msgspec.msgpack.encode(lines))
        except Exception as error:  # also of a search that is gone: then this raises again, and ends the process
            connection.send_bytes(msgspec.msgpack.encode(failed(error)))


@dataclass(eq=False)
class _IslandWorker:
    """A process, and how far the search has received its trials."""

    fork: Fork
    mark: _Mark
    due: Iterator[int]  # Numbers of the trials after the next.
    number: int | None  # Number of the trial that it sends next; None: it has sent all.


class _Mark:
    """The plan that a worker evaluates, in shared memory: the search can read it after the worker has ended."""

    _HEAD = struct.Struct("<qi")

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, self._HEAD.size + SHOWN_BYTES + 1)

    def set(self, plan: Plan) -> None:
        shown = plan_json(plan)[: SHOWN_BYTES + 1]
        self._shared[self._HEAD.size : self._HEAD.size + len(shown)] = shown
        self._HEAD.pack_into(self._shared, 0, hash(plan), len(shown))

    def clear(self) -> None:
        self._HEAD.pack_into(self._shared, 0, 0, 0)

    def read(self) -> tuple[int, str]:
        """Hash of the plan, and the beginning of its JSON; the latter is empty if no plan was being evaluated."""
        plan_hash, length = self._HEAD.unpack_from(self._shared)
        return plan_hash, self._shared[self._HEAD.size : self._HEAD.size + length].decode(errors="replace")


class _MarkingEvaluator(InlineEvaluator):
    def __init__(self, objective: Objective, mark: _Mark) -> None:
        super().__init__(objective)
        self._mark = mark

    def done(self) -> tuple[Plan, Prediction]:
        self._mark.set(self._waiting[0])
        evaluated = super().done()
        self._mark.clear()
        return evaluated
