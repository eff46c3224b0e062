"""Which steps of a job are recorded, and what was measured of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dpro_search.collect.assemble.common import RankFile
from dpro_search.collect.trace import Floats
from dpro_search.errors import InputError, JobError


@dataclass(frozen=True, kw_only=True)
class StepSchedule:
    """Which steps are skipped, timed, profiled; those after that are timed again."""

    warmup: int = 5
    untraced: int = 8
    traced: int = 10

    def __post_init__(self) -> None:
        if self.warmup < 2 or self.untraced < 0 or self.traced < 2:
            raise InputError("--warmup must be at least 2 and --traced at least 2")

    @property
    def steps(self) -> int:
        """How many a job runs at least: one ends when the next begins, and the profiler stops before the last."""
        return self.warmup + self.untraced + self.traced + 2

    def hook(self, mode: Literal["record", "time"]) -> dict[str, str]:
        """Settings of the recorder that profiles the traced steps, or only reads the clock."""
        numbers = {"WARMUP": self.warmup, "UNTRACED": self.untraced, "TRACED": self.traced}
        return {"MODE": mode, **{key: str(value) for key, value in numbers.items()}}


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Measured iterations of one run, without tracing."""

    iteration_us: Floats  # Distance between the starts of consecutive steps on rank 0 after the warm-up, [steps].
    # compute_cpu_us, comm_cpu_us: CPU time per step, mean over ranks, [steps].
    compute_cpu_us: Floats
    comm_cpu_us: Floats
    peak_rss_bytes: int = 0  # Of the rank that took the most; 0: not known.

    @property
    def median_us(self) -> float:
        """Median iteration time."""
        return float(np.median(self.iteration_us))


def step_times(hooks: Sequence[RankFile], warmup: int) -> StepTimes:
    """Measured iterations after the warm-up, from what the hooks of all ranks wrote; `JobError` if there are too few."""
    rows = [np.array(hook.steps, dtype=np.float64) for hook in hooks]
    if min(len(row) for row in rows) < warmup + 3:
        raise JobError(f"the job ran {min(len(row) for row in rows)} steps; at least {warmup + 3} are needed to measure it")
    distances = [np.diff(row, axis=0)[warmup:] / 1e3 for row in rows]
    return StepTimes(
        iteration_us=distances[0][:, 0],
        compute_cpu_us=np.mean([row[:, 2] for row in distances], axis=0),
        comm_cpu_us=np.mean([row[:, 3] for row in distances], axis=0),
        peak_rss_bytes=max(hook.peak_rss_bytes for hook in hooks),
    )
