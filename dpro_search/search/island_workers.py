"""Islands in processes on this machine, which ask, price and tell by themselves; the search only collects what they found.

A worker is a fork of the search: it shares the trace and the compiled replay. It runs one island or several. No lock is shared.
When one is killed, at any point, another fork takes its place, is driven through the trials that had come from it, and goes on.
"""

from __future__ import annotations

import multiprocessing
import selectors
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from types import TracebackType
from typing import Self

import msgspec

from dpro_search.errors import MissingCapabilityError
from dpro_search.search.finished import FinishedTrial, LazyTrial, line_as_written, plan_size
from dpro_search.search.island_process import Assignment, Mark, Report, work
from dpro_search.search.islands import Findings, Island, key_of, number_of, owner_of, share_of
from dpro_search.search.objective import Objective
from dpro_search.search.run_folder import Journal, Trial, line_of
from dpro_search.search.workers import Failed, end_of, end_workers, raise_failed, refuse_fatal
from dpro_search.space.plan import Prediction

_MOST_BARREN = 8  # losses in a row between which no trial was finished

_REPORT = msgspec.msgpack.Decoder(Report | Failed)


@dataclass(eq=False)
class _Worker:
    islands: Sequence[int]
    mark: Mark
    process: ForkProcess
    connection: Connection
    waits: tuple[int, int] | None = None  # an island, and the round before which it waits for news


class IslandWorkers:
    """The trials of islands that run in processes.

    Parameters
    ----------
    make
        Makes an island, given its number and the price of the recorded setting; called in the process where it runs.
    first
        Trial 0.
    journal
        What it knows is not priced again; takes what is found.
    trials
        How many trials there are to be, trial 0 included.
    islands, workers
        Islands are dealt to at most so many processes.

    Attributes
    ----------
    lost
        Workers that have ended before their time.
    """

    def __init__(
        self,
        objective: Objective,
        make: Callable[[int, Prediction], Island],
        first: Trial,
        journal: Journal,
        trials: int,
        *,
        islands: int,
        workers: int,
    ) -> None:
        self.lost = 0
        self._objective, self._make, self._first = objective, make, first
        self._journal, self._trials = journal, trials
        self._findings = Findings(islands)
        for trial in journal.trials[1:]:
            known = _lazy(trial)
            self._findings.add(known, known.key)
        self._passed = [0] * islands
        self._losses: Counter[int] = Counter()  # workers, by the trial that they were pricing
        self._barren = 0
        self._workers: list[_Worker] = []
        self._reports = selectors.DefaultSelector()
        for least in range(min(workers, islands, trials - 1)):
            self._start(range(least, islands, workers), Mark())

    def trials(self) -> Iterator[FinishedTrial]:
        """Finished trials, in order.

        Raises
        ------
        DproSearchError
            What an objective or a sampler raised in a worker.
        MissingCapabilityError
            A plan ends every worker that prices it, or workers end again and again before a trial is finished.
        """
        yield _lazy(self._first)
        for number in range(1, self._trials):
            island, place = owner_of(number, self._findings.islands)
            while self._passed[island] <= place:
                self._receive()
            trial = self._findings.of(island)[place]
            if number >= len(self._journal.trials):
                self._journal.append_line(line_as_written(trial))
            yield trial

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._reports.close()
        end_workers([(worker.process, worker.connection) for worker in self._workers])
        self._workers.clear()

    def _start(self, islands: Sequence[int], mark: Mark) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        # Kept open in a worker, others' sockets would hide that the search has ended, and the journal would stay locked then.
        foreign = [*(worker.connection.fileno() for worker in self._workers), ours.fileno(), self._journal.fileno()]
        assignments = [self._assignment(island) for island in islands]
        process = context.Process(
            target=work,
            args=(self._objective, self._first.prediction, assignments, self._journal, mark, theirs, foreign),
            daemon=True,
        )
        process.start()
        theirs.close()
        worker = _Worker(islands, mark, process, ours)
        self._workers.append(worker)
        self._reports.register(ours, selectors.EVENT_READ, worker)

    def _assignment(self, island: int) -> Assignment:
        count = self._findings.islands
        return Assignment(
            island=island,
            make=partial(self._make, island),
            share=share_of(island, count, self._trials),
            known=self._findings.of(island),
            number_of=partial(number_of, island, count),
        )

    def _receive(self) -> None:
        """Take what has come, at least one report or end, and give news to those that wait for them."""
        for ready, _ in self._reports.select():
            worker: _Worker = ready.data
            try:
                report = _REPORT.decode(worker.connection.recv_bytes())
            except (EOFError, OSError):
                self._ended(worker)
                continue
            if isinstance(report, Failed):
                raise_failed(report)
            for finished in report.finished:
                self._findings.add(LazyTrial(finished.line, finished.key, finished.size), finished.key)
                self._barren = 0
            self._passed[report.island] = max(self._passed[report.island], report.passed)
            worker.waits = None if report.round is None else (report.island, report.round)
        for worker in list(self._workers):
            if worker.waits is not None and self._findings.has_news(*worker.waits):
                news, worker.waits = self._findings.news(*worker.waits), None
                try:
                    worker.connection.send_bytes(msgspec.msgpack.encode(news))
                except OSError:
                    self._ended(worker)

    def _ended(self, worker: _Worker) -> None:
        """Start another one in the place of a worker that was not done."""
        self._reports.unregister(worker.connection)
        worker.connection.close()
        worker.process.join()
        self._workers.remove(worker)
        count = self._findings.islands
        if all(self._passed[island] >= share_of(island, count, self._trials) for island in worker.islands):
            return
        self.lost += 1
        self._barren += 1
        number, plan = worker.mark.read()
        if number:
            self._losses[number] += 1
            refuse_fatal(plan, self._losses[number])
        if self._barren >= _MOST_BARREN:
            raise MissingCapabilityError(
                f"--workers: {self._barren} worker processes have ended one after the other before a trial was finished"
                f" (the last: {end_of(worker.process)}); run the same command to continue"
            )
        worker.mark.clear()
        self._start(worker.islands, worker.mark)


def _lazy(trial: Trial) -> LazyTrial:
    return LazyTrial(line_of(trial), key_of(msgspec.json.encode(trial.plan)), plan_size(trial.plan))
