"""`DdpPredictor`: predicts bucket sizes and clusters of one recorded DistributedDataParallel job."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from dpro_search.collect.trace import Ints, Trace
from dpro_search.costmodel.collectives.ddp import fit_ddp_costs
from dpro_search.costmodel.collectives.horovod import CommCosts
from dpro_search.costmodel.powersgd import COMPRESSIONS as POWERSGD
from dpro_search.costmodel.powersgd import kept_bytes, low_rank
from dpro_search.costmodel.precision import no_table
from dpro_search.errors import InputError
from dpro_search.graph.ddp import DdpGraph, build_ddp_graph
from dpro_search.kinds._program import ProgramPredictor
from dpro_search.machine import machine_constants
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.plan import Plan, refuse_unknown
from dpro_search.space.programs.ddp_job import DdpJob, apply_ddp, bucket_assignment
from dpro_search.space.schemes import DdpSettings
from dpro_search.space.transformations import DdpCompression, JobFacts
from dpro_search.space.transformations.modules import in_bfloat16, recomputed, saved_bytes, uncertainty_us
from dpro_search.space.transformations.precision import Ratios

DEFAULT_CAP_BYTES = 25 * 2**20  # PyTorch's, where the user names none
_NAME = "a DistributedDataParallel job"


class DdpPredictor(ProgramPredictor):
    """Predictions of plans, deterministic by seed: of bucket sizes (DDP's ``bucket_cap_mb``), compression, and modules.

    Parameters
    ----------
    ratios
        What bfloat16 does to ops; None: not known, and plans with modules in bfloat16 are refused.

    Attributes
    ----------
    tensors
        The gradients, in the order in which they become ready.
    graph, costs, cluster
        What the predictions are made of.
    """

    core_times = (
        *("ready_us", "backward_us", "copy_us", "after_us", "forward_post_us"),
        *("forward_from_us", "forward_us", "again_us", "backward_from_us", "backward_until_us"),
    )
    error_bar = "ddp"
    graph: DdpGraph

    def __init__(
        self,
        graph: DdpGraph,
        costs: CommCosts,
        cluster: ClusterSpec,
        peak_rss_bytes: int | None = None,
        seed: int = 0,
        bucket_cap_bytes: int = DEFAULT_CAP_BYTES,
        ratios: Ratios | None = None,
    ) -> None:
        super().__init__(graph, costs, cluster, peak_rss_bytes, seed)
        self._ratios = ratios
        self._bucket_cap_bytes = bucket_cap_bytes

    @property
    def ratios(self) -> Ratios:
        """Time ratios of ops in bfloat16; raises `InputError` if they are not known."""
        if self._ratios is None:
            raise InputError(f"bfloat16_modules: {no_table('torch')}")
        return self._ratios

    @classmethod
    def from_trace(
        cls, trace: Trace, *, steps: tuple[int, ...] | None = None, with_profiler: bool = False, seed: int = 0
    ) -> DdpPredictor:
        """Build graph and costs from a trace: from the traced steps named, and with what the profiler added if asked."""
        graph = build_ddp_graph(trace, steps, with_profiler=with_profiler)
        cap = round(trace.meta.number_knob("bucket_cap_mb", DEFAULT_CAP_BYTES / 2**20) * 2**20)
        costs = fit_ddp_costs(trace, graph)
        return DdpPredictor(graph, costs, ClusterSpec.of(trace.meta), trace.meta.peak_rss_bytes, seed, cap).of_recording(trace)

    def at(
        self,
        *,
        graph: Any = None,
        costs: CommCosts | None = None,
        cluster: ClusterSpec | None = None,
        ratios: Ratios | None = None,
    ) -> Self:
        """A predictor of a changed job; a new cluster or ratios hold in every prediction."""
        changed = super().at(graph=graph, costs=costs, cluster=cluster)
        changed._ratios = ratios or self._ratios
        return changed

    def job(self, plan: Plan, cluster: ClusterSpec | None = None) -> DdpJob:
        """The job under a plan. Raises `InputError` for a plan that DDP cannot follow."""
        known = (
            *("bucket_cap_bytes", "first_bucket_bytes", "gradient_as_bucket_view"),
            *("recomputed_modules", "bfloat16_modules", "compression"),
        )
        refuse_unknown(plan, known, _NAME)
        if (why := self.refusal(plan)) is not None:
            raise InputError(f"plan: {why}")
        graph = self.graph
        if plan.bfloat16_modules:
            graph = in_bfloat16(graph, plan.bfloat16_modules, self.ratios)
        if plan.recomputed_modules:
            graph = recomputed(graph, plan.recomputed_modules)
        return apply_ddp(
            graph,
            self.costs,
            self.cluster,
            bucket_limits_bytes=self.limits_bytes(plan),
            cluster=cluster or self._wanted,
            compression=plan.compression,
            as_views=bool(DdpSettings.of(plan).gradient_as_bucket_view),
        )

    def refusal(self, plan: Plan) -> str | None:
        """Why the job's gradients cannot be compressed as a plan says; None: they can."""
        job = JobFacts(name=_NAME, tensors=self.tensors)
        return DdpCompression(job, self.graph.compression, self.graph.comm_hook).legal(plan)

    def limits_bytes(self, plan: Plan) -> list[int]:
        """Those of `bucket_assignment`; none: buckets are as recorded.

        PyTorch makes the first bucket smaller than the others only where the user names no size; here it is named on its own.
        """
        settings = DdpSettings.of(plan)
        limits = [settings.first_bucket_bytes, settings.bucket_cap_bytes]
        if limits[0] is not None and limits[1] is None:
            limits[1] = self._bucket_cap_bytes
        return [limit for limit in limits if limit is not None]

    def _bucket_of(self, plan: Plan) -> Ints:
        limits = self.limits_bytes(plan)
        return bucket_assignment(self.tensors, limits) if limits else self.graph.bucket_of

    def _memory_bytes(self, plan: Plan) -> int | None:
        """The measured peak without what the plan saves; None where the recording does not tell that, as of bfloat16.

        Halves of buckets live from the hook to their copy back: at most all at once, beside all else. What PowerSGD takes
        lives from step to step.
        """
        if plan.bfloat16_modules:
            return None
        saved = saved_bytes(self.graph, plan.recomputed_modules or ())
        peak = super()._memory_bytes(plan)
        return None if peak is None or saved is None else max(peak - saved, 0) + self._compression_bytes(plan)

    def _compression_bytes(self, plan: Plan) -> int:
        if plan.compression in POWERSGD:
            return kept_bytes(self.tensors, self._bucket_of(plan), POWERSGD[plan.compression])
        return sum(tensor.size_bytes for tensor in self.tensors if tensor.dtype == "float32") // 2 if plan.compression else 0

    def _uncertainty_us(self, plan: Plan) -> float:
        names = plan.bfloat16_modules or ()
        uncertainties = [uncertainty_us(self.graph, names, self.ratios)] if names else []
        if plan.compression in POWERSGD:
            factors = low_rank(self.tensors, self._bucket_of(plan), POWERSGD[plan.compression])
            uncertainties.append(machine_constants().powersgd.uncertainty * float(factors.stages_us.sum()))
        return float(np.linalg.norm(uncertainties))
