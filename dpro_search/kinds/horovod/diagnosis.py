"""Diagnosis of a Horovod job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from dpro_search.collect.trace import Trace
from dpro_search.graph.measured import measured_iteration_us
from dpro_search.graph.recorded_collectives import arrivals
from dpro_search.kinds._facts import critical_ops, critical_table, gain_table, rank_facts, rank_table
from dpro_search.kinds._job import Table
from dpro_search.kinds.horovod.findings import findings
from dpro_search.kinds.horovod.predictor import Predictor
from dpro_search.kinds.horovod.what_if import gains
from dpro_search.quantities import percent_text, size_text, time_text
from dpro_search.replay.horovod.ops import iteration_ops
from dpro_search.replay.memory import memory
from dpro_search.replay.path_segments import path_segments
from dpro_search.replay.replayer import replay
from dpro_search.replay.slack import slack_us
from dpro_search.replay.timeline import Timeline
from dpro_search.space.plan import Plan
from dpro_search.space.tensorflow.op_level import op_level

_TOP_BUFFERS = 5


def diagnosis(trace: Trace, predictor: Predictor) -> dict[str, Any]:
    """The facts of `Job.diagnose`; also ``op_level_iteration_us``, ``slack`` and ``memory``, of the replay of single ops."""
    timeline, gained = predictor.timeline(Plan(), log=True), gains(predictor)
    path = path_segments(iteration_ops(timeline))
    return {
        "iteration_us": timeline.iteration_us,
        "measured_iteration_us": measured_iteration_us(trace),
        "critical_path": msgspec.to_builtins(path),
        "ranks": rank_facts(trace, timeline.rank_breakdown_us),
        "gains": gained,
        "findings": list(findings(path, arrivals(trace), gained, timeline.iteration_us)),
        "warnings": list(trace.meta.warnings),
        **_op_facts(trace, predictor),
    }


def _op_facts(trace: Trace, predictor: Predictor) -> dict[str, Any]:
    """Facts from the replay of single ops. An op of the path counts over all replayed iterations."""
    timeline = replay(op_level(trace, predictor.graph, predictor.costs))
    return {
        "op_level_iteration_us": timeline.iteration_us,
        "critical_ops": critical_ops(timeline),
        "slack": _slack(timeline),
        "memory": _memory(timeline),
    }


def _slack(timeline: Timeline) -> dict[str, float]:
    """How much later the ops that take time could end, in an iteration in the middle: others follow it."""
    graph = timeline.graph
    middle = timeline.iterations // 2 * len(graph)
    slacks_us = slack_us(timeline)[middle : middle + len(graph)][graph.duration_us > 0]
    p10, p50, p90 = np.quantile(slacks_us, (0.1, 0.5, 0.9)).tolist()
    return {
        "ops": len(slacks_us),
        "below_1_ms_pct": float((slacks_us < 1000).mean()) * 100,
        "p10_us": p10,
        "p50_us": p50,
        "p90_us": p90,
    }


def _memory(timeline: Timeline) -> list[dict[str, Any]]:
    """Peak of every rank, of what the recording knows, and what it is made of."""
    graph = timeline.graph
    return [
        {
            "rank": usage.rank,
            "peak_bytes": usage.peak_bytes,
            "peak_op": graph.name(usage.peak_op % len(graph)) if usage.peak_op >= 0 else None,
            "buffers": [
                {"name": graph.buffer_names[number % len(graph.buffer_op)], "bytes": taken}
                for number, taken in zip(usage.alive[:_TOP_BUFFERS].tolist(), usage.alive_bytes.tolist(), strict=False)
            ],
        }
        for usage in memory(timeline)
    ]


def diagnosis_tables(facts: Mapping[str, Any]) -> list[Table]:
    """The facts of `diagnosis` for people."""
    shares: dict[str, float] = {}
    for segment in facts["critical_path"]:
        shares[segment["kind"]] = shares.get(segment["kind"], 0.0) + segment["duration_us"]
    length_us = sum(shares.values()) or 1.0
    path = [
        (kind, time_text(spent_us), percent_text(spent_us / length_us * 100))
        for kind, spent_us in sorted(shares.items(), key=lambda item: -item[1])
    ]
    slack = facts["slack"]
    room = [(percent_text(slack["below_1_ms_pct"]), *(time_text(slack[name]) for name in ("p10_us", "p50_us", "p90_us")))]
    buffers = [
        (str(row["rank"]), size_text(row["peak_bytes"]), row["buffers"][0]["name"] if row["buffers"] else "none")
        for row in facts["memory"]
    ]
    return [
        Table(title="critical path", columns=("what", "time", "share"), rows=path),
        rank_table(facts["ranks"]),
        gain_table(facts["gains"], facts["iteration_us"]),
        critical_table(facts["critical_ops"]),
        Table(title="slack of ops", columns=("less than 1 ms", "10 %", "50 %", "90 %"), rows=room),
        Table(title="memory", columns=("rank", "variables, gradients, buffer", "largest"), rows=buffers),
    ]
