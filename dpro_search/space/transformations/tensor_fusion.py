"""Tensor fusion of Horovod: which gradients travel in one collective."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from dpro_search.space.plan import Plan
from dpro_search.space.schemes import HorovodSettings
from dpro_search.space.tensorflow.fusion_moves import Grouping, canonical, contiguous_groups, propose, threshold_groups
from dpro_search.space.transformations._base import RECORDED, Choice, JobFacts, Knob, Transformation, grid

MOST_GROUPS = 32  # of the starting points and outer knobs; moves may make more
_LOG2_THRESHOLDS = np.arange(16.0, 28.25, 0.5)  # 64 KiB to 256 MiB
_MORE_MOVES = 0.6  # parameter of the geometric distribution of the number of moves in a proposal
_AFRESH_SHARE = 0.05  # of the proposals cut the tensors anew: small moves hardly change how many groups there are


class FusionThreshold(Knob):
    """Dynamic fusion up to a threshold, where a framework's Horovod has no exact groups."""

    name = "fusion-threshold"
    fields = ("fusion_threshold_bytes",)

    @cached_property
    def choice(self) -> Choice:
        return Choice(name=self.name, fields=self.fields, grids={RECORDED: ({},), "threshold": _thresholds()})


class TensorFusion(Transformation):
    """Dynamic fusion up to a threshold, or exact groups: any, not only of neighbours."""

    name = "tensor-fusion"
    fields = ("fusion_threshold_bytes", "tensor_groups")
    weight = 9.0

    def __init__(self, job: JobFacts) -> None:
        self.position = {tensor.name: i for i, tensor in enumerate(job.tensors)}
        super().__init__(job)

    def legal(self, plan: Plan) -> str | None:
        for group in plan.tensor_groups or ():
            for name in group:
                if name not in self.position:
                    return f"the trace has no tensor '{name}' (its first is '{self.job.tensors[0].name}')"
        return None

    def propose(self, plan: Plan, rng: np.random.Generator, hot: Mapping[str, float]) -> Plan:
        groups = plan.tensor_groups
        if groups is None or sum(map(len, groups)) != len(self.position):
            groups = self._groups(plan)
        if rng.random() < _AFRESH_SHARE:
            cuts = self.choice.grids["groups"]
            groups = cuts[rng.integers(len(cuts))]["tensor_groups"]
        elif len(self.position) > 1:
            for _ in range(rng.geometric(_MORE_MOVES)):
                groups = propose(groups, self.position, rng, hot)
        return self._with(plan, groups)

    def simplest(self, plan: Plan) -> Plan:
        """With exact groups the threshold has no effect: they are neither cut nor joined."""
        groups = None if plan.tensor_groups == self.job.values.get("tensor_groups") else plan.tensor_groups
        set_bytes = threshold = HorovodSettings.of(plan).fusion_threshold_bytes
        if groups is not None or threshold == self.job.values.get("fusion_threshold_bytes"):
            threshold = None
        if groups is plan.tensor_groups and threshold == set_bytes:
            return plan  # a new plan is checked anew
        return plan.changed(fusion_threshold_bytes=threshold, tensor_groups=groups)

    def detailed(self, plan: Plan) -> Plan:
        """Dynamic fusion as groups filled up to the threshold: what it does when it never waits."""
        return self._with(plan, self._groups(plan))

    def start(self, plan: Plan, number: int, count: int) -> Plan:
        counts = np.geomspace(1, min(MOST_GROUPS, len(self.position)), max(count, 1)).round().astype(int)
        return self._with(plan, contiguous_groups(self.job.tensors, int(counts[number])))

    @cached_property
    def choice(self) -> Choice:
        grids: dict[str, tuple[Mapping[str, object], ...]] = {RECORDED: ({},)}
        if self.job.values.get("tensor_groups") is None:  # groups of a recording cannot be undone by a threshold
            grids["threshold"] = _thresholds()
        most = min(MOST_GROUPS, len(self.job.tensors))
        counts = sorted({int(count) for count in np.geomspace(1, most, 20).round()})
        equal = [contiguous_groups(self.job.tensors, count) for count in counts]
        grids["groups"] = grid("tensor_groups", equal)
        tapered = [contiguous_groups(self.job.tensors, count, tapered=True) for count in counts]
        if others := [cut for cut in tapered if cut not in equal]:
            grids["tapered groups"] = grid("tensor_groups", others)
        return Choice(name=self.name, fields=self.fields, grids=grids)

    def _with(self, plan: Plan, groups: Grouping) -> Plan:
        return plan.changed(tensor_groups=groups, fusion_threshold_bytes=None)

    def _groups(self, plan: Plan) -> Grouping:
        groups = plan.tensor_groups
        threshold = HorovodSettings.of(plan).fusion_threshold_bytes
        if groups is None and threshold is None:
            groups = self.job.values.get("tensor_groups")
        if groups is None:
            recorded = self.job.values["fusion_threshold_bytes"]
            return threshold_groups(self.job.tensors, recorded if threshold is None else threshold)
        named = {name for group in groups for name in group}
        alone = tuple((tensor.name,) for tensor in self.job.tensors if tensor.name not in named)
        return canonical((*groups, *alone), self.position)


def _thresholds() -> tuple[Mapping[str, object], ...]:
    return grid("fusion_threshold_bytes", [0, *(round(2**power) for power in _LOG2_THRESHOLDS.tolist())])
