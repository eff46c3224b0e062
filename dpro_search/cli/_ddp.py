"""`replay` and `diagnose` of traces of PyTorch DistributedDataParallel jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpro_search.cli._jobs import ReplayRequest
    from dpro_search.collect.trace import Trace
    from dpro_search.replay.ddp.predictor import DdpPredictor
    from dpro_search.space.cluster import ClusterSpec
    from dpro_search.space.plan import Plan

_KEYS = "bucket_cap_bytes, ranks, cores, rate"


def replay_trace(trace: Trace, request: ReplayRequest) -> dict[str, Any]:
    """The facts that the verb `replay` prints.

    Raises
    ------
    InputError
        A change that DDP does not have.
    """
    import time

    import numpy as np

    from dpro_search.errors import InputError
    from dpro_search.replay.ddp.evaluate import held_out, with_own_durations
    from dpro_search.replay.ddp.predictor import DdpPredictor
    from dpro_search.replay.ddp.what_if import asked
    from dpro_search.replay.evaluate import measured_iteration_us
    from dpro_search.replay.what_if import parse_question
    from dpro_search.space.plan import Plan

    if request.perfetto is not None or request.timeline is not None:
        raise InputError("--perfetto and --timeline do not know DistributedDataParallel jobs yet: leave them out")
    chosen = Plan() if request.plan is None else Plan.load(request.plan)
    changed = bool(chosen != Plan() or request.changes or request.what_ifs)
    measured: float | None
    error: float | None
    if request.holdout_step is not None:
        predictor, measured, error = held_out(trace, request.holdout_step)
    elif request.own_durations:
        predictor, measured, error = with_own_durations(trace)
    else:
        predictor, measured, error = DdpPredictor.from_trace(trace), measured_iteration_us(trace), None
        chosen, cluster = _with_changes(predictor, chosen, request.changes)
        predictor = predictor.at(cluster=cluster)
        for text in request.what_ifs:
            predictor = asked(predictor, parse_question(text))
    predictor.predict(chosen)  # compiles the simulator the first time
    started = time.perf_counter()
    prediction = predictor.predict(chosen)
    seconds = time.perf_counter() - started
    if changed:
        measured = None
    elif error is None and measured is not None:
        error = (prediction.iteration_us / measured - 1) * 100
    drawn = {}
    if request.samples is not None:
        quantiles = np.quantile(predictor.sampled(chosen, samples=request.samples), (0.05, 0.5, 0.95)).tolist()
        drawn = {"quantiles_us": dict(zip(("p5", "p50", "p95"), quantiles, strict=True))}
    return {
        "measured_iteration_us": measured,
        "predicted_iteration_us": prediction.iteration_us,
        "error_pct": error,
        "interval_us": prediction.interval_us,
        "breakdown_us": prediction.breakdown_us,
        "peak_memory_bytes": prediction.peak_memory_bytes,
        "ops": len(predictor.graph),
        "replay_seconds": seconds,
        "settled": prediction.settled,
        "unplaced": {},
    } | drawn


def diagnose_trace(trace: Trace) -> dict[str, Any]:
    """The facts that the verb `diagnose` prints; `buckets` are in the order of their all-reduces."""
    from dpro_search.graph.arrivals import arrivals
    from dpro_search.replay.ddp.predictor import DdpPredictor
    from dpro_search.replay.ddp.what_if import gains
    from dpro_search.space.plan import Plan

    predictor = DdpPredictor.from_trace(trace)
    timeline = predictor.timeline(Plan())
    punctuality = {arrival.rank: arrival for arrival in arrivals(trace)}
    slowest = max(range(len(timeline.rank_breakdown_us)), key=lambda rank: timeline.rank_breakdown_us[rank]["compute"])
    path = [{"kind": kind, "rank": slowest, "duration_us": spent} for kind, spent in timeline.rank_breakdown_us[slowest].items()]
    return {
        "iteration_us": timeline.iteration_us,
        "critical_path": path,
        "ranks": [
            {
                "rank": rank,
                "host": trace.meta.hosts[rank],
                "breakdown_us": breakdown,
                "last_pct": punctuality[rank].last_pct if rank in punctuality else None,
                "waited_us": punctuality[rank].waited_us if rank in punctuality else None,
            }
            for rank, breakdown in enumerate(timeline.rank_breakdown_us)
        ],
        "gains": gains(predictor),
        "buckets": _buckets(predictor),
    }


def print_diagnosis(result: dict[str, Any]) -> None:
    """What `diagnose_trace` found, for people."""
    from rich import box
    from rich.table import Table

    from dpro_search.cli._output import microseconds, percent, size, stdout_console

    console = stdout_console()
    total_us = result["iteration_us"]
    console.print(f"An iteration takes {microseconds(total_us)} (replayed).")
    ranks = [
        (str(row["rank"]), *(microseconds(row["breakdown_us"][key]) for key in ("compute", "contention", "exposed_communication")))
        + (("unknown",) * 2 if row["last_pct"] is None else (percent(row["last_pct"]), microseconds(row["waited_us"])))
        for row in result["ranks"]
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
    gains = [
        (
            row["what_if"],
            microseconds(row["predicted_iteration_us"]),
            f"{microseconds(row['gain_us'])} ({percent(row['gain_us'] / total_us * 100)})",
        )
        for row in result["gains"]
    ]
    for title, columns, rows in (
        ("ranks", ("rank", "compute", "contention", "exposed comm.", "comes last", "waits for others"), ranks),
        ("buckets", ("bucket", "gradients", "size", "posted after", "transfer"), buckets),
        ("what would it gain", ("what if", "iteration", "gain"), gains),
    ):
        table = Table(box=box.SIMPLE, title=title, title_justify="left")
        for column in columns:
            table.add_column(column, justify="right")
        for cells in rows:
            table.add_row(*cells)
        console.print(table)


def _buckets(predictor: DdpPredictor) -> list[dict[str, Any]]:
    """Of each recorded bucket: its gradients and bytes, after which share of the backward pass it is posted, and its transfer."""
    from dpro_search.space.plan import Plan

    graph, timeline = predictor.graph, predictor.timeline(Plan())
    forward = len(graph.forward_bytes)
    moves_us = timeline.collective_us[:, forward:]
    found = []
    shares = graph.ready_us / graph.backward_us[..., None]
    for bucket in range(int(graph.bucket_of.max()) + 1):
        members = [tensor for tensor, own in zip(graph.tensors, graph.bucket_of.tolist(), strict=True) if own == bucket]
        found.append(
            {
                "bucket": bucket,
                "gradients": len(members),
                "bytes": sum(tensor.size_bytes for tensor in members),
                "posted_after_pct": float(shares[..., graph.bucket_of == bucket].max(axis=-1).mean()) * 100,
                "transfer_us": float((moves_us[:, bucket, 1] - moves_us[:, bucket, 0]).mean()),
            }
        )
    return found


def _with_changes(predictor: DdpPredictor, plan: Plan, changes: Sequence[str]) -> tuple[Plan, ClusterSpec]:
    """Plan and cluster after the ``--set`` options, in order."""
    import msgspec

    from dpro_search.collect.launch.netns import parse_rate
    from dpro_search.errors import InputError

    cluster = predictor.cluster
    for change in changes:
        key, _, value = change.partition("=")
        try:
            if key in ("bucket_cap_bytes", "fusion_threshold_bytes"):
                plan = msgspec.structs.replace(plan, fusion_threshold_bytes=int(value))
            elif key == "ranks":
                cluster = cluster.with_ranks(int(value))
            elif key == "cores":
                cluster = cluster.with_ranks(cluster.ranks, int(value))
            elif key == "rate":
                cluster = msgspec.structs.replace(cluster, rate_bps=parse_rate(value))
            else:
                raise InputError(f"--set {change}: a DistributedDataParallel job has no such knob; known are {_KEYS}")
        except ValueError as error:
            raise (error if isinstance(error, InputError) else InputError(f"--set {change}: '{value}' is not a number")) from error
    return plan, cluster
