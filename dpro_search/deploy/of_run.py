"""Export and validation of the plans of a run folder: what the verbs `export` and `validate` do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from dpro_search.collect._files import write_file
from dpro_search.collect.step_times import StepTimes
from dpro_search.collect.trace import Trace
from dpro_search.deploy.export import ExportedFiles, export_plan
from dpro_search.deploy.jobs import RecordedJob
from dpro_search.deploy.parts.part import JobFacts, Target
from dpro_search.deploy.targets import targets_for, targets_named
from dpro_search.deploy.validate import Validation, typical_us, validate
from dpro_search.errors import DproSearchError, InputError, JobError
from dpro_search.search import SearchResult
from dpro_search.search.calibration import Calibration
from dpro_search.search.correction import MeasuredPoint, Session
from dpro_search.search.request import calibration_of
from dpro_search.search.result import PLAN_FILE
from dpro_search.search.run_folder import read_run
from dpro_search.space.plan import Plan, Prediction


class DeployedKind(Protocol):
    """What an export needs of a kind of job; `kinds.Kind` is one."""

    def targets_of(self, framework: str) -> tuple[Target, ...]:
        """What plans of such jobs of a framework can be exported to."""

    def facts(self, trace: Trace) -> JobFacts:
        """Facts with which an export checks a plan."""


@dataclass(frozen=True, kw_only=True)
class ChosenPlan:
    """A plan, its predictions and its recording.

    Attributes
    ----------
    trace
        The recording; None without one.
    expected
        Predictions of the plan and of the recorded setting, if it comes from a search.
    """

    plan: Plan
    trace: Trace | None = None
    expected: tuple[Prediction, Prediction] | None = None


def chosen_plan(source: Path, number: int | None = None) -> ChosenPlan:
    """A plan's file, or plan `number` (None: the best) of a run folder.

    Raises
    ------
    InputError
        There is no such plan, or `number` is given for a file.
    """
    if not source.is_dir():
        if number is not None:
            raise InputError(f"--plan {number}: only with the folder of a search, and {source} is not a folder")
        return ChosenPlan(plan=Plan.load(source))
    number = 1 if number is None else number
    files = sorted(source.glob(PLAN_FILE.format("*")), key=lambda path: (len(path.name), path.name))
    if not 1 <= number <= len(files):
        raise InputError(f"{source}: no plan {number}; it holds {len(files)} plans (1 is the best); choose one with --plan")
    plan = Plan.load(files[number - 1])
    trace: Trace | None = None
    expected: tuple[Prediction, Prediction] | None = None
    with contextlib.suppress(DproSearchError):  # a folder of plans alone
        result = SearchResult.load(source)
        expected = next(((ranked.prediction, result.baseline) for ranked in result.plans if ranked.plan == plan), None)
    with contextlib.suppress(DproSearchError):  # the trace has moved
        trace = Trace.load(Path(read_run(source).trace))
    return ChosenPlan(plan=plan, trace=trace, expected=expected)


def export_from(
    source: Path,
    out: Path,
    known: Sequence[Target],
    kind_of: Callable[[Trace], DeployedKind],
    *,
    targets: Sequence[str] = (),
    number: int | None = None,
) -> ExportedFiles:
    """Write the files that a real job needs to follow a plan.

    Parameters
    ----------
    known
        All targets; the first is the default for a plan without a recording.
    kind_of
        Finds the kind of the recorded job.
    targets
        Names of targets; empty: those of the job that the plan needs.

    Raises
    ------
    InputError
        There is no such plan, `out` exists, or the targets cannot express the plan.
    """
    chosen = chosen_plan(source, number)
    facts: JobFacts | None = None
    available: tuple[Target, ...] = ()
    if chosen.trace is not None:
        kind = kind_of(chosen.trace)
        available = kind.targets_of(chosen.trace.meta.framework)
        facts = kind.facts(chosen.trace) if available else None
    if targets:
        wanted = targets_named(targets, known)
    else:
        wanted = targets_for(chosen.plan, available) if available else targets_for(chosen.plan, known, known[0])
    return export_plan(chosen.plan, out, wanted, facts, chosen.expected, known)


def validate_run(
    run: Path,
    recording: Trace,
    job: RecordedJob,
    knobs: Mapping[str, object],
    *,
    top: int = 3,
    rounds: int = 2,
    most_rounds: int | None = None,
    warmup: int = 5,
    timeout_s: float | None = None,
    on_run: Callable[[str, StepTimes | JobError], None] = lambda name, found: None,
) -> tuple[Validation, Calibration]:
    """Run the best plans of a search for real; writes ``validation.json`` and ``calibration.json`` into the run folder.

    Parameters
    ----------
    recording, job
        The searched trace, and the job that runs again.
    knobs
        Recorded values of plan fields (`space.transformations.JobFacts.values`).
    rounds, most_rounds, warmup, timeout_s, on_run
        Of `validate.validate`.

    Raises
    ------
    InputError
        `run` is no finished search.
    JobError
        The recorded setting or every plan failed, or the script follows none of the plans.
    """
    result = SearchResult.load(run)
    earlier = calibration_of(read_run(run), run)
    chosen = [(number, ranked) for number, ranked in enumerate(result.plans, 1) if ranked.plan != Plan()][:top]
    plans = [(ranked.plan, ranked.prediction) for _, ranked in chosen]
    for plan, _ in plans:
        targets_for(plan, job.targets)  # before anything runs
    validation = validate(
        job,
        result.baseline,
        plans,
        numbers=[number for number, _ in chosen],
        rounds=rounds,
        most_rounds=most_rounds,
        warmup=warmup,
        timeout_s=timeout_s,
        on_run=on_run,
    )
    recorded = recording.iterations_us()
    if len(recorded):
        validation = msgspec.structs.replace(validation, recorded_us=typical_us([recorded]))
    write_file(run / "validation.json", msgspec.json.format(msgspec.json.encode(validation), indent=1) + b"\n")
    sessions = (*earlier.sessions, measured_session(validation, result.baseline, earlier))
    calibration = Calibration.fit(sessions, knobs)
    calibration.save(run)
    return validation, calibration


def measured_session(validation: Validation, baseline: Prediction, held: Calibration | None = None) -> Session:
    """The measurements of a validation, for a calibration: the recorded setting, and plans with equal losses.

    Parameters
    ----------
    baseline
        The prediction of the recorded setting.
    held
        The calibration of its predictions, which is removed: measurements correct uncorrected predictions.
    """
    held = held or Calibration()
    noise = validation.noise_pct / 100

    def point(plan: Plan, predicted: Prediction, measured_us: float, stability_pct: float = 0.0) -> MeasuredPoint:
        plain = held.uncorrected(predicted, plan)
        return MeasuredPoint(
            plan=plan,
            predicted_us=plain.iteration_us,
            interval_us=plain.interval_us,
            measured_us=measured_us,
            noise=max(noise, stability_pct / 100),
        )

    return Session(
        recorded=point(Plan(), baseline, validation.baseline_us),
        changed=tuple(
            point(
                row.plan,
                msgspec.structs.replace(baseline, iteration_us=row.predicted_us, interval_us=row.interval_us),
                row.measured_us,
                row.stability_pct,
            )
            for row in validation.plans
        ),
        recording_us=validation.recorded_us,
    )
