"""`FsdpPredictor`: predicts ways to shard and clusters of one recorded fully sharded job."""

from __future__ import annotations

from functools import cached_property

from dpro_search.collect.trace import Trace
from dpro_search.costmodel.collectives.ddp import fit_fsdp_costs
from dpro_search.graph.fsdp import FsdpGraph, Purpose, build_fsdp_graph
from dpro_search.kinds._program import ProgramPredictor
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.plan import Plan
from dpro_search.space.programs.ddp_job import LabelledJob
from dpro_search.space.programs.fsdp_job import apply_fsdp
from dpro_search.space.schemes import FsdpSettings
from dpro_search.space.transformations import JobFacts, PlanSpace
from dpro_search.space.transformations.sharding import KeepParameters, Prefetch

NAME = "a fully sharded job"


class FsdpPredictor(ProgramPredictor):
    """Predictions of plans, deterministic by seed: of `prefetch` and `reshard_after_forward`."""

    core_times = ("work_us", "after_us")
    error_bar = "fsdp"
    graph: FsdpGraph

    @classmethod
    def from_trace(
        cls, trace: Trace, *, steps: tuple[int, ...] | None = None, with_profiler: bool = False, seed: int = 0
    ) -> FsdpPredictor:
        """Build graph and costs from a trace: from the traced steps named, and with what the profiler added if asked."""
        graph = build_fsdp_graph(trace, steps, with_profiler=with_profiler)
        costs = fit_fsdp_costs(trace, graph)
        return FsdpPredictor(graph, costs, ClusterSpec.of(trace.meta), trace.meta.peak_rss_bytes, seed).of_recording(trace)

    @cached_property
    def space(self) -> PlanSpace:
        """The plans that the job can follow."""
        facts = JobFacts(name=NAME, tensors=self.tensors)
        return PlanSpace(facts, [Prefetch(facts), KeepParameters(facts, possible=self.regathered_bytes > 0)])

    @property
    def regathered_bytes(self) -> int:
        """Parameters that are given up after the forward pass and gathered again, as each rank holds them then."""
        return int(self.graph.size_bytes[self.graph.purpose == Purpose.BACKWARD].sum())

    def job(self, plan: Plan, cluster: ClusterSpec | None = None) -> LabelledJob:
        """The job under a plan; raises `InputError` for a plan that such a job cannot follow. See `apply_fsdp`."""
        self.space.check(plan)
        settings = FsdpSettings.of(plan)
        return apply_fsdp(
            self.graph,
            self.costs,
            self.cluster,
            prefetch=bool(settings.prefetch),
            reshard=settings.reshard_after_forward is None,
            cluster=cluster or self._wanted,
        )

    @property
    def _unlike(self) -> str:
        return "" if self.wanted_cluster.ranks == self.cluster.ranks else "this number of ranks"

    def _memory_bytes(self, plan: Plan) -> int | None:
        """Measured peak of the process; not known where units hold more parameters at a time."""
        return self._peak_rss_bytes if plan == Plan() else None
