"""Measures all-reduces on the real backends over shaped hosts, until a table has all requested ones.

A job has one backend and one number of ranks; its links' rate is changed while it runs, and rounds alternate between rates, sizes
and algorithms, so that a disturbance does not fall on one of them alone. Sizes grow: one that would take too long, predicted from
the smaller ones, is left out.

What is measured is a call in a train of calls, as `nccl-tests` does it and as a backward pass enqueues them: single calls of small
tensors wait for a turn on a core, by chance, and links that have rested let a burst pass at once. Calls before the timed ones use
the burst up. Rounds beyond the requested ones are made where rounds differ. Ranks of MPI meet before each call, as they do in jobs
(Horovod negotiates each): in a train of its calls both directions of a link may become half-duplex, for as long as the train lasts.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect._files import scratch_folder
from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.tables.all_reduces import AllReduceRow, CommHeader, CommTable, RowKey, read_comm_table, write_comm_table
from dpro_search.collect.this_machine import machine
from dpro_search.errors import InputError, JobError, MissingCapabilityError
from dpro_search.measure.backends import Backend, backends_named
from dpro_search.measure.campaign import Campaign, Progress
from dpro_search.measure.conversation import Cell, CellOrder, CellTimes, Conversation

SIZES = tuple(2**power for power in range(10, 29))  # 1 KiB to 256 MiB
_TRAIN_US = 80e3  # timed calls of a cell in a round: so long, or so many
_FEWEST, _MOST = 1, 500
_DRAIN_BYTES = 512 * 1024  # sent before the timed calls: links let 128 KiB pass at once up to 2 Gbit/s
_BEFORE_BYTES = 1024 * 1024  # the largest tensor sent for that
_SETTLED = 0.02  # standard error of a duration
_FURTHER = 3  # times the requested rounds, until it is reached
_MOST_WIRE_TIMES = 2  # of the bytes that a host sends: both directions one after the other
_FIRST_US = 5e3  # guess for the smallest sizes
_CARRIES = 4  # sizes whose time follows from a measured one, and sizes of an order
_JOB_S, _EDGES_S = 3000.0, 400.0  # of orders to one job; for it to begin, to end its last order, and to end


@dataclass(frozen=True, kw_only=True)
class CommRequest:
    """The calls to measure."""

    backends: tuple[str, ...] = ()  # Names, or ``name:algorithm`` for one of its algorithms; empty: all that this machine has.
    # ranks, rates_bps, sizes_bytes: Numbers of ranks; limits of the links in bits a second, None: not limited; sizes of the tensor.
    ranks: tuple[int, ...] = (2, 3, 4, 8)
    rates_bps: tuple[float | None, ...] = (5e8, 1e9, 2e9)
    sizes_bytes: tuple[int, ...] = SIZES
    rounds: int = 3  # Of every all-reduce; up to three times as many, if at least two are requested, where these differ.
    longest_s: float = 10.0  # All-reduces that take longer are left out.
    python: str | None = None  # Interpreter that has the backends' framework; None: those of the project's environments.
    limit: int | None = None  # Rows in the table, in all; None: no limit.
    seconds: float | None = None  # After which no more is begun; None: until all is measured.
    ranks_per_host: int = 1  # On each host; more than one: with MPI only.

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 2 or max(self.ranks) > 64:
            raise InputError("--ranks: an all-reduce needs 2 ranks, and this machine takes no more than 64")
        if self.ranks_per_host < 1 or any(ranks % self.ranks_per_host or ranks == self.ranks_per_host for ranks in self.ranks):
            raise InputError(f"--ranks-per-host {self.ranks_per_host}: every number of --ranks must be that of several such hosts")
        if not self.sizes_bytes or any(size < 8 or size % 4 for size in self.sizes_bytes):
            raise InputError("sizes must be multiples of 4 bytes, from 8 on")
        if self.rounds < 1 or not self.rates_bps:
            raise InputError("at least one round and one rate are needed")


@dataclass(kw_only=True)
class CommProgress(Progress):
    """State of a collection of all-reduces; `new` counts timed calls."""

    complete: bool = False  # no request is left
    skipped: dict[str, str] = field(default_factory=dict)  # backends that this machine has not, with the reason
    failed_jobs: dict[str, str] = field(default_factory=dict)  # with the reason


def collect_communication(
    request: CommRequest, out: Path, on_progress: Callable[[CommProgress], None] = lambda _: None
) -> CommProgress:
    """Measure all-reduces and write them to the table `out`; continues where an earlier call stopped.

    Raises
    ------
    InputError
        The table is of another machine or of other versions of a backend.
    MissingCapabilityError
        A backend that was named, or a permission, is missing.
    JobError
        Nothing could be measured.
    """
    campaign = _AllReduces(request, out, on_progress)
    campaign.run(request.seconds or None)
    progress = campaign.progress
    progress.complete = next(campaign.missing(), None) is None and not progress.failed_jobs
    if not progress.rows:
        reasons = [*progress.failed_jobs.values(), *progress.skipped.values()]
        raise JobError(f"no all-reduce could be measured: {reasons[0] if reasons else 'no time was left'}")
    return progress


class _AllReduces(Campaign["_BackendJob", CommProgress]):
    """Jobs of the requested backends and numbers of ranks; the table holds what they have measured."""

    def __init__(self, request: CommRequest, out: Path, on_progress: Callable[[CommProgress], None]) -> None:
        super().__init__(CommProgress(), on_progress)
        backends = backends_named(request.backends, request.ranks_per_host)
        self._pythons: dict[str, str] = {}
        for backend in backends:
            try:
                self._pythons[backend.name] = backend.interpreter(request.python)
            except MissingCapabilityError as error:
                if request.backends:
                    raise
                self.progress.skipped[backend.name] = str(error)
        self._path, self._limit = out, request.limit
        cores = len(os.sched_getaffinity(0))
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._header = CommHeader(machine=machine(), cores=cores, versions={}, started_at=now)
        self.rows: dict[RowKey, AllReduceRow] = {}
        if out.exists():
            known = read_comm_table(out)
            if (known.header.machine, known.header.cores) != (self._header.machine, cores):
                raise InputError(f"{out}: was collected on another machine ({known.header.machine}); choose another --out")
            self._header = known.header
            self.rows = {row.key: row for row in known.rows}
        self.progress.rows = len(self.rows)
        deadline = time.monotonic() + (request.seconds or float("inf"))
        self._jobs = [
            _BackendJob(backend, ranks, request, self, deadline)
            for backend, ranks in itertools.product(backends, request.ranks)
            if backend.name in self._pythons
        ]

    def missing(self) -> Iterator[_BackendJob]:
        return (job for job in self._jobs if job.has_more())

    def measure(self, item: _BackendJob) -> None:
        self.announce(item.title)
        item.run(self._pythons[item.backend.name])

    def skip(self, item: _BackendJob, error: JobError) -> None:
        self.progress.failed_jobs[item.title] = str(error)

    @property
    def room(self) -> float:
        """Rows that may still be begun."""
        return float("inf") if self._limit is None else self._limit - len(self.rows)

    def note_version(self, backend: str, version: str) -> None:
        """Raises `InputError` if the table's rows of a backend are of another version."""
        if self._header.versions.get(backend, version) != version:
            known = self._header.versions[backend]
            raise InputError(f"{self._path}: holds rows of {known}, this is {version}; choose another --out")
        self._header = msgspec.structs.replace(self._header, versions={**self._header.versions, backend: version})

    def add(self, rows: Sequence[AllReduceRow], calls: int) -> None:
        """Put rows, new or with a further round, into the table on disk."""
        before = len(self.rows)
        self.rows |= {row.key: row for row in rows}
        write_comm_table(self._path, CommTable(header=self._header, rows=tuple(self.rows.values()), dropped={}))
        self.added(len(self.rows) - before, calls)


