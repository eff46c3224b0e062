"""`Predictor`: predicts plans of one recorded Horovod job."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from dpro_search.collect.trace import CommSettings, Trace
from dpro_search.costmodel.collectives.horovod import CommCosts, fit_comm_costs
from dpro_search.graph.build import build_graph
from dpro_search.graph.dataflow import DataflowGraph, RankProfile
from dpro_search.kinds._predictor import JobPredictor
from dpro_search.replay.horovod.timeline import HorovodReplay, replay_horovod
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.plan import Plan
from dpro_search.space.schemes import HorovodSettings
from dpro_search.space.tensorflow.apply_plan import HorovodJobs
from dpro_search.space.tensorflow.horovod_job import HorovodJob

if TYPE_CHECKING:
    from dpro_search.costmodel.collectives.all_reduce_choice import AllReduceChoice
    from dpro_search.costmodel.collectives.model_file import CommunicationModel


class Predictor(JobPredictor):
    """Predictions of plans, deterministic by seed.

    Attributes
    ----------
    tensors
        The communicated tensors, in the order in which they are posted.
    recorded
        The knobs of the recording.
    graph, costs, cluster
        What the predictions are made of.
    all_reduces
        What all-reduces by other algorithms take, for plans that name some; None: not known.
    """

    def __init__(
        self,
        graph: DataflowGraph,
        costs: CommCosts,
        recorded: CommSettings,
        cluster: ClusterSpec,
        peak_rss_bytes: int | None = None,
        seed: int = 0,
        all_reduces: CommunicationModel | None = None,
    ) -> None:
        super().__init__(cluster, peak_rss_bytes, seed)
        self.all_reduces = all_reduces
        self.graph = graph
        self.costs = costs
        self.recorded = recorded
        self.tensors = graph.tensors
        self._sizes = {tensor.name: tensor.size_bytes for tensor in graph.tensors}
        self._jobs: dict[ClusterSpec, HorovodJobs] = {}

    @classmethod
    def from_trace(
        cls, trace: Trace, *, steps: tuple[int, ...] | None = None, with_profiler: bool = False, seed: int = 0
    ) -> Predictor:
        """Build graph and costs from a trace: from the traced steps named, and with what the profiler added if asked."""
        knobs = trace.horovod_settings  # first: a trace of another kind is refused with a line that says so
        graph = build_graph(trace, steps, with_profiler=with_profiler)
        return Predictor(
            graph,
            fit_comm_costs(trace, graph),
            knobs,
            ClusterSpec.of(trace.meta),
            trace.meta.peak_rss_bytes,
            seed,
        ).of_recording(trace)

    @property
    def error_bar(self) -> str:
        return "horovod_mpi" if self.costs.poll_share else "horovod"

    def at(
        self,
        *,
        graph: DataflowGraph | None = None,
        costs: CommCosts | None = None,
        cluster: ClusterSpec | None = None,
        all_reduces: CommunicationModel | None = None,
    ) -> Predictor:
        """A predictor of a changed job; a new cluster takes the place of the recorded one in every prediction."""
        changed = Predictor(
            graph or self.graph,
            costs or self.costs,
            self.recorded,
            self.cluster,
            self._peak_rss_bytes,
            self._seed,
            all_reduces or self.all_reduces,
        )
        changed._wanted = cluster or self._wanted
        changed._device = self._device
        changed._changed = self._changed or graph is not None or costs is not None
        return changed

    def faster(self, factor: float, rank: int | None = None) -> Predictor:
        profiles = enumerate(self.graph.profiles)
        scaled = tuple(_scaled(profile, factor) if rank in (None, number) else profile for number, profile in profiles)
        return self.at(graph=replace(self.graph, profiles=scaled))

    @staticmethod
    def cheaper(costs: CommCosts, factor: float) -> CommCosts:
        scaled = {name: getattr(costs, name) * factor for name in CommCosts.__dataclass_fields__ if name != "residual_pct"}
        scaled["beta_busy_us"] = max(scaled["beta_busy_us"], 1e-9)
        scaled["beta_tail_us"] = max(scaled["beta_tail_us"], 1e-9)
        for name in ("negotiate_busy_us", "negotiate_idle_us"):
            scaled[name] = np.maximum(scaled[name], 1.0)
        return replace(costs, **scaled)

    def job(self, plan: Plan, cluster: ClusterSpec | None = None) -> HorovodJob:
        """The job under a plan."""
        where = cluster or self.wanted_cluster
        if where not in self._jobs:
            choice = None if self.all_reduces is None else self.all_reduce_choice(where)
            self._jobs[where] = HorovodJobs(self.graph, self.costs, (self.recorded, self.cluster), where, choice)
        return self._jobs[where].under(plan)

    def all_reduce_choice(self, cluster: ClusterSpec | None = None) -> AllReduceChoice:
        """The model of all-reduces on a cluster, which must be known; raises `InputError` if there is none for the cluster."""
        from dpro_search.costmodel.collectives.all_reduce_choice import AllReduceChoice

        assert self.all_reduces is not None
        where = cluster or self.wanted_cluster
        return AllReduceChoice.of(self.all_reduces, where.ranks, where.rate_bps, len(set(where.cores)), where.ranks_per_host)

    def timeline(self, plan: Plan, cluster: ClusterSpec | None = None, *, log: bool = False, iterations: int = 32) -> HorovodReplay:
        """The replay of a plan."""
        return replay_horovod(self.job(plan, cluster), iterations=iterations, seed=self._seed, log=log)

    def _replayed(self, job: HorovodJob, seed: int | np.random.SeedSequence) -> HorovodReplay:
        return replay_horovod(job, seed=seed)

    def _memory_bytes(self, plan: Plan) -> int | None:
        """Measured peak of the process, with the fusion buffer of the plan in place of the recorded one."""
        if self._peak_rss_bytes is None:
            return None
        return self._peak_rss_bytes + self._buffer_bytes(plan) - self._recorded_buffer_bytes

    @cached_property
    def _recorded_buffer_bytes(self) -> int:
        return self._buffer_bytes(Plan())

    def _buffer_bytes(self, plan: Plan) -> int:
        """Pages of the fusion buffer that are touched: the largest collective that is possible."""
        groups = plan.tensor_groups
        threshold = HorovodSettings.of(plan).fusion_threshold_bytes
        if groups is None and threshold is None:
            groups = self.recorded.groups
        if groups is not None:
            return max((sum(self._sizes[name] for name in group) for group in groups if len(group) > 1), default=0)
        threshold = self.recorded.fusion_threshold_bytes if threshold is None else threshold
        return min(threshold, sum(self._sizes.values()))


def _scaled(profile: RankProfile, factor: float) -> RankProfile:
    return replace(
        profile,
        post_us=profile.post_us * factor,
        main_us=profile.main_us * factor,
        releases=tuple(replace(release, work_us=release.work_us * factor) for release in profile.releases),
    )
