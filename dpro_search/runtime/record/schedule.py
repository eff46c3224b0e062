"""Which steps of a training job are profiled."""

from __future__ import annotations

from typing import NamedTuple


class RecordSchedule(NamedTuple):
    """Windows of profiled steps; steps are counted from 0.

    Attributes
    ----------
    wait: Steps before the first window, its warm-up included.
    warmup: Steps before each window in which the profiler runs, but whose records are dropped.
    steps: Profiled steps of a window.
    every: Steps from the begin of a window to that of the next.
    windows: The most windows of a job.
    """

    wait: int = 12
    warmup: int = 2
    steps: int = 5
    every: int = 1000
    windows: int = 3

    @classmethod
    def checked(cls, **numbers: int) -> RecordSchedule:
        """The schedule of these numbers; raises `ValueError` if windows overlap or a number is out of range."""
        schedule = cls(**numbers)
        least = cls(wait=schedule.warmup, warmup=0, steps=1, every=schedule.warmup + schedule.steps + 1, windows=0)
        for name, value in schedule._asdict().items():
            if not isinstance(value, int) or value < getattr(least, name):
                raise ValueError("Recorder: %s=%r: must be a whole number >= %d" % (name, value, getattr(least, name)))
        return schedule

    def window_that_starts_at(self, step: int) -> int | None:
        """Number of the window whose profiler starts before this step; None: no window's does."""
        window, rest = divmod(step - self.wait + self.warmup, self.every)
        return window if rest == 0 and 0 <= window < self.windows else None

    def profiled(self, window: int) -> tuple[int, int]:
        """First recorded step of a window, and the step behind the last."""
        first = self.wait + window * self.every
        return first, first + self.steps

    def to_text(self) -> str:
        """The schedule as `from_text` reads it."""
        return ",".join(map(str, self))

    @classmethod
    def from_text(cls, text: str) -> RecordSchedule:
        """The schedule of five numbers in the order of the fields, such as "12,2,5,1000,3"."""
        return cls.checked(**dict(zip(cls._fields, map(int, text.split(",")))))
