"""A test double for the replay: gradients on one serial bus, priced by a formula. Nothing in it was measured."""

from __future__ import annotations

from dataclasses import dataclass

from dpro_search.collect.trace import CommSettings, TensorInfo
from dpro_search.space.moves import Grouping, threshold_groups
from dpro_search.space.plan import Plan, Prediction


def tensors_of(sizes_bytes: list[int]) -> tuple[TensorInfo, ...]:
    return tuple(
        TensorInfo(name=f"g{i}", node=f"node{i}", dtype="float32", shape=(size // 4,), size_bytes=size)
        for i, size in enumerate(sizes_bytes)
    )


DEFAULT_SETTINGS = CommSettings(fusion_threshold_bytes=128 * 2**20, cycle_time_us=1000.0)


@dataclass(frozen=True)
class BusObjective:
    """Tensor i is ready after (i + 1) * compute_us; a group moves when its last tensor is ready and the bus is free.

    A collective takes alpha_us and beta_us a byte; half a cycle passes before each. Intervals are +- noise.
    """

    tensors: tuple[TensorInfo, ...]
    recorded: CommSettings = DEFAULT_SETTINGS
    alpha_us: float = 500.0
    beta_us_per_byte: float = 0.002
    compute_us: float = 400.0
    noise: float = 0.005

    def predict(self, plan: Plan) -> Prediction:
        cycle_us = plan.cycle_time_us or self.recorded.cycle_time_us
        ready_us = {tensor.name: (i + 1) * self.compute_us for i, tensor in enumerate(self.tensors)}
        size_bytes = {tensor.name: tensor.size_bytes for tensor in self.tensors}
        free_us = 0.0
        for group in sorted(self._groups(plan), key=lambda g: max(ready_us[name] for name in g)):
            start_us = max(free_us, max(ready_us[name] for name in group) + cycle_us / 2)
            free_us = start_us + self.alpha_us + self.beta_us_per_byte * sum(size_bytes[name] for name in group)
        free_us += 20_000.0 / cycle_us  # a busier communication thread slows the job
        return Prediction(
            iteration_us=free_us,
            interval_us=(free_us * (1 - self.noise), free_us * (1 + self.noise)),
            breakdown_us={"compute": max(ready_us.values())},
            peak_memory_bytes=None,
            source="recorded" if plan == Plan() else "extrapolated",
        )

    def _groups(self, plan: Plan) -> Grouping:
        groups = plan.tensor_groups
        if groups is None and plan.fusion_threshold_bytes is None:
            groups = self.recorded.groups
        if groups is None:
            threshold_bytes = plan.fusion_threshold_bytes
            if threshold_bytes is None:
                threshold_bytes = self.recorded.fusion_threshold_bytes
            return threshold_groups(self.tensors, threshold_bytes)
        named = {name for group in groups for name in group}
        return (*groups, *((t.name,) for t in self.tensors if t.name not in named))
