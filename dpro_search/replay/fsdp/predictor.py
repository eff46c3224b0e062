"""`FsdpPredictor`: prices ways to shard and clusters of one recorded fully sharded job; answers as `Predictor` does."""

from __future__ import annotations

from typing import Any, Self

from dpro_search.collect.trace import Trace
from dpro_search.costmodel.ddp import fit_fsdp_costs
from dpro_search.costmodel.horovod import CommCosts
from dpro_search.graph.fsdp import FsdpGraph, Purpose, build_fsdp_graph
from dpro_search.replay.ddp.program import ProgramPredictor
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.ddp_job import LabelledJob
from dpro_search.space.fsdp_job import apply_fsdp
from dpro_search.space.plan import Plan, refuse_unknown


class FsdpPredictor(ProgramPredictor):
    """Prices of the job, deterministic by seed. No field of a plan changes it; prefetching and resharding are set with `at`."""

    core_times = ("work_us", "after_us")
    _model_error = (0.05, 0.09)  # of DistributedDataParallel jobs, whose machine it is
    graph: FsdpGraph

    def __init__(
        self, graph: FsdpGraph, costs: CommCosts, cluster: ClusterSpec, peak_rss_bytes: int | None = None, seed: int = 0
    ) -> None:
        super().__init__(graph, costs, cluster, peak_rss_bytes, seed)
        self._prefetch, self._reshard = False, True

    @classmethod
    def from_trace(
        cls, trace: Trace, *, steps: tuple[int, ...] | None = None, with_profiler: bool = False, seed: int = 0
    ) -> FsdpPredictor:
        """Build graph and costs from a trace: from the traced steps named, and with what the profiler added if asked."""
        graph = build_fsdp_graph(trace, steps, with_profiler=with_profiler)
        return FsdpPredictor(graph, fit_fsdp_costs(trace, graph), ClusterSpec.of(trace.meta), trace.meta.peak_rss_bytes, seed)

    def at(
        self,
        *,
        graph: Any = None,
        costs: CommCosts | None = None,
        cluster: ClusterSpec | None = None,
        prefetch: bool | None = None,
        reshard: bool | None = None,
    ) -> Self:
        """A predictor of a changed job; what is changed holds in every prediction. See `apply_fsdp` for prefetch and reshard."""
        changed = super().at(graph=graph, costs=costs, cluster=cluster)
        changed._prefetch = self._prefetch if prefetch is None else prefetch
        changed._reshard = self._reshard if reshard is None else reshard
        return changed

    @property
    def regathered_bytes(self) -> int:
        """Parameters that are given up after the forward pass and gathered again, as each rank holds them then."""
        return int(self.graph.size_bytes[self.graph.purpose == Purpose.BACKWARD].sum())

    def job(self, plan: Plan, cluster: ClusterSpec | None = None) -> LabelledJob:
        """The job on a cluster. Raises `InputError` for a plan that changes anything."""
        refuse_unknown(plan, (), "a fully sharded job")
        return apply_fsdp(
            self.graph, self.costs, self.cluster, prefetch=self._prefetch, reshard=self._reshard, cluster=cluster or self._wanted
        )

    def _is_recorded(self, plan: Plan, cluster: ClusterSpec | None) -> bool:
        return not self._prefetch and self._reshard and super()._is_recorded(plan, cluster)

    def _memory_bytes(self, plan: Plan) -> int | None:
        """Measured peak of the process; not known where units hold more parameters at a time."""
        return self._peak_rss_bytes if self._reshard and not self._prefetch else None
