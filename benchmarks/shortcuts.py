"""What coarsened view, symmetry and partial replay bring to the pricing of plans: each on and off, on the same plans.

The plans are those of one Metropolis walk over groupings. "graph built" makes each plan's whole graph and replays it, which is what
a search does that has none of this; the other rows price groupings as arrays of numbers. All rows must give the same prices.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dpro_search.replay.data_parallel_predictor import DataParallelPredictor
from dpro_search.replay.grouping import GroupingReplay, Shortcuts
from dpro_search.replay.replayer import replay
from dpro_search.search.samplers import sampler_for
from dpro_search.space.data_parallel import DataParallelJob
from dpro_search.space.job_graph import build
from dpro_search.space.plan import Plan

_SECONDS = 4.0  # of measuring a row: as many plans of the walk as fit, at least some
_LEAST = 3


def walked(predictor: DataParallelPredictor, plans: int, seed: int = 0) -> tuple[list[np.ndarray], float]:
    """Groupings that a Metropolis sampler asks for, in turn, and how many a second it and the prices allow."""
    sampler = sampler_for(predictor.space, "mcmc", seed)
    sampler.observe(Plan(), predictor.predict(Plan()))
    asked = []
    started = time.perf_counter()
    for _ in range(plans):
        proposal = sampler.ask()
        sampler.tell(proposal, predictor.predict(proposal.plan))
        asked.append(proposal.plan)
    seconds = time.perf_counter() - started
    return [predictor.group_of(plan) for plan in asked], plans / seconds


def rate(price: Callable[[np.ndarray], float], groupings: list[np.ndarray]) -> tuple[float, list[float]]:
    """Plans a second, and the prices; the first call, which compiles, does not count."""
    price(groupings[0])
    prices: list[float] = []
    started = time.perf_counter()
    for number, group_of in enumerate(groupings):
        prices.append(price(group_of))
        if number + 1 >= _LEAST and time.perf_counter() - started > _SECONDS:
            break
    return len(prices) / (time.perf_counter() - started), prices


def ablation(job: DataParallelJob, plans: int = 2000) -> dict[str, Any]:
    """Plans a second with all combinations of shortcuts, and with a graph for each plan."""
    groupings, _ = walked(DataParallelPredictor(job), plans)
    rows: dict[str, float] = {}
    plain, exact = rate(lambda group_of: _built(job, group_of), groupings)
    rows["graph built"] = plain
    for coarsen, symmetry, partial in itertools.product((False, True), repeat=3):
        used = [name for name, on in (("coarsen", coarsen), ("symmetry", symmetry), ("partial", partial)) if on]
        pricer = GroupingReplay(job, Shortcuts(coarsen=coarsen, symmetry=symmetry, partial=partial))
        rows["+".join(used) or "no shortcut"], prices = rate(pricer.iteration_us, groupings)
        common = min(len(prices), len(exact))
        np.testing.assert_allclose(prices[:common], exact[:common], rtol=1e-9)
        exact = max(exact, prices, key=len)
    return {"tensors": len(job.tensor_bytes), "ops": len(job.steps[0]), "workers": job.ranks, "plans_per_s": rows}


def _built(job: DataParallelJob, group_of: np.ndarray) -> float:
    members = [np.flatnonzero(group_of == group) for group in np.unique(group_of)]
    groups = sorted((tuple(tensors.tolist()) for tensors in members), key=lambda group: group[-1])
    return replay(build(replace(job, groups=tuple(groups)))).iteration_us


def table(result: dict[str, Any]) -> str:
    """The rows, slowest first, with what each brings over the plain one."""
    plain = result["plans_per_s"]["graph built"]
    lines = [f"{result['ops']} ops, {result['tensors']} tensors, {result['workers']} workers (ring, message by message)"]
    rows = sorted(result["plans_per_s"].items(), key=lambda row: row[1])
    lines += [f"  {name:28} {value:10.1f} plans/s {value / plain:9.0f}x" for name, value in rows]
    return "\n".join(lines)
