"""`MeasuredJob`: a job that was recorded on processors: the graph of its step, and costs of communication fitted to the recording.

A scenario changes both before anything is replayed: the plan, then the cluster, then the speeds.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, Self, TypeVar

from dpro_search.cluster import Cluster
from dpro_search.collect.trace import EventKind, Trace
from dpro_search.costmodel.collectives.horovod import CommCosts
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import DataflowGraph
from dpro_search.graph.ddp import DdpGraph
from dpro_search.graph.fsdp import FsdpGraph
from dpro_search.graph.measured import ProfiledSteps
from dpro_search.kinds._answers import Term, cost_terms
from dpro_search.kinds._diagnosis import PredictedGain, sorted_gains
from dpro_search.kinds._gpu_cluster import GpuClusterJob
from dpro_search.kinds._job import Job, ranks_in_turn
from dpro_search.machine import Calibration, Device, calibration, machine_constants
from dpro_search.replay.lowered import Lowered
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import CLUSTER_SETTINGS, SCALES, Scale, Scenario

Graph = TypeVar("Graph", DataflowGraph, DdpGraph, FsdpGraph)


@dataclass(frozen=True, kw_only=True)
class MeasuredStep(Generic[Graph]):
    """A recorded step.

    Attributes
    ----------
    costs
        Costs of communication on `cluster`.
    peak_rss_bytes
        Peak memory of a process; None: not recorded.
    device
        Device on which the ranks compute.
    """

    graph: Graph
    costs: CommCosts
    cluster: ClusterSpec
    peak_rss_bytes: int | None = None
    device: Device = "cpu"


class MeasuredJob(Job, Generic[Graph]):
    """A recorded job.

    Attributes
    ----------
    measured
        The step as it was recorded, without the profiler's overhead.
    """

    trace: Trace
    settings: ClassVar[tuple[str, ...]] = (*CLUSTER_SETTINGS, *SCALES)
    abilities = ("samples", "steps")

    def __init__(self, measured: MeasuredStep[Graph], trace: Trace | None) -> None:
        if trace is not None:
            self.trace = trace
        self.measured: MeasuredStep[Graph] = measured
        self.tensors = measured.graph.tensors
        self._profiled_costs: dict[tuple[int, ...] | None, CommCosts] = {}

    # What a kind of job defines: how it is measured, and how speeds change it.

    @staticmethod
    @abstractmethod
    def _graph_of(trace: Trace, steps: tuple[int, ...] | None, *, with_profiler: bool) -> Graph:
        """The graph of a trace, from some profiled steps (None: all), with or without what the profiler added to them."""

    @staticmethod
    @abstractmethod
    def _costs_of(trace: Trace, graph: Graph) -> CommCosts:
        """Costs of communication, fitted to a trace and its graph."""

    @abstractmethod
    def _faster(self, graph: Graph, factor: float, rank: int | None) -> Graph:
        """The graph with all core times of a rank (None: of all ranks) multiplied by a factor."""

    @abstractmethod
    def _cheaper(self, costs: CommCosts, factor: float) -> CommCosts:
        """The costs multiplied by a factor, above the least that the engine takes."""

    @abstractmethod
    def _error_bar(self, costs: CommCosts) -> str:
        """Name of the kind's model error in the constants of a machine."""

    def _unlike(self, cluster: ClusterSpec) -> str:
        """Properties of the job on a cluster that the model error was not measured on; empty: none."""
        return ""

    @abstractmethod
    def _of_step(self, measured: MeasuredStep[Graph]) -> Self:
        """The job with the same options, of another measured step of its trace."""

    @classmethod
    def measured_step(cls, trace: Trace) -> MeasuredStep[Graph]:
        """The step of a trace without the profiler's overhead."""
        graph = cls._graph_of(trace, None, with_profiler=False)
        return MeasuredStep(
            graph=graph,
            costs=cls._costs_of(trace, graph),
            cluster=ClusterSpec.of(trace.meta),
            peak_rss_bytes=trace.meta.peak_rss_bytes,
            device=device_of(trace),
        )

    def _of_profiled(self, steps: ProfiledSteps) -> Self:
        """The job as it ran in some profiled steps."""
        graph = self._graph_of(self.trace, steps.replayed, with_profiler=True)
        if steps.fitted not in self._profiled_costs:
            same = steps.fitted == steps.replayed
            fitted_graph = graph if same else self._graph_of(self.trace, steps.fitted, with_profiler=True)
            self._profiled_costs[steps.fitted] = self._costs_of(self.trace, fitted_graph)
        return self._of_step(replace(self.measured, graph=graph, costs=self._profiled_costs[steps.fitted]))

    # A scenario.

    def lower(self, scenario: Scenario, *, steps: ProfiledSteps | None = None) -> Lowered:
        if steps is not None:
            return self._of_profiled(steps).lower(scenario)
        self.check_changes(scenario)
        if not scenario.cluster.on_gpus:
            return self._lower_on_processors(scenario)
        job = self.on_gpus(scenario.cluster.gpu_machines, scenario.cluster.ranks)
        return job.lower(Scenario(plan=scenario.plan, scales=scenario.scales))

    @abstractmethod
    def _lower_on_processors(self, scenario: Scenario) -> Lowered:
        """The job in a scenario in which the ranks run on processors."""

    @abstractmethod
    def on_gpus(self, cluster: Cluster, ranks: int | None = None) -> GpuClusterJob:
        """The job on the devices of a cluster of GPUs, where what was measured of communication does not hold.

        Parameters
        ----------
        ranks
            On the first devices; None: one on each.
        """

    def _cluster_in(self, scenario: Scenario) -> ClusterSpec:
        """The cluster of a scenario, with links as fast as its scales say."""
        cluster = scenario.cluster.applied(self.measured.cluster)
        for scale in scenario.scales:
            if scale.what == "bandwidth":
                cluster = cluster.faster(scale.factor, scale.text)
        return cluster

    def _scaled(self, step: MeasuredStep[Graph], scales: Sequence[Scale]) -> MeasuredStep[Graph]:
        """A step at other speeds; raises `InputError` for a rank that does not exist, or communication of a single one."""
        if not scales:
            return step
        graph, costs = step.graph, step.costs
        for scale in scales:
            if scale.what == "communication":
                if scale.rank is not None:
                    raise InputError(f"'{scale.text}': communication of all ranks can be scaled, not of one")
                costs = self._cheaper(costs, scale.factor)
            elif scale.what == "compute":
                scale.check_rank(graph.ranks)
                graph = self._faster(graph, scale.factor, scale.rank)
        return replace(step, graph=graph, costs=costs)

    def _calibration_on(self, cluster: ClusterSpec, costs: CommCosts) -> Calibration:
        unlike = self._unlike(cluster)
        return calibration(machine_constants(), self._error_bar(costs), self.measured.device, unlike=unlike)

    def _assumptions(self, scenario: Scenario, cluster: ClusterSpec) -> tuple[str, ...]:
        return (*scenario.cluster.left_out, *ranks_in_turn(cluster.ranks, self.measured.cluster.ranks))

    def _is_recorded(self, scenario: Scenario, cluster: ClusterSpec) -> bool:
        scaled = any(scale.what != "bandwidth" for scale in scenario.scales)
        return scenario.plan == Plan() and not scaled and cluster == self.measured.cluster

    def elsewhere(self, scenario: Scenario) -> tuple[Job, Scenario]:
        if not scenario.cluster.on_gpus:
            return self, scenario
        self.check_changes(scenario)
        job = self.on_gpus(scenario.cluster.gpu_machines, scenario.cluster.ranks)
        return job, Scenario(plan=scenario.plan, scales=scenario.scales)

    def gains(self, scenario: Scenario, plans: Mapping[str, Plan]) -> tuple[PredictedGain, ...]:
        """Iteration time and gain of the questions that every job raises and of plans by name, largest gain first."""
        recorded = self.lower(scenario)
        texts = ["compute=0.9", "communication=0"]
        texts += [f"rank{rank}.compute=0.9" for rank in range(self.measured.graph.ranks)]
        texts += ["bandwidth=2"] if recorded.cluster.rate_bps is not None else []
        scenarios = {text: scenario.then(Scenario(scales=(Scale.parse(text),))) for text in texts}
        scenarios |= {name: replace(scenario, plan=plan) for name, plan in plans.items()}
        base_us = recorded.replayable.iterations().iteration_us
        iteration_us = {name: self.lower(each).replayable.iterations().iteration_us for name, each in scenarios.items()}
        return sorted_gains(base_us, iteration_us)

    def step(self, scenario: Scenario) -> MeasuredStep[Graph]:
        """The measured step at the speeds of a scenario."""
        return self._scaled(self.measured, scenario.scales)

    def terms(self, scenario: Scenario) -> tuple[Term, ...]:
        return cost_terms(self.step(scenario).costs)


def device_of(trace: Trace) -> Device:
    """The devices on which the trace's computation ran. MXNet's profiler notes operators of a CPU as kernels of threads."""
    kernels = bool((trace.events.kind == EventKind.KERNEL).any())
    return "gpu" if kernels and trace.meta.framework != "mxnet" else "cpu"
