"""What `replay` and `diagnose` of traces of PyTorch jobs have in common, whose ranks run a program on their main threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from dpro_search.cli._jobs import ReplayRequest
    from dpro_search.collect.trace import Trace
    from dpro_search.replay.ddp.critical_path import Segment
    from dpro_search.replay.ddp.program import ProgramPredictor
    from dpro_search.space.plan import Plan

_Predictor = TypeVar("_Predictor", bound="ProgramPredictor")
_Gains = list[dict[str, float | str]]


def replayed(
    trace: Trace,
    request: ReplayRequest,
    kind: type[_Predictor],
    with_changes: Callable[[_Predictor, Plan, Sequence[str]], tuple[_Predictor, Plan]],
) -> dict[str, Any]:
    """The facts that the verb `replay` prints; see `_facts.predicted` for the parameters."""
    from dpro_search.cli._facts import predicted
    from dpro_search.replay.ddp.what_if import asked

    predictor, plan, facts = predicted(trace, request, kind, with_changes, asked)
    if request.perfetto is not None or request.timeline is not None:
        _write_ops(trace, predictor, plan, request)
    return facts


def diagnosed(
    trace: Trace,
    predictor: ProgramPredictor,
    gained: _Gains,
    findings: Callable[[Sequence[Segment], _Gains, float], tuple[str, ...]],
) -> dict[str, Any]:
    """The facts that the verb `diagnose` prints of any such job."""
    import msgspec

    from dpro_search.cli._facts import critical_ops, rank_facts
    from dpro_search.replay.ddp.critical_path import critical_path
    from dpro_search.replay.ddp.ops import iteration_ops
    from dpro_search.replay.evaluate import measured_iteration_us
    from dpro_search.space.plan import Plan

    job, timeline = predictor.job(Plan()), predictor.timeline(Plan())
    ops = iteration_ops(job, timeline)
    path = critical_path(job, ops)
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


def print_diagnosis(result: dict[str, Any], own: tuple[str, Sequence[str], Sequence[Sequence[str]]]) -> None:
    """What `diagnosed` found, with a table of the kind of job's own."""
    from dpro_search.cli._facts import gain_table, print_tables, rank_table
    from dpro_search.cli._output import microseconds, say, stdout_console

    console = stdout_console()
    total_us, measured = result["iteration_us"], result["measured_iteration_us"]
    shown = "" if measured is None else f", measured {microseconds(measured)}"
    console.print(f"An iteration takes {microseconds(total_us)} (replayed{shown}).")
    for sentence in (*result["findings"], *result["warnings"]):
        say(console, f"* {sentence}")
    path = [
        (
            {"compute": "compute", "late_rank": f"others wait for it, {row['name']}"}.get(row["kind"], row["name"]),
            "" if row["rank"] < 0 else str(row["rank"]),
            microseconds(row["start_us"]),
            microseconds(row["duration_us"]),
        )
        for row in result["critical_path"]
    ]
    print_tables(
        [
            ("critical path", ("what", "rank", "from", "takes"), path),
            rank_table(result["ranks"]),
            own,
            gain_table(result["gains"], total_us),
        ]
    )


def _write_ops(trace: Trace, predictor: ProgramPredictor, plan: Plan, request: ReplayRequest) -> None:
    """A replayed iteration as a table, and for ui.perfetto.dev: as recorded, beside the step whose durations it has."""
    from dpro_search.collect._files import write_file
    from dpro_search.replay.ddp.ops import iteration_ops
    from dpro_search.replay.outputs import measured_ops, perfetto_json, write_csv

    timeline = predictor.timeline(plan)
    ops = iteration_ops(predictor.job(plan), timeline)
    if request.perfetto is not None:
        step = int(predictor.graph.steps[timeline.sample_of[timeline.typical]])
        write_file(request.perfetto, perfetto_json(ops, measured=None if request.changed else measured_ops(trace, step)))
    if request.timeline is not None:
        write_csv(ops, request.timeline)
