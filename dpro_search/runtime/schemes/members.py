"""`Members`: which workers take part, how far each is, and which of their updates were applied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

_SMOOTHING = 0.3  # weight of the newest of several durations


class Commit(NamedTuple):
    """A worker's message about an update.

    Attributes
    ----------
    incarnation, sequence
        How many times the worker had joined, and the number of the commit since then, from 1.
    steps, loss
        Local steps in the update, and their mean training loss; None: the script gave none.
    step_s, commit_s
        Seconds of the last of these steps, and of the worker's commit before this one without waiting; None: not known.
    """

    worker: int
    incarnation: int
    sequence: int
    steps: int
    loss: float | None = None
    step_s: float | None = None
    commit_s: float | None = None


@dataclass
class Member:
    """One worker."""

    incarnation: int = 0  # How many times it has joined.
    sequence: int = 0  # Of its newest applied commit in this incarnation.
    clock: int = 0  # Commits, counted from the slowest worker's when it joined late.
    commits: int = 0  # Commits that were applied, of all incarnations.
    steps: int = 0  # Local steps in them.
    active: bool = False
    step_s: float | None = None  # Smoothed seconds of a local step.
    commit_s: float = 0.0  # Smoothed seconds of a commit without waiting.


class Members:
    """The workers that have joined. A worker that left and commits again is active again."""

    def __init__(self) -> None:
        self._of: dict[int, Member] = {}

    def __getitem__(self, worker: int) -> Member:
        return self._of[worker]

    def __contains__(self, worker: int) -> bool:
        return worker in self._of

    @property
    def active(self) -> dict[int, Member]:
        """Those that take part, by worker."""
        return {worker: member for worker, member in self._of.items() if member.active}

    @property
    def all(self) -> dict[int, Member]:
        """Those that have ever joined."""
        return dict(self._of)

    def join(self, worker: int) -> int:
        """Count a worker in; the number of its incarnation. Its clock starts at the slowest active worker's."""
        member = self._of.setdefault(worker, Member())
        member.incarnation += 1
        member.sequence = 0
        self._activate(worker)
        return member.incarnation

    def leave(self, worker: int) -> None:
        """Count a worker out; nobody waits for it."""
        if worker in self._of:
            self._of[worker].active = False

    def commit(self, commit: Commit) -> bool:
        """Whether an update is to be applied: not if it was, nor if the worker has been started anew since."""
        member, step_s, commit_s = self._of[commit.worker], commit.step_s, commit.commit_s
        if commit.incarnation != member.incarnation or commit.sequence <= member.sequence:
            return False
        if not member.active:
            self._activate(commit.worker)
        member.sequence = commit.sequence
        member.clock += 1
        member.commits += 1
        member.steps += commit.steps
        if step_s is not None:
            member.step_s = step_s if member.step_s is None else member.step_s + _SMOOTHING * (step_s - member.step_s)
        if commit_s is not None:
            member.commit_s = commit_s if not member.commit_s else member.commit_s + _SMOOTHING * (commit_s - member.commit_s)
        return True

    def _activate(self, worker: int) -> None:
        member = self._of[worker]
        others = [other.clock for key, other in self.active.items() if key != worker]
        if others:
            member.clock = max(member.clock, min(others))
        member.active = True
