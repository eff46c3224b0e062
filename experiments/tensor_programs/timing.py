"""Times of compiled programs on the thread's CPU clock (needs the environment `tvm`)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import repeat
from typing import Any

os.environ["TVM_NUM_THREADS"] = "1"  # The thread that calls runs all: its clock then holds all the work.

ROUND_NS = 400_000  # Calls of one round take at least this long together.
# Rounds after the first call for programs that take up to so long. Many short ones, because other work on a second thread of the
# same core slows a program by up to 2.1 times; phases of seconds remain (README). A program above the last limit is called once and
# no more: schedules that are hundreds of times slower than the best tell little and cost most.
ROUNDS = ((1_000_000, 24), (4_000_000, 12), (12_000_000, 8), (40_000_000, 4), (100_000_000, 2))


def fastest_us(functions: Sequence[Any], arguments: Sequence[Any]) -> tuple[list[float], list[int]]:
    """Time of a call of each function in us, and the rounds that it is the minimum of (0: only the first call was timed).

    Rounds go over all functions in turn. The clock counts what this thread ran, so that it does not contain other processes on the
    same core.
    """
    best = [_call_ns(function, arguments, 1) for function in functions]  # Touches all pages.
    counts = [max(1, min(1000, round(ROUND_NS / max(first, 1)))) for first in best]
    rounds = [next((times for longest, times in ROUNDS if first <= longest), 0) for first in best]
    for turn in range(max(rounds)):
        for place, (function, count) in enumerate(zip(functions, counts, strict=True)):
            if turn < rounds[place]:
                best[place] = min(best[place], _call_ns(function, arguments, count))
    return [one / 1e3 for one in best], rounds


def _call_ns(function: Any, arguments: Sequence[Any], count: int) -> float:
    start = time.thread_time_ns()
    for _ in repeat(None, count):
        function(*arguments)
    return (time.thread_time_ns() - start) / count
