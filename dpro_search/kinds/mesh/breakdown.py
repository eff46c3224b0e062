"""`breakdown_us`: where a parallel step goes: computation, communication by axis that nothing hides, bubble, optimizer, host.

Of the pipeline rank that has most to do. What communication within passes costs is what its passes would be shorter by if it took
no time, one axis after the other in the order of `IN_PASSES`; so is what the host costs, where kernels end before it has launched
the next. What is between passes is what the step would be shorter by, in the order of `BETWEEN_PASSES`. Parts add up to the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dpro_search.replay.parallel_step import ParallelSteps
from dpro_search.space.mesh import Scales, Strategy

BETWEEN_PASSES: Mapping[str, frozenset[str]] = {
    "exposed_data_parallel": frozenset(
        {"replicas", "shard", "shard replicas", "expert replicas", "expert shard", "expert shard replicas", "world"}
    ),
    "exposed_pipeline_sends": frozenset({"send", "first and last stage"}),
}
IN_PASSES: Mapping[str, frozenset[str]] = {
    "exposed_expert_parallel": frozenset({"ep", "etp"}),
    "exposed_context_parallel": frozenset({"cp"}),
    "exposed_tensor_parallel": frozenset({"tp"}),
}
_LEAST = 1e-9  # of a step: less is rounding


def breakdown_us(steps: ParallelSteps, strategy: Strategy, step_us: float) -> dict[str, float]:
    """The parts of a step of `step_us`; "compute" and those above 0. "bubble" is when the rank waits for other stages."""
    base, free = steps.workload.scales, frozenset[str]()
    between: dict[str, float] = {}
    left_us = step_us
    for name, axes in BETWEEN_PASSES.items():
        if _used(axes, strategy):
            free |= axes
            without_us = steps.scaled(_with(base, free, base.host)).step_us(strategy)
            between[name], left_us = max(left_us - without_us, 0.0), min(left_us, without_us)
    rank, busy_us, update_us = busiest(steps, strategy)
    found = {"bubble": max(left_us - busy_us - update_us, 0.0), **between}
    free = frozenset()
    for name, axes in IN_PASSES.items():
        if _used(axes, strategy):
            free |= axes
            without_us = passes_us(steps.scaled(_with(base, free, base.host)), strategy, rank)
            found[name], busy_us = max(busy_us - without_us, 0.0), min(busy_us, without_us)
    without_us = passes_us(steps.scaled(_with(base, free, 0.0)), strategy, rank)
    found["host"], busy_us = max(busy_us - without_us, 0.0), min(busy_us, without_us)
    update_us = step_us - busy_us - sum(found.values())
    found = {"compute": busy_us, "optimizer": update_us, **found}
    return {name: value_us for name, value_us in found.items() if value_us > _LEAST * step_us or name == "compute"}


def busiest(steps: ParallelSteps, strategy: Strategy) -> tuple[int, float, float]:
    """The pipeline rank that has most to do, its passes, and its update."""
    updates = steps.costs(strategy).update_us or (0.0,) * strategy.pp
    found = [(passes_us(steps, strategy, rank), updates[rank], rank) for rank in range(strategy.pp)]
    most, update_us, rank = max(found, key=lambda each: each[0] + each[1])
    return rank, most, update_us


def passes_us(steps: ParallelSteps, strategy: Strategy, rank: int) -> float:
    """All passes of a pipeline rank."""
    stages = steps.costs(strategy).stages
    layers = [layer for stage in steps.stages_on(strategy, rank) for layer in stages[stage]]
    return strategy.micro_batches * sum(layer.forward_us + layer.backward_us for layer in layers)


def _with(base: Scales, free: frozenset[str], host: float) -> Scales:
    return replace(base, host=host, free=base.free | free)


def _used(axes: frozenset[str], strategy: Strategy) -> bool:
    """Whether any of some axes has more than one rank."""
    sizes = {
        "tp": strategy.tp,
        "cp": strategy.cp,
        "ep": strategy.ep,
        "etp": strategy.etp,
        "send": strategy.pp,
        "replicas": strategy.dp * strategy.cp,
        "expert replicas": strategy.expert_dp,
        "world": strategy.devices,
    }
    return any(sizes.get(axis, 1) > 1 for axis in axes)
