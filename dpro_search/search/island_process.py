"""What a worker process does that runs islands: ask, price, tell, and send what is finished.

It sends reports as it likes, which the search always reads, and hears news by a pipe of its own, into which the search never waits
to write: so neither side ever waits for one that waits for it.
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NoReturn

import msgspec

from dpro_search.search.finished import FinishedTrial, LazyTrial, plan_size
from dpro_search.search.islands import FIRST_NEWS, ROUND, Asked, Island, News
from dpro_search.search.news_pipe import NewsReader
from dpro_search.search.objective import Objective
from dpro_search.search.run_folder import Journal, line_with
from dpro_search.search.trials import check_same
from dpro_search.search.workers import SHOWN_BYTES, failed
from dpro_search.space.plan import Prediction

_SEND_EVERY_S = 0.025  # of the trials so far: what a killed worker may lose, beside the one that it was pricing


class Report(msgspec.Struct, frozen=True, tag=True):
    """What a worker sends of an island.

    Attributes
    ----------
    passed
        How many of its trials the island has been through, those included whose price the search knew.
    finished
        New trials, in order.
    """

    island: int
    passed: int
    finished: list[LazyTrial]


class Mark:
    """What a worker is pricing, where the search can read it when the worker is gone: a trial's number and its plan's beginning."""

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
        """Number 0: nothing is being priced."""
        number, length = self._HEAD.unpack_from(self._shared)
        return number, self._shared[self._HEAD.size : self._HEAD.size + length].decode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What an island has to do.

    Attributes
    ----------
    make
        Makes the island, given the price of the recorded setting.
    share
        How many trials are its own.
    known
        Those of them that are finished.
    number_of
        The number of a trial of its own among all.
    """

    island: int
    make: Callable[[Prediction], Island]
    share: int
    known: Sequence[FinishedTrial]
    number_of: Callable[[int], int]


class _GoneError(Exception):
    """The search has closed its end."""


@dataclass(eq=False)
class _Post:
    """Reports of the island whose turn it is, and what it hears."""

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
    objective: Objective,
    recorded: Prediction,
    assignments: Sequence[Assignment],
    journal: Journal,
    mark: Mark,
    connection: Connection,
    news: NewsReader,
    foreign: Sequence[int],
) -> NoReturn:
    """Run islands round by round until they have their shares or the search is gone; Ctrl-C is the search's business.

    Parameters
    ----------
    foreign
        File descriptors that are the search's own.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for descriptor in foreign:
        os.close(descriptor)
    gc.freeze()  # what was forked along is not looked at, which would copy its pages
    try:
        _run(objective, recorded, assignments, journal, mark, _Post(connection, news))
    except _GoneError:
        pass
    except Exception as error:
        connection.send_bytes(msgspec.msgpack.encode(failed(error)))
    finally:
        os._exit(0)  # without clean-up: what was forked along (progress bars, files) belongs to the search


def _run(
    objective: Objective, recorded: Prediction, assignments: Sequence[Assignment], journal: Journal, mark: Mark, post: _Post
) -> None:
    islands = [assignment.make(recorded) for assignment in assignments]
    longest = max(assignment.share for assignment in assignments)
    for first in range(0, longest, ROUND):
        for assignment, island in zip(assignments, islands, strict=True):
            if first >= assignment.share:
                continue
            post.island, post.passed = assignment.island, first
            if first >= FIRST_NEWS * ROUND:
                island.hear(post.news(first // ROUND))
            for place in range(first, min(first + ROUND, assignment.share)):
                asked = island.ask()
                if place < len(assignment.known):
                    known = assignment.known[place]
                    check_same(known, asked.proposal, journal)
                    prediction = known.prediction
                else:
                    number = assignment.number_of(place)
                    prediction = _priced(objective, island, asked, number, mark)
                    post.finished.append(_finished(asked, number, prediction))
                island.tell(asked, prediction)
                post.passed = place + 1
                post.send_soon()
            post.send()


def _priced(objective: Objective, island: Island, asked: Asked, number: int, mark: Mark) -> Prediction:
    prediction = island.price(asked)
    if prediction is None:
        mark.set(number, asked.plan_json)
        prediction = objective.predict(asked.proposal.plan)
        mark.clear()
    return prediction


def _finished(asked: Asked, number: int, prediction: Prediction) -> LazyTrial:
    plan, origin = asked.proposal
    line = line_with(number, origin, asked.plan_json, prediction)
    return LazyTrial(line, asked.key, plan_size(plan), number, origin, prediction)
