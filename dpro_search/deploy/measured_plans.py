"""`measured_plans`: everything that was measured of a run's plans, whoever measured it: the one place that readers ask.

``validation.json`` has the runs of `validate` (see `validate.py`). ``measured.jsonl`` has what people report of runs elsewhere
(`add_measurement`, the verb `measured`): one measurement a line, appended. Several measurements of one plan are all kept; its time
is their median, and their spread says how far one measurement may be off.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from dpro_search._regular_files import read_regular
from dpro_search.collect._files import DAMAGED, write_file
from dpro_search.deploy.validate import Validation
from dpro_search.errors import InputError
from dpro_search.search import SearchResult
from dpro_search.search.calibration import Calibration
from dpro_search.search.correction import MeasuredPoint, Session
from dpro_search.search.request import calibration_of
from dpro_search.search.run_folder import locked_run, read_run
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.plan_json import decoded

_FILE, _VERSION = "measured.jsonl", 1
LEAST_NOISE = 0.02
"""Standard deviation of a measured step's logarithm: published runs that were repeated differ by 1 to 3 % (experiments/truth)."""


class ReportedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of a plan, a line of ``measured.jsonl``.

    Attributes
    ----------
    trace_digest
        Digest of the job's trace or description, which is that of its run folder (`RunInfo.trace_digest`).
    plan
        The plan; the empty one is the recorded or described setting.
    predicted_us, interval_us
        Prediction of the search for it.
    step_us, spread_us
        Median step, and quantiles of 10 and 90 % of the steps (None: a single number was given).
    steps
        Number of steps that were measured; None: not known.
    memory_bytes
        The most memory of a device; None: not known.
    when, origin
        Date of the report in UTC, like "2026-01-31T12:00:00Z", and where the number comes from.
    """

    version: int = _VERSION
    trace_digest: str
    plan: Plan
    predicted_us: float
    interval_us: tuple[float, float]
    step_us: float
    spread_us: tuple[float, float] | None = None
    steps: int | None = None
    memory_bytes: int | None = None
    when: str
    origin: str


@dataclass(frozen=True, kw_only=True)
class MeasuredTimes:
    """All measurements of one plan, in the order of their dates; at least one."""

    plan: Plan
    measurements: Sequence[ReportedStep]

    @property
    def step_us(self) -> float:
        """Median of the measurements."""
        return float(np.median([one.step_us for one in self.measurements]))

    @property
    def noise(self) -> float:
        """Standard deviation of the logarithm of `step_us`: that of one measurement, or more where measurements differ more."""
        logs = np.log([one.step_us for one in self.measurements])
        return max(LEAST_NOISE, float(np.std(logs, ddof=1)) if len(logs) > 1 else 0.0)

    @property
    def memory_bytes(self) -> int | None:
        """The most memory that was measured; None: it was not."""
        return max((one.memory_bytes for one in self.measurements if one.memory_bytes is not None), default=None)


def measured_plans(run: Path) -> Mapping[Plan, MeasuredTimes]:
    """Everything that was measured of a run's plans, by plan; plans that `validate` refused or that failed have no time.

    Raises
    ------
    InputError
        The folder is no run folder, or one of its files is damaged or belongs to another job.
    """
    by_plan: dict[Plan, list[ReportedStep]] = {}
    for one in (*_validated(run), *reported(run)):
        by_plan.setdefault(one.plan, []).append(one)
    return {
        plan: MeasuredTimes(plan=plan, measurements=sorted(several, key=lambda one: one.when)) for plan, several in by_plan.items()
    }


def reported(run: Path) -> tuple[ReportedStep, ...]:
    """The lines of ``measured.jsonl``; errors are those of `measured_plans`."""
    path, digest = run / _FILE, read_run(run).trace_digest
    if not path.is_file():
        return ()
    measurements = []
    for number, line in enumerate(read_regular(path).splitlines(), 1):
        try:
            one = decoded(line, ReportedStep)
        except (*DAMAGED, InputError) as error:
            raise InputError(f"{path}: line {number} is damaged ({error}); take the line out") from error
        if one.trace_digest != digest:
            raise InputError(f"{path}: line {number} was measured for another job than the one of {run}; take the line out")
        times_us = (one.step_us, one.predicted_us, *one.interval_us, *(one.spread_us or ()))
        if one.version != _VERSION or not all(0 < us < math.inf for us in times_us):
            raise InputError(f"{path}: line {number} has a time that is not above 0, or is of a later version; take the line out")
        measurements.append(one)
    return tuple(measurements)


def add_measurement(run: Path, measurement: ReportedStep) -> None:
    """Append a measurement; raises `InputError` while a search writes the folder, `MissingCapabilityError` for a full disk."""
    with locked_run(run):
        lines = [msgspec.json.encode(one) + b"\n" for one in (*reported(run), measurement)]
        write_file(run / _FILE, b"".join(lines))


def now_text() -> str:
    """The date as measurements have it."""
    return _date(time.time())


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _validated(run: Path) -> list[ReportedStep]:
    """The settings of ``validation.json`` that have a measured time. Paced runs are left out, because they did not compute."""
    validation = Validation.load(run)
    if validation is None or validation.paced:
        return []
    digest, when = read_run(run).trace_digest, _date((run / "validation.json").stat().st_mtime)

    def line(plan: Plan, predicted_us: float, interval_us: tuple[float, float], step_us: float) -> ReportedStep:
        return ReportedStep(
            trace_digest=digest,
            plan=plan,
            predicted_us=predicted_us,
            interval_us=interval_us,
            step_us=step_us,
            when=when,
            origin=f"validate, {validation.rounds} rounds",
        )

    us = validation.baseline_predicted_us
    return [
        line(Plan(), us, (us, us), validation.baseline_us),
        *(line(row.plan, row.predicted_us, row.interval_us, row.measured_us) for row in validation.plans),
    ]


def fitted_calibration(run: Path, knobs: Mapping[str, object]) -> Calibration:
    """The calibration by everything that was measured in a run folder, and by what its predictions were calibrated with.

    Parameters
    ----------
    knobs
        Recorded values of plan fields (`space.transformations.PlanningFacts.values`).

    Raises
    ------
    InputError
        Nothing was measured, or a file of the run folder is damaged.
    """
    baseline, validation = SearchResult.load(run).baseline, Validation.load(run)
    held = calibration_of(read_run(run), run)
    sessions = list(held.sessions)
    if validation is not None:
        sessions.append(measured_session(validation, baseline, held))
    if lines := reported(run):
        sessions.append(_reported_session(lines, baseline, held))
    return Calibration.fit(sessions, knobs)


def measured_session(validation: Validation, baseline: Prediction, held: Calibration | None = None) -> Session:
    """The measurements of a validation, for a calibration: the recorded setting, and plans with equal losses.

    Parameters
    ----------
    baseline
        The prediction of the recorded setting.
    held
        The calibration of its predictions, which is removed: measurements correct uncorrected predictions.
    """
    held, noise = held or Calibration(), validation.noise_pct / 100
    return Session(
        recorded=_point(held, Plan(), baseline, validation.baseline_us, noise),
        changed=tuple(
            _point(
                held,
                row.plan,
                msgspec.structs.replace(baseline, iteration_us=row.predicted_us, interval_us=row.interval_us),
                row.measured_us,
                max(noise, row.stability_pct / 100),
            )
            for row in validation.plans
        ),
        recording_us=validation.recorded_us,
    )


def _reported_session(lines: Sequence[ReportedStep], baseline: Prediction, held: Calibration) -> Session:
    """The times that people reported, as one session with each plan once."""
    by_plan: dict[Plan, list[ReportedStep]] = {}
    for one in lines:
        by_plan.setdefault(one.plan, []).append(one)
    points = []
    for plan, several in by_plan.items():
        times, last = MeasuredTimes(plan=plan, measurements=several), several[-1]
        predicted = msgspec.structs.replace(baseline, iteration_us=last.predicted_us, interval_us=last.interval_us)
        points.append(_point(held, plan, predicted, times.step_us, times.noise))
    return Session(
        recorded=next((point for point in points if point.plan == Plan()), None),
        changed=tuple(point for point in points if point.plan != Plan()),
    )


def _point(held: Calibration, plan: Plan, predicted: Prediction, measured_us: float, noise: float) -> MeasuredPoint:
    plain = held.uncorrected(predicted, plan)
    return MeasuredPoint(
        plan=plan, predicted_us=plain.iteration_us, interval_us=plain.interval_us, measured_us=measured_us, noise=noise
    )
