"""Times of compiled programs on the thread's CPU clock (needs the environment `tvm`)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import repeat
from typing import Any

os.environ["TVM_NUM_THREADS"] = "1"  # The thread that calls runs all: its clock then holds all the work.

ROUND_NS = 2_000_000  # Calls of one round take at least this long together.
FEW_ROUNDS_NS, ONE_ROUND_NS = 20_000_000, 150_000_000  # Programs that take longer get 3 rounds, and 1.


def fastest_us(functions: Sequence[Any], arguments: Sequence[Any]) -> list[float]:
    """Time of a call of each function in us: the minimum over rounds that go over all functions in turn.

    The clock counts what this thread ran, so that other processes disturb it by 3 to 5 % instead of 20 %.
    """
    first = [_call_ns(function, arguments, 1) for function in functions]  # Touches all pages.
    counts = [max(1, min(1000, round(ROUND_NS / max(one, 1)))) for one in first]
    rounds = 5 if max(first) < FEW_ROUNDS_NS else 3 if max(first) < ONE_ROUND_NS else 1
    best = list(first) if rounds == 1 else [float("inf")] * len(first)
    for _ in range(rounds):
        for place, (function, count) in enumerate(zip(functions, counts, strict=True)):
            best[place] = min(best[place], _call_ns(function, arguments, count))
    return [one / 1e3 for one in best]


def _call_ns(function: Any, arguments: Sequence[Any], count: int) -> float:
    start = time.thread_time_ns()
    for _ in repeat(None, count):
        function(*arguments)
    return (time.thread_time_ns() - start) / count
