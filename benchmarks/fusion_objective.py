"""`FusionObjective`: predicts tensor fusion in a data-parallel job, as an `Objective` of a search."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.ring_job import RingJob
from dpro_search.collect.trace import CommSettings, TensorInfo
from dpro_search.replay.replayer import settled_us
from dpro_search.space.data_parallel import DataParallelJob
from dpro_search.space.data_parallel_graph import fold
from dpro_search.space.plan import Plan, Prediction, refuse_unknown
from dpro_search.space.transformations import PlanningFacts, PlanSpace
from dpro_search.space.transformations.horovod import TensorFusion


class FusionObjective:
    """Predictions of plans that fuse tensors; a graph is built and replayed for each plan.

    Attributes
    ----------
    tensors
        Tensors in the order of the job, in which they become ready.
    space
        The plans that it knows.
    """

    def __init__(self, job: DataParallelJob | RingJob) -> None:
        self._job = job
        step = job.steps[0]
        names = step.tensor_names or tuple(f"tensor{tensor}" for tensor in range(len(step.tensor_bytes)))
        self.tensors = tuple(
            TensorInfo(name=name, node=name, dtype="uint8", shape=(int(size),), size_bytes=int(size))
            for name, size in zip(names, step.tensor_bytes.tolist(), strict=True)
        )
        self._number = {name: tensor for tensor, name in enumerate(names)}
        self.recorded = CommSettings(fusion_threshold_bytes=0, cycle_time_us=0.0, groups=None)
        facts = {"fusion_threshold_bytes": 0, "tensor_groups": None}
        fusion = TensorFusion(PlanningFacts(name="a data-parallel job", tensors=self.tensors, values=facts))
        self.space = PlanSpace(fusion.job, [fusion])

    def predict(self, plan: Plan) -> Prediction:
        """The settled iteration time under a plan; tensors in no group travel alone."""
        iteration_us = self.iteration_us(self.groups(plan))
        return Prediction(
            iteration_us=iteration_us,
            interval_us=(iteration_us, iteration_us),
            breakdown_us={},
            peak_memory_bytes=None,
            source="extrapolated",
        )

    def iteration_us(self, groups: tuple[tuple[int, ...], ...]) -> float:
        """The settled iteration time under fused tensors."""
        graph = self._job.graph(groups) if isinstance(self._job, RingJob) else fold(replace(self._job, groups=groups)).graph
        return settled_us(graph)[0]

    def groups(self, plan: Plan) -> tuple[tuple[int, ...], ...]:
        """Numbers of the tensors of each group, in the order in which the groups are complete."""
        refuse_unknown(plan, self.space.fields, self.space.job.name)
        threshold_bytes = plan.get("fusion_threshold_bytes")
        if plan.tensor_groups is None:
            return _neighbours([tensor.size_bytes for tensor in self.tensors], threshold_bytes or 0)
        fused = [tuple(sorted(self._number[name] for name in group)) for group in plan.tensor_groups]
        alone = set(range(len(self.tensors))) - {tensor for group in fused for tensor in group}
        return tuple(sorted([*fused, *((tensor,) for tensor in alone)], key=max))


def _neighbours(sizes_bytes: list[int], threshold_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Groups of tensors that follow each other, of at most so many bytes; a larger tensor is alone."""
    first = [0]
    for tensor in range(1, len(sizes_bytes)):
        if sum(sizes_bytes[first[-1] : tensor + 1]) > threshold_bytes:
            first.append(tensor)
    return tuple(tuple(part.tolist()) for part in np.split(np.arange(len(sizes_bytes)), first[1:]))
