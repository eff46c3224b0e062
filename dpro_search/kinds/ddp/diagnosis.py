"""Diagnosis of a DistributedDataParallel job: facts, and findings: sentences with numbers, the costliest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpro_search.graph.ddp import DdpGraph
from dpro_search.kinds import _program
from dpro_search.kinds._job import Table
from dpro_search.kinds._program import ProgramJob
from dpro_search.quantities import percent_text, size_text, time_text
from dpro_search.replay.path_findings import best_gain, path_findings
from dpro_search.replay.path_segments import PathSegment
from dpro_search.space.plan import Plan

_HOOKS = {
    "compression=fp16": "Compressing the buckets to half of their bytes (fp16_compress_hook) would gain {}, with what its casts "
    "cost; it changes the numbers.",
    "compression=powersgd-1": "Sending factors of rank 1 in place of gradients (PowerSGD) would gain {}, with what computing them "
    "costs; it changes the numbers more than halves do.",
}


def diagnosis(job: ProgramJob[DdpGraph]) -> dict[str, Any]:
    """The facts of `Job.diagnose`; also ``buckets``, in the order of their all-reduces."""
    return _program.diagnosis(job, job.gains(job.questions), findings) | {"buckets": _buckets(job)}


def findings(path: Sequence[PathSegment], gains: Sequence[Mapping[str, Any]], iteration_us: float) -> tuple[str, ...]:
    """Those of `path_findings` with DDP's knobs."""
    otherwise = "no other size of buckets would gain anything; a faster link or a compressing hook would"
    advice = best_gain(gains, ("bucket_cap_bytes", "first_bucket_bytes"), iteration_us, otherwise)
    return path_findings(path, gains, iteration_us, sentences=_HOOKS, advice=advice)


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
    return _program.diagnosis_tables(facts, Table(title="buckets", columns=columns, rows=rows))


def _buckets(job: ProgramJob[DdpGraph]) -> list[dict[str, Any]]:
    """Facts of each recorded bucket: gradients, bytes, the share of the backward pass before its post, and its transfer."""
    graph = job.step.graph
    moves_us = job.program(Plan()).iterations().collective_us[:, len(graph.forward_bytes) :]
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
