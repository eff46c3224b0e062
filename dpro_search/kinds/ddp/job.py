"""`Ddp`: a DistributedDataParallel job, whose plans set buckets and, where that is asked for, halve them or change modules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

import numpy as np

from dpro_search.cluster import Cluster
from dpro_search.collect.trace import Trace
from dpro_search.costmodel.precision import named_model
from dpro_search.errors import InputError
from dpro_search.kinds._at_scale import AtScale, RankWorkload, members, steps_of_ddp
from dpro_search.kinds._job import Job, Table
from dpro_search.kinds._options import PlanOptions, refuse_algorithms
from dpro_search.kinds._program_job import ProgramJob
from dpro_search.kinds.ddp.predictor import DdpPredictor
from dpro_search.space.describe import describe
from dpro_search.space.plan import Plan
from dpro_search.space.programs.ddp_job import bucket_assignment
from dpro_search.space.tensor_groups import Group, TensorGroups
from dpro_search.space.transformations import (
    BucketSize,
    BucketViews,
    DdpCompression,
    FirstBucketSize,
    JobFacts,
    PlanSpace,
    Transformation,
)
from dpro_search.space.transformations.modules import NOT_RECORDED, ModulePrecision, ModuleRecomputation, unpriced


class Ddp(ProgramJob[DdpPredictor]):
    """Predictions of bucket sizes, and on request of compressed buckets and of modules that are recomputed or in bfloat16.

    Parameters
    ----------
    compute
        Some of "precision", which needs the predictor to know ratios, and "recomputation".
    allow_lossy
        Also gradients in fp16 or by PowerSGD.
    """

    title = "a DistributedDataParallel job"
    askable = ("bucket_cap_bytes", "first_bucket_bytes", "gradient_as_bucket_view", "compression")
    predictor_type = DdpPredictor

    @classmethod
    def of(cls, trace: Trace, options: PlanOptions) -> Self:
        refuse_algorithms(options, trace)
        unknown = options.compute - {"precision", "recomputation"}
        if unknown:
            raise InputError(
                f"{min(unknown)}: a DistributedDataParallel job has plans for buckets, precision and recomputation "
                "(and compressed gradients), not for that"
            )
        if options.compute and not trace.modules:
            raise InputError(f"{min(options.compute)}: {NOT_RECORDED}")
        predictor, compute = DdpPredictor.from_trace(trace), set(options.compute)
        if "precision" in compute:
            if options.memory_limit_bytes is not None:
                raise InputError(
                    "precision: what bfloat16 takes of a DistributedDataParallel job's memory is not known, so that no "
                    "memory limit can be kept with it; leave out one of them"
                )
            if (why := unpriced(trace.modules)) is not None:
                raise InputError(f"precision: {why}")
            predictor = predictor.at(ratios=named_model(options.precision_table, "torch"))
        if options.memory_limit_bytes is not None and trace.modules:
            compute.add("recomputation")
        return cls(predictor, compute, allow_lossy=options.allow_lossy, trace=trace)

    def __init__(
        self, predictor: DdpPredictor, compute: Collection[str] = (), *, allow_lossy: bool = False, trace: Trace | None = None
    ) -> None:
        super().__init__(predictor, trace)
        self._compute, self._allow_lossy = tuple(compute), allow_lossy
        job, modules = JobFacts(name=self.title, tensors=predictor.tensors), predictor.graph.modules
        copied = bool(predictor.graph.copy_us.any())
        transformations: list[Transformation] = [
            BucketSize(job),
            FirstBucketSize(job),
            BucketViews(  # not searched, so that searches of earlier versions go on: new ones try it among the job's questions
                job, refused=None if copied else "the recorded job's gradients are views of the buckets already", searched=False
            ),
        ]
        if allow_lossy:
            transformations.append(DdpCompression(job, predictor.graph.compression, predictor.graph.comm_hook))
        if "precision" in compute:
            transformations.append(ModulePrecision(job, modules, predictor.ratios))
        if "recomputation" in compute:
            transformations.append(ModuleRecomputation(job, modules))
        self.space = PlanSpace(job, transformations)

    def allowing(self, plan: Plan, options: PlanOptions) -> Ddp:
        allowed = options.allowing(plan)
        predictor, compute = self.predictor, {*self._compute, *allowed.compute} & {"precision", "recomputation"}
        if "precision" in compute:
            predictor = predictor.at(ratios=named_model(options.precision_table, "torch"))
        return Ddp(predictor, compute, allow_lossy=self._allow_lossy or allowed.allow_lossy, trace=self.trace)

    def _with(self, predictor: DdpPredictor) -> Ddp:
        return Ddp(predictor, self._compute, allow_lossy=self._allow_lossy, trace=self.trace)

    def at_scale(self, cluster: Cluster, ranks: int | None = None) -> Job:
        from dpro_search.kinds.ddp.what_if import BUCKETS

        graph = self.predictor.graph
        steps = steps_of_ddp(graph)

        def workload(plan: Plan) -> RankWorkload:
            limits = self.predictor.limits_bytes(plan)
            return RankWorkload(
                steps=steps, groups=members(bucket_assignment(graph.tensors, limits) if limits else graph.bucket_of)
            )

        sizes = [each for each in self.space.transformations if isinstance(each, BucketSize)]
        return AtScale(
            title=self.title,
            tensors=self.tensors,
            space=PlanSpace(self.space.job, sizes),
            workload=workload,
            cluster=cluster,
            ranks=ranks,
            trace=self.trace,
            questions=BUCKETS,
        )

    @property
    def questions(self) -> Mapping[str, Plan]:
        from dpro_search.kinds.ddp.what_if import questions

        return questions(self.predictor)

    def diagnose(self) -> dict[str, Any]:
        from dpro_search.kinds.ddp.diagnosis import diagnosis

        return diagnosis(self.trace, self.predictor)

    def tables(self, facts: Mapping[str, Any]) -> list[Table]:
        from dpro_search.kinds.ddp.diagnosis import diagnosis_tables

        return diagnosis_tables(facts)

    def tensor_groups(self, step: int | None, best: Plan | None) -> TensorGroups | None:
        """The buckets: they follow from a size alone."""
        graph = self.predictor.graph
        numbers = {"as recorded": graph.bucket_of}
        if best is not None and (limits := self.predictor.limits_bytes(best)):
            numbers[describe(best)] = bucket_assignment(graph.tensors, limits)
        groups: dict[str, Sequence[Group]] = {}
        for setting, bucket_of in numbers.items():
            members = [np.flatnonzero(bucket_of == bucket).tolist() for bucket in range(int(bucket_of.max(initial=-1)) + 1)]
            groups[setting] = [
                Group(
                    tensors=tuple(graph.tensors[place].name for place in bucket_members),
                    size_bytes=round(float(graph.gradient_bytes[bucket_members].sum())),
                )
                for bucket_members in members
            ]
        return TensorGroups(groups=groups, noun="bucket")
