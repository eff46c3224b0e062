"""How far the predictions can be trusted: steps predicted from the others, plans that ran, and the terms of the cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dpro_search.report import units
from dpro_search.report.charts import bars
from dpro_search.report.html import Element, Section, figure, name_of, paragraph, table


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


@dataclass(frozen=True, kw_only=True)
class Term:
    """A fitted number of a cost model, in words."""

    name: str
    value: str
    meaning: str


def quality_section(
    held_out: Sequence[HeldOutStep],
    terms: Sequence[Term],
    validation: Mapping[str, Any] | None,
    corrected_pct: tuple[float, float] | None = None,
) -> Section:
    """Errors first, then what the model is made of."""
    content: list[Element] = []
    if held_out:
        content.append(_held_out(held_out))
    else:
        content.append(
            paragraph("No step could be held out: the recording has too few, or its kind of job has no such check.", "quiet")
        )
    if validation is not None:
        content.append(_plans(validation))
    if corrected_pct is not None:
        before, after = map(units.percent, corrected_pct)
        content.append(
            paragraph(
                f"Without correction, predictions are off by {before} in the mean; each corrected by the others, by {after}. "
                "'dpro-search run --calibrate RUN' corrects those of a new search so."
            )
        )
    if terms:
        rows = ((name_of(term.name), term.value, term.meaning) for term in terms)
        content.append(table("Terms of the cost model, fitted on this recording", ("term", "value#", "what it stands for"), rows))
    else:
        content.append(paragraph("Nothing is fitted for this kind of recording: ops keep the durations that they had.", "quiet"))
    return Section("quality", "How good the model is", content)


def _held_out(steps: Sequence[HeldOutStep]) -> Element:
    errors = [abs(step.error_pct) for step in steps]
    caption = (
        f"Each step predicted from all others: error {units.percent(median(errors))} in the median, "
        f"{units.percent(max(errors))} at most "
        f"({units.count(len(steps), 'step')} of the recording held out in turn)."
    )
    rows = [
        (
            f"step {step.step}",
            units.signed_percent(step.error_pct),
            step.error_pct,
            f"{units.duration(step.predicted_us)} predicted",
        )
        for step in steps
    ]
    numbers = table(
        "Held-out steps",
        ("step", "measured#", "predicted#", "error#"),
        (
            (str(s.step), units.duration(s.measured_us), units.duration(s.predicted_us), units.signed_percent(s.error_pct))
            for s in steps
        ),
    )
    return figure(bars("Error of each held-out step", rows, "part compute"), caption, numbers)


def _plans(validation: Mapping[str, Any]) -> Element:
    baseline = (
        "as recorded",
        units.duration(validation["baseline_predicted_us"]),
        units.duration(validation["baseline_us"]),
        units.signed_percent(validation["baseline_error_pct"]),
    )
    plans = (
        (
            name_of(row["name"]),
            units.duration(row["predicted_us"]),
            units.duration(row["measured_us"]),
            units.signed_percent(row["error_pct"]),
        )
        for row in validation["plans"]
    )
    return table("Predictions beside real runs", ("setting", "predicted#", "measured#", "error#"), (baseline, *plans))
