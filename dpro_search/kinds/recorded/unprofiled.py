"""``without_profiler(predictor, step_us)``: a profile's steps with host threads as fast as they are without a profiler.

A profiler notes each op, launch and shape on the thread that it profiles, so that host-bound jobs take 1.2 to 2.2 times as long in
their profiles (experiments/validation/gpu_jobs.md), while kernels take as long as ever. One number that any script measures, the
step without the profiler, tells by how much: the work of host threads is scaled alike until the replay takes that long.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dpro_search.errors import InputError
from dpro_search.kinds.recorded.predictor import RecordedPredictor
from dpro_search.quantities import time_text

_ALIKE = 0.03
"""Tolerance between a step and its replay for other reasons than the profiler's work on the host (empirical: kernels of GPU-bound
jobs took up to 2 % longer in their profiles)."""
_PRECISION = 0.002  # of the factor


def without_profiler(predictor: RecordedPredictor, step_us: float) -> tuple[RecordedPredictor, float]:
    """The predictor with the work of host threads scaled, and by what.

    Parameters
    ----------
    step_us
        A step of the same job, measured without a profiler.

    Raises
    ------
    InputError
        The step is as short as no work of the host could make it, or longer than its profile, or the trace has no such work.
    """
    recorded_us = predictor.predict().iteration_us
    setting = f"measured={time_text(step_us)}"
    if not predictor.sorts.host.any():
        raise InputError(f"{setting}: the trace shows no work of host threads that kernels wait for; there is nothing to scale")
    if step_us > recorded_us * (1 + _ALIKE):
        raise InputError(
            f"{setting}: the profiled step takes {time_text(recorded_us)}, and no profiler makes a step shorter; "
            "is it the same job?"
        )
    if step_us >= recorded_us * (1 - _ALIKE):
        return predictor, 1.0
    least_us = _scaled(predictor, 0.0).predict().iteration_us
    if step_us < least_us * (1 - _ALIKE):
        raise InputError(f"{setting}: kernels alone take {time_text(least_us)} in the profile; is it the same job?")
    low, high = 0.0, 1.0
    while high - low > _PRECISION:
        middle = (low + high) / 2
        slower = _scaled(predictor, middle).predict().iteration_us > step_us
        low, high = (low, middle) if slower else (middle, high)
    return _scaled(predictor, high), high


def _scaled(predictor: RecordedPredictor, factor: float) -> RecordedPredictor:
    ops, host = predictor.ops, predictor.sorts.host
    by = np.where(host, factor, 1.0)
    return predictor.with_ops(replace(ops, duration_us=ops.duration_us * by, loading_us=ops.loading_us * by))
