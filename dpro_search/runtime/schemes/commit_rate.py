"""ADSP: equal numbers of commits in every check period, and the online search of that number (AAAI 2020, arXiv 1911.06949)."""

from __future__ import annotations

from collections.abc import Sequence

from dpro_search.runtime.schemes.members import Members
from dpro_search.runtime.schemes.rules import Order, Rule

_CYCLES = 10  # steps and commits of the slowest worker in a check period, where none is given
_MOST_MEDIANS = 100  # a check period is at most so many times that of the median worker: one stuck worker must not stop the search
_MOST_LOSSES = 20_000  # every second one is dropped beyond that
_FLOORS = (0.0, 0.25, 0.5, 0.75, 0.9)  # tried as the limit of the loss, as shares of the smallest loss seen


class EqualCommits(Rule):
    """All workers aim at the same number of commits at the end of each check period; nobody waits.

    A worker's next commit is due after (rest of the period) / (commits that it lacks); so one that fell behind commits more often.
    """

    def __init__(self, *, commits: int | None, period_s: float | None, epoch_periods: int) -> None:
        self._search = None if commits is not None else CommitRateSearch(epoch_periods)
        self.commits = commits or 1
        self.period_s = period_s
        self._given_period = period_s is not None
        self._end: float | None = None
        self._target = 0
        self._losses: list[tuple[float, float]] = []

    def order(self, members: Members, worker: int, now: float) -> Order:
        self._advance(members, now)
        if self._end is None or self.period_s is None:
            return Order(steps=1)
        missing = self._target - members[worker].clock
        rest = self._end - now
        return Order(seconds=rest / missing if missing > 0 else rest + self.period_s / self.commits)

    def loss(self, loss: float, now: float) -> None:
        self._losses.append((now, loss))
        if len(self._losses) > _MOST_LOSSES:
            self._losses = self._losses[::2]

    def _advance(self, members: Members, now: float) -> None:
        if self._end is not None and now < self._end:
            return
        cycles = [m.step_s + m.commit_s for m in members.active.values() if m.step_s is not None]
        if not cycles or (self._end is None and len(cycles) < len(members.active)):
            return  # the first period begins when the steps of all are known; who comes later is not waited for
        if not self._given_period:
            self.period_s = _CYCLES * min(max(cycles), _MOST_MEDIANS / _CYCLES * sorted(cycles)[len(cycles) // 2])
        assert self.period_s is not None
        if self._search is not None and self._end is not None:
            most = max(1, int(self.period_s / max(cycles)))
            self.commits = self._search.next_commits(self._losses, self._end - self.period_s, most)
        self._end = now + self.period_s
        self._target = max(member.clock for member in members.active.values()) + self.commits


class CommitRateSearch:
    """Tries 1, 2, ... commits for a period each while the loss falls faster and faster; keeps the best for the rest of the epoch.

    The speed is a1^2 of the curve 1 / (a1^2 t + a2) + a3 through the losses of the period. The paper compares the times to a given
    loss instead; as the loss falls from one trial to the next, these would favour the later one. a3 is fitted to all losses so far.
    """

    def __init__(self, epoch_periods: int) -> None:
        self._epoch_periods = epoch_periods
        self._speeds: list[float] = []
        self._left = 0  # periods until the next search
        self._best = 1

    def next_commits(self, losses: Sequence[tuple[float, float]], since: float, most: int) -> int:
        """Commits in the next period, after one that began at `since`; `losses`: (time, loss) of all periods."""
        if self._left > 0:
            self._left -= 1
            if self._left == 0:
                self._speeds = []
                return 1
            return min(self._best, most)
        self._speeds.append(speed_of_decrease(losses, since))
        tried = len(self._speeds)
        better = tried == 1 or self._speeds[-1] > self._speeds[-2]
        if better and tried < most:
            return tried + 1
        self._best = max(range(tried), key=lambda i: self._speeds[i]) + 1
        self._left = max(self._epoch_periods - tried, 1)
        return self._best


def speed_of_decrease(losses: Sequence[tuple[float, float]], since: float) -> float:
    """a1^2 of 1 / (a1^2 t + a2) + a3 through the losses since a time, 1/seconds; 0 for fewer than two of them."""
    recent = [(time, loss) for time, loss in losses if time >= since]
    if len(recent) < 2:
        return 0.0
    floor = _floor(losses)
    return _line([(time, 1.0 / max(loss - floor, 1e-9)) for time, loss in recent])[0]


def _floor(losses: Sequence[tuple[float, float]]) -> float:
    """The a3 of least squares."""
    least = min(loss for _, loss in losses)
    thinned = losses[:: max(1, len(losses) // 200)]

    def error(share: float) -> float:
        floor = share * least
        slope, offset = _line([(time, 1.0 / max(loss - floor, 1e-9)) for time, loss in thinned])
        return sum((floor + 1.0 / max(slope * time + offset, 1e-9) - loss) ** 2 for time, loss in thinned)

    return least * min(_FLOORS, key=error) if least > 0 else least - 1e-3


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and offset of least squares."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread > 0 else 0.0
    return slope, mean_y - slope * mean_x
