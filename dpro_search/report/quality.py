"""Errors of predictions: held-out steps, plans that ran for real, and the fitted terms of the cost model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from dpro_search.deploy.measured_plans import ReportedStep
from dpro_search.deploy.validate import Validation
from dpro_search.kinds import Term
from dpro_search.machine import IntervalSource
from dpro_search.report import units
from dpro_search.report.charts import bars
from dpro_search.report.html import Element, Section, figure, name_of, paragraph, table
from dpro_search.space.plan import Plan

_NO_HELD_OUT = (
    "No step was predicted from the others: the recording has too few steps, or jobs of this kind do not support the check."
)
_NO_TERMS = "Ops keep their recorded durations: no cost model was fitted."
_DESCRIBED = "Nothing was measured of a described job. Its intervals follow from the errors of predictions of published runs."


@dataclass(frozen=True, kw_only=True)
class HeldOutStep:
    """A recorded step beside its prediction from all other steps."""

    step: int
    measured_us: float
    predicted_us: float

    @property
    def error_pct(self) -> float:
        """Signed error of the prediction."""
        return (self.predicted_us / self.measured_us - 1) * 100


def quality_section(
    held_out: Sequence[HeldOutStep],
    terms: Sequence[Term],
    validation: Validation | None,
    name_of_plan: Callable[[Plan], str],
    corrected_pct: tuple[float, float] | None = None,
    *,
    described: bool = False,
    reported: Sequence[tuple[str, ReportedStep]] = (),
    calibration: IntervalSource | None = None,
) -> Section:
    """Errors of predictions first, then the basis of intervals (`calibration`) and the terms of the cost model."""
    content: list[Element] = []
    if described and not reported:
        content.append(paragraph(_DESCRIBED, "quiet"))
    elif held_out:
        content.append(_held_out(held_out))
    elif not described:
        content.append(paragraph(_NO_HELD_OUT, "quiet"))
    if validation is not None:
        content.append(_plans(validation, name_of_plan))
    if reported:
        content.append(_reported(reported))
    if corrected_pct is not None:
        before, after = map(units.percent, corrected_pct)
        errors = f"Mean error of the predictions: {before}; {after} after each was corrected by the other measurements."
        content.append(paragraph(f"{errors} 'dpro-search run --calibrate RUN' applies this correction to a new search."))
    if calibration is not None:
        content.append(paragraph(f"Intervals are based on: {calibration.text}.", "quiet"))
    if terms:
        rows = ((name_of(term.name), term.value, term.meaning) for term in terms)
        content.append(table("Terms of the cost model, fitted on this recording", ("term", "value#", "meaning"), rows))
    elif not described:
        content.append(paragraph(_NO_TERMS, "quiet"))
    return Section("quality", "How far to trust the predictions", content)


def _held_out(steps: Sequence[HeldOutStep]) -> Element:
    errors = [abs(step.error_pct) for step in steps]
    middle, worst, number = units.percent(median(errors)), units.percent(max(errors)), units.count(len(steps), "step")
    caption = f"{number} of the recording, each predicted from all other steps: median error {middle}, largest error {worst}."
    rows = [
        (f"step {s.step}", units.signed_percent(s.error_pct), s.error_pct, f"{units.duration(s.predicted_us)} predicted")
        for s in steps
    ]
    numbers = table(
        "Steps predicted from the others",
        ("step", "measured#", "predicted#", "error#"),
        (_row(str(step.step), step.measured_us, step.predicted_us, step.error_pct) for step in steps),
    )
    return figure(bars("Error of each step", rows, "part compute"), caption, numbers)


def _plans(validation: Validation, name_of_plan: Callable[[Plan], str]) -> Element:
    recorded = validation.baseline_predicted_us, validation.baseline_us, validation.baseline_error_pct
    plans = (_row(name_of(name_of_plan(row.plan)), row.predicted_us, row.measured_us, row.error_pct) for row in validation.plans)
    columns = ("setting", "predicted#", "measured#", "error#")
    return table("Predicted and measured step times", columns, (_row("as recorded", *recorded), *plans))


def _reported(measurements: Sequence[tuple[str, ReportedStep]]) -> Element:
    columns = ("setting", "predicted#", "measured#", "error#", "date", "origin")
    rows = [
        (*_row(name_of(name), one.predicted_us, one.step_us, (one.predicted_us / one.step_us - 1) * 100), one.when, one.origin)
        for name, one in measurements
    ]
    return table("Predicted step times, and those that were measured elsewhere", columns, rows)


def _row(name: Element | str, one_us: float, other_us: float, error_pct: float) -> tuple[Element | str, str, str, str]:
    return name, units.duration(one_us), units.duration(other_us), units.signed_percent(error_pct)
