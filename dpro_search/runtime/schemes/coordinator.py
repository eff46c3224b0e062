"""`Coordinator`: all decisions of a scheme, for the parameter server of a real job and for the simulation of one.

It reads no clock and moves no data: the caller says what time it is (seconds on one clock) and applies the updates.
"""

from __future__ import annotations

import math

from dpro_search.errors import InputError
from dpro_search.runtime.schemes.commit_rate import EqualCommits
from dpro_search.runtime.schemes.members import Commit, Members
from dpro_search.runtime.schemes.rules import AdaptiveSteps, Lockstep, Order, Rule, Shares
from dpro_search.runtime.schemes.schemes import (
    Accumulation,
    Adacomm,
    Adsp,
    Asp,
    Bsp,
    Diloco,
    FixedAdacomm,
    LocalSgd,
    Scheme,
    Ssp,
)


class Coordinator:
    """Decides for a number of workers. Workers join before they do anything else.

    `commit` answers whether to apply the update, with `weight`; then the worker waits until it is `ready`, receives the global
    model, and does what its `order` says.
    """

    def __init__(self, scheme: Scheme, workers: int) -> None:
        if workers < 1:
            raise InputError(f"synchronisation: a job has at least one worker, not {workers}")
        self.scheme, self.workers = scheme, workers
        self.members = Members()
        self.rule = _rule(scheme, workers)
        self._started = False

    @property
    def weight(self) -> float:
        """The factor of an update: one by the number of active workers."""
        return 1.0 / max(len(self.members.active), 1)

    def join(self, worker: int, now: float) -> int:
        """Count a worker in, for the first time or again; the number of its incarnation."""
        if not 0 <= worker < self.workers:
            raise InputError(f"synchronisation: there is no worker {worker}: the job has 0 to {self.workers - 1}")
        incarnation = self.members.join(worker)
        self._started = self._started or len(self.members.active) == self.workers
        return incarnation

    def start(self) -> None:
        """Begin with those that have joined, however few."""
        self._started = True

    def leave(self, worker: int, now: float) -> None:
        """Count a worker out that ended or is silent: nobody waits for it."""
        self.members.leave(worker)

    def commit(self, commit: Commit, now: float) -> bool:
        """Whether an update is to be applied; False for one that was, or that a later incarnation has replaced."""
        if not self.members.commit(commit):
            return False
        if commit.loss is not None and math.isfinite(commit.loss):
            self.rule.loss(commit.loss, now)
        return True

    def ready(self, worker: int) -> bool:
        """Whether a worker that has joined or committed may go on."""
        return self._started and self.rule.ready(self.members, worker)

    def order(self, worker: int, now: float) -> Order:
        """The next work of a worker that is ready."""
        return self.rule.order(self.members, worker, now)


def _rule(scheme: Scheme, workers: int) -> Rule:
    if isinstance(scheme, Bsp):
        return Lockstep()
    if isinstance(scheme, Ssp):
        return Lockstep(staleness=scheme.staleness)
    if isinstance(scheme, Asp):
        return Lockstep(staleness=math.inf)
    if isinstance(scheme, (FixedAdacomm, LocalSgd, Diloco)):
        return Lockstep(scheme.steps)
    if isinstance(scheme, Adacomm):
        return AdaptiveSteps(scheme.steps, scheme.adapt_s)
    if isinstance(scheme, Accumulation):
        return Shares(scheme.batches or 2 * workers)
    if isinstance(scheme, Adsp):
        return EqualCommits(commits=scheme.commits, period_s=scheme.period_s, epoch_periods=scheme.epoch_periods)
    raise AssertionError(scheme)
