"""`replay` and `diagnose` of traces of Horovod jobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpro_search.cli._jobs import ReplayRequest
    from dpro_search.collect.trace import Trace
    from dpro_search.replay import Predictor, Timeline
    from dpro_search.space.cluster import ClusterSpec
    from dpro_search.space.plan import Plan

_TOP_OPS, _TOP_BUFFERS, _NAME_LENGTH = 10, 5, 50
_AFTER = {"start": "nothing", "dependency": "what it needs", "device": "its device", "collective": "other ranks"}


def replay_trace(trace: Trace, request: ReplayRequest) -> dict[str, Any]:
    """The facts that the verb `replay` prints.

    Raises
    ------
    InputError
        A change that Horovod does not have.
    """
    import time

    from dpro_search.collect._files import write_file
    from dpro_search.errors import InputError
    from dpro_search.replay import Predictor
    from dpro_search.replay.evaluate import held_out, measured_iteration_us, with_own_durations
    from dpro_search.replay.horovod.perfetto import perfetto_json as horovod_json
    from dpro_search.replay.what_if import asked, parse_question
    from dpro_search.space.plan import Plan

    chosen = Plan() if request.plan is None else Plan.load(request.plan)
    changed = bool(chosen != Plan() or request.changes or request.what_ifs)
    if request.timeline is not None and changed:
        raise InputError("--timeline has the ops of the recorded setting: leave out --plan, --set and --what-if")
    measured: float | None
    error: float | None
    if request.holdout_step is not None:
        predictor, measured, error = held_out(trace, request.holdout_step)
    elif request.own_durations:
        predictor, measured, error = with_own_durations(trace)
    else:
        predictor, measured, error = Predictor.from_trace(trace), measured_iteration_us(trace), None
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
    drawn_us = None if request.samples is None else _drawn_us(predictor, chosen, request.samples)
    if request.perfetto is not None and changed:
        write_file(request.perfetto, horovod_json(trace, predictor, chosen))
    if (request.perfetto is not None and not changed) or request.timeline is not None:
        _write_ops(trace, predictor, None if changed else request.perfetto, request.timeline)
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
        "unplaced": dict(predictor.graph.unplaced),
    } | ({} if drawn_us is None else {"quantiles_us": drawn_us})


def diagnose_trace(trace: Trace) -> dict[str, Any]:
    """The facts that the verb `diagnose` prints."""
    import msgspec

    from dpro_search.graph.arrivals import arrivals
    from dpro_search.replay import Predictor
    from dpro_search.replay.horovod.critical_path import critical_path
    from dpro_search.replay.what_if import gains
    from dpro_search.space.plan import Plan

    predictor = Predictor.from_trace(trace)
    timeline = predictor.timeline(Plan(), log=True)
    punctuality = {arrival.rank: arrival for arrival in arrivals(trace)}
    ranks = [
        {
            "rank": rank,
            "host": trace.meta.hosts[rank],
            "breakdown_us": breakdown,
            "last_pct": punctuality[rank].last_pct if rank in punctuality else None,
            "waited_us": punctuality[rank].waited_us if rank in punctuality else None,
        }
        for rank, breakdown in enumerate(timeline.rank_breakdown_us)
    ]
    return {
        "iteration_us": timeline.iteration_us,
        "critical_path": msgspec.to_builtins(critical_path(timeline)),
        "ranks": ranks,
        "gains": gains(predictor),
        **_op_facts(trace, predictor),
    }


def _drawn_us(predictor: Predictor, plan: Plan, samples: int) -> dict[str, float]:
    """Quantiles of the iteration time over replays with durations drawn anew; a bar on stderr where that is a terminal."""
    import numpy as np
    from rich.progress import Progress

    from dpro_search.cli._output import stderr_console

    console = stderr_console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("replaying", total=samples)
        found = predictor.sampled(plan, samples=samples, on_sample=lambda: bar.advance(task))
    p5, p50, p95 = np.quantile(found, (0.05, 0.5, 0.95)).tolist()
    return {"p5": p5, "p50": p50, "p95": p95}


def _write_ops(trace: Trace, predictor: Predictor, perfetto: Path | None, table: Path | None) -> None:
    """The recorded setting, replayed op by op: its last iteration beside the measured step, and all iterations as a table."""
    from dpro_search.collect._files import write_file
    from dpro_search.replay.outputs import measured_ops, perfetto_json, write_csv
    from dpro_search.replay.replayer import replay as replay_ops
    from dpro_search.space.op_level import op_level, typical_step

    step = typical_step(trace, predictor.graph)
    timeline = replay_ops(op_level(trace, predictor.graph, predictor.costs, step=step))
    if perfetto is not None:
        measured = measured_ops(trace, step)
        write_file(perfetto, perfetto_json(timeline, measured=measured, first_iteration=timeline.iterations - 1))
    if table is not None:
        write_csv(timeline, table)


def _with_changes(predictor: Predictor, plan: Plan, changes: Sequence[str]) -> tuple[Plan, ClusterSpec]:
    """Plan and cluster after the ``--set`` options, in order."""
    import msgspec

    from dpro_search.collect.launch.netns import parse_rate
    from dpro_search.errors import InputError
    from dpro_search.space.moves import contiguous_groups

    cluster = predictor.cluster
    for change in changes:
        key, _, value = change.partition("=")
        try:
            if key == "fusion_threshold_bytes":
                plan = msgspec.structs.replace(plan, fusion_threshold_bytes=int(value))
            elif key == "cycle_time_us":
                plan = msgspec.structs.replace(plan, cycle_time_us=float(value))
            elif key == "groups":
                plan = msgspec.structs.replace(plan, tensor_groups=contiguous_groups(predictor.tensors, int(value)))
            elif key == "ranks":
                cluster = cluster.with_ranks(int(value))
            elif key == "cores":
                cluster = cluster.with_ranks(cluster.ranks, int(value))
            elif key == "rate":
                cluster = msgspec.structs.replace(cluster, rate_bps=parse_rate(value))
            else:
                raise InputError(
                    f"--set {change}: unknown key; known are fusion_threshold_bytes, cycle_time_us, groups, ranks, cores, rate"
                )
        except ValueError as error:
            raise (error if isinstance(error, InputError) else InputError(f"--set {change}: '{value}' is not a number")) from error
    return plan, cluster


def _op_facts(trace: Trace, predictor: Predictor) -> dict[str, Any]:
    """What the replay of single ops says; an op of the path counts over all replayed iterations."""
    from dpro_search.replay import replay
    from dpro_search.space.op_level import op_level

    timeline = replay(op_level(trace, predictor.graph, predictor.costs))
    return {
        "op_level_iteration_us": timeline.iteration_us,
        "critical_ops": _critical_ops(timeline),
        "slack": _slack(timeline),
        "memory": _memory(timeline),
    }


def _critical_ops(timeline: Timeline) -> list[dict[str, Any]]:
    """The ops with the largest part of the critical path, and the commonest reason why they started no earlier."""
    from collections import Counter

    from dpro_search.graph.dataflow import OpKind
    from dpro_search.replay.critical_path import critical_path, path_shares

    graph, path = timeline.graph, critical_path(timeline)
    reasons: dict[int, Counter[str]] = {}
    for step in path:
        reasons.setdefault(step.op % len(graph), Counter())[step.reason.value] += 1
    shares = path_shares(timeline, path).by_op
    total_us = sum(shares.values())
    return [
        {
            "op": graph.name(op),
            "rank": int(graph.rank_of_op[op]),
            "kind": OpKind(graph.op_kind[op]).name,
            "share_pct": spent_us / total_us * 100,
            "reason": reasons[op].most_common(1)[0][0],
        }
        for op, spent_us in list(shares.items())[:_TOP_OPS]
    ]


def _slack(timeline: Timeline) -> dict[str, float]:
    """How much later the ops that take time could end, in an iteration in the middle: others follow it."""
    import numpy as np

    from dpro_search.replay.slack import slack_us

    graph = timeline.graph
    middle = timeline.iterations // 2 * len(graph)
    found = slack_us(timeline)[middle : middle + len(graph)][graph.duration_us > 0]
    p10, p50, p90 = np.quantile(found, (0.1, 0.5, 0.9)).tolist()
    return {"ops": len(found), "below_1_ms_pct": float((found < 1000).mean()) * 100, "p10_us": p10, "p50_us": p50, "p90_us": p90}


def _memory(timeline: Timeline) -> list[dict[str, Any]]:
    """Peak of every rank, of what the recording knows, and what it is made of."""
    from dpro_search.replay.memory import memory

    graph = timeline.graph
    return [
        {
            "rank": found.rank,
            "peak_bytes": found.peak_bytes,
            "peak_op": graph.name(found.peak_op % len(graph)) if found.peak_op >= 0 else None,
            "buffers": [
                {"name": graph.buffer_names[number % len(graph.buffer_op)], "bytes": taken}
                for number, taken in zip(found.alive[:_TOP_BUFFERS].tolist(), found.alive_bytes.tolist(), strict=False)
            ],
        }
        for found in memory(timeline)
    ]


def print_diagnosis(result: dict[str, Any]) -> None:
    """What `diagnose_trace` found, for people."""
    from rich import box
    from rich.table import Table

    from dpro_search.cli._output import microseconds, percent, size, stdout_console

    console = stdout_console()
    total_us = result["iteration_us"]
    console.print(f"An iteration takes {microseconds(total_us)} (replayed). What it waits for, by share:")
    shares: dict[str, float] = {}
    for segment in result["critical_path"]:
        shares[segment["kind"]] = shares.get(segment["kind"], 0.0) + segment["duration_us"]
    length_us = sum(shares.values())
    for kind, spent_us in sorted(shares.items(), key=lambda item: -item[1]):
        console.print(f"  {kind:11} {microseconds(spent_us):>10}  {percent(spent_us / length_us * 100):>7}")
    table = Table(box=box.SIMPLE, title="ranks", title_justify="left")
    for title in ("rank", "compute", "contention", "exposed comm.", "comes last", "waits for others"):
        table.add_column(title, justify="right")
    for row in result["ranks"]:
        breakdown = row["breakdown_us"]
        known = row["last_pct"] is not None
        table.add_row(
            str(row["rank"]),
            *(microseconds(breakdown[key]) for key in ("compute", "contention", "exposed_communication")),
            percent(row["last_pct"]) if known else "unknown",
            microseconds(row["waited_us"]) if known else "unknown",
        )
    console.print(table)
    table = Table(box=box.SIMPLE, title="what would it gain", title_justify="left")
    table.add_column("what if")
    for title in ("iteration", "gain"):
        table.add_column(title, justify="right")
    for row in result["gains"]:
        gain = f"{microseconds(row['gain_us'])} ({percent(row['gain_us'] / total_us * 100)})"
        table.add_row(row["what_if"], microseconds(row["predicted_iteration_us"]), gain)
    console.print(table)
    table = Table(box=box.SIMPLE, title="ops on the critical path", title_justify="left")
    table.add_column("op")
    table.add_column("share", justify="right")
    table.add_column("starts after")
    for row in result["critical_ops"]:
        name = row["op"] if len(row["op"]) <= _NAME_LENGTH else "..." + row["op"][3 - _NAME_LENGTH :]
        table.add_row(name, percent(row["share_pct"]), _AFTER[row["reason"]])
    console.print(table)
    slack = result["slack"]
    console.print(
        f"{percent(slack['below_1_ms_pct'])} of the ops have less than 1 ms to spare, half of them less than "
        f"{microseconds(slack['p50_us'])}."
    )
    for row in result["memory"]:
        largest = row["buffers"][0]
        console.print(
            f"Rank {row['rank']}: variables, gradients, fusion buffer take up to {size(row['peak_bytes'])}; "
            f"the largest is {largest['name']}."
        )
