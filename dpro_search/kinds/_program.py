"""`ProgramPredictor`: what predictors of PyTorch jobs have in common, whose ranks' main threads run a program (`DdpJob`)."""

from __future__ import annotations

import copy
from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np

from dpro_search.costmodel.collectives.horovod import CommCosts
from dpro_search.errors import InputError
from dpro_search.kinds._predictor import JobPredictor
from dpro_search.replay.ddp.timeline import DdpTimeline, replay_ddp
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.plan import Plan
from dpro_search.space.programs.ddp_job import DdpJob


class ProgramPredictor(JobPredictor):
    """Predictions of plans, deterministic by seed.

    Attributes
    ----------
    tensors
        The gradients.
    graph, costs, cluster
        What the predictions are made of.
    """

    core_times: ClassVar[tuple[str, ...]]  # fields of the graph that hold core time, [samples, ranks, ...]

    def __init__(
        self, graph: Any, costs: CommCosts, cluster: ClusterSpec, peak_rss_bytes: int | None = None, seed: int = 0
    ) -> None:
        super().__init__(cluster, peak_rss_bytes, seed)
        self.graph = graph
        self.costs = costs
        self.tensors = graph.tensors

    def at(self, *, graph: Any = None, costs: CommCosts | None = None, cluster: ClusterSpec | None = None) -> Self:
        """A predictor of a changed job; a new cluster holds in every prediction."""
        changed = copy.copy(self)
        changed.graph, changed.costs, changed._wanted = graph or self.graph, costs or self.costs, cluster or self._wanted
        changed._changed = self._changed or graph is not None or costs is not None
        return changed

    def faster(self, factor: float, rank: int | None = None) -> Self:
        """A predictor of the job with all core times of a rank (of all ranks if None) multiplied by a factor.

        Raises `InputError` if the rank does not exist.
        """
        if rank is not None and not 0 <= rank < self.graph.ranks:
            raise InputError(f"rank {rank}: the trace has ranks 0 to {self.graph.ranks - 1}")
        scale = np.full(self.graph.ranks, factor) if rank is None else np.where(np.arange(self.graph.ranks) == rank, factor, 1.0)
        columns = {name: getattr(self.graph, name) for name in self.core_times}
        scaled = {name: values * scale.reshape((1, -1) + (1,) * (values.ndim - 2)) for name, values in columns.items()}
        return self.at(graph=replace(self.graph, **scaled))

    @staticmethod
    def cheaper(costs: CommCosts, factor: float) -> CommCosts:
        names = ("alpha_busy_us", "alpha_more_us", "alpha_tail_us", "beta_busy_us", "beta_tail_us", "cpu_us", "collective_cpu_us")
        return replace(costs, **{name: max(getattr(costs, name) * factor, 1e-9) for name in names})

    @abstractmethod
    def job(self, plan: Plan, cluster: ClusterSpec | None = None) -> DdpJob:
        """The job under a plan; raises `InputError` for a plan that it cannot follow."""

    def timeline(self, plan: Plan, cluster: ClusterSpec | None = None, *, iterations: int = 32) -> DdpTimeline:
        """The replay of a plan."""
        return replay_ddp(self.job(plan, cluster), iterations=iterations, seed=self._seed)

    def _replayed(self, job: DdpJob, seed: int | np.random.SeedSequence) -> DdpTimeline:
        return replay_ddp(job, seed=seed)
