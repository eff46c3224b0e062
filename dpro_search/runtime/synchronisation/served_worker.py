"""`ServedWorker`: what workers of a parameter server do by the orders of its replies, whichever engine carries them."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any

from dpro_search.errors import InputError, JobError
from dpro_search.runtime.schemes import Commit, Order
from dpro_search.runtime.synchronisation.ledger import Reply
from dpro_search.runtime.synchronisation.local_model import Flat, LocalModel
from dpro_search.runtime.synchronisation.recording import RecordedCommit
from dpro_search.runtime.synchronisation.worker import Worker, WorkerPart

_SMOOTHING = 0.3  # weight of the newest of several durations


class ServedWorker(Worker):
    """See `Synchronised` for the methods. An engine has `_join` and `_send`, and calls `_begin` at its end of `__init__`."""

    def __init__(self, model: LocalModel, part: WorkerPart) -> None:
        super().__init__(model, part)
        self._sequence = 0  # of the newest commit
        self._commit_s: float | None = None

    @abstractmethod
    def _join(self) -> Reply:
        """Take part in the job; returns when the training begins."""

    @abstractmethod
    def _send(self, update: Flat, commit: Commit) -> Reply:
        """Commit a change of the parameters; returns when the scheme lets the worker go on."""

    def step(self, loss: Any = None, batch_size: int | None = None) -> None:
        if loss is None and (self._scheme.needs_loss or self._part.goal.target_loss is not None):
            why = "a target loss was given" if not self._scheme.needs_loss else f"{self._scheme.name} decides by the training loss"
            hint = ", or give the rate, as in 'adsp(commits=2)'" if self._scheme.name == "adsp" else ""
            raise InputError(f"synchronise: {why}: call step(loss){hint}")
        self._local.update(loss, batch_size)
        self._stepped(loss)
        if self._order.due(self._steps, time.monotonic() - self._received, (self._commit_s or 0.0) / 2):
            self.commit()

    def commit(self) -> None:
        """Send the local update and take the global model, now. `step` calls it when it is due."""
        begun = time.monotonic()
        self._pacer.half_commit()
        self._sequence += 1
        loss = self._loss
        commit = Commit(self._worker, self._incarnation, self._sequence, self._steps, loss, self._step_s, self._commit_s)
        reply = self._send(self._local.flat() - self._anchor, commit)
        if reply.replaced:
            raise JobError(f"synchronise: worker {self._worker} was started again elsewhere; this process is not part of the job")
        self._take(reply)
        self._pacer.half_commit()
        took = time.monotonic() - begun - reply.waited_s
        self._commit_s = took if self._commit_s is None else self._commit_s + _SMOOTHING * (took - self._commit_s)
        time_s, weight, behind = reply.applied
        self._committed(RecordedCommit(time_s, self._steps, weight, behind, loss, took, reply.waited_s))

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "commit_s": self._commit_s}

    def _begin(self) -> None:
        """Join, and take the first model."""
        reply = self._join()
        self._incarnation, self.run = reply.incarnation, reply.run
        self._take(reply)
        self._pacer.start(reply.job_s)

    def _take(self, reply: Reply) -> None:
        self._received = time.monotonic()
        self._order: Order = reply.order
        self._anchor: Flat = reply.parameters
        self._local.put(self._anchor)
        self.running = not reply.stop
