"""The worker process that runs islands: ask, evaluate, tell, and send finished trials to the search.

It sends reports at any time; the search always reads them. It receives the results of other islands through a pipe of its own, to
which the search writes without blocking. So the two sides cannot deadlock.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import msgspec

from dpro_search.search.finished import FinishedTrial, LazyTrial, plan_size
from dpro_search.search.islands import FIRST_NEWS, ROUND, Island, KeyedProposal, News
from dpro_search.search.news_pipe import NewsReader
from dpro_search.search.objective import Objective
from dpro_search.search.run_folder import Journal, line_with
from dpro_search.search.trials import check_same
from dpro_search.search.workers import SHOWN_BYTES, failed
from dpro_search.space.plan import Prediction

_SEND_EVERY_S = 0.025  # interval of reports: a killed worker loses the trials of this time, and the current one


class Report(msgspec.Struct, frozen=True, tag=True):
    """A report of a worker on an island."""

    island: int
    passed: int  # How many of its trials the island has finished, with those that the search knew.
    finished: list[LazyTrial]  # New trials, in order.


class Mark:
    """The trial that a worker evaluates, in shared memory: the search can read it after the worker has ended."""

    _HEAD = struct.Struct("<qi")

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, self._HEAD.size + SHOWN_BYTES + 1)

    def set(self, number: int, plan_json: bytes) -> None:
        shown = plan_json[: SHOWN_BYTES + 1]
        self._shared[self._HEAD.size : self._HEAD.size + len(shown)] = shown
        self._HEAD.pack_into(self._shared, 0, number, len(shown))

    def clear(self) -> None:
        self._HEAD.pack_into(self._shared, 0, 0, 0)

    def read(self) -> tuple[int, str]:
        """Number of the trial, 0 if there is none, and the beginning of its plan's JSON."""
        number, length = self._HEAD.unpack_from(self._shared)
        return number, self._shared[self._HEAD.size : self._HEAD.size + length].decode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The task of an island."""

    island: int
    make: Callable[[Prediction], Island]  # Makes the island, given the prediction of the recorded setting.
    share: int  # How many trials are its own.
    known: Sequence[FinishedTrial]  # Those that are finished.
    number_of: Callable[[int], int]  # The number of a trial of its own among all.


class _GoneError(Exception):
    """The search has closed its end."""


@dataclass(eq=False)
class _Messages:
    """Reports of the island that runs now, and the results that it receives."""

    connection: Connection
    heard: NewsReader
    island: int = 0
    passed: int = 0
    finished: list[LazyTrial] = field(default_factory=list)
    sent_s: float = field(default_factory=time.monotonic)

    def send(self) -> None:
        try:
            self.connection.send_bytes(msgspec.msgpack.encode(Report(self.island, self.passed, self.finished)))
        except OSError as error:
            raise _GoneError from error
        self.finished = []
        self.sent_s = time.monotonic()

    def send_soon(self) -> None:
        if time.monotonic() - self.sent_s >= _SEND_EVERY_S:
            self.send()

    def news(self, round_: int) -> list[News]:
        try:
            return self.heard.before(self.island, round_)
        except EOFError as error:
            raise _GoneError from error


def work(
    connection: Connection,
    objective: Objective,
    recorded: Prediction,
    assignments: Sequence[Assignment],
    journal: Journal,
    mark: Mark,
    news: NewsReader,
) -> None:
    """Run islands round by round until they have their shares or the search is gone."""
    try:
        _run(objective, recorded, assignments, journal, mark, _Messages(connection, news))
    except _GoneError:
        pass
    except Exception as error:
        connection.send_bytes(msgspec.msgpack.encode(failed(error)))


def _run(
    objective: Objective,
    recorded: Prediction,
    assignments: Sequence[Assignment],
    journal: Journal,
    mark: Mark,
    exchange: _Messages,
) -> None:
    islands = [assignment.make(recorded) for assignment in assignments]
    longest = max(assignment.share for assignment in assignments)
    for first in range(0, longest, ROUND):
        for assignment, island in zip(assignments, islands, strict=True):
            if first >= assignment.share:
                continue
            exchange.island, exchange.passed = assignment.island, first
            if first >= FIRST_NEWS * ROUND:
                island.hear(exchange.news(first // ROUND))
            for place in range(first, min(first + ROUND, assignment.share)):
                keyed = island.ask()
                if place < len(assignment.known):
                    known = assignment.known[place]
                    check_same(known, keyed.proposal, journal)
                    prediction = known.prediction
                else:
                    number = assignment.number_of(place)
                    prediction = _evaluated(objective, island, keyed, number, mark)
                    exchange.finished.append(_finished(keyed, number, prediction))
                island.tell(keyed, prediction)
                exchange.passed = place + 1
                exchange.send_soon()
            exchange.send()


def _evaluated(objective: Objective, island: Island, keyed: KeyedProposal, number: int, mark: Mark) -> Prediction:
    prediction = island.known_prediction(keyed)
    if prediction is None:
        mark.set(number, keyed.plan_json)
        prediction = objective.predict(keyed.proposal.plan)
        mark.clear()
    return prediction


def _finished(keyed: KeyedProposal, number: int, prediction: Prediction) -> LazyTrial:
    plan, origin = keyed.proposal
    line = line_with(number, origin, keyed.plan_json, prediction)
    return LazyTrial(line, keyed.key, plan_size(plan), number, origin, prediction)
