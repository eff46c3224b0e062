"""Diagnosis of a fully sharded job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpro_search.collect.trace import Trace
from dpro_search.kinds import _program_job
from dpro_search.kinds._job import Table
from dpro_search.kinds.fsdp.findings import findings
from dpro_search.kinds.fsdp.predictor import FsdpPredictor
from dpro_search.kinds.fsdp.what_if import gains
from dpro_search.quantities import size_text, time_text
from dpro_search.space.plan import Plan


def diagnosis(trace: Trace, predictor: FsdpPredictor) -> dict[str, Any]:
    """The facts of `Job.diagnose`; also ``collectives``, in the order in which they are enqueued."""
    facts = _program_job.diagnosis(
        trace,
        predictor,
        gains(predictor),
        lambda path, gained, iteration_us: findings(path, gained, iteration_us, predictor.regathered_bytes),
    )
    return facts | {"collectives": _collectives(predictor)}


def diagnosis_tables(facts: Mapping[str, Any]) -> list[Table]:
    """The facts of `diagnosis` for people."""
    rows = [(row["name"], size_text(row["bytes"]), time_text(row["transfer_us"])) for row in facts["collectives"]]
    columns = ("collective", "whole tensor", "transfer")
    return _program_job.diagnosis_tables(facts, Table(title="collectives", columns=columns, rows=rows))


def _collectives(predictor: FsdpPredictor) -> list[dict[str, Any]]:
    """Facts of each recorded collective: its name, bytes of the whole tensor, and its transfer."""
    graph, moves_us = predictor.graph, predictor.timeline(Plan()).collective_us
    return [
        {"name": label, "bytes": int(size_bytes), "transfer_us": float((moves_us[:, place, 1] - moves_us[:, place, 0]).mean())}
        for place, (label, size_bytes) in enumerate(zip(graph.labels, graph.size_bytes.tolist(), strict=True))
    ]
