"""`breakdown_us`: where a parallel step goes: computation, communication by axis that nothing hides, bubble, optimizer, host.

The breakdown describes the pipeline rank that has most to do. Communication within passes costs what the passes would be shorter by
if it took no time, one axis after the other in the order of `IN_PASSES`. The host costs what they would be shorter by if it took no
time to launch kernels. Communication between passes costs what the step would be shorter by, in the order of `BETWEEN_PASSES`. The
parts add up to the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from dpro_search.parallel.costs.scales import Scales
from dpro_search.parallel.model import Block, Op, OpType
from dpro_search.parallel.model.op import OpRole
from dpro_search.parallel.steps.step_prices import StepPrices
from dpro_search.parallel.strategy import Recompute, Strategy
from dpro_search.parallel.workload import recomputed

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


def breakdown_us(steps: StepPrices, strategy: Strategy, step_us: float) -> dict[str, float]:
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
    parts_us = {"bubble": max(left_us - busy_us - update_us, 0.0), **between}
    free = frozenset()
    for name, axes in IN_PASSES.items():
        if _used(axes, strategy):
            free |= axes
            without_us = passes_us(steps.scaled(_with(base, free, base.host)), strategy, rank)
            parts_us[name], busy_us = max(busy_us - without_us, 0.0), min(busy_us, without_us)
    without_us = passes_us(steps.scaled(_with(base, free, 0.0)), strategy, rank)
    parts_us["host"], busy_us = max(busy_us - without_us, 0.0), min(busy_us, without_us)
    update_us = step_us - busy_us - sum(parts_us.values())
    parts_us = {"compute": busy_us, "optimizer": update_us, **parts_us}
    return {name: value_us for name, value_us in parts_us.items() if value_us > _LEAST * step_us or name == "compute"}


def computation_us(steps: StepPrices, strategy: Strategy, compute_us: float) -> dict[str, float]:
    """The part "compute" of a step's breakdown by part of the model, the longest first; the parts add up to `compute_us`.

    The shares are those of the modelled times of the ops on the rank that `breakdown_us` is about. Activations that are computed
    again are a part of their own.
    """
    rank, _, _ = busiest(steps, strategy)
    times, stages, spent_us = steps.op_times(strategy), steps.stages(strategy), defaultdict[str, float](float)
    for blocks in (stages[stage] for stage in steps.stages_on(strategy, rank)):
        for block, again in zip(blocks, recomputed(strategy, blocks), strict=True):
            for time in times[block.name]:
                spent_us[model_part(block, time.op)] += time.forward_us + time.backward_us
                if again and (strategy.recompute is Recompute.FULL or _again_selectively(steps, time.op)):
                    spent_us["recomputation"] += time.forward_us
    total_us = sum(spent_us.values())
    longest = sorted(spent_us.items(), key=lambda item: -item[1])
    return {part: us / total_us * compute_us for part, us in longest if us > _LEAST * total_us}


def model_part(block: Block, op: Op) -> str:
    """The part of a model that an op belongs to; ops of models that are no transformers are told apart by how they compute."""
    if op.role in (OpRole.NORM, OpRole.INSTANCE_NORM, OpRole.RESIDUAL):
        return "norms"
    if block.name in ("embedding", "head"):
        return block.name
    if op.name.startswith(("attention.", "cross_attention.")):
        return "attention"
    if op.name.startswith(("feed_forward.", "experts", "shared_expert.")) or op.name in ("router", "dispatch", "combine"):
        return "mlp"
    return op.type.value


def _again_selectively(steps: StepPrices, op: Op) -> bool:
    """Whether selective recomputation repeats an op: the attention's scores, which a fused attention never stores."""
    return op.type is OpType.ATTENTION and not steps.workload.runtime.flash_attention


def busiest(steps: StepPrices, strategy: Strategy) -> tuple[int, float, float]:
    """The pipeline rank that has most to do, its passes, and its update."""
    updates = steps.costs(strategy).update_us or (0.0,) * strategy.pp
    totals = [(passes_us(steps, strategy, rank), updates[rank], rank) for rank in range(strategy.pp)]
    most, update_us, rank = max(totals, key=lambda each: each[0] + each[1])
    return rank, most, update_us


def passes_us(steps: StepPrices, strategy: Strategy, rank: int) -> float:
    """All passes of a pipeline rank."""
    stages = steps.costs(strategy).stages
    layers = [layer for stage in steps.stages_on(strategy, rank) for layer in stages[stage]]
    return strategy.micro_batches // strategy.copies * sum(layer.forward_us + layer.backward_us for layer in layers)


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
