"""`breakdown_us`: where a parallel step goes: computation, communication by axis that nothing hides, bubble, optimizer, host.

Communication of an axis is what the step would be shorter by if it took no time, one axis after the other in the order of `AXES`,
so that the parts add up to the step. So is what the host costs, where kernels end before it has launched the next.
"""

from __future__ import annotations

from collections.abc import Mapping

from dpro_search.replay.parallel_step import ParallelSteps
from dpro_search.space.mesh import Scales, Strategy

_LEAST = 1e-9  # of a step: less is rounding

AXES: Mapping[str, frozenset[str]] = {
    "exposed_data_parallel": frozenset(
        {"replicas", "shard", "shard replicas", "expert replicas", "expert shard", "expert shard replicas", "world"}
    ),
    "exposed_pipeline_sends": frozenset({"send", "first and last stage"}),
    "exposed_expert_parallel": frozenset({"ep", "etp"}),
    "exposed_context_parallel": frozenset({"cp"}),
    "exposed_tensor_parallel": frozenset({"tp"}),
}


def breakdown_us(steps: ParallelSteps, strategy: Strategy, step_us: float) -> dict[str, float]:
    """The parts of a step of `step_us`; they add up to it.

    "compute" is that of the rank with most of it, "optimizer" its update, "bubble" what is left: when it waits for other stages.
    """
    found: dict[str, float] = {}
    left_us, free = step_us, frozenset[str]()
    base = steps.workload.scales
    for name, axes in AXES.items():
        if not _used(axes, strategy):
            continue
        free |= axes
        without_us = steps.scaled(_with(base, free, base.host)).step_us(strategy)
        found[name], left_us = max(left_us - without_us, 0.0), min(left_us, without_us)
    bare = steps.scaled(_with(base, free, 0.0))
    without_us = bare.step_us(strategy)
    found["host"], left_us = max(left_us - without_us, 0.0), min(left_us, without_us)
    compute_us, update_us = busy_us(bare, strategy)
    found = {"compute": compute_us, "optimizer": update_us, "bubble": max(left_us - compute_us - update_us, 0.0), **found}
    return {name: value_us for name, value_us in found.items() if value_us > _LEAST * step_us or name == "compute"}


def busy_us(steps: ParallelSteps, strategy: Strategy) -> tuple[float, float]:
    """Passes, and the update, of the pipeline rank that has most to do."""
    costs = steps.costs(strategy)
    found = []
    for rank in range(strategy.pp):
        layers = [layer for stage in costs.stages[rank :: strategy.pp] for layer in stage]
        passes_us = strategy.micro_batches * sum(layer.forward_us + layer.backward_us for layer in layers)
        found.append((passes_us, costs.update_us[rank] if costs.update_us else 0.0))
    return max(found, key=sum)


def _with(base: Scales, free: frozenset[str], host: float) -> Scales:
    return Scales(
        compute=base.compute, communication=base.communication, bandwidth=base.bandwidth, host=host, free=base.free | free
    )


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
