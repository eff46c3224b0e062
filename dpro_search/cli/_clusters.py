"""What `dpro-search run --cluster A,B` prints: the best plan on each of several clusters, the fastest and the cheapest."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpro_search.kinds import Job
    from dpro_search.search import SearchResult


def several(cluster: str | None) -> list[str]:
    """The clusters of a list with commas; empty for one."""
    names = [name.strip() for name in (cluster or "").split(",") if name.strip()]
    return names if len(names) > 1 and not Path(cluster or "").is_file() else []


def run_of(out: Path, cluster: str) -> Path:
    """The run folder of the search on one of several clusters."""
    return out / (re.sub(r"[^\w.@-]+", "-", cluster).strip("-.") or "cluster")


def row_of(cluster: str, job: Job, result: SearchResult) -> dict[str, Any]:
    """The best plan of a search on a cluster, and what it gives and costs."""
    from dpro_search.kinds._efficiency import KEYS, efficiency

    best = result.plans[0]
    work = job.work
    facts = dict.fromkeys(KEYS) if work is None else efficiency(work, best.prediction.iteration_us)
    return {
        "cluster": cluster,
        "devices": job.cluster.ranks,
        "run": result.run,
        "feasible": result.feasible,
        "plan": dict(best.plan.settings),
        "name": result.names[0],
        "predicted_iteration_us": best.prediction.iteration_us,
        "interval_us": best.prediction.interval_us,
        "peak_memory_bytes": best.prediction.peak_memory_bytes,
        **{key: facts[key] for key in KEYS},
    }


def comparison(rows: Sequence[Mapping[str, Any]], tokens_per_second: float | None = None) -> dict[str, Any]:
    """The rows with the names of the fastest, the cheapest and the smallest that is fast enough.

    Parameters
    ----------
    rows
        Those of `row_of`, or a "cluster" with an "error".
    tokens_per_second
        What is fast enough; None: not asked.
    """
    fit = [row for row in rows if row.get("feasible")]
    priced = [row for row in fit if row["cost_per_million_tokens"] is not None]
    found: dict[str, Any] = {"clusters": list(rows)}
    found["fastest"] = min(fit, key=lambda row: row["predicted_iteration_us"])["cluster"] if fit else None
    found["cheapest"] = min(priced, key=lambda row: row["cost_per_million_tokens"])["cluster"] if priced else None
    if tokens_per_second is not None:
        enough = [row for row in fit if (row["tokens_per_second"] or 0.0) >= tokens_per_second]
        found["fewest_devices"] = min(enough, key=lambda row: row["devices"])["cluster"] if enough else None
    return found


def print_comparison(found: Mapping[str, Any], tokens_per_second: float | None, origin: str) -> None:
    """For people."""
    from dpro_search.cli._output import microseconds, print_table, say, stdout_console

    console = stdout_console()
    rows = []
    for row in found["clusters"]:
        if "error" in row:
            rows.append((row["cluster"], "-", row["error"], "-", "-", "-"))
            continue
        tokens, price = row["tokens_per_second"], row["cost_per_million_tokens"]
        name = row["name"] if row["plan"] else f"as {origin}"
        rows.append(
            (
                row["cluster"],
                str(row["devices"]),
                name if row["feasible"] else f"nothing fits in memory; least: {name}",
                microseconds(row["predicted_iteration_us"]),
                "-" if tokens is None else f"{tokens:,.0f}",
                "-" if price is None else f"${price:.4g}",
            )
        )
    columns = ("cluster", "devices", "best plan", "iteration", "tokens/s", "a million tokens")
    print_table(console, "best plan on each cluster", columns, rows)
    if found["fastest"] is not None:
        say(console, f"Fastest: {found['fastest']}.")
    if found["cheapest"] is not None:
        say(console, f"Cheapest for a token: {found['cheapest']}.")
    else:
        say(console, "The cheapest is not known: no cluster has a price (price_per_device_hour_usd in its file).")
    if tokens_per_second is not None:
        fewest = found["fewest_devices"]
        wanted = f"{tokens_per_second:,.0f} tokens a second"
        say(console, f"Fewest devices with {wanted}: {fewest}." if fewest else f"None of the clusters gives {wanted}.")
