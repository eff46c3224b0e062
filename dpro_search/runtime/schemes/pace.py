"""`Pace`: how long a worker's steps and commits last, over time. It sets the speed of a paced worker, and of a simulated one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dpro_search.errors import InputError


@dataclass(frozen=True)
class Pace:
    """The speed of one worker.

    Attributes
    ----------
    step_s
        Seconds of a local step.
    commit_s
        Seconds of a commit beside the server's: half until it has the update, half until the worker has the model.
    changes
        (seconds since the start, seconds of a step from then on), in order of time.
    """

    step_s: float
    commit_s: float = 0.0
    changes: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        times = [time for time, _ in self.changes]
        if any(one >= other for one, other in zip(times, times[1:])) or any(time < 0 for time in times):
            raise InputError(f"pace: times of changes must be >= 0 and grow, not {times}")
        for step in (self.step_s, *(step for _, step in self.changes)):
            if not 0 < step < 1e6:
                raise InputError(f"pace: a step must take more than 0 and less than 1e6 seconds, not {step}")
        if not 0 <= self.commit_s < 1e6:
            raise InputError(f"pace: a commit must take at least 0 and less than 1e6 seconds, not {self.commit_s}")

    def step_at(self, time_s: float) -> float:
        """Seconds of a step that begins at a time, in seconds since the start."""
        step_s = self.step_s
        for start, step in self.changes:
            if time_s < start:
                break
            step_s = step
        return step_s


def parse_paces(text: str, *, step_s: float, commit_s: float = 0.0) -> tuple[Pace, ...]:
    """The paces of a mix of speeds such as ``1:1:2:3``; `step_s` is the step of a worker of speed 1.

    Raises `InputError` for what is no list of positive numbers.
    """
    return paces(parse_speeds(text), step_s=step_s, commit_s=commit_s)


def parse_speeds(text: str) -> tuple[float, ...]:
    """The speeds of ``1:1:2:3``; raises `InputError` for what is no list of positive numbers."""
    try:
        speeds = tuple(float(each) for each in text.split(":"))
    except ValueError:
        raise InputError(f"workers: speeds are numbers with colons between them, like 1:1:2:3, not {text!r}") from None
    if not all(0 < speed < float("inf") for speed in speeds):
        raise InputError(f"workers: speeds must be > 0, not {', '.join(f'{speed:g}' for speed in speeds)}")
    return speeds


def paces(speeds: Iterable[float], *, step_s: float, commit_s: float = 0.0) -> tuple[Pace, ...]:
    """The paces of workers of given speeds, of which speed 1 takes `step_s` for a step."""
    return tuple(Pace(step_s=step_s / speed, commit_s=commit_s) for speed in speeds)
