"""`dpro-search diagnose`: what an iteration waits for, rank by rank, and what removing it would gain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dpro_search.replay.critical_path import Segment


def diagnose(
    trace: Annotated[
        Path | None, typer.Argument(metavar="TRACE", help="Folder made by 'collect'; left out: the bundled sample.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what an iteration waits for, which rank comes late, and what each improvement would gain.

    Example: dpro-search diagnose T
    """
    import msgspec

    from dpro_search.cli._output import print_json
    from dpro_search.collect.sample import sample_trace_path
    from dpro_search.collect.trace import Trace
    from dpro_search.graph.arrivals import arrivals
    from dpro_search.replay import Predictor
    from dpro_search.replay.critical_path import critical_path
    from dpro_search.replay.what_if import gains
    from dpro_search.space.plan import Plan

    recorded = Trace.load(sample_trace_path() if trace is None else trace)
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
    }
    if as_json:
        print_json(result)
    else:
        _print(result, path)


def _print(result: dict[str, Any], path: tuple[Segment, ...]) -> None:
    from rich import box
    from rich.table import Table

    from dpro_search.cli._output import microseconds, percent, stdout_console

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
