"""`Predictor`: prices plans of one recorded job; what the search, the command line and the validation ask."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dpro_search.collect.trace import CommSettings, Floats, TensorInfo, Trace
from dpro_search.costmodel.horovod import CommCosts, fit_comm_costs
from dpro_search.errors import InputError
from dpro_search.graph.build import build_graph
from dpro_search.graph.dataflow import DataflowGraph
from dpro_search.replay.horovod.timeline import HorovodTimeline, replay_horovod
from dpro_search.space.apply import apply
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.plan import Plan, Prediction

# Half-width of the interval beside the noise of the steps, from docs/validation.md: nine in ten errors were smaller.
_MODEL_ERROR_RECORDED = 0.05
_MODEL_ERROR_CHANGED = 0.08


class Predictor:
    """Prices of plans, deterministic by seed.

    Attributes
    ----------
    tensors
        The communicated tensors, in the order in which they are posted.
    recorded
        The knobs of the recording.
    graph, costs, cluster
        What the predictions are made of.
    """

    def __init__(
        self,
        graph: DataflowGraph,
        costs: CommCosts,
        recorded: CommSettings,
        cluster: ClusterSpec,
        peak_rss_bytes: int | None = None,
        seed: int = 0,
    ) -> None:
        self.graph = graph
        self.costs = costs
        self.recorded = recorded
        self.cluster = cluster
        self.tensors: tuple[TensorInfo, ...] = graph.tensors
        self._peak_rss_bytes = peak_rss_bytes
        self._seed = seed
        self._wanted: ClusterSpec | None = None

    @staticmethod
    def from_trace(trace: Trace, *, steps: tuple[int, ...] | None = None, with_profiler: bool = False, seed: int = 0) -> Predictor:
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
        )

    def at(
        self, *, graph: DataflowGraph | None = None, costs: CommCosts | None = None, cluster: ClusterSpec | None = None
    ) -> Predictor:
        """A predictor of a changed job; a new cluster takes the place of the recorded one in every prediction."""
        changed = Predictor(graph or self.graph, costs or self.costs, self.recorded, self.cluster, self._peak_rss_bytes, self._seed)
        changed._wanted = cluster or self._wanted
        return changed

    def timeline(
        self, plan: Plan, cluster: ClusterSpec | None = None, *, log: bool = False, iterations: int = 32
    ) -> HorovodTimeline:
        """The replay of a plan."""
        graph = apply(plan, self.graph, self.costs, (self.recorded, self.cluster), cluster or self._wanted)
        return replay_horovod(graph, iterations=iterations, seed=self._seed, log=log)

    def predict(self, plan: Plan, cluster: ClusterSpec | None = None) -> Prediction:
        """The settled iteration time of a plan, with an interval."""
        timeline = self.timeline(plan, cluster)
        as_recorded = plan == Plan() and (cluster or self._wanted) in (None, self.cluster)
        centre = timeline.iteration_us
        # The median of a run varies with its steps; the model's own error comes on top.
        noise = 1.64 * 1.2533 * float(np.std(timeline.iterations_us)) / np.sqrt(len(timeline.iterations_us))
        model = (_MODEL_ERROR_RECORDED if as_recorded else _MODEL_ERROR_CHANGED) * centre
        half = float(np.hypot(noise, model))
        return Prediction(
            iteration_us=centre,
            interval_us=(centre - half, centre + half),
            breakdown_us=timeline.breakdown_us,
            peak_memory_bytes=self._memory_bytes(plan),
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
        """Iteration times of replays that differ in luck: the order of recorded steps, latencies and agreements, [samples].

        Parameters
        ----------
        seed
            The result depends on it, not on the number of threads.
        threads
            How many replay at a time; None: one for each processor that this process may use.
        on_sample
            Called after each replay, from the calling thread.

        Raises
        ------
        InputError
            `samples` or `threads` is below 1.
        """
        if samples < 1 or (threads is not None and threads < 1):
            raise InputError(f"samples and threads must be >= 1, not {samples} and {threads}")
        job = apply(plan, self.graph, self.costs, (self.recorded, self.cluster), cluster or self._wanted)
        children = np.random.SeedSequence(seed).spawn(samples)
        found = np.empty(samples)
        with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
            for number, timeline in enumerate(pool.map(lambda child: replay_horovod(job, seed=child), children)):
                found[number] = timeline.iteration_us
                on_sample()
        return found

    def _memory_bytes(self, plan: Plan) -> int | None:
        """Measured peak of the process, with the fusion buffer of the plan in place of the recorded one."""
        if self._peak_rss_bytes is None:
            return None
        return self._peak_rss_bytes + self._buffer_bytes(plan) - self._buffer_bytes(Plan())

    def _buffer_bytes(self, plan: Plan) -> int:
        """Pages of the fusion buffer that are touched: the largest collective that is possible."""
        sizes = {tensor.name: tensor.size_bytes for tensor in self.tensors}
        groups = plan.tensor_groups
        if groups is None and plan.fusion_threshold_bytes is None:
            groups = self.recorded.groups
        if groups is not None:
            return max((sum(sizes[name] for name in group) for group in groups if len(group) > 1), default=0)
        threshold = plan.fusion_threshold_bytes
        threshold = self.recorded.fusion_threshold_bytes if threshold is None else threshold
        return min(threshold, sum(sizes.values()))
