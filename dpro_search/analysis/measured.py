"""`record`: a real time of a plan that somebody else ran, checked against what is possible, and stored in the run folder."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from dpro_search._text import visible
from dpro_search.analysis.next_run import NextRun, next_run
from dpro_search.collect.trace import Floats
from dpro_search.collect.training_logs import TrainingLog, read_training_log
from dpro_search.deploy.measured_plans import ReportedStep, add_measurement, fitted_calibration, measured_plans, now_text
from dpro_search.errors import InputError
from dpro_search.kinds._measured_runs import SearchedRun
from dpro_search.parallel.job import ParallelJob
from dpro_search.quantities import parse_bytes, parse_us, size_text, time_text
from dpro_search.space.plan import Plan, Prediction

_FAR = 20.0  # Measured over predicted time, or the inverse, from which on a unit was probably mistaken.
_NEAR = 4.0  # The same of a time in the unit that was probably meant, at most.
_MEMORY_SLACK = 1.02


class MeasuredAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement beside the prediction; times in us.

    Attributes
    ----------
    number, name
        The plan, 0 without one, and its settings in words.
    step_us, spread_us, steps
        See `ReportedStep`.
    predicted_us, interval_us, error_pct
        The prediction, its 90 % interval, and its error.
    within
        Whether the interval holds the measured time.
    measurements
        How often the plan was measured, this time included; `all_us` is the median of all.
    left_out, starts, origin
        Readings of a log that were left out as warm-up (0 without a log), how often its training began, and where the number comes
        from.
    next
        The run to make next.
    """

    number: int
    name: str
    step_us: float
    spread_us: tuple[float, float] | None
    steps: int | None
    memory_bytes: int | None
    predicted_us: float
    interval_us: tuple[float, float]
    error_pct: float
    within: bool
    measurements: int
    all_us: float
    left_out: int
    starts: int
    origin: str
    next: NextRun

    def lines(self) -> list[str]:
        """The answer in sentences."""
        low_us, high_us = self.interval_us
        spread = "" if self.spread_us is None else f" ({time_text(self.spread_us[0])} to {time_text(self.spread_us[1])})"
        steps = "" if self.steps is None else f", {self.steps} steps without {self.left_out} of the warm-up"
        plan = f"plan {self.number}: {self.name}" if self.number else self.name
        position = "within" if self.within else "outside"
        again = f" Measured {self.measurements} times, median {time_text(self.all_us)}." if self.measurements > 1 else ""
        return [
            f"{plan}: {time_text(self.step_us)}{spread} measured ({self.origin}{steps}), {time_text(self.predicted_us)} predicted, "
            f"{position} its interval ({time_text(low_us)} to {time_text(high_us)}).{again}",
            *self.next.lines(),
        ]


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """Measured durations in us, [readings], and how they were given."""

    times_us: Floats
    text: str  # As the message of an error names it.
    origin: str
    log: TrainingLog | None = None


def record(
    run: Path,
    number: int,
    *,
    step_time: str | None = None,
    memory: str | None = None,
    log: Path | None = None,
    trace: Path | None = None,
    training_us: float | None = None,
) -> MeasuredAnswer:
    """Store a measurement of a plan, and say what it tells.

    Parameters
    ----------
    number
        The plan; 0: the recorded or described setting.
    step_time, memory
        As people write them: "12.4s", "71GiB"; None: from the log.
    log
        What the training program printed (`collect.training_logs`); None: `step_time` is given.
    trace
        Path of the search's trace, if it has moved.
    training_us
        As in `next_run`.

    Raises
    ------
    InputError
        There is no such plan, the log has no steps, or the numbers contradict the plan, each other or what devices can do.
    """
    searched = SearchedRun.of(run, trace)
    plan, prediction, name = searched.plan(number)
    steps = _steps(searched, plan, step_time, log)
    step_us = float(np.median(steps.times_us))
    _check_time(searched, plan, prediction, step_us, steps.text)
    memory_bytes = parse_bytes(memory) if memory is not None else None if steps.log is None else steps.log.memory_bytes
    if memory_bytes is not None:
        _check_memory(searched, memory_bytes)
    several = len(steps.times_us) > 1
    low_us, high_us = np.quantile(steps.times_us, (0.1, 0.9)).tolist()
    measurement = ReportedStep(
        trace_digest=searched.info.trace_digest,
        plan=plan,
        predicted_us=prediction.iteration_us,
        interval_us=prediction.interval_us,
        step_us=step_us,
        spread_us=(low_us, high_us) if several else None,
        steps=len(steps.times_us) if several else None,
        memory_bytes=memory_bytes,
        when=now_text(),
        origin=steps.origin,
    )
    add_measurement(run, measurement)
    if not searched.job.job.learns_speeds:  # Others learn from the measured plans themselves.
        fitted_calibration(run, searched.job.space.job.values).save(run)
    times, low, high = measured_plans(run)[plan], *prediction.interval_us
    return MeasuredAnswer(
        number=number,
        name=name,
        step_us=step_us,
        spread_us=measurement.spread_us,
        steps=measurement.steps,
        memory_bytes=memory_bytes,
        predicted_us=prediction.iteration_us,
        interval_us=prediction.interval_us,
        error_pct=(prediction.iteration_us / step_us - 1) * 100,
        within=low <= step_us <= high,
        measurements=len(times.measurements),
        all_us=times.step_us,
        left_out=0 if steps.log is None else steps.log.left_out,
        starts=1 if steps.log is None else steps.log.starts,
        origin=steps.origin,
        next=next_run(searched, training_us),
    )


