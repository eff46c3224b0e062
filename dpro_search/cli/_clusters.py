"""Output of `dpro-search run` for several clusters or batches: the best plan of each, the fastest and the cheapest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from dpro_search.quantities import count_text, money_text, parse_count

if TYPE_CHECKING:
    from msgspec import UnsetType

    from dpro_search.analysis.clusters import ClusterChoice


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


def print_choice(answer: ClusterChoice, tokens_per_second: float | None, origin: str) -> None:
    """For people."""
    from msgspec import UNSET

    from dpro_search.analysis.clusters import ALMOST, ImpossibleSearch
    from dpro_search.cli._output import microseconds, print_table, say, stdout_console

    console = stdout_console()
    rows = []
    for row in answer.clusters:
        batch = () if row.global_batch is UNSET else (f"{row.global_batch:,}",)
        if isinstance(row, ImpossibleSearch):
            rows.append((row.cluster, *batch, "-", row.error, "-", "-", "-"))
            continue
        name = row.name if row.plan else f"as {origin}"
        rows.append(
            (
                row.cluster,
                *batch,
                str(row.devices),
                name if row.feasible else f"nothing fits in memory; least: {name}",
                microseconds(row.predicted_iteration_us),
                "-" if row.tokens_per_second is None else count_text(row.tokens_per_second),
                "-" if row.cost_per_million_tokens is None else money_text(row.cost_per_million_tokens),
            )
        )
    batches = ("batch",) if answer.of_batches else ()
    columns = ("cluster", *batches, "devices", "best plan", "iteration", "tokens/s", "a million tokens")
    print_table(console, f"best plan {'of each batch' if answer.of_batches else 'on each cluster'}", columns, rows)
    if answer.fastest is not None:
        say(console, f"Fastest: {_named(answer.fastest, answer.fastest_batch)}.")
        smallest, batch_of_fastest = answer.smallest_batch, answer.fastest_batch
        if isinstance(smallest, int) and isinstance(batch_of_fastest, int) and smallest < batch_of_fastest:
            say(console, f"At most {ALMOST:.0%} slower: a batch of {smallest:,}.")
    if answer.cheapest is not None:
        say(console, f"Cheapest for a token: {_named(answer.cheapest, answer.cheapest_batch)}.")
    else:
        say(console, "The cheapest is not known: no cluster has a price (price_per_device_hour_usd in its file).")
    if tokens_per_second is not None:
        speed = f"{count_text(tokens_per_second)} tokens a second"
        if answer.fewest_devices:
            say(console, f"Fewest devices with {speed}: {_named(answer.fewest_devices, answer.fewest_devices_batch)}.")
        else:
            say(console, f"None of the clusters gives {speed}.")


def _named(cluster: str, batch: int | UnsetType | None) -> str:
    """A cluster, with the batch where several are compared."""
    return f"{cluster} with a batch of {batch:,}" if isinstance(batch, int) else cluster
