"""How well a replay meets its own recording."""

from __future__ import annotations

from typing import TypeVar, overload

import numpy as np

from dpro_search.collect.trace import Trace
from dpro_search.errors import InputError
from dpro_search.replay.job_predictor import JobPredictor
from dpro_search.replay.predictor import Predictor
from dpro_search.space.plan import Plan

_Predictor = TypeVar("_Predictor", bound=JobPredictor)


def measured_iteration_us(trace: Trace) -> float | None:
    """Median of the untraced iterations; None where the recording has fewer than three."""
    untraced = trace.iterations_us()
    return float(np.median(untraced)) if len(untraced) >= 3 else None


@overload
def held_out(trace: Trace, step: int) -> tuple[Predictor, float, float]: ...
@overload
def held_out(trace: Trace, step: int, kind: type[_Predictor]) -> tuple[_Predictor, float, float]: ...
def held_out(trace: Trace, step: int, kind: type[JobPredictor] = Predictor) -> tuple[JobPredictor, float, float]:
    """Predict a profiled step from all the others: (predictor without it, its measured iteration in us, error in %).

    Both sides hold the profiler's overhead. Raises `InputError` if the step was not profiled.
    """
    others, measured = without_step(trace, step)
    predictor = kind.from_trace(trace, steps=others, with_profiler=True)
    return predictor, measured, (predictor.predict(Plan()).iteration_us / measured - 1) * 100


@overload
def with_own_durations(trace: Trace) -> tuple[Predictor, float, float]: ...
@overload
def with_own_durations(trace: Trace, kind: type[_Predictor]) -> tuple[_Predictor, float, float]: ...
def with_own_durations(trace: Trace, kind: type[JobPredictor] = Predictor) -> tuple[JobPredictor, float, float]:
    """Replay each profiled step from its own durations: (predictor of all, mean measured in us, mean absolute error in %).

    What communication costs is fitted on all steps.
    """
    durations = profiled_iterations_us(trace)
    predictor = kind.from_trace(trace, with_profiler=True)
    errors = []
    for step, measured in durations.items():
        own = predictor.at(graph=kind.from_trace(trace, steps=(step,), with_profiler=True).graph)
        errors.append(abs(own.predict(Plan()).iteration_us / measured - 1) * 100)
    return predictor, float(np.mean(list(durations.values()))), float(np.mean(errors))


def without_step(trace: Trace, step: int) -> tuple[tuple[int, ...], float]:
    """The other profiled steps, and the measured iteration of this one in us; `InputError` if it, or another, was not profiled."""
    durations = profiled_iterations_us(trace)
    others = tuple(number for number in durations if number != step)
    if step not in durations or not others:
        raise InputError(f"--holdout-step {step}: profiled steps are {min(durations)} to {max(durations)}; at least two are needed")
    return others, durations[step]


def profiled_iterations_us(trace: Trace) -> dict[int, float]:
    """Iteration of each profiled step that another profiled step follows."""
    mine = trace.steps.select(trace.steps.rank == 0)
    whole = np.flatnonzero(mine.traced[:-1] & mine.traced[1:])
    if not len(whole):
        raise InputError("the trace has no two profiled steps in a row; record more with --traced")
    distance = np.diff(mine.start_us)
    return {int(mine.index[i]): float(distance[i]) for i in whole}