def measured_of(searched: SearchedRun, number: int) -> tuple[Plan, list[str]]:
    """A plan by its number, and what was measured of it, as ``expect --measured`` takes it; empty where it was not measured."""
    plan = searched.plan(number)[0]
    times = measured_plans(searched.folder).get(plan)
    if times is None:
        return plan, []
    memory = [] if times.memory_bytes is None else [f"memory={times.memory_bytes}"]
    return plan, [f"step_time={times.step_us:.3f}us", *memory]


def _steps(searched: SearchedRun, plan: Plan, step_time: str | None, log: Path | None) -> _Steps:
    """The measured steps; raises `InputError` where both or none of the two are given, or the log is of another batch."""
    if (step_time is None) == (log is None):
        raise InputError("give either --step-time 12.4s or --log FILE")
    if step_time is not None:
        us = parse_us(step_time)
        if us <= 0:
            raise InputError(f"--step-time {step_time}: must be above 0; write it like 12.4s")
        return _Steps(times_us=np.array([us]), text=f"--step-time {step_time}", origin="reported")
    assert log is not None, "checked above"
    steps = read_training_log(log)
    work, samples = searched.job.work, _global_batch(searched, plan)
    if samples is not None and steps.global_batch not in (None, samples):
        raise InputError(
            f"{log}: its steps have a batch of {steps.global_batch}, those of the plan {samples}: it is the log of another job"
        )
    tokens = None if work is None or work.tokens is None else work.tokens / work.devices
    mean = ", the mean of all steps, the first ones included" if steps.is_mean else ""
    origin = f"log of {steps.program}, {visible(log.name)}{mean}"
    return _Steps(times_us=steps.steps_us(tokens, samples), text=str(log), origin=origin, log=steps)


def _global_batch(searched: SearchedRun, plan: Plan) -> int | None:
    """Samples of a step under a plan; None: not known."""
    return _strategy_number(searched, plan, "global_batch")


def _strategy_number(searched: SearchedRun, plan: Plan, name: str) -> int | None:
    """A number of the strategy of a described job under a plan; None for other jobs."""
    job = searched.job.job
    if not isinstance(job, ParallelJob):
        return None
    return int(getattr(job.prepared(searched.job.scenario).space.strategy(plan), name))


def _check_time(searched: SearchedRun, plan: Plan, prediction: Prediction, step_us: float, text: str) -> None:
    """Raise `InputError`, with the unit that was probably meant, for an impossible time, or one that is far from the prediction."""
    lowered = searched.job.lowered(plan)
    floor_us = max(lowered.error.floor_us, lowered.replayable.iterations().floor_us)
    predicted_us = prediction.iteration_us
    if step_us < floor_us:
        why = f"below {time_text(floor_us)}, which the work of a step takes at the peak of its devices"
    elif not 1 / _FAR < step_us / predicted_us < _FAR:
        why = f"{step_us / predicted_us:.3g} times the prediction of {time_text(predicted_us)}"
    else:
        return
    meant = [(abs(math.log(step_us * factor / predicted_us)), words, step_us * factor) for words, factor in _units(searched, plan)]
    distance, words, other_us = min(meant)
    if distance < math.log(_NEAR) and other_us >= floor_us:
        raise InputError(f"{text}: a step of {time_text(step_us)} is {why}; probably {words} was meant, {time_text(other_us)}")
    raise InputError(f"{text}: a step of {time_text(step_us)} is {why}; check the unit, and that the plan is the one that ran")


def _units(searched: SearchedRun, plan: Plan) -> Iterator[tuple[str, float]]:
    """Other units that a time may have been given in, and the factor to them."""
    yield from (
        ("a time in seconds", 1e6),
        ("a time in milliseconds", 1e-3),
        ("1000 times as much", 1e3),
        ("a time in minutes", 60.0),
    )
    micro_batches = _strategy_number(searched, plan, "micro_batches")
    if micro_batches is not None and micro_batches > 1:
        yield "the time of one micro-batch", float(micro_batches)


def _check_memory(searched: SearchedRun, memory_bytes: int) -> None:
    job = searched.job.job
    has_bytes = job.prepared(searched.job.scenario).device_bytes if isinstance(job, ParallelJob) else None
    if has_bytes is not None and memory_bytes > has_bytes * _MEMORY_SLACK:
        raise InputError(
            f"--memory {size_text(memory_bytes)}: a device has {size_text(has_bytes)}; the number is probably that of several"
        )
