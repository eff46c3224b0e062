"""`Ledger`: what a parameter server knows of a job beside the model: workers, commits, losses. All decisions are `Coordinator`'s.

It reads no clock and holds no model. Ray's server (``server.py``) and the desk of a KVStore (``kvstore_desk.py``) keep one each.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from dpro_search.runtime.schemes import Commit, Coordinator, Goal, LossWindow, Order, Scheme

_KEPT_COMMITS = 100_000


class Applied(NamedTuple):
    """A worker's newest commit: seconds since the job began, its weight, and the steps of others that it missed."""

    time_s: float = 0.0
    weight: float = 0.0
    behind_steps: float = 0.0


@dataclass(frozen=True)
class Reply:
    """The answer to a worker that joined or committed.

    Attributes
    ----------
    parameters
        The global model, float32, [elements].
    order
        What to do next.
    job_s, waited_s
        Seconds since the job began, and how long the scheme let the worker wait.
    applied
        Of the worker's newest commit.
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
    applied: Applied
    run: str
    replaced: bool = False
    stop: bool = False


class Ledger:
    """The workers and commits of one job.

    Times `now_s` are seconds since the job began; `clock_s` are of any clock.

    Attributes
    ----------
    stop
        Whether the training is over.
    """

    def __init__(self, scheme: Scheme, workers: int, goal: Goal) -> None:
        self.coordinator = Coordinator(scheme, workers)
        self.run = secrets.token_hex(6)
        self.stop = False
        self._goal = goal
        self._loss = LossWindow()
        self._newest: dict[int, Applied] = {}
        self._heard: dict[int, float] = {}
        # Seconds, worker, steps, weight, and steps of others since the worker's last pull; of the newest commits.
        self._commits: deque[tuple[float, int, int, float, float]] = deque(maxlen=_KEPT_COMMITS)
        self._at_pull: dict[int, float] = {}
        self._applied = 0.0
        self._waited: dict[int, float] = {}
        self._departures = 0
        self._repeated = 0

    def heard(self, worker: int, clock_s: float) -> None:
        """A sign of life."""
        self._heard[worker] = clock_s

    def commit(self, commit: Commit, now_s: float, weight: float | None = None) -> float | None:
        """The weight of an update; None: it is not to be applied, as it was before, or a later start of the worker took over.

        Parameters
        ----------
        weight
            That which it was applied with; None: the coordinator's now.
        """
        if not self.coordinator.commit(commit, now_s):
            self._repeated += 1
            return None
        weight = self.coordinator.weight if weight is None else weight
        behind = self._applied - self._at_pull.get(commit.worker, 0.0)
        self._commits.append((now_s, commit.worker, commit.steps, weight, behind))
        self._applied += weight * commit.steps
        self._newest[commit.worker] = Applied(now_s, weight, behind)
        if commit.loss is not None:
            self._loss.add(commit.loss, commit.steps)
        self.stop = self.stop or self._goal.ends(now_s, self._loss.mean)
        return weight

    def look(self, clock_s: float, now_s: float, silent_s: float) -> None:
        """Count out those that are silent, and stop where the time is over."""
        for worker in list(self.coordinator.members.active):
            if clock_s - self._heard[worker] > silent_s:
                self.coordinator.leave(worker, now_s)
                self._departures += 1
        self.stop = self.stop or self._goal.ends(now_s, None)

    def replaced(self, worker: int, incarnation: int) -> bool:
        """Whether a later start of a worker has taken its place."""
        return self.coordinator.members[worker].incarnation != incarnation

    def goes_on(self, worker: int, incarnation: int) -> bool:
        """Whether a worker that joined or committed gets its reply now."""
        return self.stop or self.replaced(worker, incarnation) or self.coordinator.ready(worker)

    def reply(self, worker: int, incarnation: int, parameters: Any, *, now_s: float, waited_s: float) -> Reply:
        """The reply to a worker that goes on, with the global model."""
        self._waited[worker] = self._waited.get(worker, 0.0) + waited_s
        self._at_pull[worker] = self._applied
        return Reply(
            parameters=parameters,
            order=self.coordinator.order(worker, now_s),
            incarnation=incarnation,
            job_s=now_s,
            waited_s=waited_s,
            applied=self._newest.get(worker, Applied()),
            run=self.run,
            replaced=self.replaced(worker, incarnation),
            stop=self.stop,
        )

    def facts(self, now_s: float) -> dict[str, Any]:
        """Events so far; the newest commits only of long jobs."""
        members = self.coordinator.members
        return {
            "scheme": str(self.coordinator.scheme),
            "job_s": now_s,
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
