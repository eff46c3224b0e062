"""Orders the ranks of a running job what to measure, order by order, while the launcher waits for the job: `Conversation`.

Orders and results are files in the job's folder, for the ranks of all backends can read and write those alike.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import msgspec

from dpro_search.collect._files import write_file
from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.errors import JobError

_POLL_S = 0.005
_ANSWER_S = 240.0  # an order takes seconds
_READY_S = 120.0
_STEP_NS = 10_000_000  # in which the kernel counts what cores do


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One all-reduce to be timed: `before` calls of `before_bytes`, and at once `calls` of `size_bytes`, which count."""

    algorithm: str
    size_bytes: int
    before_bytes: int
    before: int
    calls: int
    meet: bool  # Whether ranks meet before each timed call; else one call follows the other.


@dataclass(frozen=True, kw_only=True)
class CellOrder:
    """Cells that are measured one after the other behind links of one rate."""

    rate_bps: float | None
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True)
class CellTimes:
    """Duration of each call of a cell."""

    call_us: float  # The time of all calls over their number.
    sent_bytes: int  # The most that a host sent.
    busy_us: float  # How long a core did anything, its ranks, servers or the kernel, on the core where that was longest.


OnAnswers = Callable[[CellOrder, Sequence[CellTimes]], None]


class Conversation(threading.Thread):
    """Gives the orders of an iterator, which may look at earlier answers, until it ends; then the job ends.

    Parameters
    ----------
    orders
        Drawn one at a time, each after the one before was answered.
    on_ready
        Called with the backend's version once all ranks are up.
    on_answers
        Called with every answer.

    Attributes
    ----------
    error
        What went wrong here, if anything; the job's own failure is the launcher's to report.
    """

    def __init__(
        self,
        folder: Path,
        ranks: int,
        hosts: ShapedHosts,
        orders: Iterator[CellOrder],
        on_ready: Callable[[str], None],
        on_answers: OnAnswers,
    ) -> None:
        super().__init__(name="conversation", daemon=True)
        self._folder, self._ranks, self._hosts, self._orders = folder, ranks, hosts, orders
        self._on_ready, self._on_answers = on_ready, on_answers
        self._given = 0
        self._over = threading.Event()
        self.error: Exception | None = None

    def end(self) -> None:
        """The job is over: give no more orders, wait for no more answers."""
        self._over.set()
        self.join()

    def run(self) -> None:
        """Talk until the orders end or the job does."""
        try:
            versions = self._awaited("ready", _READY_S)
            if versions is None:
                return
            self._on_ready(versions[0]["version"])
            for order in self._orders:
                if not self._give(order):
                    return
        except Exception as error:  # the launcher's thread raises it
            self.error = error
        finally:
            with contextlib.suppress(Exception):
                self._post([])

    def _give(self, order: CellOrder) -> bool:
        """Whether the order was answered."""
        self._hosts.set_rate(order.rate_bps)
        self._post([astuple(cell) for cell in order.cells])
        results = self._awaited(f"result-{self._given - 1}", _ANSWER_S)
        if results is None:
            return False
        self._on_answers(order, [cell_times(cell, [rank[number] for rank in results]) for number, cell in enumerate(order.cells)])
        return True

    def _post(self, cells: list[tuple[Any, ...]]) -> None:
        write_file(self._folder / f"order-{self._given}.json", msgspec.json.encode(cells))
        self._given += 1

    def _awaited(self, name: str, patience_s: float) -> list[Any] | None:
        """Files that every rank wrote under a name; None if the job is over. Raises `JobError` if it takes too long."""
        paths = [self._folder / f"{name}-{rank}.json" for rank in range(self._ranks)]
        deadline = time.monotonic() + patience_s
        while not all(path.exists() for path in paths):
            if self._over.is_set():
                return None
            if time.monotonic() > deadline:
                raise JobError(f"the ranks gave no {name} within {patience_s:.0f} s")
            time.sleep(_POLL_S)
        return [msgspec.json.decode(path.read_bytes()) for path in paths]


def cell_times(cell: Cell, ranks: Sequence[dict[str, Any]]) -> CellTimes:
    """The times of a cell, as the ranks measured them; a call lasts from when the last rank began to when the last had ended."""
    spans = zip(*(rank["spans_ns"] for rank in ranks), strict=True)
    total_ns = sum(max(end for _, end in span) - max(begin for begin, _ in span) for span in spans)
    call_us = max(total_ns, 1) / 1e3 / cell.calls
    by_cores: dict[tuple[int, ...], list[dict[str, Any]]] = defaultdict(list)
    for rank in ranks:
        by_cores[tuple(rank["cores"])].append(rank)
    return CellTimes(
        call_us=call_us,
        sent_bytes=max(int(rank["sent_bytes"]) for rank in ranks) // cell.calls,
        busy_us=call_us * max(statistics.fmean(map(_busy_part, some)) for some in by_cores.values()),
    )


def _busy_part(rank: dict[str, Any]) -> float:
    """The part of a rank's calls in which its cores did anything: they are read in steps, so that it may be below 0.

    Rest is counted more finely than work. But a virtual machine counts the time twice that other machines took while a core was
    idle, as idle and as taken: where work and rest are together longer than the calls by more than a step, work is taken.
    """
    spans, cores = rank["spans_ns"], len(rank["cores"])
    work_ns, rest_ns = float(rank["work_ns"]), float(rank["rest_ns"])
    span_ns = cores * max(float(spans[-1][1] - spans[0][0]), 1.0)
    counted_twice = work_ns + rest_ns > span_ns + 2 * cores * _STEP_NS
    return (work_ns if counted_twice else span_ns - rest_ns) / span_ns
