"""What `diagnose` says of an imported trace: device time, late ranks, slow links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from dpro_search.collect.trace import Trace
from dpro_search.graph.bus_bandwidth import group_speeds
from dpro_search.graph.device_time import lateness, rank_times
from dpro_search.kinds._base import Table
from dpro_search.kinds._facts import critical_ops, critical_table, gain_rows, gain_table, path_facts
from dpro_search.kinds._recorded import RecordedPredictor
from dpro_search.quantities import percent_text, time_text
from dpro_search.replay.findings import findings
from dpro_search.replay.replayer import replay
from dpro_search.replay.sensitivity import gains

_PARTS = ("compute_us", "exposed_communication_us", "waiting_for_ranks_us", "idle_us", "host_bound_us")


def diagnosis(trace: Trace, predictor: RecordedPredictor) -> dict[str, Any]:
    """The facts of `Job.diagnose`; also ``links``, the speed of each process group.

    The iteration, its breakdown, the critical path and gains are of the replay, as `RecordedPredictor.predict` gives it; ranks and
    links are of the recorded steps.
    """
    timeline, prediction = replay(predictor.graph), predictor.predict()
    scale = prediction.iteration_us / timeline.iteration_us  # not 1 where the median is between two steps
    found = [replace(gain, iteration_us=gain.iteration_us * scale, gain_us=gain.gain_us * scale) for gain in gains(predictor.graph)]
    times, late, speeds = rank_times(trace), lateness(trace), group_speeds(trace)
    punctuality = {row.rank: msgspec.to_builtins(row) for row in late}
    return {
        "iteration_us": prediction.iteration_us,
        "measured_iteration_us": predictor.measured_iteration_us,
        "breakdown_us": prediction.breakdown_us,
        "critical_path": path_facts(timeline),
        "ranks": [
            {"host": trace.meta.hosts[row.rank], "last_pct": None, "cost_us": None, "waited_us": None}
            | msgspec.to_builtins(row)
            | punctuality.get(row.rank, {})
            for row in times
        ],
        "gains": gain_rows(found),
        "critical_ops": critical_ops(timeline),
        "links": [msgspec.to_builtins(speed) for speed in speeds],
        "findings": list(findings(times, late, found, prediction.iteration_us, speeds)),
        "warnings": list(trace.meta.warnings),
    }


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
    columns = ("rank", "compute", "exposed comm.", "waits", "idle", "host-bound", "last")
    return [
        Table(title="ranks, mean of the recorded steps", columns=columns, rows=ranks),
        gain_table(facts["gains"], facts["iteration_us"]),
        critical_table(facts["critical_ops"]),
    ]
