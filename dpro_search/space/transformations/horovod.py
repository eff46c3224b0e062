"""Changes that plans can make to the communication of a Horovod job.

They are tensor fusion (which gradients travel in one collective), the cycle (the shortest distance between two wake-ups of
Horovod's communication thread), and which algorithm of Open MPI adds up an all-reduce, by its size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from dpro_search.collect.trace import CommSettings, TensorInfo
from dpro_search.space.plan import Plan
from dpro_search.space.schemes import HorovodSettings
from dpro_search.space.tensorflow.fusion_moves import Grouping, canonical, contiguous_groups, propose, threshold_groups
from dpro_search.space.transformations._base import RECORDED, Choice, Knob, PlanningFacts, PlanSpace, Transformation, grid

if TYPE_CHECKING:
    from dpro_search.costmodel.collectives.all_reduce_choice import AllReduceChoice

MOST_GROUPS = 32  # of the starting points and outer knobs; moves may make more
_LOG2_THRESHOLDS = np.arange(16.0, 28.25, 0.5)  # 64 KiB to 256 MiB
_MORE_MOVES = 0.6  # parameter of the geometric distribution of the number of moves in a proposal
_AFRESH_SHARE = 0.05  # of the proposals cut the tensors anew: small moves hardly change how many groups there are
CYCLE_RANGE_US = (500.0, 50_000.0)
DEFAULT_CYCLE_US = 1000.0  # Horovod's own
_BACK_SHARE = 0.2  # of the moves go back to the recorded cycle time
HOROVOD_DEFAULT = Plan.of(fusion_threshold_bytes=128 * 2**20, cycle_time_us=DEFAULT_CYCLE_US)
_LOG2_BOUNDARIES = range(12, 25)  # 4 KiB to 16 MiB


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

    def __init__(self, job: PlanningFacts) -> None:
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


class CycleTime(Transformation):
    """Any time within `CYCLE_RANGE_US`, or the recorded one."""

    name = "cycle-time"
    fields = ("cycle_time_us",)

    def legal(self, plan: Plan) -> str | None:
        return None

    def propose(self, plan: Plan, rng: np.random.Generator, hot: Mapping[str, float]) -> Plan:
        cycle_us = HorovodSettings.of(plan).cycle_time_us
        if cycle_us is not None and rng.random() < _BACK_SHARE:
            return plan.changed(cycle_time_us=None)
        now_us = max(cycle_us or self.job.values.get("cycle_time_us") or DEFAULT_CYCLE_US, CYCLE_RANGE_US[0])
        return plan.changed(cycle_time_us=rounded_cycle_us(now_us * math.exp(rng.normal(0.0, 1.0))))

    def start(self, plan: Plan, number: int, count: int) -> Plan:
        """Alternately the library's default and the recorded one."""
        return self.simplest(plan.changed(cycle_time_us=DEFAULT_CYCLE_US)) if number % 2 == 0 else plan

    @cached_property
    def choice(self) -> Choice:
        low, high = CYCLE_RANGE_US
        values = sorted({rounded_cycle_us(us) for us in np.arange(low, high + 1, 10.0).tolist()})
        # Evenly spread over the logarithm, like the differences that matter.
        evenly_spaced_us = np.geomspace(low, high, 48)
        spread = sorted({min(values, key=lambda value: abs(math.log(value / us))) for us in evenly_spaced_us.tolist()})
        return Choice(name=self.name, fields=self.fields, grids={RECORDED: ({},), "set": grid("cycle_time_us", spread)})


def rounded_cycle_us(cycle_us: float) -> float:
    """A cycle time within range and with two significant digits: finer differences drown in the jitter of a wake-up."""
    low, high = CYCLE_RANGE_US
    return float(f"{min(max(cycle_us, low), high):.2g}")


def horovod_facts(tensors: Sequence[TensorInfo], recorded: CommSettings) -> PlanningFacts:
    """The facts of a Horovod job with recorded knobs."""
    values = {
        "fusion_threshold_bytes": recorded.fusion_threshold_bytes,
        "cycle_time_us": recorded.cycle_time_us,
        "tensor_groups": recorded.groups,
    }
    return PlanningFacts(name="a Horovod job", tensors=tuple(tensors), values=values)


def horovod_space(
    tensors: Sequence[TensorInfo], recorded: CommSettings, *, others: Sequence[Transformation] = (), exact_groups: bool = True
) -> PlanSpace:
    """The plans of a Horovod job: tensor fusion and cycle time, and what other transformations bring.

    `exact_groups`: whether its framework's Horovod lets a job name the tensors of a group.
    """
    job = horovod_facts(tensors, recorded)
    fusion, cycle = TensorFusion(job) if exact_groups else FusionThreshold(job), CycleTime(job)
    # Groups of a recording cannot be undone by a threshold, so that the defaults are no plan then.
    defaults = () if recorded.groups is not None else (cycle.simplest(fusion.simplest(HOROVOD_DEFAULT)),)
    return PlanSpace(job, (fusion, cycle, *others), [plan for plan in defaults if plan != Plan()])


class AllReduceAlgorithms(Knob):
    """One algorithm for all sizes, two with a boundary between them, or whichever is the fastest by itself.

    Parameters
    ----------
    known
        What they take.
    """

    name = "all-reduce"
    fields = ("allreduce_algorithms",)

    def __init__(self, job: PlanningFacts, known: AllReduceChoice) -> None:
        self.known = known
        super().__init__(job)

    def legal(self, plan: Plan) -> str | None:
        return self.known.refusal([algorithm for _, algorithm in HorovodSettings.of(plan).allreduce_algorithms or ()])

    @cached_property
    def choice(self) -> Choice:
        algorithms = self.known.algorithms
        alone = [((0, algorithm),) for algorithm in algorithms]
        grids: dict[str, tuple[Mapping[str, object], ...]] = {RECORDED: ({},), "one": grid("allreduce_algorithms", alone)}
        for small in algorithms:
            for large in algorithms:
                if small != large:
                    cuts = [((0, small), (2**power, large)) for power in _LOG2_BOUNDARIES]
                    grids[f"{small}, then {large}"] = grid("allreduce_algorithms", cuts)
        fastest = self.known.fastest()
        if all({"allreduce_algorithms": fastest} not in points for points in grids.values()):
            grids["fastest"] = grid("allreduce_algorithms", [fastest])
        return Choice(name=self.name, fields=self.fields, grids=grids)
