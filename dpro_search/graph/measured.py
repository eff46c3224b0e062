"""Profiled steps of a recording, and the measured iteration times that predictions are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import Trace
from dpro_search.errors import GraphError, InputError
from dpro_search.quantities import time_text

_MOST_REPLAY_ERROR_PCT = 10.0  # good recordings had at most 8.8 % (README.md, recorded setting), busy machines 20 to 50 %
_CLOCKS_EXPLAIN = 0.5  # share of the error, from which on uncertain clocks are named as its cause


@dataclass(frozen=True, kw_only=True)
class ProfiledSteps:
    """A choice among the profiled steps of a recording. A job that is replayed from them has the profiler's overhead.

    Attributes
    ----------
    replayed
        Steps whose durations are replayed; None: all.
    fitted
        Steps to which the costs of communication are fitted; None: all.
    """

    replayed: tuple[int, ...] | None = None
    fitted: tuple[int, ...] | None = None


def measured_iteration_us(trace: Trace) -> float | None:
    """Median of the untraced iterations; None where the recording has fewer than three."""
    untraced = trace.iterations_us()
    untraced = untraced[untraced > 0]  # time stamps of the others are damaged
    return float(np.median(untraced)) if len(untraced) >= 3 else None


def replay_error(predicted_us: float, measured_us: float | None) -> float:
    """Relative error of the replay of the recorded setting; 0 where it is as small as that of good recordings, or not known.

    The intervals of predictions were calibrated on good recordings, so that such small errors are part of them already.
    """
    if measured_us is None or measured_us <= 0:
        return 0.0
    error = predicted_us / measured_us - 1
    return error if abs(error) * 100 > _MOST_REPLAY_ERROR_PCT else 0.0


def recording_doubt(predicted_us: float, measured_us: float | None, clock_residual_us: float = 0.0) -> str | None:
    """A sentence that says why predictions from a recording are not to be trusted; None if they are.

    They are not where the replay of the recorded setting is far from what was measured. `clock_residual_us` is how far apart the
    ranks' clocks may be: if that explains the error, the clocks are named as its cause.
    """
    error = replay_error(predicted_us, measured_us)
    if not error or measured_us is None:
        return None
    if clock_residual_us >= _CLOCKS_EXPLAIN * abs(predicted_us - measured_us):
        cause = (
            f"The cause may be the clocks of the ranks, which are known to within {time_text(clock_residual_us)} only: record more "
            "steps, for each collective helps to align them."
        )
    else:
        cause = "The machine was busy, or the step waits for what was not recorded, like input data: record the job again."
    return (
        f"the recording cannot be trusted: the replay of the recorded setting takes {time_text(predicted_us)}, but "
        f"{time_text(measured_us)} was measured ({error * 100:+.1f} %). Predictions from it are no better, and their intervals "
        f"include this error. {cause}"
    )


def sampled_steps(trace: Trace, requested: tuple[int, ...] | None) -> tuple[int, ...]:
    """Steps that are profiled on every rank, or the requested ones of them; raises `GraphError` if none exists.

    The last profiled step is left out: the profiler stops before the next step starts.
    """
    common: set[int] | None = None
    for rank in range(trace.meta.ranks):
        traced = set(trace.steps.index[(trace.steps.rank == rank) & trace.steps.traced].tolist())
        if not traced:
            raise GraphError(f"rank {rank} has no profiled step: its files are missing or its job ended early; record it again")
        common = traced if common is None else common & traced
    profiled = sorted(common or ())
    profiled = profiled[:-1] if len(profiled) > 1 else profiled
    chosen = profiled if requested is None else [step for step in profiled if step in requested]
    if not chosen:
        raise GraphError(f"none of the requested steps was profiled on every rank (profiled: {profiled})")
    return tuple(chosen)


def without_step(trace: Trace, step: int) -> tuple[tuple[int, ...], float]:
    """The other profiled steps, and the measured iteration of this one in us; `InputError` if it, or another, was not profiled."""
    durations = profiled_iterations_us(trace)
    others = tuple(number for number in durations if number != step)
    if step not in durations:
        raise InputError(f"step {step} was not profiled; choose a step from {min(durations)} to {max(durations)}")
    if not others:
        raise InputError(f"step {step} is the only profiled one; at least two are needed to hold one out")
    return others, durations[step]


def profiled_iterations_us(trace: Trace) -> dict[int, float]:
    """Iteration of each profiled step that another profiled step follows."""
    rank_steps = trace.steps.select(trace.steps.rank == 0)
    whole = np.flatnonzero(rank_steps.traced[:-1] & rank_steps.traced[1:])
    if not len(whole):
        raise InputError("the trace has no two profiled steps in a row; record more with --traced")
    distance = np.diff(rank_steps.start_us)
    return {int(rank_steps.index[i]): float(distance[i]) for i in whole}
