"""`ParameterServer`: the Ray actor that holds the global model of a job. All decisions are those of `Coordinator`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from dpro_search.errors import InputError
from dpro_search.runtime.schemes import Commit, Goal, parse_scheme
from dpro_search.runtime.synchronisation.ledger import Ledger, Reply

NAMESPACE = "dpro-search-synchronisation"


class ParameterServer:
    """Methods run one at a time, but for their waits: an update is applied as a whole or not at all."""

    def __init__(self, scheme: str, workers: int, parameters: Any, silent_s: float, start_s: float, goal: Goal) -> None:
        """A server.

        Parameters
        ----------
        silent_s
            Seconds without a sign of life after which a worker is not waited for.
        start_s
            Seconds after the first worker's arrival from which those that have not come are not waited for.
        goal
            When all workers are told to stop.
        """
        self._ledger = Ledger(parse_scheme(scheme), workers, goal)
        self._coordinator = self._ledger.coordinator
        self._parameters = np.array(parameters, dtype=np.float32)
        self._silent_s, self._start_s = silent_s, start_s
        self._left = False
        self._created = time.monotonic()
        self._begun: float | None = None
        self._changed: asyncio.Condition | None = None
        self._watching: asyncio.Task[None] | None = None

    async def join(self, worker: int, scheme: str, workers: int) -> Reply | None:
        """Count a worker in, for the first time or again, and wait until it may begin; None: the job is over.

        Raises `InputError` if the job has another scheme or number of workers.
        """
        running = (str(self._coordinator.scheme), self._coordinator.workers)
        if running != (scheme, workers):
            raise InputError(f"synchronise: the job runs {running[0]} with {running[1]} workers; give this one another name (job=)")
        if self._left and not self._coordinator.members.active:
            return None
        self._ledger.heard(worker, time.monotonic())
        incarnation = self._coordinator.join(worker, self._now())
        return await self._reply(worker, incarnation)

    async def commit(self, commit: Commit, update: Any) -> Reply:
        """Apply an update (float32, [elements]) once, however often it arrives, and wait until the worker may go on."""
        self._ledger.heard(commit.worker, time.monotonic())
        weight = self._ledger.commit(commit, self._now())
        if weight is not None:
            self._parameters += np.float32(weight) * update
        return await self._reply(commit.worker, commit.incarnation)

    async def beat(self, worker: int) -> None:
        """A sign of life."""
        self._ledger.heard(worker, time.monotonic())

    async def leave(self, worker: int) -> None:
        """A worker has ended; the job is over when all have."""
        self._left = True
        self._coordinator.leave(worker, self._now())
        await self._notify()

    async def stop(self) -> None:
        """Tell all workers that the training is over, at their next commit."""
        self._ledger.stop = True
        await self._notify()

    async def model(self) -> tuple[float, Any]:
        """Seconds since the job began, and the global model."""
        return self._now(), self._parameters.copy()

    async def facts(self) -> dict[str, Any]:
        """Events so far; the newest commits only of long jobs."""
        return self._ledger.facts(self._now())

    async def _reply(self, worker: int, incarnation: int) -> Reply:
        if self._changed is None:
            self._changed = asyncio.Condition()
            self._watching = asyncio.ensure_future(self._watch())
        begun = time.monotonic()
        await self._notify()
        async with self._changed:
            await self._changed.wait_for(lambda: self._ledger.goes_on(worker, incarnation))
        if self._begun is None:
            self._begun = time.monotonic()
        waited_s = max(time.monotonic() - max(begun, self._begun), 0.0)
        return self._ledger.reply(worker, incarnation, self._parameters.copy(), now_s=self._now(), waited_s=waited_s)

    async def _notify(self) -> None:
        if self._changed is not None:
            async with self._changed:
                self._changed.notify_all()

    async def _watch(self) -> None:
        """Count out those that are silent, and begin without those that do not come."""
        while True:
            await asyncio.sleep(self._silent_s / 4)
            now = time.monotonic()
            self._ledger.look(now, self._now(), self._silent_s)
            if now - self._created > self._start_s:
                self._coordinator.start()
            await self._notify()

    def _now(self) -> float:
        return 0.0 if self._begun is None else time.monotonic() - self._begun
