"""`DdpPredictor`: prices bucket sizes and clusters of one recorded DistributedDataParallel job; answers as `Predictor` does."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from dpro_search.collect.trace import Floats, TensorInfo, Trace
from dpro_search.costmodel.ddp import fit_ddp_costs
from dpro_search.costmodel.horovod import CommCosts
from dpro_search.errors import InputError
from dpro_search.graph.ddp import DdpGraph, build_ddp_graph
from dpro_search.replay.ddp.timeline import DdpTimeline, replay_ddp
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.ddp_job import DdpJob, apply_ddp
from dpro_search.space.plan import Plan, Prediction

# Half-width of the interval beside the noise of the steps: nine in ten errors were smaller where plans were measured.
_MODEL_ERROR_RECORDED = 0.05
_MODEL_ERROR_CHANGED = 0.09


class DdpPredictor:
    """Prices of plans, deterministic by seed. A plan's `fusion_threshold_bytes` is DDP's ``bucket_cap_mb``.

    Attributes
    ----------
    tensors
        The gradients, in the order in which they become ready.
    graph, costs, cluster
        What the predictions are made of.
    """

    def __init__(
        self, graph: DdpGraph, costs: CommCosts, cluster: ClusterSpec, peak_rss_bytes: int | None = None, seed: int = 0
    ) -> None:
        self.graph = graph
        self.costs = costs
        self.cluster = cluster
        self.tensors: tuple[TensorInfo, ...] = graph.tensors
        self._peak_rss_bytes = peak_rss_bytes
        self._seed = seed
        self._wanted: ClusterSpec | None = None

    @staticmethod
    def from_trace(
        trace: Trace, *, steps: tuple[int, ...] | None = None, with_profiler: bool = False, seed: int = 0
    ) -> DdpPredictor:
        """Build graph and costs from a trace: from the traced steps named, and with what the profiler added if asked."""
        graph = build_ddp_graph(trace, steps, with_profiler=with_profiler)
        return DdpPredictor(graph, fit_ddp_costs(trace, graph), ClusterSpec.of(trace.meta), trace.meta.peak_rss_bytes, seed)

    def at(
        self, *, graph: DdpGraph | None = None, costs: CommCosts | None = None, cluster: ClusterSpec | None = None
    ) -> DdpPredictor:
        """A predictor of a changed job; a new cluster takes the place of the recorded one in every prediction."""
        changed = DdpPredictor(graph or self.graph, costs or self.costs, self.cluster, self._peak_rss_bytes, self._seed)
        changed._wanted = cluster or self._wanted
        return changed

    def faster(self, factor: float, rank: int | None = None) -> DdpPredictor:
        """A predictor of the job with all core times of a rank (of all ranks if None) multiplied by a factor.

        Raises `InputError` if the rank does not exist.
        """
        if rank is not None and not 0 <= rank < self.graph.ranks:
            raise InputError(f"rank {rank}: the trace has ranks 0 to {self.graph.ranks - 1}")
        scale = np.full(self.graph.ranks, factor) if rank is None else np.where(np.arange(self.graph.ranks) == rank, factor, 1.0)
        names = ("ready_us", "backward_us", "copy_us", "after_us", "forward_post_us")
        columns = {name: getattr(self.graph, name) for name in names}
        scaled = {name: values * scale.reshape((1, -1) + (1,) * (values.ndim - 2)) for name, values in columns.items()}
        return self.at(graph=replace(self.graph, **scaled))

    def job(self, plan: Plan, cluster: ClusterSpec | None = None) -> DdpJob:
        """The job under a plan. Raises `InputError` for a plan that DDP cannot follow."""
        if plan.cycle_time_us is not None or plan.tensor_groups is not None:
            raise InputError("plan: DistributedDataParallel has no cycle time and no exact groups; set its bucket size")
        cluster = cluster or self._wanted
        return apply_ddp(self.graph, self.costs, self.cluster, bucket_cap_bytes=plan.fusion_threshold_bytes, cluster=cluster)

    def timeline(self, plan: Plan, cluster: ClusterSpec | None = None, *, iterations: int = 32) -> DdpTimeline:
        """The replay of a plan."""
        return replay_ddp(self.job(plan, cluster), iterations=iterations, seed=self._seed)

    def predict(self, plan: Plan, cluster: ClusterSpec | None = None) -> Prediction:
        """The settled iteration time of a plan, with an interval."""
        timeline = self.timeline(plan, cluster)
        as_recorded = plan == Plan() and (cluster or self._wanted) in (None, self.cluster)
        centre = timeline.iteration_us
        # The median of a run varies with its steps; the model's own error comes on top.
        noise = 1.64 * 1.2533 * float(np.std(timeline.iterations_us)) / np.sqrt(len(timeline.iterations_us))
        half = float(np.hypot(noise, (_MODEL_ERROR_RECORDED if as_recorded else _MODEL_ERROR_CHANGED) * centre))
        return Prediction(
            iteration_us=centre,
            interval_us=(centre - half, centre + half),
            breakdown_us=timeline.breakdown_us,
            peak_memory_bytes=self._peak_rss_bytes,  # all gradients have a place in some bucket, whatever its size
            source="recorded" if as_recorded else "extrapolated",
            settled=timeline.settled,
        )

    def sampled(
        self,
        plan: Plan,
        cluster: ClusterSpec | None = None,
        *,
        samples: int,
        seed: int = 0,
        threads: int | None = None,
        on_sample: Callable[[], None] = lambda: None,
    ) -> Floats:
        """Iteration times of replays that differ in luck: the order of recorded steps, and latencies, [samples].

        Parameters and errors are those of `Predictor.sampled`.
        """
        if samples < 1 or (threads is not None and threads < 1):
            raise InputError(f"samples and threads must be >= 1, not {samples} and {threads}")
        job = self.job(plan, cluster)
        children = np.random.SeedSequence(seed).spawn(samples)
        found = np.empty(samples)
        with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
            for number, timeline in enumerate(pool.map(lambda child: replay_ddp(job, seed=child), children)):
                found[number] = timeline.iteration_us
                on_sample()
        return found
