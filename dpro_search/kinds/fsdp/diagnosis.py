"""Diagnosis of a fully sharded job: facts, and findings: sentences with numbers and the setting to change, the costliest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpro_search.graph.fsdp import FsdpGraph
from dpro_search.kinds import _program
from dpro_search.kinds._job import Table
from dpro_search.kinds._program import ProgramJob
from dpro_search.quantities import size_text, time_text
from dpro_search.replay.path_findings import exposed_us, path_findings
from dpro_search.replay.path_segments import PathSegment
from dpro_search.space.plan import Plan


def diagnosis(job: ProgramJob[FsdpGraph], regathered_bytes: int) -> dict[str, Any]:
    """The facts of `Job.diagnose`; also ``collectives``, in the order in which they are enqueued.

    `regathered_bytes`: parameters that are gathered again for the backward pass.
    """
    facts = _program.diagnosis(
        job,
        job.gains(job.questions),
        lambda path, gained, iteration_us: findings(path, gained, iteration_us, regathered_bytes),
    )
    return facts | {"collectives": _collectives(job)}


def findings(
    path: Sequence[PathSegment], gains: Sequence[Mapping[str, Any]], iteration_us: float, regathered_bytes: int
) -> tuple[str, ...]:
    """Those of `path_findings` with the knobs of sharding.

    Parameters
    ----------
    regathered_bytes
        Parameters that are gathered again for the backward pass.
    """
    sentences = {
        "prefetch=1": "Gathering each unit's parameters while the unit before it computes (set_modules_to_forward_prefetch, with "
        "asynchronous all-gathers) would gain {}.",
        "reshard_after_forward=0": "Keeping parameters after the forward pass (reshard_after_forward=False) would gain {}, and "
        f"take up to {size_text(regathered_bytes)} more on each rank.",
    }
    gathers_us = sum(value for name, value in exposed_us(path).items() if name.startswith("all-gather"))
    return path_findings(path, gains, iteration_us, sentences=sentences, parts_us={"all-gathers": gathers_us})


def diagnosis_tables(facts: Mapping[str, Any]) -> list[Table]:
    """The facts of `diagnosis` for people."""
    rows = [(row["name"], size_text(row["bytes"]), time_text(row["transfer_us"])) for row in facts["collectives"]]
    columns = ("collective", "whole tensor", "transfer")
    return _program.diagnosis_tables(facts, Table(title="collectives", columns=columns, rows=rows))


def _collectives(job: ProgramJob[FsdpGraph]) -> list[dict[str, Any]]:
    """Facts of each recorded collective: its name, bytes of the whole tensor, and its transfer."""
    graph, moves_us = job.measured.graph, job.program(Plan()).iterations().collective_us
    return [
        {"name": label, "bytes": int(size_bytes), "transfer_us": float((moves_us[:, place, 1] - moves_us[:, place, 0]).mean())}
        for place, (label, size_bytes) in enumerate(zip(graph.labels, graph.size_bytes.tolist(), strict=True))
    ]
