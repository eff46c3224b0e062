"""`Desk`: the `Ledger` of a job behind one key of a KVStore, which holds numbers: messages are pushed to it, replies pulled.

The key's value is one row of replies for each worker. A pushed value begins with a `DeskMessage`; the updater on the server writes
all rows anew (``kvstore_updates.py``). A worker whose message is answered finds its commit's number in its row. Servers keep
float32, whatever is pushed: whole numbers are exact to `LARGEST`.
"""

from __future__ import annotations

import math
import zlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpro_search.runtime.schemes import Commit, Goal, Order, Scheme
from dpro_search.runtime.synchronisation.ledger import Applied, Ledger, Reply

JOIN, COMMIT, BEAT, LEAVE = 1, 2, 3, 4
LARGEST = 2**24
_MARK = 19112.0  # begins each row that a desk wrote
Values = NDArray[np.float32]


class DeskMessage(NamedTuple):
    """The message that a worker pushes; nan stands for None.

    Attributes
    ----------
    kind
        JOIN, COMMIT, BEAT or LEAVE.
    job
        `job_number` of the scheme and the workers that it expects.
    sequence, steps, loss, step_s, commit_s
        See `Commit`.
    weight
        The factor of the update, which is already in the model.
    """

    kind: float
    worker: float
    job: float
    sequence: float = 0
    steps: float = 0
    loss: float = math.nan
    step_s: float = math.nan
    commit_s: float = math.nan
    weight: float = 1


class Row(NamedTuple):
    """The row of replies that a worker pulls.

    Attributes
    ----------
    mark
        Says that the servers run dpro-search.
    job
        `job_number` of the job that the servers run.
    sequence
        Of the newest commit that was answered; 0 after a join.
    doubled
        Whether two processes joined as this worker.
    order_steps, order_seconds, job_s, time_s, weight, behind_steps, stop
        See `Reply`; nan stands for None.
    run_high, run_low
        The name's value as a number, in two halves.
    active, lost, commits
        Workers that take part now; those that were counted out and did not come back; applied commits of this worker.
    """

    mark: float = _MARK
    job: float = 0
    sequence: float = -1
    doubled: float = 0
    order_steps: float = math.nan
    order_seconds: float = math.nan
    incarnation: float = 0
    job_s: float = 0
    time_s: float = 0
    weight: float = 0
    behind_steps: float = 0
    stop: float = 0
    run_high: float = 0
    run_low: float = 0
    active: float = 0
    lost: float = 0
    commits: float = 0

    @property
    def is_of_a_desk(self) -> bool:
        """Whether a desk wrote it; else the servers do something else with what is pushed."""
        return self.mark == _MARK

    def reply(self, parameters: Any, waited_s: float) -> Reply:
        """The row as the worker's reply."""
        return Reply(
            parameters=parameters,
            order=Order(steps=_whole(self.order_steps), seconds=_given(self.order_seconds)),
            incarnation=int(self.incarnation),
            job_s=self.job_s,
            waited_s=waited_s,
            applied=Applied(self.time_s, self.weight, self.behind_steps),
            run=f"{int(self.run_high):06x}{int(self.run_low):06x}",
            stop=bool(self.stop),
        )


