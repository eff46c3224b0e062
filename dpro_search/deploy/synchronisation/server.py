"""`ParameterServer`: the Ray actor that holds the global model of a job. All decisions are those of `Coordinator`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpro_search.errors import InputError
from dpro_search.space.synchronisation import Coordinator, Goal, LossWindow, Order, parse_scheme

_KEPT_COMMITS = 100_000
NAMESPACE = "dpro-search-synchronisation"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a worker receives that joined or committed.

    Attributes
    ----------
    parameters
        The global model, float32, [elements].
    order
        What to do next.
    job_s, waited_s
        Seconds since the job began, and how long the scheme let the worker wait.
    applied
        Of the worker's newest commit: seconds since the job began, its weight, and the steps of others that it missed.
    run
        Name of this run of the job.
    replaced
        Whether a later start of the same worker has taken its place.
    stop
        Whether the training is over.
    """

    parameters: Any
    order: Order
    incarnation: int
    job_s: float
    waited_s: float
    applied: tuple[float, float, float]
    run: str
    replaced: bool = False
    stop: bool = False


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
        self._coordinator = Coordinator(parse_scheme(scheme), workers)
        self._parameters = np.array(parameters, dtype=np.float32)
        self._silent_s, self._start_s, self._goal = silent_s, start_s, goal
        self._run = secrets.token_hex(6)
        self._loss = LossWindow()
        self._newest: dict[int, tuple[float, float, float]] = {}
        self._heard: dict[int, float] = {}
        # Seconds, worker, steps, weight, and steps of others since the worker's last pull; of the newest commits.
        self._commits: deque[tuple[float, int, int, float, float]] = deque(maxlen=_KEPT_COMMITS)
        self._at_pull: dict[int, float] = {}
        self._applied = 0.0
        self._waited: dict[int, float] = {}
        self._departures = 0
        self._left = False
        self._repeated = 0
        self._stop = False
        self._created = time.monotonic()
        self._begun: float | None = None
        self._changed: asyncio.Condition | None = None
        self._watching: asyncio.Task[None] | None = None

    async def join(self, worker: int, scheme: str, workers: int) -> Reply | None:
        """Count a worker in, for the first time or again, and wait until it may begin; None: the job is over.

        Raises `InputError` if the job has another scheme or number of workers.
        """
        own = (str(self._coordinator.scheme), self._coordinator.workers)
        if own != (scheme, workers):
            raise InputError(f"synchronise: the job runs {own[0]} with {own[1]} workers; give this one another name (job=)")
        if self._left and not self._coordinator.members.active:
            return None
        self._heard[worker] = time.monotonic()
        incarnation = self._coordinator.join(worker, self._now())
        return await self._reply(worker, incarnation)

    async def commit(
        self,
        worker: int,
        incarnation: int,
        sequence: int,
        update: Any,
        *,
        steps: int,
        loss: float | None,
        step_s: float | None,
        commit_s: float | None,
    ) -> Reply:
        """Apply an update (float32, [elements]) once, however often it arrives, and wait until the worker may go on."""
        self._heard[worker] = time.monotonic()
        now = self._now()
        taken = self._coordinator.commit(
            worker, incarnation, sequence, steps=steps, now=now, loss=loss, step_s=step_s, commit_s=commit_s
        )
        if taken:
            weight = self._coordinator.weight
            self._parameters += np.float32(weight) * update
            behind = self._applied - self._at_pull.get(worker, 0.0)
            self._commits.append((now, worker, steps, weight, behind))
            self._applied += weight * steps
            self._newest[worker] = (now, weight, behind)
            if loss is not None:
                self._loss.add(loss, steps)
            self._stop = self._stop or self._goal.ends(now, self._loss.mean)
        else:
            self._repeated += 1
        return await self._reply(worker, incarnation)

    async def beat(self, worker: int) -> None:
        """A sign of life."""
        self._heard[worker] = time.monotonic()

    async def leave(self, worker: int) -> None:
        """A worker has ended; the job is over when all have."""
        self._left = True
        self._coordinator.leave(worker, self._now())
        await self._notify()

    async def stop(self) -> None:
        """Tell all workers that the training is over, at their next commit."""
        self._stop = True
        await self._notify()

    async def model(self) -> tuple[float, Any]:
        """Seconds since the job began, and the global model."""
        return self._now(), self._parameters.copy()

    async def facts(self) -> dict[str, Any]:
        """What has happened so far; the newest commits only of long jobs."""
        members = self._coordinator.members
        return {
            "scheme": str(self._coordinator.scheme),
            "job_s": self._now(),
            "loss": self._loss.mean,
            "active": sorted(members.active),
            "departures": self._departures,
            "repeated_commits": self._repeated,
            "commits": list(self._commits),
            "workers": {
                worker: {
                    "commits": member.commits,
                    "steps": member.steps,
                    "incarnation": member.incarnation,
                    "waited_s": self._waited.get(worker, 0.0),
                }
                for worker, member in sorted(members.all.items())
            },
        }

    async def _reply(self, worker: int, incarnation: int) -> Reply:
        if self._changed is None:
            self._changed = asyncio.Condition()
            self._watching = asyncio.ensure_future(self._watch())
        members = self._coordinator.members
        begun = time.monotonic()
        await self._notify()
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._stop or members[worker].incarnation != incarnation or self._coordinator.ready(worker)
            )
        if self._begun is None:
            self._begun = time.monotonic()
        waited = time.monotonic() - max(begun, self._begun)
        self._waited[worker] = self._waited.get(worker, 0.0) + max(waited, 0.0)
        self._at_pull[worker] = self._applied
        return Reply(
            parameters=self._parameters.copy(),
            order=self._coordinator.order(worker, self._now()),
            incarnation=incarnation,
            job_s=self._now(),
            waited_s=max(waited, 0.0),
            applied=self._newest.get(worker, (0.0, 0.0, 0.0)),
            run=self._run,
            replaced=members[worker].incarnation != incarnation,
            stop=self._stop,
        )

    async def _notify(self) -> None:
        if self._changed is not None:
            async with self._changed:
                self._changed.notify_all()

    async def _watch(self) -> None:
        """Count out those that are silent, and begin without those that do not come."""
        while True:
            await asyncio.sleep(self._silent_s / 4)
            now = time.monotonic()
            for worker in list(self._coordinator.members.active):
                if now - self._heard[worker] > self._silent_s:
                    self._coordinator.leave(worker, self._now())
                    self._departures += 1
            if now - self._created > self._start_s:
                self._coordinator.start()
            self._stop = self._stop or self._goal.ends(self._now(), None)
            await self._notify()

    def _now(self) -> float:
        return 0.0 if self._begun is None else time.monotonic() - self._begun
