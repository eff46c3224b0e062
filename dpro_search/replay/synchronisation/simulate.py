"""``simulate(scheme, paces, ...)``: discrete events of workers of unequal speed and their parameter server.

The decisions are those of `Coordinator`, as in a real job. A worker steps at its pace until its order says to commit; half of the
commit's seconds later the server has the update, which it applies in turn (`server_s` each); the worker waits until the scheme
lets it go on, and has the global model after the other half. What the updates do to a model is up to `Numerics`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dpro_search.errors import InputError
from dpro_search.runtime.schemes import Commit, Coordinator, Order, Pace, Scheme


@dataclass(frozen=True, kw_only=True)
class AppliedCommit:
    """One applied update.

    Attributes
    ----------
    begun_s, time_s
        When its worker began the first local step, and when it was applied.
    steps, weight
        Local steps in it, and the factor that it was applied with.
    behind_steps
        Steps of others that were applied since its worker received the global model, each times its weight.
    """

    time_s: float
    worker: int
    steps: int
    weight: float
    behind_steps: float
    begun_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Events until the simulation was stopped; times in seconds.

    Attributes
    ----------
    end_s, reached
        When it stopped, and whether because the caller said so rather than because of the limit.
    waiting_s
        By worker, time in which it was not let go on by the scheme.
    """

    end_s: float
    reached: bool
    commits: tuple[AppliedCommit, ...]
    steps: tuple[int, ...]
    waiting_s: tuple[float, ...]

    @property
    def waiting_share(self) -> float:
        """Waiting as a share of all workers' time."""
        return sum(self.waiting_s) / max(self.end_s * len(self.waiting_s), 1e-12)


class Numerics(Protocol):
    """The effect of steps and commits on the models of a simulated job."""

    def step(self, worker: int) -> float | None:
        """A local step; its training loss, if one exists."""

    def commit(self, worker: int, commit: AppliedCommit) -> None:
        """Apply a worker's local update to the global model."""

    def pull(self, worker: int) -> None:
        """Replace a worker's model by the global one."""


@dataclass
class _SimulatedWorker:
    pace: Pace
    order: Order = field(default_factory=Order)
    since: float = 0.0  # when it had the global model
    released: float = 0.0  # when the scheme let it go on
    local_steps: int = 0
    losses: list[float] = field(default_factory=list)
    sequence: int = 0
    incarnation: int = 0
    arrived: float = 0.0
    applied_at_pull: float = 0.0
    waiting: bool = False


def simulate(
    scheme: Scheme,
    paces: Sequence[Pace],
    numerics: Numerics,
    *,
    stop: Callable[[float], bool],
    server_s: float = 0.0,
    check_s: float = 0.1,
    limit_s: float = 3600.0,
) -> Simulated:
    """Simulate until `stop` says so, which is asked every `check_s`, or until `limit_s`.

    Parameters
    ----------
    server_s
        Seconds in which the server applies one update; it applies one at a time.
    """
    return _TrainingSimulation(scheme, paces, numerics, server_s).run(stop, check_s, limit_s)


class _TrainingSimulation:
    def __init__(self, scheme: Scheme, paces: Sequence[Pace], numerics: Numerics, server_s: float) -> None:
        self.coordinator = Coordinator(scheme, len(paces))
        self.workers = [_SimulatedWorker(pace) for pace in paces]
        self.numerics, self.server_s = numerics, server_s
        self.server_free = 0.0
        self.applied = 0.0  # steps times weights
        self.commits: list[AppliedCommit] = []
        self.waiting_s = [0.0] * len(paces)
        self._events: list[tuple[float, int, Callable[[float, int], None], int]] = []
        self._count = itertools.count()

    def run(self, stop: Callable[[float], bool], check_s: float, limit_s: float) -> Simulated:
        for number, worker in enumerate(self.workers):
            worker.incarnation = self.coordinator.join(number, 0.0)
        for number in range(len(self.workers)):
            self._go(0.0, number)
        next_check, reached, now = 0.0, False, 0.0
        while self._events:
            now, _, happen, number = heapq.heappop(self._events)
            if now >= limit_s:
                now = limit_s
                break
            if now >= next_check:
                if stop(next_check):
                    now, reached = next_check, True
                    break
                next_check += check_s * max(1, int((now - next_check) / check_s))
            happen(now, number)
        else:
            raise InputError("synchronisation: all workers wait for each other")
        steps = tuple(member.steps for _, member in sorted(self.coordinator.members.all.items()))
        for number, worker in enumerate(self.workers):
            if worker.waiting:
                self.waiting_s[number] += now - worker.arrived
        return Simulated(end_s=now, reached=reached, commits=tuple(self.commits), steps=steps, waiting_s=tuple(self.waiting_s))

    def _at(self, time: float, happen: Callable[[float, int], None], number: int) -> None:
        heapq.heappush(self._events, (time, next(self._count), happen, number))

    def _go(self, now: float, number: int) -> None:
        """The scheme lets a worker go on: the model is on its way to it."""
        worker = self.workers[number]
        worker.order = self.coordinator.order(number, now)
        worker.waiting = False
        worker.applied_at_pull = self.applied
        self.numerics.pull(number)
        worker.released = now
        self._at(now + worker.pace.commit_s / 2 if worker.sequence else now, self._begin, number)

    def _begin(self, now: float, number: int) -> None:
        worker = self.workers[number]
        worker.since, worker.local_steps, worker.losses = now, 0, []
        self._at(now + worker.pace.step_at(now), self._step, number)

    def _step(self, now: float, number: int) -> None:
        worker = self.workers[number]
        loss = self.numerics.step(number)
        worker.local_steps += 1
        if loss is not None:
            worker.losses.append(loss)
        if worker.order.due(worker.local_steps, now - worker.released, worker.pace.commit_s / 2):
            self._at(now + worker.pace.commit_s / 2, self._arrive, number)
        else:
            self._at(now + worker.pace.step_at(now), self._step, number)

    def _arrive(self, now: float, number: int) -> None:
        self.server_free = max(now, self.server_free) + self.server_s
        self._at(self.server_free, self._apply, number)

    def _apply(self, now: float, number: int) -> None:
        worker = self.workers[number]
        worker.sequence += 1
        sent = Commit(
            number,
            worker.incarnation,
            worker.sequence,
            worker.local_steps,
            loss=sum(worker.losses) / len(worker.losses) if worker.losses else None,
            step_s=worker.pace.step_at(worker.since),
            commit_s=worker.pace.commit_s + self.server_s,
        )
        taken = self.coordinator.commit(sent, now)
        assert taken, "a simulated worker repeats no commit"
        weight = self.coordinator.weight
        commit = AppliedCommit(
            time_s=now,
            worker=number,
            steps=worker.local_steps,
            weight=weight,
            behind_steps=self.applied - worker.applied_at_pull,
            begun_s=worker.since,
        )
        self.numerics.commit(number, commit)
        self.commits.append(commit)
        self.applied += weight * worker.local_steps
        worker.waiting, worker.arrived = True, now
        for other, each in enumerate(self.workers):
            if each.waiting and self.coordinator.ready(other):
                self.waiting_s[other] += now - each.arrived
                self._go(now, other)
