"""`KvstoreWorker`: one worker of an MXNet job, on the parameter servers of ps-lite."""

from __future__ import annotations

import atexit
import time
from typing import Any

import numpy as np

from dpro_search.errors import InputError, JobError
from dpro_search.runtime.schemes import Adsp, Asp, Commit
from dpro_search.runtime.synchronisation.kvstore.desk import (
    BEAT,
    COMMIT,
    JOIN,
    LEAVE,
    Desk,
    DeskMessage,
    Row,
    job_number,
    nan_if_none,
    row_of,
)
from dpro_search.runtime.synchronisation.kvstore.store import Store
from dpro_search.runtime.synchronisation.ledger import Reply
from dpro_search.runtime.synchronisation.local_model import Flat, LocalModel
from dpro_search.runtime.synchronisation.served_worker import ServedWorker
from dpro_search.runtime.synchronisation.worker import WorkerPart

_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.0005, 0.01  # between looks at the desk, which double


class KvstoreWorker(ServedWorker):
    """See `Synchronised` for the methods.

    A commit is in the model before the desk hears of it. The other way round a worker that waits for it could take a model without.
    """

    def __init__(self, model: LocalModel, part: WorkerPart, store: Store) -> None:
        super().__init__(model, part)
        self._store = store
        self._free = isinstance(part.scheme, (Asp, Adsp))  # nobody waits: the model may lack what is just being added
        self._told_at = time.monotonic()
        self._left = self._refused = False
        self._begin()

    def step(self, loss: Any = None, batch_size: int | None = None) -> None:
        super().step(loss, batch_size)
        self._beat()

    def facts(self) -> dict[str, Any]:
        """As `Worker.facts`; and by part of the model, the updates in it, and by worker, the commits that the desk knows."""
        self._store.pull()
        table = self._store.table()
        commits = [int(row_of(table, worker).commits) for worker in range(self._part.workers)]
        return {**super().facts(), "updates": list(self._store.updates), "all_commits": commits}

    def _join(self) -> Reply:
        part = self._part
        self._store.begin(self._local.flat(), Desk(self._scheme, part.workers, part.goal, part.silent_s))
        self._tell(JOIN)
        self._check(self._row())
        atexit.register(self._part_ways)
        row, _ = self._answer(0)
        return row.reply(self._store.pull(), 0.0)

    def _send(self, update: Flat, commit: Commit) -> Reply:
        weight = 1.0 / self._active
        self._store.add(update * np.float32(weight))
        model = self._store.pull() if self._free else None
        self._tell(
            COMMIT,
            sequence=commit.sequence,
            steps=commit.steps,
            loss=nan_if_none(commit.loss),
            step_s=nan_if_none(commit.step_s),
            commit_s=nan_if_none(commit.commit_s),
            weight=weight,
        )
        row, waited_s = self._answer(commit.sequence)
        return row.reply(self._store.pull() if model is None else model, waited_s)

    def _answer(self, sequence: int) -> tuple[Row, float]:
        """The row that answers a message, and how long the scheme let the worker wait for it."""
        row = self._row()
        begun = now = time.monotonic()
        look_s = _FIRST_LOOK_S
        while row.sequence != sequence:
            self._check(row)
            time.sleep(look_s)
            look_s = min(2 * look_s, _LONGEST_LOOK_S)
            self._beat()
            row = self._row()
            now = time.monotonic()
        self._active = max(row.active, 1.0)
        return row, now - begun

    def _leave(self) -> None:
        if not self._left:
            self._left = True
            self._tell(LEAVE)

    def _part_ways(self) -> None:
        """Wait until all others have left or are lost: ps-lite ends a job when all of its workers end."""
        if self._refused:
            return
        self._leave()
        row = self._row()
        while row.active:
            time.sleep(_LONGEST_LOOK_S)
            self._beat()
            row = self._row()
        if row.lost:
            self._store.end_without_the_others()

    def _check(self, row: Row) -> None:
        """Raise an error where this worker's row is not of the desk of its job, or is another process's too."""
        problem: Exception | None = None
        if not row.is_of_a_desk:
            problem = JobError("synchronise: the parameter servers cannot import dpro_search: install it there, or set PYTHONPATH")
        elif row.job != job_number(self._scheme, self._part.workers):
            problem = InputError(f"synchronise: the servers run another scheme than {self._scheme}, which this worker gives")
        elif row.doubled:
            problem = InputError(f"synchronise: two processes are worker {self._worker}; see RANK, or worker=")
        if problem is not None:
            self._refused = True
            self._store.end_without_the_others()
            raise problem

    def _beat(self) -> None:
        """A sign of life, where the last one is old."""
        if time.monotonic() - self._told_at > self._part.silent_s / 4:
            self._tell(BEAT)

    def _row(self) -> Row:
        return row_of(self._store.table(), self._worker)

    def _tell(self, kind: int, **more: float) -> None:
        self._told_at = time.monotonic()
        job = job_number(self._scheme, self._part.workers)
        self._store.tell(DeskMessage(kind=kind, worker=self._worker, job=job, **more))
