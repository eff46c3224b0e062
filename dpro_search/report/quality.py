"""How far the predictions can be trusted: steps predicted from the others, plans that ran, and the terms of the cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from dpro_search.costmodel.horovod import CommCosts
from dpro_search.report import units
from dpro_search.report.charts import bars
from dpro_search.report.html import Element, figure, name_of, paragraph, section, table
from dpro_search.space.byteps_job import BytepsJob
from dpro_search.space.kvstore_job import KvstoreJob


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


def cost_terms(costs: CommCosts) -> tuple[Term, ...]:
    """What an all-reduce costs by the fitted model."""
    agreement = [float(np.median(waits)) if len(waits) else 0.0 for waits in (costs.negotiate_busy_us, costs.negotiate_idle_us)]
    rows = (
        ("latency, busy ranks", units.duration(costs.alpha_busy_us), "an all-reduce of few bytes while a rank computes"),
        (
            "latency, large tensors",
            units.duration(costs.alpha_more_us),
            "what a large all-reduce takes on top, while a rank computes",
        ),
        ("latency, idle ranks", units.duration(costs.alpha_tail_us), "an all-reduce once all ranks have computed"),
        ("transfer, busy ranks", _per_byte(costs.beta_busy_us), "time per byte while a rank computes"),
        ("transfer, idle ranks", _per_byte(costs.beta_tail_us), "time per byte once all ranks have computed"),
        ("processor time of a transfer", _per_byte(costs.cpu_us), "taken from the compute of each rank"),
        ("copies in and out", _per_byte(costs.copy_in_us + costs.copy_out_us), "into the fusion buffer and back"),
        ("agreement, busy ranks", units.duration(agreement[0]), "median, from a cycle's start to what is sent"),
        ("agreement, idle ranks", units.duration(agreement[1]), "the same while no rank computes"),
        ("between collectives", units.duration(costs.dispatch_us), "callbacks and preparation"),
        ("burst", units.duration(costs.burst_us), "by which a link that has rested is ahead of its rate, at most"),
        ("spread left over", units.percent(costs.residual_pct), "standard deviation of measured over fitted transfers of a step"),
    )
    return tuple(Term(name=name, value=value, meaning=meaning) for name, value, meaning in rows)


def store_terms(job: KvstoreJob | BytepsJob) -> tuple[Term, ...]:
    """What a job with parameter servers costs by what was read off its recording."""
    link = "no limit" if job.bytes_per_us is None else f"{job.bytes_per_us:.0f} MB/s"
    rows = [("link", link, "what a host sends, or receives, at most")]
    if isinstance(job, KvstoreJob):
        rows += [
            ("processor time of messages", _per_byte(job.comm_us_per_byte), "of a process, for what it sends or receives"),
            ("copies and calls of a worker", _per_byte(float(np.mean(job.beside_us_per_byte))), "beside its messages"),
            ("first part on a server", _per_byte(job.copy_us_per_byte), "copied"),
            ("further parts on a server", _per_byte(job.sum_us_per_byte), "added, each"),
            ("update", _per_byte(job.update_us_per_byte), "of the weights, once all parts are there"),
            ("slice", units.duration(job.slice_us), "core time of a server for the messages of a slice of any size"),
            ("call of the optimizer", units.duration(job.update_call_us), "for each slice, where servers update"),
        ]
    else:
        rows += [
            ("processor time", _per_byte(job.cpu_us_per_byte), "of a process, for what it sends, receives or adds"),
            ("message", units.duration(job.message_us), "core time of a message of any size"),
            ("before a push", units.duration(job.reduce_us + job.before_push_us), "stages of the worker that take no core"),
            ("reply", units.duration(job.reply_us), "until a message is acknowledged"),
            ("after a pull", units.duration(job.after_pull_us), "from the arrival of the sum to its use"),
            ("looking for work, workers", units.percent(job.worker_polling * 100), "of the core of each"),
            ("looking for work, servers", units.percent(job.server_polling * 100), "of the core of each"),
        ]
    return tuple(Term(name=name, value=value, meaning=meaning) for name, value, meaning in rows)


def quality_section(
    held_out: Sequence[HeldOutStep],
    terms: Sequence[Term],
    validation: Mapping[str, Any] | None,
    corrected_pct: tuple[float, float] | None = None,
) -> Element:
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
    return section("quality", "How good the model is", *content)


def _per_byte(value_us: float) -> str:
    return f"{value_us * 2**20 / 1e3:.2f} ms/MiB"


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
