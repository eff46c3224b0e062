"""Base of PyTorch jobs whose ranks run a program on their main threads: `ProgramJob` and its diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from dpro_search.collect.trace import Trace
from dpro_search.graph.measured import measured_iteration_us
from dpro_search.kinds._facts import critical_ops, gain_table, rank_facts, rank_table
from dpro_search.kinds._job import Table
from dpro_search.kinds._predicted_job import PredictedJob
from dpro_search.kinds._predictor import Gains
from dpro_search.kinds._program import ProgramPredictor
from dpro_search.quantities import time_text
from dpro_search.replay.ddp.ops import iteration_ops
from dpro_search.replay.outputs import MeasuredOps, measured_ops
from dpro_search.replay.path_segments import PathSegment, path_segments
from dpro_search.replay.timeline import Timeline
from dpro_search.space.plan import Plan

_Predictor = TypeVar("_Predictor", bound=ProgramPredictor)


class ProgramJob(PredictedJob[_Predictor]):
    """A job whose `ProgramPredictor` predicts its plans."""

    def op_count(self, plan: Plan) -> int:
        return len(self.predictor.graph)

    def timeline(self, plan: Plan) -> Timeline:
        return iteration_ops(self.predictor.job(plan), self.predictor.timeline(plan))

    def measured_ops(self, timeline: Timeline) -> MeasuredOps | None:
        replayed = self.predictor.timeline(Plan())
        return measured_ops(self.trace, int(self.predictor.graph.steps[replayed.sample_of[replayed.typical]]))


def diagnosis(
    trace: Trace,
    predictor: ProgramPredictor,
    gained: Gains,
    findings: Callable[[Sequence[PathSegment], Gains, float], tuple[str, ...]],
) -> dict[str, Any]:
    """The facts of `Job.diagnose` that any such job has."""
    job, timeline = predictor.job(Plan()), predictor.timeline(Plan())
    ops = iteration_ops(job, timeline)
    path = path_segments(ops)
    return {
        "iteration_us": timeline.iteration_us,
        "measured_iteration_us": measured_iteration_us(trace),
        "critical_path": msgspec.to_builtins(path),
        "critical_ops": critical_ops(ops),
        "ranks": rank_facts(trace, timeline.rank_breakdown_us),
        "gains": gained,
        "findings": list(findings(path, gained, timeline.iteration_us)),
        "warnings": list(trace.meta.warnings),
    }


def diagnosis_tables(facts: Mapping[str, Any], of_kind: Table) -> list[Table]:
    """The facts of `diagnosis` for people, with a table of the kind of job's own."""
    path = [
        (
            {"compute": "compute", "late_rank": f"others wait for it, {row['name']}"}.get(row["kind"], row["name"]),
            "" if row["rank"] < 0 else str(row["rank"]),
            time_text(row["start_us"]),
            time_text(row["duration_us"]),
        )
        for row in facts["critical_path"]
    ]
    return [
        Table(title="critical path", columns=("what", "rank", "from", "takes"), rows=path),
        rank_table(facts["ranks"]),
        of_kind,
        gain_table(facts["gains"], facts["iteration_us"]),
    ]
