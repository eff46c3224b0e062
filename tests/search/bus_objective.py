"""Test doubles for the replay: gradients on one serial bus, and one knob, predicted by formulas. Nothing was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpro_search.collect.trace import CommSettings, TensorInfo
from dpro_search.replay.exchanges import Exchange
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.tensorflow.fusion_moves import Grouping, threshold_groups
from dpro_search.space.transformations import BucketSize, PlanningFacts, PlanSpace, horovod_space


def tensors_of(sizes_bytes: list[int]) -> tuple[TensorInfo, ...]:
    return tuple(
        TensorInfo(name=f"g{i}", node=f"node{i}", dtype="float32", shape=(size // 4,), size_bytes=size)
        for i, size in enumerate(sizes_bytes)
    )


DEFAULT_SETTINGS = CommSettings(fusion_threshold_bytes=128 * 2**20, cycle_time_us=1000.0)


def prediction_of(iteration_us: float, plan: Plan, noise: float, peak_memory_bytes: int | None = None) -> Prediction:
    return Prediction(
        iteration_us=iteration_us,
        interval_us=(iteration_us * (1 - noise), iteration_us * (1 + noise)),
        breakdown_us={},
        peak_memory_bytes=peak_memory_bytes,
        source="recorded" if plan == Plan() else "extrapolated",
    )


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

    @property
    def space(self) -> PlanSpace:
        return horovod_space(self.tensors, self.recorded)

    def predict(self, plan: Plan) -> Prediction:
        ended_us = max(exchange.ended_us for exchange in self.exchanges(plan))
        return prediction_of(ended_us + 20_000.0 / self._cycle_us(plan), plan, self.noise)  # a busier thread slows the job

    def exchanges(self, plan: Plan) -> tuple[Exchange, ...]:
        ready_us = {tensor.name: (i + 1) * self.compute_us for i, tensor in enumerate(self.tensors)}
        size_bytes = {tensor.name: tensor.size_bytes for tensor in self.tensors}
        collected = []
        free_us = 0.0
        for group in sorted(self._groups(plan), key=lambda g: max(ready_us[name] for name in g)):
            names = tuple(sorted(group, key=ready_us.__getitem__))
            total, posted_us = sum(size_bytes[name] for name in names), ready_us[names[-1]]
            free_us = max(free_us, posted_us + self._cycle_us(plan) / 2) + self.alpha_us + self.beta_us_per_byte * total
            ready = tuple(ready_us[name] for name in names)
            collected.append(Exchange(tensors=names, ready_us=ready, size_bytes=total, posted_us=posted_us, ended_us=free_us))
        return tuple(collected)

    def _cycle_us(self, plan: Plan) -> float:
        return plan.get("cycle_time_us") or self.recorded.cycle_time_us

    def _groups(self, plan: Plan) -> Grouping:
        groups = plan.tensor_groups
        if groups is None and plan.get("fusion_threshold_bytes") is None:
            groups = self.recorded.groups
        if groups is None:
            threshold_bytes = plan.get("fusion_threshold_bytes")
            if threshold_bytes is None:
                threshold_bytes = self.recorded.fusion_threshold_bytes
            return threshold_groups(self.tensors, threshold_bytes)
        named = {name for group in groups for name in group}
        return (*groups, *((t.name,) for t in self.tensors if t.name not in named))


class KnobObjective:
    """A job with one knob, whose best value is `best_bytes`: ever slower with the ratio to it. Memory grows with the knob."""

    recorded = None

    def __init__(self, best_bytes: int = 8 * 2**20, recorded_bytes: int = 2**18) -> None:
        self.tensors = tensors_of([2**20] * 100)
        job = PlanningFacts(name="a job with one knob", tensors=self.tensors, values={"bucket_cap_bytes": recorded_bytes})
        self.space = PlanSpace(job, (BucketSize(job),))
        self._best_bytes, self._recorded_bytes = best_bytes, recorded_bytes

    def predict(self, plan: Plan) -> Prediction:
        self.space.check(plan)
        cap = plan.get("bucket_cap_bytes") or self._recorded_bytes
        return prediction_of(100_000.0 * (1 + 0.1 * abs(math.log(cap / self._best_bytes))), plan, 0.005, cap)
