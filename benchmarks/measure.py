"""Timing on a machine that others use: everything that is compared runs in turn, again and again, and the medians count."""

from __future__ import annotations

import os
import platform
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of several rounds."""

    rounds: tuple[float, ...]
    median: float
    least: float
    spread_pct: float  # from the first to the third quartile, over the median


def wall_s(function: Callable[[], object]) -> float:
    """How long a function takes."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def process_usage(command: list[str]) -> dict[str, float | int]:
    """Seconds of a process and its peak memory; its start is part of it."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        raise SystemExit(f"{command[0]} failed")
    return {"seconds": seconds, "cpu_seconds": usage.ru_utime + usage.ru_stime, "peak_rss_bytes": usage.ru_maxrss * 1024}


def wall_apart_s(function: Callable[[], object]) -> float:
    """How long it takes in a fork, which finds all caches as they are here, and takes with it what it adds to them.

    The start and the end of the fork do not count. Raises `ChildProcessError` if it ends without an answer.
    """
    reads, writes = os.pipe()

    def run() -> None:
        os.write(writes, struct.pack("<d", wall_s(function)))

    fork = get_context("fork").Process(target=run)
    fork.start()
    os.close(writes)
    with os.fdopen(reads, "rb") as answers:
        answer = answers.read()
    fork.join()
    if not answer:
        raise ChildProcessError(f"what was to be timed ended with code {fork.exitcode}")
    (seconds,) = struct.unpack("<d", answer)
    return float(seconds)


def in_turn(
    functions: dict[str, Callable[[], object]], rounds: int, seconds_of: Callable[[Callable[[], object]], float] = wall_s
) -> dict[str, Measured]:
    """Run A B C A B C ...; the first round, which compiles and fills caches, does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            taken_s = seconds_of(function)
            if number:
                seconds[name].append(taken_s)
    return {name: _summary(values) for name, values in seconds.items()}


def _summary(values: list[float]) -> Measured:
    first, median, third = np.quantile(values, (0.25, 0.5, 0.75))
    return Measured(rounds=tuple(values), median=float(median), least=min(values), spread_pct=float((third - first) / median * 100))


def machine() -> str:
    """Processor, cores and load, in a line."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}, Python {platform.python_version()}"
