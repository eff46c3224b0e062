"""`ProfiledDdp`: a profiled DistributedDataParallel job, whose plans change its buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Self

import msgspec
import numpy as np

from dpro_search.collect.trace import EventKind, Ints, TensorInfo, Trace
from dpro_search.costmodel.powersgd import COMPRESSIONS as POWERSGD
from dpro_search.costmodel.powersgd import allocated_bytes, low_rank
from dpro_search.errors import InputError
from dpro_search.graph.gradient_events import Gradients, gradients_of
from dpro_search.kinds._diagnosis import Diagnosis, Table
from dpro_search.kinds._job import JobInScenario
from dpro_search.kinds._options import PlanOptions, refuse_compute
from dpro_search.kinds.recorded.cluster import StepsOnCluster
from dpro_search.kinds.recorded.diagnosis import ProfileDiagnosis, with_plans
from dpro_search.kinds.recorded.planned import PlannableJob
from dpro_search.machine import machine_constants
from dpro_search.quantities import size_text, time_text
from dpro_search.space.describe import describe
from dpro_search.space.plan import Plan
from dpro_search.space.programs.ddp_job import bucket_assignment
from dpro_search.space.recorded.buckets import BucketPlan, cut_at_gradients, explain_copies, with_buckets
from dpro_search.space.recorded.low_rank_buckets import with_low_rank_buckets
from dpro_search.space.recorded.memory import MemoryChange, buckets_changes
from dpro_search.space.recorded.step_edit import StepEdit
from dpro_search.space.scenario import Scale, Scenario
from dpro_search.space.schemes import DdpSettings
from dpro_search.space.tensor_groups import Group, TensorGroups
from dpro_search.space.transformations import (
    BucketSize,
    BucketViews,
    FirstBucketSize,
    PlanningFacts,
    PlanSpace,
    StaticGraph,
    Transformation,
)
from dpro_search.space.transformations.gradient_compression import ProfiledDdpCompression

_MIB = 2**20
_HALVES = ("fp16", "bf16")
_DEFAULTS = ([1 * _MIB, 25 * _MIB], [25 * _MIB])  # PyTorch's limits, where the script names none, and where it names 25
_QUESTIONS: dict[str, Plan] = {
    **{f"bucket_cap_bytes={mib}MiB": Plan.of(bucket_cap_bytes=mib * _MIB) for mib in (1, 5, 25, 100)},
    "gradient_as_bucket_view=1": Plan.of(gradient_as_bucket_view=True),
    "static_graph=1": Plan.of(static_graph=True),
    "compression=fp16": Plan(compression="fp16"),
    "compression=powersgd-1": Plan(compression="powersgd-1"),
}


class ProfiledDdp(PlannableJob):
    """Predictions of bucket sizes, of gradients that are views of buckets, and on request of halves and PowerSGD."""

    title = "a profiled DistributedDataParallel job"
    askable = ("bucket_cap_bytes", "first_bucket_bytes", "gradient_as_bucket_view", "static_graph", "compression")

    @classmethod
    def of(cls, trace: Trace, options: PlanOptions) -> Self:
        refuse_compute(options, trace, cls.askable)
        gradients = gradients_of(trace)
        if gradients is None:
            raise InputError("the ranks or the steps of the trace differ in the buckets that they all-reduce")
        return cls(trace, gradients, allow_lossy=options.allow_lossy)

    def __init__(self, trace: Trace, gradients: Gradients, *, allow_lossy: bool = False) -> None:
        super().__init__(trace, allow_lossy=allow_lossy)
        self.gradients = gradients
        self.tensors: tuple[TensorInfo, ...] = gradients.tensors

    def _plans_on(self, on_cluster: StepsOnCluster, *, allow_lossy: bool) -> PlanSpace:
        return _space(self.trace, self.gradients, allow_lossy=allow_lossy)

    def limits_bytes(self, plan: Plan) -> list[int]:
        """Those of `bucket_assignment`; none: buckets are as recorded. Raises `InputError` if the recorded limit is not known."""
        settings = DdpSettings.of(plan)
        if settings.first_bucket_bytes is None:
            return [] if settings.bucket_cap_bytes is None else [settings.bucket_cap_bytes]
        later = settings.bucket_cap_bytes or self._recorded_cap_bytes
        if later is None:
            raise InputError("plan: first_bucket_bytes: the size of the later buckets is not known; set bucket_cap_bytes too")
        return [settings.first_bucket_bytes, later]

    @cached_property
    def _recorded_cap_bytes(self) -> int | None:
        """The limit that makes the recorded buckets, PyTorch's own if that does."""
        sizes = np.bincount(self.gradients.bucket_of, weights=[tensor.size_bytes for tensor in self.tensors]).astype(int)
        for limits in (*_DEFAULTS, [int(sizes[:-1].min(initial=sizes.max()))]):
            if (bucket_assignment(self.tensors, limits) == self.gradients.bucket_of).all():
                return limits[-1]
        return None

    def bucket_of(self, plan: Plan) -> Ints:
        """Bucket of each gradient under a plan, in the order in which they become ready, [gradients]."""
        limits = self.limits_bytes(plan)
        return bucket_assignment(self.tensors, limits) if limits else self.gradients.bucket_of

    def _prepare(self, edit: StepEdit, step: int) -> None:
        cut_at_gradients(edit, self.gradients, step)
        explain_copies(edit, self.trace, self.gradients, step)

    def _rewriter(self, plan: Plan, on_cluster: StepsOnCluster) -> Callable[[StepEdit, int], None]:
        settings, gradients, prices = DdpSettings.of(plan), self.gradients, on_cluster.steps.prices
        changed = BucketPlan(
            bucket_of=self.bucket_of(plan),
            half=plan.compression in _HALVES,
            as_views=bool(settings.gradient_as_bucket_view),
            static=bool(settings.static_graph),
        )
        rank = POWERSGD.get(plan.compression or "")
        if rank is None:
            return lambda edit, step: with_buckets(edit, gradients, step, changed, prices)
        return lambda edit, step: with_low_rank_buckets(edit, gradients, step, changed, rank, prices)

    def _compute_error_us(self, plan: Plan) -> float:
        rank = POWERSGD.get(plan.compression or "")
        if rank is None:
            return 0.0
        stages_us = low_rank(self.tensors, self.bucket_of(plan), rank).stages_us
        return machine_constants().powersgd.uncertainty * float(stages_us.sum())

    def _memory_changes(self, plan: Plan, on_cluster: StepsOnCluster) -> list[MemoryChange] | None:
        as_views = bool(DdpSettings.of(plan).gradient_as_bucket_view)
        half, rank = plan.compression in _HALVES, POWERSGD.get(plan.compression or "")
        kept = 0 if rank is None else allocated_bytes(self.tensors, self.bucket_of(plan), rank)
        return buckets_changes(self.trace, self.gradients, as_views=as_views, half=half, hook_bytes=kept)

    def _least_bytes(self, plan: Plan, on_cluster: StepsOnCluster) -> int | None:
        if not self.gradients.known:
            return None
        copies = 2 if DdpSettings.of(plan).gradient_as_bucket_view else 3  # parameters, buckets, and gradients beside these
        return sum(tensor.size_bytes for tensor in self.tensors) * (copies + self._optimizer_copies)

    def _part_bytes(self) -> dict[int, int]:
        gradients = self.gradients
        sizes = np.bincount(gradients.bucket_of, weights=[tensor.size_bytes for tensor in gradients.tensors]) * gradients.share
        # Buckets whose gradients have no known size have no entry: all of them, or those posted after the last gradient.
        return {
            part: int(size) for step in gradients.steps.values() for part, size in zip(step.parts, sizes.tolist(), strict=False)
        }

    def assumed(self, on_cluster: StepsOnCluster, scales: Sequence[Scale]) -> Iterator[str]:
        yield f"gradients: {self.gradients.why}"
        yield from super().assumed(on_cluster, scales)

    def questions(self, scenario: Scenario) -> Mapping[str, Plan]:
        return _QUESTIONS

    def diagnose(self, here: JobInScenario) -> Diagnosis:
        return ProfiledDdpDiagnosis(buckets=self._buckets(), **with_plans(here, self._profile_diagnosis(here)))

    def _buckets(self) -> tuple[ProfiledBucket, ...]:
        events = self.trace.events
        buckets = []
        for bucket in range(self.gradients.buckets):
            parts = [each.parts[bucket] for each in self.gradients.steps.values()]
            buckets.append(
                ProfiledBucket(
                    bucket=bucket,
                    gradients=int((self.gradients.bucket_of == bucket).sum()) if self.gradients.known else None,
                    size_bytes=self._part_bytes().get(parts[0], int(events.size_bytes[parts[0]])),
                    transfer_us=float(np.mean(events.end_us[parts] - events.start_us[parts])),
                )
            )
        return tuple(buckets)

    def tensor_groups(self, here: JobInScenario, step: int | None, best: Plan | None) -> TensorGroups | None:
        numbers = {"as recorded": self.gradients.bucket_of}
        if best is not None and self.limits_bytes(best):
            numbers[describe(best)] = self.bucket_of(best)
        return TensorGroups(groups={name: self._groups(bucket_of) for name, bucket_of in numbers.items()}, noun="bucket")

    def _groups(self, bucket_of: Ints) -> list[Group]:
        groups = []
        for bucket in range(int(bucket_of.max(initial=-1)) + 1):
            tensors = [tensor for tensor, number in zip(self.tensors, bucket_of.tolist(), strict=True) if number == bucket]
            groups.append(Group(tensors=tuple(t.name for t in tensors), size_bytes=sum(t.size_bytes for t in tensors)))
        return groups


