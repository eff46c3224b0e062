"""`DataParallelPredictor`: predicts tensor fusion in a data-parallel job of ops, as an `Objective` of a search."""

from __future__ import annotations

import numpy as np

from dpro_search.collect.trace import CommSettings, Ints, TensorInfo
from dpro_search.errors import InputError
from dpro_search.machine import calibration, machine_constants
from dpro_search.replay.exchanges import Exchange
from dpro_search.replay.grouping import GroupingReplay, Shortcuts
from dpro_search.space.data_parallel import DataParallelJob, buckets
from dpro_search.space.plan import Plan, Prediction, refuse_unknown
from dpro_search.space.schemes import HorovodSettings
from dpro_search.space.transformations import JobFacts, PlanSpace
from dpro_search.space.transformations.tensor_fusion import TensorFusion


class DataParallelPredictor:
    """Predictions of plans; equal plans have equal predictions.

    A plan's groups travel as they are, each with its last tensor; a fusion threshold makes groups of neighbours up to that size.

    Attributes
    ----------
    tensors
        In the order of the job, which is taken for the order in which they become ready.
    recorded
        The job's own groups.
    space
        The plans that it knows.
    """

    def __init__(self, job: DataParallelJob, shortcuts: Shortcuts | None = None) -> None:
        self._replay = GroupingReplay(job, shortcuts)
        self._tensor_bytes = job.tensor_bytes
        names = job.steps[0].tensor_names or tuple(f"tensor{tensor}" for tensor in range(len(job.tensor_bytes)))
        self.tensors = tuple(
            TensorInfo(name=name, node=name, dtype="uint8", shape=(int(size),), size_bytes=int(size))
            for name, size in zip(names, job.tensor_bytes.tolist(), strict=True)
        )
        self._number = {name: tensor for tensor, name in enumerate(names)}
        together = any(len(group) > 1 for group in job.groups)
        groups = tuple(tuple(names[tensor] for tensor in group) for group in job.groups) if together else None
        self.recorded = CommSettings(fusion_threshold_bytes=0, cycle_time_us=0.0, groups=groups)
        facts = {"fusion_threshold_bytes": 0, "tensor_groups": groups}
        fusion = TensorFusion(JobFacts(name="a data-parallel job", tensors=self.tensors, values=facts))
        self.space = PlanSpace(fusion.job, [fusion])
        works = [float(step.duration_us.sum()) for step in job.steps]
        self._model_error = calibration(machine_constants(), "data_parallel").model_error[1]
        self._compute_us = float((np.array(works)[job.step_of_rank] * job.compute_factor).max())

    def predict(self, plan: Plan) -> Prediction:
        """The settled iteration time under a plan; raises `InputError` for a plan that this job cannot follow."""
        iteration_us = self.iteration_us(self.group_of(plan))
        return Prediction(
            iteration_us=iteration_us,
            interval_us=(iteration_us * (1 - self._model_error), iteration_us * (1 + self._model_error)),
            breakdown_us={"compute": self._compute_us, "exposed_communication": max(iteration_us - self._compute_us, 0.0)},
            peak_memory_bytes=None,
            source="extrapolated",
        )

    def exchanges(self, plan: Plan) -> tuple[Exchange, ...]:
        """The collectives of the first iteration under a plan, in the order of their posts; empty where graphs are built."""
        times = self._replay.times_us(self.group_of(plan))
        if times is None:
            return ()
        found = []
        for last in np.unique(times[0]).tolist():
            members = np.flatnonzero(times[0] == last)
            members = members[np.argsort(times[1][members], kind="stable")]
            ready_us = times[1][members].tolist()
            found.append(
                Exchange(
                    tensors=tuple(self.tensors[tensor].name for tensor in members.tolist()),
                    ready_us=tuple(ready_us),
                    size_bytes=float(self._tensor_bytes[members].sum()),
                    posted_us=ready_us[-1],
                    ended_us=float(times[2][last]),
                )
            )
        return tuple(sorted(found, key=lambda exchange: exchange.posted_us))

    def iteration_us(self, group_of: Ints) -> float:
        """The settled iteration time under a grouping, see `GroupingReplay`."""
        return self._replay.iteration_us(group_of)

    def group_of(self, plan: Plan) -> Ints:
        """Group of each tensor under a plan, [tensors]; raises `InputError` for a plan that this job cannot follow."""
        refuse_unknown(plan, self.space.fields, self.space.job.name)
        groups, threshold = plan.tensor_groups, HorovodSettings.of(plan).fusion_threshold_bytes
        if groups is None and threshold is None:
            groups = self.recorded.groups
        if groups is None:
            sizes = buckets(self._tensor_bytes, float(threshold or 0))
            return np.repeat(np.arange(len(sizes)), [len(bucket) for bucket in sizes])
        found = [-1] * len(self.tensors)
        for number, group in enumerate(groups):
            for tensor_name in group:
                tensor = self._number.get(tensor_name)
                if tensor is None:
                    raise InputError(f"plan: the job has no tensor '{tensor_name}' (its first is '{self.tensors[0].name}')")
                found[tensor] = number
        alone = [tensor for tensor, number in enumerate(found) if number < 0]
        for number, tensor in enumerate(alone, start=len(groups)):
            found[tensor] = number
        return np.array(found, np.int64)
