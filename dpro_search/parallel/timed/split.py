"""`predicted_split`: where the time of a replayed step goes, as `deploy/step_split.py` defines it; `alone_us`: lone exchanges.

Of each rank of the replay: while it computes, while it waits for an exchange that one of its ops needs, and the rest, the bubble.
Exchanges within passes are what the passes would be shorter by without them. That ranks wait for the slowest of them in a pass is
exposed communication, as it is where it is measured; what a rank does itself when it hands over gradients is computation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from dpro_search.collect.trace import CollectiveKind
from dpro_search.deploy.step_split import AloneUs, ComparedSplit, StepSplit, measured_split, read_spans
from dpro_search.graph.dataflow import OpKind
from dpro_search.parallel.answers.breakdown import IN_PASSES, passes_us
from dpro_search.parallel.costs.pricer import Pricer
from dpro_search.parallel.steps.step_graph import axis_of
from dpro_search.parallel.steps.step_prices import StepPrices
from dpro_search.parallel.strategy import Strategy
from dpro_search.parallel.workload import Workload
from dpro_search.replay.replayer import replay
from dpro_search.replay.timeline import Timeline
from dpro_search.space.plan import Plan

_KINDS = {
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "all_gather": CollectiveKind.ALL_GATHER,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "all_to_all": CollectiveKind.ALL_TO_ALL,
    "recv": CollectiveKind.SEND,
}
Interval = tuple[float, float]


class Splits(Protocol):
    """A job whose steps are split."""

    def split(self, plan: Plan) -> StepSplit: ...

    def alone_us(self, plan: Plan) -> AloneUs: ...


def paced_split(job: Splits, plan: Plan, folder: Path, warmup: int) -> ComparedSplit | None:
    """The measured breakdown that paced ranks wrote into a folder, beside the prediction; None if they ran too few steps."""
    measured = measured_split(read_spans(folder), warmup, job.alone_us(plan))
    return None if measured is None else ComparedSplit.of(measured, job.split(plan))


def predicted_split(steps: StepPrices, strategy: Strategy) -> StepSplit:
    """The split of a step under a strategy; contention is what exchanges would be shorter by if others used no links."""
    shared = _parts(steps, strategy)
    alone = _parts(StepPrices(replace(steps.workload, interference=False)), strategy)
    total_us = shared.step_us
    exposed_us = sum(shared.by_axis_us.values())
    return StepSplit(
        step_us=total_us,
        compute=shared.compute_us / total_us,
        bubble=1.0 - (shared.compute_us + exposed_us) / total_us,
        exposed_communication=exposed_us / total_us,
        contention=max(exposed_us - sum(alone.by_axis_us.values()), 0.0) / total_us,
        by_axis={axis: us / total_us for axis, us in shared.by_axis_us.items() if us > 0},
    )


def alone_us(workload: Workload) -> AloneUs:
    """Times of exchanges of a workload while no other group exchanges; kinds and axes as ranks write them."""
    groups, plan = Pricer(replace(workload, interference=False)).groups, workload.strategy
    axes = {"tp": "tp", "pp": "pp", "world": "world", "dp_shard": "shard"}
    axes["dp_replicate"] = "shard replicas" if plan.dp_replicate > 1 else "replicas"

    def collective_us(kind: str, axis: str, size_bytes: float) -> float | None:
        return groups.us(_KINDS[kind], size_bytes, axes[axis]) if kind in _KINDS and axis in axes else None

    return collective_us


@dataclass(frozen=True, kw_only=True)
class _SplitParts:
    """Breakdown of a step as means over ranks; exposed communication by axis."""

    step_us: float
    compute_us: float
    by_axis_us: dict[str, float]


def _parts(steps: StepPrices, strategy: Strategy) -> _SplitParts:
    timeline = replay(steps.graph(strategy))
    rows = [_rank_parts(steps, strategy, timeline, rank) for rank in range(strategy.pp)]
    axes = dict.fromkeys(axis for _, by_axis in rows for axis in by_axis)
    return _SplitParts(
        step_us=timeline.makespan_us,
        compute_us=float(np.mean([compute_us for compute_us, _ in rows])),
        by_axis_us={axis: float(np.mean([by_axis.get(axis, 0.0) for _, by_axis in rows])) for axis in axes},
    )


def _rank_parts(steps: StepPrices, strategy: Strategy, timeline: Timeline, rank: int) -> tuple[float, dict[str, float]]:
    """Compute of a rank in the replay, and its exposed communication by axis, in us."""
    computing, needed = _intervals(timeline, rank)
    compute_us = _covered_us(computing)
    by_axis_us = {axis: _covered_us([*computing, *spans]) - compute_us for axis, spans in needed.items()}
    rank_passes_us, handed_us = _own_us(steps, strategy, rank)
    busy_us, free, base = passes_us(steps, strategy, rank), frozenset[str](), steps.workload.scales
    before_us = busy_us
    for name, axes in IN_PASSES.items():
        free |= axes
        without_us = passes_us(steps.scaled(replace(base, free=base.free | free)), strategy, rank)
        _add(by_axis_us, _SHORT[name], busy_us - without_us)
        busy_us = min(busy_us, without_us)
    slowest_us = max(busy_us - rank_passes_us, 0.0)  # which tensor parallel ranks wait for, or those that share parameters
    _add(by_axis_us, "tp" if strategy.tp > 1 else "dp", slowest_us)
    handed_us = min(handed_us, by_axis_us.get("dp", 0.0))
    _add(by_axis_us, "dp", -handed_us)
    return compute_us - (before_us - busy_us) - slowest_us + handed_us, by_axis_us


_SHORT = {"exposed_expert_parallel": "ep", "exposed_context_parallel": "cp", "exposed_tensor_parallel": "tp"}


def _add(totals: dict[str, float], axis: str, us: float) -> None:
    totals[axis] = totals.get(axis, 0.0) + us


def _own_us(steps: StepPrices, strategy: Strategy, rank: int) -> tuple[float, float]:
    """A rank's own work in its passes, and when it hands gradients over; its micro-batches' together."""
    times_of_block, stages = steps.rank_work(strategy), steps.stages(strategy)
    blocks = [times_of_block[block.name] for stage in steps.stages_on(strategy, rank) for block in stages[stage]]
    passes = strategy.micro_batches * sum(each.forward_us + each.backward_us for each in blocks)
    reductions = strategy.micro_batches if steps.costs(strategy).reduces_every_pass else 1
    return passes, reductions * sum(each.reduce_us for each in blocks)


def _intervals(timeline: Timeline, rank: int) -> tuple[list[Interval], dict[str, list[Interval]]]:
    """When a rank computes, and when an exchange runs that one of its ops needs, by axis.

    What both ends of a pipeline exchange of a tied embedding counts on the first one only: pipelines of PyTorch have none.
    """
    graph, times = timeline.graph, timeline.times
    exchange = graph.op_kind == int(OpKind.COMM)
    computing = np.flatnonzero(~exchange & (graph.rank_of_op == rank))
    source, target = graph.edges()
    last = np.setdiff1d(np.flatnonzero(exchange & (graph.rank_of_op == rank)), source)  # nothing needs it but the step's end
    needed = np.union1d(source[exchange[source] & (graph.rank_of_op[target] == rank)], last)
    exchanges: dict[str, list[Interval]] = {}
    for op in needed.tolist():
        exchanges.setdefault(axis_of(graph.name(op)), []).append((float(times.start_us[op]), float(times.end_us[op])))
    return [(float(times.start_us[op]), float(times.end_us[op])) for op in computing.tolist()], exchanges


def _covered_us(intervals: Iterable[Interval]) -> float:
    """Length of a union of intervals."""
    total_us, until_us = 0.0, -np.inf
    for start_us, end_us in sorted(intervals):
        total_us += max(end_us - max(start_us, until_us), 0.0)
        until_us = max(until_us, end_us)
    return float(total_us)
