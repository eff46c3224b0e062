"""Table: what coarsened view, partial replay and symmetry bring to the search's speed.

    python -m experiments.dpro.search_time RESULTS [--plans 2000]

The measurement is that of `experiments.search.ablation`, on its jobs of 16 workers; run it on an idle machine.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from benchmarks.measure import machine
from benchmarks.search_jobs import ring
from benchmarks.shortcuts import ablation
from dpro_search.space.data_parallel import RankStep
from experiments.dpro.parts import Options, Section, gathered, script, table
from experiments.dpro.published import SEARCH_HOURS, SOURCE
from experiments.search.ablation import JOBS

NAME = "search-time"
STEPS = {  # in the paper's order
    "a graph for each plan": "graph built",
    "none": "no shortcut",
    "+ coarsened view": "coarsen",
    "+ partial replay": "coarsen+partial",
    "+ symmetry": "coarsen+symmetry+partial",
}
_PLANS = 10_000  # whose time the table says


class Row(msgspec.Struct, kw_only=True):
    """One job: its size, and plans a second by combination of shortcuts."""

    tensors: int
    ops: int
    workers: int
    plans_per_s: dict[str, float]
    machine: str


def search_time(options: Options) -> Section:
    """The section."""
    jobs = {title: lambda step=step: row_of(step, options.plans) for title, step in JOBS.items()}
    rows = gathered(options.results / f"{NAME}.json", Row, jobs)
    lines = [[f"{title}: {row.tensors} tensors, {row.ops} ops, {row.workers} workers", *_cells(row)] for title, row in rows.items()]
    where = "; ".join(sorted({row.machine for row in rows.values()}))
    note = f"Minutes to price {_PLANS} plans; in brackets plans a second ({where}):\n\n"
    text = note + table(("job", *(f"{name}#" for name in STEPS)), lines) + "\n" + _theirs()
    return Section(name=NAME, title="Time of a search", text=text)


def row_of(step: Callable[[], RankStep], plans: int) -> Row:
    """Measure all combinations of shortcuts on one job."""
    return Row(**ablation(ring(step()), plans), machine=machine())


def _cells(row: Row) -> list[str]:
    rates = [row.plans_per_s[name] for name in STEPS.values()]
    return [f"{_PLANS / rate / 60:,.2f} ({rate:,.1f})" for rate in rates]


def _theirs() -> str:
    lines = [[model, *("" if hours is None else hours for hours in row)] for model, row in SEARCH_HOURS.items()]
    return f"Theirs, hours of a whole search ({SOURCE}):\n\n" + table(
        ("model", "plain#", "+ coarsened view#", "+ partial replay#", "+ symmetry#"), lines
    )


if __name__ == "__main__":
    script(search_time, __doc__)
