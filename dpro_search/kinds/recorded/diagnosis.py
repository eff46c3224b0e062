"""Diagnosis of an imported trace: breakdown of the devices' time, gains, late ranks, slow links.

Every number is of the replayed iteration that `replay` predicts, but for `last_pct`, `cost_us`, `waited_us` and `links`, which were
measured in the recorded steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from dpro_search.graph.event_names import origins
from dpro_search.graph.recorded_collectives import group_speeds, lateness
from dpro_search.kinds._facts import critical_ops, critical_table, gain_table, path_facts
from dpro_search.kinds._job import Job, Table
from dpro_search.kinds.recorded.findings import findings, stall_findings
from dpro_search.kinds.recorded.questions import answers
from dpro_search.kinds.recorded.replay import RecordedReplay
from dpro_search.quantities import percent_text, time_text
from dpro_search.replay.sentences import differs_from_median
from dpro_search.space.plan import Plan

_PARTS = ("compute_us", "exposed_communication_us", "waiting_for_ranks_us", "unknown_us", "idle_us", "host_bound_us")
_SHOWN_PCT = 0.1  # of an iteration


def diagnosis(job: Job, replay: RecordedReplay, *, is_profiled: bool = True) -> dict[str, Any]:
    """The facts of `Job.diagnose`; also ``links``, the speed of each process group.

    Parameters
    ----------
    replay
        The job without a plan.
    is_profiled
        Whether host threads are as slow as the profiler made them.
    """
    trace = replay.steps.trace
    base, timeline = replay.iterations(), replay.timeline()
    late, speeds = lateness(trace), group_speeds(trace)
    punctuality = {row.rank: msgspec.to_builtins(row) for row in late}
    gains = answers(replay, speeds, error=abs(job.replay_error))
    numbers, rows = trace.meta.numbers, replay.rows
    path = [row | {"rank": numbers[row["rank"]] if row["rank"] >= 0 else -1} for row in path_facts(timeline)]
    times = [msgspec.structs.replace(row, rank=numbers[row.rank]) for row in replay.rank_times]
    collective = next(iter(replay.steps.sorts.collectives), "")
    hosts = dict(zip(numbers, trace.meta.hosts, strict=True))
    return {
        "iteration_us": base.iteration_us,
        "measured_iteration_us": job.measured_iteration_us,
        "predicted_mean_us": base.mean_us,
        "measured_mean_us": replay.measured.mean_us,
        "breakdown_us": base.breakdown_us,
        "critical_path": path,
        "ranks": [
            {"host": hosts[row.rank] or None, "last_pct": None, "cost_us": None, "waited_us": None}
            | msgspec.to_builtins(row)
            | punctuality.get(row.rank, {})
            for row in times
        ],
        "gains": msgspec.to_builtins(gains),
        "critical_ops": critical_ops(
            timeline, numbers=numbers, origins=origins(trace, replay.steps.ops.about[rows]) if len(rows) else ()
        ),
        "links": [msgspec.to_builtins(speed) for speed in speeds],
        "findings": [
            *stall_findings(replay, gains),
            *findings(
                times,
                gains,
                base.iteration_us,
                speeds,
                collective,
                profiled=is_profiled,
                stalls=replay.stalls,
                framework=trace.meta.framework,
                pipeline=bool(replay.steps.pipelines),
            ),
        ],
        "warnings": list(trace.meta.warnings),
    }


def with_plans(job: Job, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a diagnosis with a row of ``gains`` for each legal plan; ``what_if`` is then what ``--set`` takes.

    Parameters
    ----------
    facts
        The answer of `diagnosis`.
    """
    base_us = float(facts["iteration_us"])
    rows = list(facts["gains"])
    error_us = abs(job.replay_error) * base_us
    for text, plan in job.questions.items():
        if job.space.refusal(plan) is not None or job.space.simplest(plan) == Plan():
            continue
        after_us = job.predict(plan).iteration_us
        gain_us = base_us - after_us
        rows.append(
            {
                "what_if": text,
                "topic": "plan",
                "ranks": [],
                "meaning": f"--set {text}",
                "predicted_iteration_us": after_us,
                "gain_us": gain_us,
                "gain_pct": 100 * gain_us / base_us if base_us > 0 else 0.0,
                "certain": gain_us > error_us,
            }
        )
    return {**facts, "gains": sorted(rows, key=lambda row: -float(row["gain_us"]))}


def diagnosis_tables(facts: Mapping[str, Any]) -> list[Table]:
    """The facts of `diagnosis` for people."""
    ranks = [
        (
            str(row["rank"]),
            *(time_text(row[part]) for part in _PARTS),
            "unknown" if row["last_pct"] is None else percent_text(row["last_pct"]),
        )
        for row in facts["ranks"]
    ]
    worth = [row for row in facts["gains"] if row["gain_pct"] >= _SHOWN_PCT] or facts["gains"][:1]
    gains = gain_table(worth, facts["iteration_us"])
    if differs_from_median(facts["predicted_mean_us"], facts["iteration_us"]):
        means = [row | {"predicted_iteration_us": row.get("predicted_mean_us", row["predicted_iteration_us"])} for row in worth]
        gains = replace(gain_table(means, facts["predicted_mean_us"]), title="what would it gain on average")
    columns = ("rank", "compute", "exposed comm.", "waits", "unknown", "idle", "host-bound", "came last")
    return [
        Table(title="ranks, per iteration", columns=columns, rows=ranks),
        *([gains] if worth else []),
        critical_table(facts["critical_ops"]),
    ]
