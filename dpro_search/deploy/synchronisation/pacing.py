"""`Pacer`: sleeps so that a worker's steps and commits last as long as its `Pace` says."""

from __future__ import annotations

import time

from dpro_search.space.synchronisation import Pace


class Pacer:
    """The clock of one worker, paced or not.

    Attributes
    ----------
    late_steps
        Steps that took longer than they should have: the machine was too slow for the pace.
    """

    def __init__(self, pace: Pace | None) -> None:
        self.late_steps = 0
        self._pace = pace
        self._origin = self._begin = time.monotonic()

    def start(self, job_s: float) -> None:
        """The worker has the first model, `job_s` after the job's start."""
        self._begin = time.monotonic()
        self._origin = self._begin - job_s

    def end_step(self) -> float:
        """Sleep until the step may end; seconds that it took."""
        if self._pace is not None:
            wanted = self._begin + self._pace.step_at(self._begin - self._origin)
            rest = wanted - time.monotonic()
            if rest > 0:
                time.sleep(rest)
            elif rest < -0.1 * (wanted - self._begin):
                self.late_steps += 1
        begun, self._begin = self._begin, time.monotonic()
        return self._begin - begun

    def half_commit(self) -> None:
        """Sleep half of a commit's time."""
        if self._pace is not None and self._pace.commit_s:
            time.sleep(self._pace.commit_s / 2)

    def begin_step(self) -> None:
        """The next step begins now."""
        self._begin = time.monotonic()
