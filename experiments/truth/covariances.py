"""`covariances`: what errors of predicted steps have in common, and how far predicted memory is off, for answers on single jobs.

An error of a step is a sum of what the efficiencies of its GPU and framework make of it (`Scales`), what rows of a group share and
the rest. Their widths are those that make the errors of published rows most likely (`pooling.pooled`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpro_search.parallel.costs.scales import MEASURED
from dpro_search.parallel.steps.step_prices import StepPrices
from experiments.truth.calibrate import STEP, error_lines, log_steps
from experiments.truth.contradictions import consistent
from experiments.truth.intervals import source_quantiles
from experiments.truth.jobs import workload_of
from experiments.truth.pooling import pooled
from experiments.truth.rows import publisher_of
from experiments.truth.score import Scored, fifth, group_of


def covariances_toml(scored: Sequence[Scored], seeds: Sequence[int]) -> str:
    """Two tables of ``accuracy.toml``: standard deviations of logarithms, medians over seeds, and quantiles of memory."""
    ran = consistent([one for one in scored if one.timed])
    each = np.array([_widths(_fifth(ran, seed)) for seed in seeds])
    widths = dict(zip((*MEASURED, "group", "row"), np.median(each, axis=0), strict=True))
    low, high = _memory(scored)
    return "\n".join((
        "# Standard deviations of the logarithms of efficiencies of a GPU and framework (parallel/costs/scales.py), of what jobs",
        "# of one group share, and of the rest of a step's error: medians over fifths of the groups of these runs.",
        "[spread]",
        *(f"{name} = {width:.3f}" for name, width in widths.items()),
        "",
        "# Measured over predicted memory: quantiles of 5 and 95 % of another source.",
        "[memory]",
        f"ratio = [{low:.3f}, {high:.3f}]",
        "",
    ))  # fmt: skip


def _fifth(rows: Sequence[Scored], seed: int) -> list[Scored]:
    chosen = fifth([one.row for one in rows], seed)
    return [one for one in rows if group_of(one.row) in chosen]


def _widths(rows: Sequence[Scored]) -> list[float]:
    steps = [StepPrices(workload_of(one.row)) for one in rows]
    base = log_steps(steps, np.zeros((len(rows), len(MEASURED))))
    slopes = [(log_steps(steps, np.tile(step, (len(rows), 1))) - base) / STEP for step in STEP * np.eye(len(MEASURED))]
    measured = np.log([one.row.number("step_time_s") or 1.0 for one in rows])
    widths = pooled(error_lines(rows, measured - base, np.array(slopes).T, group_of)).widths
    return [*widths.parameters, widths.groups, widths.rows]


def _memory(scored: Sequence[Scored]) -> tuple[float, float]:
    """Quantiles of measured over predicted memory of a source that is not known."""
    pairs = [
        (publisher_of(one.row.values["source"]), np.log((one.row.number("memory_gb") or 0.0) * 2**30 / one.prediction.memory_bytes))
        for one in scored
        if one.prediction.memory_bytes and one.row.number("memory_gb") and (one.row.measured or one.row.memory_alone)
    ]
    sources, logs = zip(*pairs, strict=True)
    low, high = source_quantiles(np.array(logs), np.array(sources))
    return float(np.exp(low)), float(np.exp(high))
