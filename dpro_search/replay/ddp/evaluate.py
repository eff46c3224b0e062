"""How well a replay meets its own recording of a DistributedDataParallel job."""

from __future__ import annotations

import numpy as np

from dpro_search.collect.trace import Trace
from dpro_search.replay.ddp.predictor import DdpPredictor
from dpro_search.replay.evaluate import profiled_iterations_us, without_step
from dpro_search.space.plan import Plan


def held_out(trace: Trace, step: int) -> tuple[DdpPredictor, float, float]:
    """Predict a profiled step from all the others: (predictor without it, its measured iteration in us, error in %).

    Both sides hold the profiler's overhead. Raises `InputError` if the step was not profiled.
    """
    others, measured = without_step(trace, step)
    predictor = DdpPredictor.from_trace(trace, steps=others, with_profiler=True)
    return predictor, measured, (predictor.predict(Plan()).iteration_us / measured - 1) * 100


def with_own_durations(trace: Trace) -> tuple[DdpPredictor, float, float]:
    """Replay each profiled step from its own durations: (predictor of all, mean measured in us, mean absolute error in %).

    What communication costs is fitted on all steps.
    """
    durations = profiled_iterations_us(trace)
    predictor = DdpPredictor.from_trace(trace, with_profiler=True)
    errors = []
    for step, measured in durations.items():
        own = predictor.at(graph=DdpPredictor.from_trace(trace, steps=(step,), with_profiler=True).graph)
        errors.append(abs(own.predict(Plan()).iteration_us / measured - 1) * 100)
    return predictor, float(np.mean(list(durations.values()))), float(np.mean(errors))
