"""What `dpro-search run` prints of several clusters or batches: the best plan of each, the fastest and the cheapest."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpro_search.quantities import count_text, money_text, parse_count

if TYPE_CHECKING:
    from dpro_search.kinds import Job
    from dpro_search.search import SearchResult

ALMOST = 0.05
"""As fast as another one, about: less than predictions are off by."""


def several(cluster: str | None) -> list[str]:
    """The clusters of a list with commas; empty for one."""
    names = [name.strip() for name in (cluster or "").split(",") if name.strip()]
    return names if len(names) > 1 and not Path(cluster or "").is_file() else []


def batches_of(text: str | None) -> list[int]:
    """The batches of a list with commas; raises `InputError`."""
    return [parse_count(each.strip()) for each in text.split(",")] if text is not None else []


def run_of(out: Path, cluster: str) -> Path:
    """The run folder of the search on one of several clusters, or with one of several batches."""
    return out / (re.sub(r"[^\w.@-]+", "-", cluster).strip("-.") or "cluster")


def row_of(cluster: str, batch: int | None, job: Job, result: SearchResult) -> dict[str, Any]:
    """The best plan of a search on a cluster, and what it gives and costs; `batch` where several were asked for."""
    from dpro_search.kinds._work import EFFICIENCY_KEYS, efficiency

    best = result.plans[0]
    work = job.work
    gives = None if work is None else efficiency(work, best.prediction.iteration_us)
    return {
        "cluster": cluster,
        **({} if batch is None else {"global_batch": batch}),
        "devices": job.cluster.ranks,
        "run": result.run,
        "feasible": result.feasible,
        "plan": dict(best.plan.settings),
        "name": result.names[0],
        "predicted_iteration_us": best.prediction.iteration_us,
        "interval_us": best.prediction.interval_us,
        "peak_memory_bytes": best.prediction.peak_memory_bytes,
        **{key: None if gives is None else getattr(gives, key) for key in EFFICIENCY_KEYS},
    }


def comparison(rows: Sequence[Mapping[str, Any]], tokens_per_second: float | None = None) -> dict[str, Any]:
    """The rows with the names of the clusters that are fastest, cheapest, and smallest of those that are fast enough.

    Of several batches the fastest trains most sequences a second. "fastest_batch", "cheapest_batch" and "fewest_devices_batch" say
    with which batch; "smallest_batch" is the least on the fastest cluster that is at most `ALMOST` slower: a larger one hardly
    pays for what it changes about training.

    Parameters
    ----------
    rows
        Those of `row_of`, or a "cluster" (and "global_batch") with an "error".
    tokens_per_second
        What is fast enough; None: not asked.
    """
    fit = [row for row in rows if row.get("feasible")]
    priced = [row for row in fit if row["cost_per_million_tokens"] is not None]
    chosen = {"fastest": max(fit, key=_rate, default=None)}
    chosen["cheapest"] = min(priced, key=lambda row: row["cost_per_million_tokens"], default=None)
    if tokens_per_second is not None:
        enough = [row for row in fit if (row["tokens_per_second"] or 0.0) >= tokens_per_second]
        chosen["fewest_devices"] = min(enough, key=lambda row: (row["devices"], row.get("global_batch", 0)), default=None)
    found: dict[str, Any] = {"clusters": list(rows)}
    found |= {name: None if row is None else row["cluster"] for name, row in chosen.items()}
    if _batches(rows):
        found |= {f"{name}_batch": None if row is None else row["global_batch"] for name, row in chosen.items()}
        best = chosen["fastest"]
        near = [row for row in fit if best and row["cluster"] == best["cluster"] and _rate(row) >= (1 - ALMOST) * _rate(best)]
        found["smallest_batch"] = min((row["global_batch"] for row in near), default=None)
    return found


def _batches(rows: Sequence[Mapping[str, Any]]) -> bool:
    return any("global_batch" in row for row in rows)


def _rate(row: Mapping[str, Any]) -> float:
    """Batches a microsecond, or sequences where batches differ."""
    return float(row.get("global_batch", 1) / row["predicted_iteration_us"])


def print_comparison(found: Mapping[str, Any], tokens_per_second: float | None, origin: str) -> None:
    """For people."""
    from dpro_search.cli._output import microseconds, print_table, say, stdout_console

    console = stdout_console()
    rows = []
    of_batches = _batches(found["clusters"])
    for row in found["clusters"]:
        batch = (f"{row['global_batch']:,}",) if of_batches else ()
        if "error" in row:
            rows.append((row["cluster"], *batch, "-", row["error"], "-", "-", "-"))
            continue
        tokens, price = row["tokens_per_second"], row["cost_per_million_tokens"]
        name = row["name"] if row["plan"] else f"as {origin}"
        rows.append(
            (
                row["cluster"],
                *batch,
                str(row["devices"]),
                name if row["feasible"] else f"nothing fits in memory; least: {name}",
                microseconds(row["predicted_iteration_us"]),
                "-" if tokens is None else count_text(tokens),
                "-" if price is None else money_text(price),
            )
        )
    columns = ("cluster", *(("batch",) if of_batches else ()), "devices", "best plan", "iteration", "tokens/s", "a million tokens")
    print_table(console, f"best plan {'of each batch' if of_batches else 'on each cluster'}", columns, rows)
    if found["fastest"] is not None:
        say(console, f"Fastest: {_named(found, 'fastest')}.")
        if of_batches and found["smallest_batch"] < found["fastest_batch"]:
            say(console, f"At most {ALMOST:.0%} slower: a batch of {found['smallest_batch']:,}.")
    if found["cheapest"] is not None:
        say(console, f"Cheapest for a token: {_named(found, 'cheapest')}.")
    else:
        say(console, "The cheapest is not known: no cluster has a price (price_per_device_hour_usd in its file).")
    if tokens_per_second is not None:
        fewest = _named(found, "fewest_devices")
        speed = f"{count_text(tokens_per_second)} tokens a second"
        say(console, f"Fewest devices with {speed}: {fewest}." if fewest else f"None of the clusters gives {speed}.")


def _named(found: Mapping[str, Any], name: str) -> str | None:
    """The cluster of an answer, and the batch where there are several."""
    batch = found.get(f"{name}_batch")
    return found[name] if batch is None else f"{found[name]} with a batch of {batch:,}"
