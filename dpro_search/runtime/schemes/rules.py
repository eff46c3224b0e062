"""Rules of the schemes: may a worker go on, and how long does it train before its next commit?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpro_search.runtime.schemes.members import Members


@dataclass(frozen=True)
class Order:
    """The next work of a worker: at least one local step, until one of the limits is reached; then it commits."""

    steps: int | None = None
    seconds: float | None = None  # Since it has the global model, and including the commit.

    def due(self, steps: int, elapsed_s: float, commit_s: float) -> bool:
        """Whether to commit after so many local steps, and seconds since the global model; a commit takes `commit_s`."""
        if self.steps is not None and steps >= self.steps:
            return True
        return self.seconds is not None and elapsed_s + commit_s >= self.seconds


class Rule:
    """The decisions of a scheme. Times are seconds on one clock."""

    def ready(self, members: Members, worker: int) -> bool:
        """Whether a worker that has committed may go on."""
        return True

    def order(self, members: Members, worker: int, now: float) -> Order:
        """The next work of a worker that has just received the global model."""
        raise NotImplementedError

    def loss(self, loss: float, now: float) -> None:
        """Take note of the mean training loss of a worker's last local steps."""


class Lockstep(Rule):
    """Commits after a number of steps; a worker is at most `staleness` commits ahead of the slowest one."""

    def __init__(self, steps: int = 1, staleness: float = 0) -> None:
        self.steps, self.staleness = steps, staleness

    def ready(self, members: Members, worker: int) -> bool:
        clocks = [member.clock for member in members.active.values()]
        return not clocks or members[worker].clock - min(clocks) <= self.staleness

    def order(self, members: Members, worker: int, now: float) -> Order:
        return Order(steps=self.steps)


class AdaptiveSteps(Lockstep):
    """ADACOMM: after each interval the number of steps is the first one times the root of the loss by the first loss.

    Where that is not less than before, the number is halved (Wang and Joshi, 2019, section 4.2).
    """

    def __init__(self, steps: int, adapt_s: float) -> None:
        super().__init__(steps)
        self._first_steps, self._adapt_s = steps, adapt_s
        self._first_loss: float | None = None
        self._losses: list[float] = []
        self._next: float | None = None

    def loss(self, loss: float, now: float) -> None:
        self._losses.append(loss)
        if self._next is None:
            self._next = now + self._adapt_s
        if now < self._next:
            return
        mean = sum(self._losses) / len(self._losses)
        self._losses, self._next = [], now + self._adapt_s
        if self._first_loss is None:
            self._first_loss = max(mean, 1e-12)
            return
        steps = math.ceil(math.sqrt(max(mean, 0.0) / self._first_loss) * self._first_steps)
        self.steps = max(1, steps if steps < self.steps else self.steps // 2)


class Shares(Lockstep):
    """Gradient accumulation: a worker's micro-batches in a round are proportional to its speed."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self._batches = batches

    def order(self, members: Members, worker: int, now: float) -> Order:
        active = members.active
        return Order(steps=shares({key: member.step_s for key, member in active.items()}, self._batches).get(worker, 1))


def shares(step_s: dict[int, float | None], batches: int) -> dict[int, int]:
    """Numbers of batches, at least one, that workers compute so that all end as early as possible.

    Equal shares until all durations are known.
    """
    if any(each is None for each in step_s.values()):
        return dict.fromkeys(step_s, max(1, batches // max(len(step_s), 1)))
    batches_of = dict.fromkeys(step_s, 1)
    for _ in range(batches - len(step_s)):
        first = min(batches_of, key=lambda key: ((batches_of[key] + 1) * (step_s[key] or 0.0), key))
        batches_of[first] += 1
    return batches_of
