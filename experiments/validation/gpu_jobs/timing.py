"""Step times without a profiler, and profiles as docs/howto/gpu_traces.md records them."""

from __future__ import annotations

import gzip
import shutil
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

Step = Callable[[], Any]
BLOCK_S = 0.4  # that a round of a variant takes, about
STEPS = (10, 40)  # of a round, at least and at most
WARMUP = 2
SYNCHRONISED = 2


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def step_times(step: Step, steps: int | None = None) -> dict[str, Any]:
    """A round of steps.

    Returns
    -------
    dict
        ``events_us``: distances of the ends of steps on the device, of steps that follow each other freely; ``wall_us``: the mean
        of the same steps by the host's clock; ``synchronised_us``: steps of which each waits for the device.
    """
    step()
    synchronise()
    begun = time.perf_counter()
    for _ in range(WARMUP):
        step()
    synchronise()
    if steps is None:
        steps = min(max(int(BLOCK_S / ((time.perf_counter() - begun) / WARMUP)), STEPS[0]), STEPS[1])
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)] if torch.cuda.is_available() else []
    begun = time.perf_counter()
    for number in range(steps):
        if marks and not number:
            marks[0].record()
        step()
        if marks:
            marks[number + 1].record()
    synchronise()
    wall_us = (time.perf_counter() - begun) / steps * 1e6
    events_us = [first.elapsed_time(second) * 1e3 for first, second in pairwise(marks)]
    alone_us = []
    for _ in range(SYNCHRONISED):
        begun = time.perf_counter()
        step()
        synchronise()
        alone_us.append((time.perf_counter() - begun) * 1e6)
    return {"events_us": _rounded(events_us), "wall_us": wall_us, "synchronised_us": _rounded(alone_us)}


def _rounded(values_us: list[float]) -> list[float]:
    return [round(value_us, 1) for value_us in values_us]


def recorded(step: Step, path: Path, *, with_stack: bool = False, profile_memory: bool = False) -> None:
    """Write the profile of five steps to `path`, a .json.gz."""
    devices = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "profile.json"
        with profile(
            activities=[ProfilerActivity.CPU, *devices],
            schedule=schedule(wait=5, warmup=2, active=5),
            record_shapes=True,
            with_stack=with_stack,
            profile_memory=profile_memory,
            on_trace_ready=lambda p: p.export_chrome_trace(str(raw)),
        ) as profiler:
            for _ in range(12):
                step()
                profiler.step()
        with raw.open("rb") as source, gzip.open(path, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)