class Desk:
    """The server's side of the key. It is pickled before its first message, to travel to the servers."""

    def __init__(self, scheme: Scheme, workers: int, goal: Goal, silent_s: float) -> None:
        """A desk; a worker without a message for `silent_s` seconds is not waited for."""
        self._ledger = Ledger(scheme, workers, goal)
        self._job, self._workers, self._silent_s = job_number(scheme, workers), workers, silent_s
        self._begun: float | None = None
        self._rows = [Row(job=self._job)] * workers
        self._doubled: set[int] = set()
        self._open: dict[int, int] = {}  # commits, or 0 for a join, that wait for their reply, by worker
        self._left: set[int] = set()

    def answered(self, pushed: Values, clock_s: float) -> Values:
        """The key's new value, [`desk_size`], after a message in a pushed value; `clock_s`: seconds of the server's clock."""
        message = DeskMessage(*pushed[: len(DeskMessage._fields)].tolist())
        worker = int(message.worker)
        if message.job == self._job and 0 <= worker < self._workers:
            self._take(message, worker, clock_s)
        now_s = self._now(clock_s)
        self._ledger.look(clock_s, now_s, self._silent_s)
        self._reply(clock_s)
        return self._table()

    def _take(self, message: DeskMessage, worker: int, clock_s: float) -> None:
        coordinator, now_s = self._ledger.coordinator, self._now(clock_s)
        if message.kind == JOIN:
            if worker in coordinator.members:
                self._doubled.add(worker)
                return
            coordinator.join(worker, now_s)
            self._open[worker] = 0
        self._ledger.heard(worker, clock_s)
        if message.kind == COMMIT:
            commit = Commit(
                worker,
                coordinator.members[worker].incarnation,
                int(message.sequence),
                int(message.steps),
                loss=_given(message.loss),
                step_s=_given(message.step_s),
                commit_s=_given(message.commit_s),
            )
            self._ledger.commit(commit, now_s, message.weight)
            self._open[worker] = commit.sequence
        elif message.kind == LEAVE:
            coordinator.leave(worker, now_s)
            self._open.pop(worker, None)
            self._left.add(worker)

    def _reply(self, clock_s: float) -> None:
        """Write the rows of those that go on."""
        members = self._ledger.coordinator.members
        for worker, sequence in list(self._open.items()):
            incarnation = members[worker].incarnation
            if not self._ledger.goes_on(worker, incarnation):
                continue
            if self._begun is None:
                self._begun = clock_s
            reply = self._ledger.reply(worker, incarnation, None, now_s=self._now(clock_s), waited_s=0.0)
            self._rows[worker] = Row(
                job=self._job,
                sequence=sequence,
                order_steps=nan_if_none(reply.order.steps),
                order_seconds=nan_if_none(reply.order.seconds),
                incarnation=reply.incarnation,
                job_s=reply.job_s,
                time_s=reply.applied.time_s,
                weight=reply.applied.weight,
                behind_steps=reply.applied.behind_steps,
                stop=reply.stop,
                run_high=int(reply.run[:6], 16),
                run_low=int(reply.run[6:], 16),
            )
            del self._open[worker]

    def _table(self) -> Values:
        members = self._ledger.coordinator.members
        active, joined = members.active, members.all
        counts = {"active": len(active), "lost": len(joined.keys() - active.keys() - self._left)}
        rows = [
            row._replace(**counts, doubled=worker in self._doubled, commits=joined[worker].commits if worker in joined else 0)
            for worker, row in enumerate(self._rows)
        ]
        table = np.zeros(desk_size(self._workers), dtype=np.float32)
        table[: len(rows) * len(Row._fields)] = np.array(rows, dtype=np.float32).reshape(-1)
        return table

    def _now(self, clock_s: float) -> float:
        return 0.0 if self._begun is None else clock_s - self._begun


def desk_size(workers: int) -> int:
    """Numbers in the key of a job."""
    return max(len(DeskMessage._fields), workers * len(Row._fields))


def pushed_value(message: DeskMessage, workers: int) -> Values:
    """The value that a worker pushes, [`desk_size`]."""
    value = np.zeros(desk_size(workers), dtype=np.float32)
    value[: len(message)] = message
    return value


def row_of(table: Values, worker: int) -> Row:
    """A worker's row of a pulled value."""
    fields = len(Row._fields)
    return Row(*table[worker * fields : (worker + 1) * fields].tolist())


def job_number(scheme: Scheme, workers: int) -> int:
    """Equal for workers that expect the same scheme and number of workers."""
    return zlib.crc32(f"{scheme} with {workers}".encode()) % LARGEST


def nan_if_none(value: float | None) -> float:
    """The number in a message or a row for a value that may be unknown."""
    return math.nan if value is None else value


def _given(value: float) -> float | None:
    return None if math.isnan(value) else value


def _whole(value: float) -> int | None:
    return None if math.isnan(value) else int(value)
