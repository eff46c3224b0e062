"""`Goal`: when a training ends; `LossWindow`: the training loss that a goal is about, and that recordings are read with."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from dpro_search.errors import InputError

WINDOW_STEPS = 100  # local steps of all workers whose mean loss is compared with a target


@dataclass(frozen=True)
class Goal:
    """The end of a training; None: never.

    Attributes
    ----------
    target_loss
        The mean training loss of the last `WINDOW_STEPS` local steps of all workers is at most that.
    limit_s
        Seconds since the job's start.
    """

    target_loss: float | None = None
    limit_s: float | None = None

    def __post_init__(self) -> None:
        if self.target_loss is not None and not math.isfinite(self.target_loss):
            raise InputError(f"synchronise: a target loss is a number, not {self.target_loss}")
        if self.limit_s is not None and not self.limit_s > 0:
            raise InputError(f"synchronise: a time limit must be above 0 seconds, not {self.limit_s:g}")

    def ends(self, now_s: float, loss: float | None) -> bool:
        """Whether the training is over at a time, with the mean loss of a window (None: it is not full yet)."""
        if self.target_loss is not None and loss is not None and loss <= self.target_loss:
            return True
        return self.limit_s is not None and now_s >= self.limit_s


class LossWindow:
    """The mean training loss of the newest local steps.

    Attributes
    ----------
    length
        Steps of a full window.
    mean
        None until there are as many steps as the window has.
    """

    def __init__(self, steps: int = WINDOW_STEPS) -> None:
        self.mean: float | None = None
        self.length = steps
        self._steps = 0
        self._parts: deque[tuple[float, int]] = deque()

    def add(self, loss: float, steps: int) -> None:
        """Take note of the mean loss of some local steps."""
        self._parts.append((loss, steps))
        self._steps += steps
        while self._steps - self._parts[0][1] >= self.length:
            self._steps -= self._parts.popleft()[1]
        if self._steps >= self.length:
            self.mean = sum(loss * steps for loss, steps in self._parts) / self._steps