class _BackendJob:
    """One backend on one number of ranks: which orders it needs, and the run that answers them."""

    def __init__(self, backend: Backend, ranks: int, request: CommRequest, table: _AllReduces, deadline: float) -> None:
        self.backend, self._ranks, self._request, self._table, self._deadline = backend, ranks, request, table, deadline

    @property
    def title(self) -> str:
        return f"{self.backend.name}, {self._ranks} ranks"

    def has_more(self) -> bool:
        """Whether an order is left to be given."""
        return next(self._orders(), None) is not None

    def run(self, python: str) -> None:
        """Start the job, give the orders, and keep the answers; raises `JobError` if the job fails."""
        servers = self.backend.servers(self._ranks)
        until = min(self._deadline, time.monotonic() + _JOB_S)
        with (
            scratch_folder("dpro-search-comm-") as folder,
            ShapedHosts(self._ranks // self._request.ranks_per_host + servers) as hosts,
        ):
            talk = Conversation(folder, self._ranks, hosts, self._in_time(until), self._on_ready, self._on_answers)
            talk.start()
            try:
                layout = self._ranks, self._request.ranks_per_host
                self.backend.run(python, layout, hosts, folder, until - time.monotonic() + _EDGES_S)
            finally:
                talk.end()
            if talk.error is not None:
                raise talk.error

    def _in_time(self, until: float) -> Iterator[CellOrder]:
        """Orders until the time is up."""
        return itertools.takewhile(lambda _: time.monotonic() < until, self._orders())

    def _orders(self) -> Iterator[CellOrder]:
        """Round by round, rate by rate, sizes upwards; each order looks at what the ones before it took."""
        sizes = sorted(self._request.sizes_bytes)
        parts = [sizes[i : i + _CARRIES] for i in range(0, len(sizes), _CARRIES)]
        for number in range(1, self._most_rounds + 1):
            for part, rate_bps in itertools.product(parts, self._request.rates_bps):
                cells_of_part = [
                    self._cell(algorithm, size, rate_bps, number) for size in part for algorithm in self.backend.algorithms
                ]
                if cells := self._within_limit([cell for cell in cells_of_part if cell is not None], rate_bps):
                    yield CellOrder(rate_bps=rate_bps, cells=cells)

    def _within_limit(self, cells: Sequence[Cell], rate_bps: float | None) -> tuple[Cell, ...]:
        """Cells of the table's rows, and as many others as it may still take."""
        kept, room = [], self._table.room
        for cell in cells:
            new = self._key(cell.algorithm, cell.size_bytes, rate_bps) not in self._table.rows
            if not new or room > 0:
                kept.append(cell)
                room -= new
        return tuple(kept)

    def _cell(self, algorithm: str, size_bytes: int, rate_bps: float | None, number: int) -> Cell | None:
        """The cell's round of a number; None if it was measured, or would take too long."""
        if not self._wants(self._table.rows.get(self._key(algorithm, size_bytes, rate_bps)), number):
            return None
        expected_us = self._expected_us(algorithm, size_bytes, rate_bps)
        if expected_us > self._request.longest_s * 1e6:
            return None
        calls = int(np.clip(_TRAIN_US / expected_us, _FEWEST, _MOST))
        before_bytes = min(size_bytes, _BEFORE_BYTES)
        before = min(-(-_DRAIN_BYTES // before_bytes), max(calls // 2, 1))
        return Cell(
            algorithm=algorithm,
            size_bytes=size_bytes,
            before_bytes=before_bytes,
            before=before,
            calls=calls,
            meet=self.backend.meets,
        )

    @property
    def _most_rounds(self) -> int:
        return self._request.rounds * (_FURTHER if self._request.rounds > 1 else 1)

    def _wants(self, known: AllReduceRow | None, number: int) -> bool:
        """Whether an all-reduce is to be measured when a round of this number is made."""
        done = 0 if known is None else len(known.rounds_us)
        if known is None or done < min(number, self._request.rounds):
            return True
        return done < number and known.standard_error > _SETTLED

    def _expected_us(self, algorithm: str, size_bytes: int, rate_bps: float | None) -> float:
        """From the next smaller size that was measured; infinite where that is far away."""
        sizes = sorted(size for size in self._request.sizes_bytes if size <= size_bytes)
        for position, size in enumerate(reversed(sizes)):
            row = self._table.rows.get(self._key(algorithm, size, rate_bps))
            if row is not None:
                return _carried_us(row, size_bytes) if position <= _CARRIES else float("inf")
        return _FIRST_US if len(sizes) <= _CARRIES else float("inf")

    def _key(self, algorithm: str, size_bytes: int, rate_bps: float | None) -> RowKey:
        return self.backend.name, algorithm, self._ranks, self._request.ranks_per_host, rate_bps, size_bytes

    def _on_ready(self, version: str) -> None:
        self._table.note_version(self.backend.name, version)

    def _on_answers(self, order: CellOrder, answers: Sequence[CellTimes]) -> None:
        rows = []
        for cell, answer in zip(order.cells, answers, strict=True):
            old = self._table.rows.get(self._key(cell.algorithm, cell.size_bytes, order.rate_bps))
            rows.append(
                AllReduceRow(
                    backend=self.backend.name,
                    algorithm=cell.algorithm,
                    ranks=self._ranks,
                    servers=self.backend.servers(self._ranks),
                    ranks_per_host=self._request.ranks_per_host,
                    rate_bps=order.rate_bps,
                    size_bytes=cell.size_bytes,
                    rounds_us=(*(old.rounds_us if old else ()), round(answer.call_us, 2)),
                    calls=(old.calls if old else 0) + cell.calls,
                    sent_bytes=answer.sent_bytes,
                    busy_us=() if self.backend.polls else (*(old.busy_us if old else ()), round(answer.busy_us, 2)),
                )
            )
        self._table.add(rows, sum(cell.calls for cell in order.cells))


def _carried_us(row: AllReduceRow, size_bytes: int) -> float:
    """Time of a larger tensor than a row's: the row's, and what the further bytes take on the link; at most in proportion."""
    in_proportion = row.duration_us * size_bytes / row.size_bytes
    if row.rate_bps is None:
        return in_proportion
    further_us = (size_bytes / row.size_bytes - 1) * row.sent_bytes * 8e6 / row.rate_bps
    return min(in_proportion, row.duration_us + _MOST_WIRE_TIMES * further_us)
