"""Islands in processes on this machine; the search only collects their trials.

A worker is a fork (`workers.Fork`) that runs one island or several. If a worker is killed, another fork replaces it, repeats the
proposals of its finished trials, and continues.
"""

from __future__ import annotations

import selectors
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

import msgspec

from dpro_search.errors import MissingCapabilityError
from dpro_search.search.finished import FinishedTrial, compact_trial, line_as_written
from dpro_search.search.island_process import Assignment, Mark, Report, work
from dpro_search.search.islands import Findings, Island, number_of, owner_of, share_of
from dpro_search.search.news_pipe import NewsWriter, news_pipe
from dpro_search.search.objective import Objective
from dpro_search.search.run_folder import Journal, Trial
from dpro_search.search.workers import Failed, Fork, end_forks, raise_failed, refuse_fatal
from dpro_search.space.plan import Prediction

_MOST_LOSSES_IN_A_ROW = 8  # without a finished trial between them

_REPORT = msgspec.msgpack.Decoder(Report | Failed)


@dataclass(eq=False)
class _IslandWorker:
    islands: Sequence[int]
    mark: Mark
    fork: Fork
    news: NewsWriter


class IslandWorkers:
    """The trials of islands that run in processes.

    Parameters
    ----------
    make
        Makes an island, given its number and the prediction of the recorded setting; called in the worker process.
    first
        Trial 0.
    journal
        Its trials are not evaluated again; new ones are appended.
    trials
        How many trials the search has, with trial 0.
    islands, workers
        Islands are distributed to at most so many processes.

    Attributes
    ----------
    lost
        Workers that ended too early.
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
        for number in range(1, len(journal.trials)):
            known = compact_trial(journal.trials[number])
            self._findings.add(known, known.key)
        self._told = [self._findings.rounds(island) for island in range(islands)]  # rounds whose results were sent to the others
        self._passed = [0] * islands
        self._losses: Counter[int] = Counter()  # workers, by the trial that they evaluated
        self._losses_in_a_row = 0
        self._workers: list[_IslandWorker] = []
        self._ready = selectors.DefaultSelector()
        for least in range(min(workers, islands, trials - 1)):
            self._start(range(least, islands, workers), Mark())

    def trials(self) -> Iterator[FinishedTrial]:
        """Finished trials, in order.

        Raises
        ------
        DproSearchError
            What an objective or a sampler raised in a worker.
        MissingCapabilityError
            A plan ends every worker that evaluates it, or workers end repeatedly before a trial is finished.
        """
        yield compact_trial(self._first)
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
        self._ready.close()
        end_forks([worker.fork for worker in self._workers])
        for worker in self._workers:
            worker.news.close()
        self._workers.clear()

    def _start(self, islands: Sequence[int], mark: Mark) -> None:
        news, heard = news_pipe(self._findings.islands)
        foreign = [end.fileno() for worker in self._workers for end in (worker.fork.connection, worker.news)]
        foreign += [news.fileno(), self._journal.fileno()]
        assignments = [self._assignment(island) for island in islands]
        fork = Fork.start(work, self._objective, self._first.prediction, assignments, self._journal, mark, heard, foreign=foreign)
        heard.close()
        worker = _IslandWorker(islands, mark, fork, news)
        self._workers.append(worker)
        self._ready.register(fork.connection, selectors.EVENT_READ, worker)
        for round_ in range(max(self._told)):
            for island, first_unknown_round in enumerate(self._told):
                if round_ < first_unknown_round:
                    self._send(worker, island, msgspec.msgpack.encode(self._findings.news_of(island, round_)))

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
        """Take what has arrived, at least one report or end, and continue to send results to workers that can take more."""
        for ready, _ in self._ready.select():
            worker: _IslandWorker = ready.data
            if worker not in self._workers:
                continue  # its end came first
            if ready.fileobj is worker.news:
                self._continue_sending(worker)
            else:
                self._take_report(worker)

    def _take_report(self, worker: _IslandWorker) -> None:
        try:
            report = _REPORT.decode(worker.fork.connection.recv_bytes())
        except (EOFError, OSError):
            self._ended(worker)
            return
        if isinstance(report, Failed):
            raise_failed(report)
        for trial in report.finished:
            self._findings.add(trial, trial.key)
            self._losses_in_a_row = 0
        island = report.island
        self._passed[island] = max(self._passed[island], report.passed)
        for round_ in range(self._told[island], self._findings.rounds(island)):
            news = msgspec.msgpack.encode(self._findings.news_of(island, round_))
            for other in self._workers:
                self._send(other, island, news)
            self._told[island] += 1

    def _send(self, worker: _IslandWorker, island: int, news: bytes) -> None:
        """Send a worker the results of an island's round, unless the worker runs that island only."""
        if list(worker.islands) != [island]:
            worker.news.add(news)
            self._continue_sending(worker)

    def _continue_sending(self, worker: _IslandWorker) -> None:
        """Write pending results; if some are left, wait for room in the pipe."""
        left, awaited = worker.news.write(), worker.news.fileno() in self._ready.get_map()
        if left and not awaited:
            self._ready.register(worker.news, selectors.EVENT_WRITE, worker)
        elif awaited and not left:
            self._ready.unregister(worker.news)

    def _ended(self, worker: _IslandWorker) -> None:
        """Replace a worker that ended before its islands were finished."""
        self._ready.unregister(worker.fork.connection)
        if worker.news.fileno() in self._ready.get_map():
            self._ready.unregister(worker.news)
        worker.news.close()
        how = worker.fork.ended()
        self._workers.remove(worker)
        count = self._findings.islands
        if all(self._passed[island] >= share_of(island, count, self._trials) for island in worker.islands):
            return
        self.lost += 1
        self._losses_in_a_row += 1
        number, plan = worker.mark.read()
        if number:
            self._losses[number] += 1
            refuse_fatal(plan, self._losses[number])
        if self._losses_in_a_row >= _MOST_LOSSES_IN_A_ROW:
            raise MissingCapabilityError(
                f"--workers: {self._losses_in_a_row} worker processes have ended one after the other before a trial was finished"
                f" (the last: {how}); run the same command to continue"
            )
        worker.mark.clear()
        self._start(worker.islands, worker.mark)
