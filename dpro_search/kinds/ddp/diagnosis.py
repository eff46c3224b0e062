"""Diagnosis of a DistributedDataParallel job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpro_search.collect.trace import Trace
from dpro_search.kinds import _program_job
from dpro_search.kinds._job import Table
from dpro_search.kinds.ddp.findings import findings
from dpro_search.kinds.ddp.predictor import DdpPredictor
from dpro_search.kinds.ddp.what_if import gains
from dpro_search.quantities import percent_text, size_text, time_text
from dpro_search.space.plan import Plan


def diagnosis(trace: Trace, predictor: DdpPredictor) -> dict[str, Any]:
    """The facts of `Job.diagnose`; also ``buckets``, in the order of their all-reduces."""
    return _program_job.diagnosis(trace, predictor, gains(predictor), findings) | {"buckets": _buckets(predictor)}


def diagnosis_tables(facts: Mapping[str, Any]) -> list[Table]:
    """The facts of `diagnosis` for people."""
    rows = [
        (
            str(row["bucket"]),
            str(row["gradients"]),
            size_text(row["bytes"]),
            percent_text(row["posted_after_pct"]),
            time_text(row["transfer_us"]),
        )
        for row in facts["buckets"]
    ]
    columns = ("bucket", "gradients", "moved", "enqueued after", "transfer")
    return _program_job.diagnosis_tables(facts, Table(title="buckets", columns=columns, rows=rows))


def _buckets(predictor: DdpPredictor) -> list[dict[str, Any]]:
    """Facts of each recorded bucket: gradients, bytes, the share of the backward pass before its post, and its transfer."""
    graph = predictor.graph
    moves_us = predictor.timeline(Plan()).collective_us[:, len(graph.forward_bytes) :]
    shares = graph.ready_us / graph.backward_us[..., None]
    rows = []
    for bucket in range(int(graph.bucket_of.max()) + 1):
        of_bucket = graph.bucket_of == bucket
        rows.append(
            {
                "bucket": bucket,
                "gradients": int(of_bucket.sum()),
                "bytes": int(graph.gradient_bytes[of_bucket].sum()),
                "posted_after_pct": float(shares[..., of_bucket].max(axis=-1).mean()) * 100,
                "transfer_us": float((moves_us[:, bucket, 1] - moves_us[:, bucket, 0]).mean()),
            }
        )
    return rows