class ProfiledBucket(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded bucket: its gradients (None: not known) and its transfer with waits, mean over ranks and steps."""

    bucket: int
    gradients: int | None
    size_bytes: int = msgspec.field(name="bytes")
    transfer_us: float


class ProfiledDdpDiagnosis(ProfileDiagnosis, frozen=True, kw_only=True, omit_defaults=True):
    """The diagnosis of a profiled DistributedDataParallel job."""

    buckets: tuple[ProfiledBucket, ...]

    @property
    def tables(self) -> Sequence[Table]:
        rows = [
            (
                str(row.bucket),
                "unknown" if row.gradients is None else str(row.gradients),
                size_text(row.size_bytes),
                time_text(row.transfer_us),
            )
            for row in self.buckets
        ]
        columns = ("bucket", "gradients", "moved", "transfer, with waits")
        return (*super().tables, *([Table(title="buckets", columns=columns, rows=rows)] if rows else []))


def _space(trace: Trace, gradients: Gradients, *, allow_lossy: bool) -> PlanSpace:
    facts = PlanningFacts(name=ProfiledDdp.title, tensors=gradients.tensors)
    on_gpus = bool((trace.events.kind == EventKind.KERNEL).any())
    if not gradients.tensors:
        why = f"{gradients.why}; the sizes of the buckets were not recorded either: there is nothing to search"
        return PlanSpace(facts, [], why_empty=why)
    compressed = "the recorded job's gradients are halves already" if gradients.share < 1 else None
    no_copies = None if gradients.known and gradients.has_copies else (
        "the trace shows no copies of buckets to gradients: gradients are views of them already, or the profile did not mark them"
    )  # fmt: skip
    nothing_searched = None if gradients.searches else (
        "the recorded job searches no unused parameters (find_unused_parameters): nothing would change"
    )  # fmt: skip
    transformations: list[Transformation] = [
        BucketSize(facts),
        FirstBucketSize(facts),
        BucketViews(facts, refused=no_copies),
        StaticGraph(facts, refused=nothing_searched),
        ProfiledDdpCompression(
            facts, allow_lossy=allow_lossy, on_gpus=on_gpus, refused=compressed, unshaped=None if gradients.known else gradients.why
        ),
    ]
    return PlanSpace(facts, transformations)
