"""`dpro-search diagnose`: what an iteration waits for, rank by rank, and what removing it would gain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dpro_search.collect.trace import Trace
    from dpro_search.replay import Predictor, Timeline
    from dpro_search.replay.horovod.critical_path import Segment

_TOP_OPS, _TOP_BUFFERS, _NAME_LENGTH = 10, 5, 50
_AFTER = {"start": "nothing", "dependency": "what it needs", "device": "its device", "collective": "other ranks"}


def diagnose(
    trace: Annotated[
        Path | None, typer.Argument(metavar="TRACE", help="Folder made by 'collect'; left out: the bundled sample.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what an iteration waits for, which rank comes late, what each improvement would gain, and what takes memory.

    Example: dpro-search diagnose T
    """
    import msgspec

    from dpro_search.cli._output import print_json
    from dpro_search.collect.sample import sample_trace_path
    from dpro_search.collect.trace import Trace
    from dpro_search.graph.arrivals import arrivals
    from dpro_search.replay import Predictor
    from dpro_search.replay.horovod.critical_path import critical_path
    from dpro_search.replay.what_if import gains
    from dpro_search.space.plan import Plan

    recorded = Trace.load(sample_trace_path() if trace is None else trace)
    if recorded.meta.format == "pytorch-ddp":
        from dpro_search.cli._ddp import diagnose_ddp_trace, print_diagnosis

        facts = diagnose_ddp_trace(recorded)
        if as_json:
            print_json(facts)
        else:
            print_diagnosis(facts)
        return
    if recorded.meta.format == "mxnet-kvstore":
        from dpro_search.cli import _kvstore

        facts = _kvstore.diagnose_kvstore_trace(recorded)
        if as_json:
            print_json(facts)
        else:
            _kvstore.print_diagnosis(facts)
        return
    if recorded.meta.settings is None:
        _diagnose_recorded(recorded, as_json)
        return
    predictor = Predictor.from_trace(recorded)
    timeline = predictor.timeline(Plan(), log=True)
    punctuality = {arrival.rank: arrival for arrival in arrivals(recorded)}
    ranks = [
        {
            "rank": rank,
            "host": recorded.meta.hosts[rank],
            "breakdown_us": breakdown,
            "last_pct": punctuality[rank].last_pct if rank in punctuality else None,
            "waited_us": punctuality[rank].waited_us if rank in punctuality else None,
        }
        for rank, breakdown in enumerate(timeline.rank_breakdown_us)
    ]
    path = critical_path(timeline)
    result = {
        "iteration_us": timeline.iteration_us,
        "critical_path": msgspec.to_builtins(path),
        "ranks": ranks,
        "gains": gains(predictor),
        **_op_facts(recorded, predictor),
    }
    if as_json:
        print_json(result)
    else:
        _print(result, path)


def _diagnose_recorded(trace: Trace, as_json: bool) -> None:
    """A trace of another kind than Horovod's: its own ops and dependencies are replayed."""
    from dpro_search.cli._output import print_json
    from dpro_search.cli._recorded import diagnose_recorded, print_diagnosis

    result = diagnose_recorded(trace)
    if as_json:
        print_json(result)
    else:
        print_diagnosis(result)


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


def _print(result: dict[str, Any], path: tuple[Segment, ...]) -> None:
    from rich import box
    from rich.table import Table

    from dpro_search.cli._output import microseconds, percent, size, stdout_console

    console = stdout_console()
    total_us = result["iteration_us"]
    console.print(f"An iteration takes {microseconds(total_us)} (replayed). What it waits for, by share:")
    shares: dict[str, float] = {}
    for segment in path:
        shares[segment.kind] = shares.get(segment.kind, 0.0) + segment.duration_us
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
