"""Changes that plans can make to the communication of a Horovod job."""

from __future__ import annotations

from collections.abc import Sequence

from dpro_search.collect.trace import CommSettings, TensorInfo
from dpro_search.space.plan import Plan
from dpro_search.space.transformations._base import JobFacts, Transformation
from dpro_search.space.transformations._space import PlanSpace
from dpro_search.space.transformations.cycle_time import DEFAULT_CYCLE_US, CycleTime
from dpro_search.space.transformations.tensor_fusion import FusionThreshold, TensorFusion

HOROVOD_DEFAULT = Plan.of(fusion_threshold_bytes=128 * 2**20, cycle_time_us=DEFAULT_CYCLE_US)


def horovod_facts(tensors: Sequence[TensorInfo], recorded: CommSettings) -> JobFacts:
    """The facts of a Horovod job with recorded knobs."""
    values = {
        "fusion_threshold_bytes": recorded.fusion_threshold_bytes,
        "cycle_time_us": recorded.cycle_time_us,
        "tensor_groups": recorded.groups,
    }
    return JobFacts(name="a Horovod job", tensors=tuple(tensors), values=values)


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
