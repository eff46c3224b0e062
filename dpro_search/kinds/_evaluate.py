"""How well the replay of a job with a `JobPredictor` meets its own recording."""

from __future__ import annotations

import time
from typing import TypeVar

import numpy as np

from dpro_search.collect.trace import Trace
from dpro_search.graph.measured import profiled_iterations_us, without_step
from dpro_search.kinds._job import Comparison
from dpro_search.kinds._predictor import JobPredictor
from dpro_search.space.plan import Plan

_Predictor = TypeVar("_Predictor", bound=JobPredictor)


def held_out(trace: Trace, step: int, kind: type[_Predictor]) -> tuple[_Predictor, float, float]:
    """Predict a profiled step from all the others: (predictor without it, its measured iteration in us, error in %).

    Both sides hold the profiler's overhead. Raises `InputError` if the step was not profiled.
    """
    others, measured = without_step(trace, step)
    predictor = kind.from_trace(trace, steps=others, with_profiler=True)
    return predictor, measured, (predictor.predict(Plan()).iteration_us / measured - 1) * 100


def with_own_durations(trace: Trace, kind: type[_Predictor]) -> tuple[_Predictor, float, float]:
    """Replay each profiled step from its own durations: (predictor of all, mean measured in us, mean absolute error in %).

    What communication costs is fitted on all steps.
    """
    durations = profiled_iterations_us(trace)
    predictor = kind.from_trace(trace, with_profiler=True)
    errors = []
    for step, measured in durations.items():
        step_predictor = predictor.at(graph=kind.from_trace(trace, steps=(step,), with_profiler=True).graph)
        errors.append(abs(step_predictor.predict(Plan()).iteration_us / measured - 1) * 100)
    return predictor, float(np.mean(list(durations.values()))), float(np.mean(errors))


def held_out_step(trace: Trace, step: int, kind: type[JobPredictor]) -> Comparison:
    """`held_out` as a `Comparison`."""
    predictor, measured_us, error_pct = held_out(trace, step, kind)
    return _compared(predictor, measured_us, error_pct)


def own_durations_of_steps(trace: Trace, kind: type[JobPredictor]) -> Comparison:
    """`with_own_durations` as a `Comparison`."""
    predictor, measured_us, error_pct = with_own_durations(trace, kind)
    return _compared(predictor, measured_us, error_pct)


def _compared(predictor: JobPredictor, measured_us: float, error_pct: float) -> Comparison:
    started = time.perf_counter()
    prediction = predictor.predict(Plan())
    seconds = time.perf_counter() - started
    return Comparison(
        measured_us=measured_us, prediction=prediction, error_pct=error_pct, ops=len(predictor.graph), seconds=seconds
    )
