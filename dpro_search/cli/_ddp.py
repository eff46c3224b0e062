"""`replay` and `diagnose` of traces of PyTorch DistributedDataParallel jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpro_search.cli._jobs import ReplayRequest
    from dpro_search.collect.trace import Trace
    from dpro_search.replay.ddp.predictor import DdpPredictor
    from dpro_search.replay.ddp.timeline import DdpTimeline
    from dpro_search.space.plan import Plan


def replay_trace(trace: Trace, request: ReplayRequest) -> dict[str, Any]:
    """The facts that the verb `replay` prints.

    Raises
    ------
    InputError
        A change that DDP does not have.
    """
    from dpro_search.cli._facts import predicted
    from dpro_search.replay.ddp.predictor import DdpPredictor
    from dpro_search.replay.ddp.what_if import asked

    predictor, plan, facts = predicted(trace, request, DdpPredictor, _with_changes, asked)
    if request.perfetto is not None or request.timeline is not None:
        _write_ops(trace, predictor, plan, request)
    return facts


def diagnose_trace(trace: Trace) -> dict[str, Any]:
    """The facts that the verb `diagnose` prints; `buckets` are in the order of their all-reduces."""
    import msgspec

    from dpro_search.cli._facts import rank_facts
    from dpro_search.replay.ddp.critical_path import critical_path
    from dpro_search.replay.ddp.findings import findings
    from dpro_search.replay.ddp.ops import iteration_ops
    from dpro_search.replay.ddp.predictor import DdpPredictor
    from dpro_search.replay.ddp.what_if import gains
    from dpro_search.replay.evaluate import measured_iteration_us
    from dpro_search.space.plan import Plan

    predictor = DdpPredictor.from_trace(trace)
    job, timeline, gained = predictor.job(Plan()), predictor.timeline(Plan()), gains(predictor)
    path = critical_path(job, iteration_ops(job, timeline))
    return {
        "iteration_us": timeline.iteration_us,
        "measured_iteration_us": measured_iteration_us(trace),
        "critical_path": msgspec.to_builtins(path),
        "ranks": rank_facts(trace, timeline.rank_breakdown_us),
        "gains": gained,
        "buckets": _buckets(predictor, timeline),
        "findings": list(findings(path, gained, timeline.iteration_us)),
        "warnings": list(trace.meta.warnings),
    }


def print_diagnosis(result: dict[str, Any]) -> None:
    """What `diagnose_trace` found, for people."""
    from dpro_search.cli._facts import gain_table, print_tables, rank_table
    from dpro_search.cli._output import microseconds, percent, size, stdout_console

    console = stdout_console()
    total_us, measured = result["iteration_us"], result["measured_iteration_us"]
    shown = "" if measured is None else f", measured {microseconds(measured)}"
    console.print(f"An iteration takes {microseconds(total_us)} (replayed{shown}).")
    for sentence in (*result["findings"], *result["warnings"]):
        console.print(f"* {sentence}")
    path = [
        (
            {"compute": "compute", "late_rank": f"others wait for it, {row['name']}"}.get(row["kind"], row["name"]),
            "" if row["rank"] < 0 else str(row["rank"]),
            microseconds(row["start_us"]),
            microseconds(row["duration_us"]),
        )
        for row in result["critical_path"]
    ]
    buckets = [
        (
            str(row["bucket"]),
            str(row["gradients"]),
            size(row["bytes"]),
            percent(row["posted_after_pct"]),
            microseconds(row["transfer_us"]),
        )
        for row in result["buckets"]
    ]
    print_tables(
        [
            ("critical path", ("what", "rank", "from", "takes"), path),
            rank_table(result["ranks"]),
            ("buckets", ("bucket", "gradients", "moved", "posted after", "transfer"), buckets),
            gain_table(result["gains"], total_us),
        ]
    )


def _write_ops(trace: Trace, predictor: DdpPredictor, plan: Plan, request: ReplayRequest) -> None:
    """A replayed iteration as a table, and for ui.perfetto.dev: as recorded, beside the step whose durations it has."""
    from dpro_search.collect._files import write_file
    from dpro_search.replay.ddp.ops import iteration_ops
    from dpro_search.replay.outputs import measured_ops, perfetto_json, write_csv

    replayed = predictor.timeline(plan)
    ops = iteration_ops(predictor.job(plan), replayed)
    if request.perfetto is not None:
        step = int(predictor.graph.steps[replayed.sample_of[replayed.typical]])
        write_file(request.perfetto, perfetto_json(ops, measured=None if request.changed else measured_ops(trace, step)))
    if request.timeline is not None:
        write_csv(ops, request.timeline)


def _buckets(predictor: DdpPredictor, timeline: DdpTimeline) -> list[dict[str, Any]]:
    """Of each recorded bucket: gradients, bytes moved, after which share of the backward pass it is posted, and its transfer."""
    graph = predictor.graph
    moves_us = timeline.collective_us[:, len(graph.forward_bytes) :]
    shares = graph.ready_us / graph.backward_us[..., None]
    found = []
    for bucket in range(int(graph.bucket_of.max()) + 1):
        own = graph.bucket_of == bucket
        found.append(
            {
                "bucket": bucket,
                "gradients": int(own.sum()),
                "bytes": int(graph.gradient_bytes[own].sum()),
                "posted_after_pct": float(shares[..., own].max(axis=-1).mean()) * 100,
                "transfer_us": float((moves_us[:, bucket, 1] - moves_us[:, bucket, 0]).mean()),
            }
        )
    return found


def _with_changes(predictor: DdpPredictor, plan: Plan, changes: Sequence[str]) -> tuple[DdpPredictor, Plan]:
    """Predictor and plan after the ``--set`` options, in order."""
    import msgspec

    from dpro_search.cli._facts import changed, cluster_knobs

    def cap(state: tuple[DdpPredictor, Plan], value: str) -> tuple[DdpPredictor, Plan]:
        return state[0], msgspec.structs.replace(state[1], fusion_threshold_bytes=int(value))

    def first(state: tuple[DdpPredictor, Plan], value: str) -> tuple[DdpPredictor, Plan]:
        return state[0].at(first_bucket_bytes=int(value)), state[1]

    knobs = {"bucket_cap_bytes": cap, "fusion_threshold_bytes": cap, "first_bucket_bytes": first}
    return changed((predictor, plan), changes, {**knobs, **cluster_knobs(type(predictor))}, "a DistributedDataParallel job")
