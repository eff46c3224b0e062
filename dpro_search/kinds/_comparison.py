"""`MeasuredIterations` of a job, and `Comparison`: recorded steps beside their own replay."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.kinds._answers import ReplayedStep
from dpro_search.replay.lowered import Lowered
from dpro_search.space.plan import Prediction


@dataclass(frozen=True, kw_only=True)
class MeasuredIterations:
    """The measured iterations that the prediction of the recorded setting is compared with, in us."""

    median_us: float | None = None  # None: not measured.
    mean_us: float | None = None  # Steps that stall make it longer than the median; None: not measured.
    iterations_us: Floats = field(default_factory=lambda: np.zeros(0))  # [n]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Recorded steps beside their own replay."""

    measured_us: float | None  # What was measured of an iteration; None: a single step was recorded, of which no iteration follows.
    prediction: Prediction  # What was predicted of the same.
    error_pct: float  # Signed for one step; the mean of absolute errors for several.
    ops: int  # How many ops were replayed.
    seconds: float = 0.0  # How long that took.
    # baseline_us, baseline_error_pct: The mean of the other steps as a prediction of a held-out step, and its error; None: unknown.
    baseline_us: float | None = None
    baseline_error_pct: float | None = None
    steps: tuple[ReplayedStep, ...] = ()  # Each step with its own durations, where the kind of job tells.


def compared_with(lowered: Lowered, measured_us: float, error: float) -> Comparison:
    """Recorded steps beside a job that is replayed from them, once again, to see how long that takes; `error` is relative."""
    started = time.perf_counter()
    prediction = lowered.reported()
    seconds = time.perf_counter() - started
    return Comparison(
        measured_us=measured_us,
        prediction=prediction,
        error_pct=error * 100,
        ops=lowered.replayable.op_count,
        seconds=seconds,
    )
