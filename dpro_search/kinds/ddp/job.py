"""`Ddp`: a DistributedDataParallel job, whose plans set buckets and, where that is asked for, halve them or change modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np

from dpro_search.cluster import Cluster
from dpro_search.collect.trace import Ints, Trace
from dpro_search.costmodel.collectives.ddp import fit_ddp_costs
from dpro_search.costmodel.collectives.horovod import CommCosts
from dpro_search.costmodel.powersgd import COMPRESSIONS as POWERSGD
from dpro_search.costmodel.powersgd import kept_bytes, low_rank
from dpro_search.costmodel.precision import named_model
from dpro_search.errors import InputError
from dpro_search.graph.ddp import DdpGraph, build_ddp_graph
from dpro_search.kinds._diagnosis import PredictedGain, Table
from dpro_search.kinds._gpu_cluster import GpuClusterJob, RankWorkload, members, steps_of_ddp
from dpro_search.kinds._job import JobInScenario
from dpro_search.kinds._measured import MeasuredStep
from dpro_search.kinds._options import PlanOptions, refuse_algorithms
from dpro_search.kinds._program import ProgramDiagnosis, ProgramJob, program_replay
from dpro_search.machine import machine_constants
from dpro_search.quantities import percent_text, size_text, time_text
from dpro_search.replay.ddp.timeline import DdpTimeline
from dpro_search.replay.path.findings import best_gain, path_findings
from dpro_search.replay.path.segments import PathSegment
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.describe import describe
from dpro_search.space.plan import Plan
from dpro_search.space.programs.ddp_job import DdpJob, apply_ddp, bucket_assignment
from dpro_search.space.scenario import Scenario
from dpro_search.space.schemes import DdpSettings
from dpro_search.space.tensor_groups import Group, TensorGroups
from dpro_search.space.transformations import (
    BucketSize,
    BucketViews,
    DdpCompression,
    FirstBucketSize,
    PlanningFacts,
    PlanSpace,
    Transformation,
)
from dpro_search.space.transformations.modules import (
    NOT_RECORDED,
    ModulePrecision,
    ModuleRecomputation,
    in_bfloat16,
    recomputed,
    saved_bytes,
    uncertainty_us,
    unpriced,
)
from dpro_search.space.transformations.precision import Ratios

DEFAULT_CAP_BYTES = 25 * 2**20  # PyTorch's, where the user names none
_COMPUTE = frozenset({"precision", "recomputation"})
_MIB = 2**20
_TRIED_MIB = (1, 5, 25, 100)
_BUCKETS = {f"bucket_cap_bytes={mib}MiB": Plan.of(bucket_cap_bytes=mib * _MIB) for mib in _TRIED_MIB}
_FIRST_BUCKETS = {f"first_bucket_bytes={mib}MiB": Plan.of(first_bucket_bytes=mib * _MIB) for mib in _TRIED_MIB}
_VIEWS = {"gradient_as_bucket_view=1": Plan.of(gradient_as_bucket_view=True)}
_HOOKS = {"compression=fp16": Plan(compression="fp16"), "compression=powersgd-1": Plan(compression="powersgd-1")}

_HOOK_SENTENCES = {
    "compression=fp16": "Compressing the buckets to half of their bytes (fp16_compress_hook) would gain {}, with what its casts "
    "cost; it changes the numbers.",
    "compression=powersgd-1": "Sending factors of rank 1 in place of gradients (PowerSGD) would gain {}, with what computing them "
    "costs; it changes the numbers more than halves do.",
}


class Ddp(ProgramJob[DdpGraph]):
    """A job whose plans set sizes of buckets, and on request compress them, or recompute modules or compute them in bfloat16.

    Parameters
    ----------
    trace
        The recording; None: the step was made up, and only predictions are available.
    ratios
        Time ratios of ops in bfloat16; None: those of the table that the options name.
    """

    title = "a DistributedDataParallel job"
    askable = ("bucket_cap_bytes", "first_bucket_bytes", "gradient_as_bucket_view", "compression")
    core_times = (
        *("ready_us", "backward_us", "copy_us", "after_us", "forward_post_us"),
        *("forward_from_us", "forward_us", "again_us", "backward_from_us", "backward_until_us"),
    )

    @classmethod
    def of(cls, trace: Trace, options: PlanOptions) -> Ddp:
        refuse_algorithms(options, trace)
        unknown = options.compute - _COMPUTE
        if unknown:
            raise InputError(
                f"{min(unknown)}: a DistributedDataParallel job has plans for buckets, precision and recomputation "
                "(and compressed gradients), not for that"
            )
        if options.compute and not trace.modules:
            raise InputError(f"{min(options.compute)}: {NOT_RECORDED}")
        if "precision" in options.compute:
            if options.memory_limit_bytes is not None:
                raise InputError(
                    "precision: what bfloat16 takes of a DistributedDataParallel job's memory is not known, so that no "
                    "memory limit can be kept with it; leave out one of them"
                )
            if (why := unpriced(trace.modules)) is not None:
                raise InputError(f"precision: {why}")
        return cls(cls.measured_step(trace), options, trace)

    def __init__(
        self,
        measured: MeasuredStep[DdpGraph],
        options: PlanOptions | None = None,
        trace: Trace | None = None,
        *,
        ratios: Ratios | None = None,
    ) -> None:
        super().__init__(measured, trace)
        self.options, self._ratios = options or PlanOptions(), ratios
        self._space = self.plans(Scenario())

    @staticmethod
    def _graph_of(trace: Trace, steps: tuple[int, ...] | None, *, with_profiler: bool) -> DdpGraph:
        return build_ddp_graph(trace, steps, with_profiler=with_profiler)

    @staticmethod
    def _costs_of(trace: Trace, graph: DdpGraph) -> CommCosts:
        return fit_ddp_costs(trace, graph)

    def _error_bar(self, costs: CommCosts) -> str:
        return "ddp"

    def _of_step(self, measured: MeasuredStep[DdpGraph]) -> Ddp:
        return Ddp(measured, self.options, self.trace, ratios=self._ratios)

    # The plans.

    def plans(self, scenario: Scenario) -> PlanSpace:
        options, graph = self.options.allowing(scenario.plan), self.measured.graph
        compute = options.compute & _COMPUTE
        if options.memory_limit_bytes is not None and graph.modules:
            compute |= {"recomputation"}
        views_already = None if graph.copy_us.any() else "the recorded job's gradients are views of the buckets already"
        transformations: list[Transformation] = [
            BucketSize(self._facts),
            FirstBucketSize(self._facts),
            # Not searched, so that searches of earlier versions go on: new ones try it among the job's questions.
            BucketViews(self._facts, refused=views_already, searched=False),
        ]
        if options.allow_lossy:
            transformations.append(DdpCompression(self._facts, graph.compression, graph.comm_hook))
        if "precision" in compute:
            transformations.append(ModulePrecision(self._facts, graph.modules, self.ratios))
        if "recomputation" in compute:
            transformations.append(ModuleRecomputation(self._facts, graph.modules))
        return PlanSpace(self._facts, transformations)

    @cached_property
    def _facts(self) -> PlanningFacts:
        return PlanningFacts(name=self.title, tensors=self.tensors)

    @cached_property
    def ratios(self) -> Ratios:
        """Time ratios of ops in bfloat16; raises `InputError` if the options name no table of them."""
        return self._ratios or named_model(self.options.precision_table, "torch")

    def refusal(self, plan: Plan) -> str | None:
        """Why the job's gradients cannot be compressed as a plan says; None: they can."""
        graph = self.measured.graph
        return DdpCompression(self._facts, graph.compression, graph.comm_hook).legal(plan)

    # A scenario.

    def _program(self, graph: DdpGraph, costs: CommCosts, cluster: ClusterSpec, plan: Plan) -> DdpJob:
        if plan.bfloat16_modules:
            graph = in_bfloat16(graph, plan.bfloat16_modules, self.ratios)
        if plan.recomputed_modules:
            graph = recomputed(graph, plan.recomputed_modules)
        return apply_ddp(
            graph,
            costs,
            self.measured.cluster,
            bucket_limits_bytes=self.limits_bytes(plan),
            cluster=cluster,
            compression=plan.compression,
            as_views=bool(DdpSettings.of(plan).gradient_as_bucket_view),
        )

    def limits_bytes(self, plan: Plan) -> list[int]:
        """The limits of `bucket_assignment` under a plan; none: buckets are as recorded.

        PyTorch makes the first bucket smaller than the others only where the user names no size; here it is named on its own.
        """
        settings = DdpSettings.of(plan)
        limits = [settings.first_bucket_bytes, settings.bucket_cap_bytes]
        if limits[0] is not None and limits[1] is None:
            limits[1] = self._recorded_cap_bytes
        return [limit for limit in limits if limit is not None]

    @property
    def _recorded_cap_bytes(self) -> int:
        """The recorded limit of later buckets."""
        mib = DEFAULT_CAP_BYTES / 2**20
        return round((mib if self.trace is None else self.trace.meta.number_knob("bucket_cap_mb", mib)) * 2**20)

    def _bucket_of(self, plan: Plan) -> Ints:
        limits = self.limits_bytes(plan)
        return bucket_assignment(self.tensors, limits) if limits else self.measured.graph.bucket_of

    def _memory_bytes(self, graph: DdpGraph, plan: Plan) -> int | None:
        """The measured peak without what the plan saves; None where the recording does not tell that, as of bfloat16.

        Halves of buckets live from the hook to their copy back: at most all at once, beside all else. What PowerSGD takes
        lives from step to step.
        """
        if plan.bfloat16_modules:
            return None
        saved, peak = saved_bytes(graph, plan.recomputed_modules or ()), self.measured.peak_rss_bytes
        return None if peak is None or saved is None else max(peak - saved, 0) + self._compression_bytes(plan)

    def _compression_bytes(self, plan: Plan) -> int:
        if plan.compression in POWERSGD:
            return kept_bytes(self.tensors, self._bucket_of(plan), POWERSGD[plan.compression])
        return sum(tensor.size_bytes for tensor in self.tensors if tensor.dtype == "float32") // 2 if plan.compression else 0

    def _uncertainty_us(self, graph: DdpGraph, plan: Plan) -> float:
        names = plan.bfloat16_modules or ()
        uncertainties = [uncertainty_us(graph, names, self.ratios)] if names else []
        if plan.compression in POWERSGD:
            factors = low_rank(self.tensors, self._bucket_of(plan), POWERSGD[plan.compression])
            uncertainties.append(machine_constants().powersgd.uncertainty * float(factors.stages_us.sum()))
        return float(np.linalg.norm(uncertainties))

    def on_gpus(self, cluster: Cluster, ranks: int | None = None) -> GpuClusterJob:
        graph = self.measured.graph
        steps = steps_of_ddp(graph)

        def workload(plan: Plan, machines: Cluster) -> RankWorkload:
            limits = self.limits_bytes(plan)
            return RankWorkload(
                steps=steps, groups=members(bucket_assignment(graph.tensors, limits) if limits else graph.bucket_of)
            )

        return GpuClusterJob(
            title=self.title,
            tensors=self.tensors,
            space=PlanSpace(self._facts, [BucketSize(self._facts)]),
            workload=workload,
            cluster=cluster,
            ranks=ranks,
            trace=self.trace,
            questions=_BUCKETS,
        )

    def questions(self, scenario: Scenario) -> Mapping[str, Plan]:
        hooks = {name: plan for name, plan in _HOOKS.items() if self.refusal(plan) is None}
        views = _VIEWS if self.measured.graph.copy_us.any() else {}
        return _BUCKETS | _FIRST_BUCKETS | views | hooks

    def findings(self, path: Sequence[PathSegment], gains: Sequence[PredictedGain], iteration_us: float) -> tuple[str, ...]:
        otherwise = "no other size of buckets would gain anything; a faster link or a compressing hook would"
        advice = best_gain(gains, ("bucket_cap_bytes", "first_bucket_bytes"), iteration_us, otherwise)
        return path_findings(path, gains, iteration_us, sentences=_HOOK_SENTENCES, advice=advice)

    def diagnose(self, here: JobInScenario) -> DdpDiagnosis:
        program = program_replay(here.lowered(Plan()))
        replayed = program.iterations()
        buckets = self._buckets(self.step(here.scenario).graph, replayed)
        return DdpDiagnosis(buckets=buckets, **self._diagnosis(here.scenario, replayed, program.timeline()))

    def _buckets(self, graph: DdpGraph, replayed: DdpTimeline) -> tuple[BucketFacts, ...]:
        moves_us = replayed.collective_us[:, len(graph.forward_bytes) :]
        shares = graph.ready_us / graph.backward_us[..., None]
        rows = []
        for bucket in range(int(graph.bucket_of.max()) + 1):
            of_bucket = graph.bucket_of == bucket
            rows.append(
                BucketFacts(
                    bucket=bucket,
                    gradients=int(of_bucket.sum()),
                    size_bytes=int(graph.gradient_bytes[of_bucket].sum()),
                    posted_after_pct=float(shares[..., of_bucket].max(axis=-1).mean()) * 100,
                    transfer_us=float((moves_us[:, bucket, 1] - moves_us[:, bucket, 0]).mean()),
                )
            )
        return tuple(rows)

    def tensor_groups(self, here: JobInScenario, step: int | None, best: Plan | None) -> TensorGroups | None:
        """The buckets: they follow from a size alone."""
        graph = self.measured.graph
        numbers = {"as recorded": graph.bucket_of}
        if best is not None and (limits := self.limits_bytes(best)):
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


class BucketFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded bucket: its gradients, the share of the backward pass before its post, and its transfer."""

    bucket: int
    gradients: int
    size_bytes: int = msgspec.field(name="bytes")
    posted_after_pct: float
    transfer_us: float


class DdpDiagnosis(ProgramDiagnosis, frozen=True, kw_only=True, omit_defaults=True):
    """The diagnosis of a DistributedDataParallel job; buckets are in the order of their all-reduces."""

    buckets: tuple[BucketFacts, ...]

    @property
    def collective_table(self) -> Table:
        rows = [
            (
                str(row.bucket),
                str(row.gradients),
                size_text(row.size_bytes),
                percent_text(row.posted_after_pct),
                time_text(row.transfer_us),
            )
            for row in self.buckets
        ]
        return Table(title="buckets", columns=("bucket", "gradients", "moved", "enqueued after", "transfer"), rows=rows)
