"""`Horovod`: a Horovod job, whose plans may also change its compute, its memory and its numbers.

A plan's changes of compute are made to the recorded step first. That is prepared once for all plans that differ in communication
only (`_Prepared`), which is what samplers change most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from dpro_search.cluster import Cluster
from dpro_search.collect.trace import CommSettings, Trace
from dpro_search.costmodel.collectives.horovod import CommCosts, fit_comm_costs
from dpro_search.costmodel.memory import peak_bytes
from dpro_search.errors import InputError
from dpro_search.graph.build import build_graph
from dpro_search.graph.core_time import polls
from dpro_search.graph.dataflow import DataflowGraph, RankProfile
from dpro_search.kinds._diagnosis import Diagnosis
from dpro_search.kinds._gpu_cluster import GpuClusterJob, RankWorkload
from dpro_search.kinds._job import JobInScenario, JobObjective
from dpro_search.kinds._measured import MeasuredJob, MeasuredStep
from dpro_search.kinds._options import PlanOptions
from dpro_search.kinds.horovod.collectives import horovod_exchanges, tensor_groups
from dpro_search.machine import Calibration
from dpro_search.replay.exchanges import Exchange
from dpro_search.replay.horovod.ops import iteration_ops
from dpro_search.replay.horovod.schedule import HorovodSchedule
from dpro_search.replay.lowered import ErrorModel, Lowered
from dpro_search.replay.outputs import measured_ops, perfetto_json
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.data_parallel import rank_step_of
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import CLUSTER_SETTINGS, SCALES, Scenario
from dpro_search.space.schemes import HorovodSettings
from dpro_search.space.tensorflow.apply_plan import HorovodJobs
from dpro_search.space.tensorflow.fusion_moves import threshold_groups
from dpro_search.space.tensorflow.op_level import typical_step
from dpro_search.space.transformations import PlanningFacts, PlanSpace, Transformation, horovod_facts, horovod_space
from dpro_search.space.transformations.compute import ComputeGraph, transformed
from dpro_search.space.transformations.gradients import Fp16Compression, GradientAccumulation
from dpro_search.space.transformations.horovod import AllReduceAlgorithms
from dpro_search.space.transformations.op_fusion import OpFusion
from dpro_search.space.transformations.precision import Precision
from dpro_search.space.transformations.recomputation import Recomputation

if TYPE_CHECKING:
    from dpro_search.costmodel.collectives.all_reduce_choice import AllReduceChoice
    from dpro_search.costmodel.collectives.model_file import CommunicationModel
    from dpro_search.space.tensor_groups import TensorGroups

_REMEMBERED = 64  # prepared scenarios that are kept: samplers change communication more often than compute


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A job in a scenario, but for what a plan changes of its communication.

    Attributes
    ----------
    step
        The step under the plan's changes of compute, at the speeds of the scenario.
    jobs
        The jobs that plans make of it.
    uncertainty_us
        Uncertainty of the length of the changed step.
    more_bytes
        Change of peak memory by changes of compute; None: not known.
    sizes
        Bytes of each tensor that is communicated.
    """

    step: MeasuredStep[DataflowGraph]
    jobs: HorovodJobs
    cluster: ClusterSpec
    calibration: Calibration
    as_recorded: bool
    uncertainty_us: float
    more_bytes: float | None
    sizes: Mapping[str, int]
    assumptions: tuple[str, ...]


class Horovod(MeasuredJob[DataflowGraph]):
    """A Horovod job.

    Parameters
    ----------
    recorded
        Its knobs in the recording.
    options
        Changes of plans beyond fusing tensors and setting the cycle.
    trace
        The recording; None: the step was made up, as TensorFlow would run it: only predictions are available.
    all_reduces
        Durations of all-reduces by other algorithms, which plans may choose then; None: not known.
    """

    title = "a Horovod job"
    askable = ("fusion_threshold_bytes", "cycle_time_us", "micro_batches", "compression")
    settings = ("groups", *CLUSTER_SETTINGS, *SCALES)
    recorded: CommSettings

    @classmethod
    def of(cls, trace: Trace, options: PlanOptions) -> Horovod:
        recorded = trace.horovod_settings  # first: a trace of another kind is refused with a line that says so
        return cls(cls.measured_step(trace), recorded, options, trace)

    def __init__(
        self,
        measured: MeasuredStep[DataflowGraph],
        recorded: CommSettings,
        options: PlanOptions | None = None,
        trace: Trace | None = None,
        *,
        all_reduces: CommunicationModel | None = None,
    ) -> None:
        super().__init__(measured, trace)
        self.recorded, self.options = recorded, options or PlanOptions()
        self._all_reduces = all_reduces or self._named_all_reduces()
        self._transformations: dict[PlanOptions, tuple[Transformation, ...]] = {}
        self._prepared: dict[Scenario, _Prepared] = {}
        self._space = self.plans(Scenario())

    @staticmethod
    def _graph_of(trace: Trace, steps: tuple[int, ...] | None, *, with_profiler: bool) -> DataflowGraph:
        return build_graph(trace, steps, with_profiler=with_profiler)

    @staticmethod
    def _costs_of(trace: Trace, graph: DataflowGraph) -> CommCosts:
        return fit_comm_costs(trace, graph)

    def _faster(self, graph: DataflowGraph, factor: float, rank: int | None) -> DataflowGraph:
        profiles = enumerate(graph.profiles)
        return replace(
            graph,
            profiles=tuple(_slower(profile, factor) if rank in (None, number) else profile for number, profile in profiles),
        )

    def _cheaper(self, costs: CommCosts, factor: float) -> CommCosts:
        scaled = {name: getattr(costs, name) * factor for name in CommCosts.__dataclass_fields__ if name != "residual_pct"}
        scaled["beta_busy_us"] = max(scaled["beta_busy_us"], 1e-9)
        scaled["beta_tail_us"] = max(scaled["beta_tail_us"], 1e-9)
        for name in ("negotiate_busy_us", "negotiate_idle_us"):
            scaled[name] = np.maximum(scaled[name], 1.0)
        return replace(costs, **scaled)

    def _error_bar(self, costs: CommCosts) -> str:
        return "horovod_mpi" if costs.poll_share else "horovod"

    def _of_step(self, measured: MeasuredStep[DataflowGraph]) -> Horovod:
        return Horovod(measured, self.recorded, self.options, self.trace, all_reduces=self._all_reduces)

    # The plans.

    @property
    def _framework(self) -> str:
        return "tensorflow" if self.trace is None else self.trace.meta.framework

    @property
    def names_groups(self) -> bool:
        """Whether the framework's Horovod lets a job name the tensors of a group."""
        return self._framework == "tensorflow"

    def plans(self, scenario: Scenario) -> PlanSpace:
        others = self._transformations_of(self.options.allowing(scenario.plan))
        if self._all_reduces is None and HorovodSettings.of(scenario.plan).allreduce_algorithms is not None:
            raise InputError(
                "plan: allreduce_algorithms: give --all-reduce-model, which 'dpro-search fit' makes of all-reduces measured on "
                "Open MPI"
            )
        if self._all_reduces is not None:
            choice = self.all_reduce_choice(self._cluster_in(scenario))
            others = (AllReduceAlgorithms(self._facts, choice), *others)
        exact_groups = self.names_groups or scenario.plan.tensor_groups is not None
        return horovod_space(self.tensors, self.recorded, others=others, exact_groups=exact_groups)

    @cached_property
    def _facts(self) -> PlanningFacts:
        return horovod_facts(self.tensors, self.recorded)

    @cached_property
    def _compute(self) -> ComputeGraph:
        return ComputeGraph(self.measured.graph)

    def _transformations_of(self, options: PlanOptions) -> tuple[Transformation, ...]:
        """Changes of compute, memory and numbers that options allow; made once, because some remember what ops take."""
        if options not in self._transformations:
            self._transformations[options] = tuple(self._new_transformations(options))
        return self._transformations[options]

    def _new_transformations(self, options: PlanOptions) -> list[Transformation]:
        requested, graph = set(options.compute), self.measured.graph
        if requested and self._framework != "tensorflow":
            raise InputError(f"{min(requested)}: only for TensorFlow's graphs, and this trace is of {self._framework}")
        if options.memory_limit_bytes is not None and graph.memory is not None:
            requested |= {"recomputation", "accumulation"}
        transformations: list[Transformation] = []
        precision = None
        if "precision" in requested:
            from dpro_search.costmodel.precision import named_model

            precision = Precision(self._facts, self._compute, named_model(options.precision_table, "tensorflow"))
        if "op-fusion" in requested:
            from dpro_search.costmodel.fused.clusters import ClusterCosts, default_model
            from dpro_search.costmodel.fused.model_file import FusionModel

            model = default_model() if options.cluster_model is None else FusionModel.load(options.cluster_model)
            # A job is planned as its first rank ran; a trace may hold the shapes of its tensors.
            recorded = None if self.trace is None or not self.trace.graphs else self.trace.graphs[self.trace.graph_of_rank[0]]
            costs = ClusterCosts(model, graph, recorded=recorded)
            transformations.append(OpFusion(self._facts, self._compute, costs, precision))
        if precision is not None:
            transformations.append(precision)
        if "recomputation" in requested:
            transformations.append(Recomputation(self._facts, self._compute))
        if "accumulation" in requested:
            transformations.append(GradientAccumulation(self._facts, self._compute, allow_lossy=options.allow_lossy))
        if options.allow_lossy:
            copy_us = self.measured.costs.copy_in_us
            transformations.append(Fp16Compression(self._facts, self._compute, copy_us_per_byte=copy_us, allow_lossy=True))
        return transformations

    def _named_all_reduces(self) -> CommunicationModel | None:
        """The model that the options name; raises `InputError` if the job uses another library than Open MPI."""
        if self.options.all_reduce_model is None:
            return None
        from dpro_search.costmodel.collectives.model_file import CommunicationModel

        if not polls(self.trace):
            raise InputError(
                "the all-reduce model is for jobs on Open MPI, and this one was recorded on Gloo, which has one algorithm"
            )
        return CommunicationModel.load(self.options.all_reduce_model)

    def all_reduce_choice(self, cluster: ClusterSpec) -> AllReduceChoice:
        """The model of all-reduces on a cluster, which must be known; raises `InputError` if none exists for the cluster."""
        from dpro_search.costmodel.collectives.all_reduce_choice import AllReduceChoice

        assert self._all_reduces is not None
        cores = len(set(cluster.cores))
        return AllReduceChoice.of(self._all_reduces, cluster.ranks, cluster.rate_bps, cores, cluster.ranks_per_host)

    # A scenario.

    def _lower_on_processors(self, scenario: Scenario) -> Lowered:
        plan = scenario.plan
        space = self._space if plan.settings.keys() <= set(self._space.fields) else self.plans(scenario)
        space.check(plan)
        compute = msgspec.structs.replace(plan, tensor_groups=None, scheme=None)
        prepared = self._prepared_for(replace(scenario, plan=compute), space)
        step, as_recorded = prepared.step, prepared.as_recorded and plan == Plan()
        return Lowered(
            replayable=HorovodSchedule(
                job=prepared.jobs.under(plan),
                graph=step.graph,
                costs=step.costs,
                trace=self.trace,
                as_recorded=as_recorded,
            ),
            error=ErrorModel(model=prepared.calibration.model_error[0 if as_recorded else 1], plan_us=prepared.uncertainty_us),
            as_recorded=as_recorded,
            cluster=prepared.cluster,
            calibration=prepared.calibration,
            assumptions=prepared.assumptions,
            peak_memory_bytes=self._memory_bytes(plan, prepared),
            unplaced=self.measured.graph.unplaced,
        )

    def _prepared_for(self, scenario: Scenario, space: PlanSpace) -> _Prepared:
        """A scenario whose plan changes compute only, as a space has it; the latest ones are kept."""
        prepared = self._prepared.pop(scenario, None) or self._prepare(scenario, space)
        self._prepared[scenario] = prepared  # the last one
        if len(self._prepared) > _REMEMBERED:
            del self._prepared[next(iter(self._prepared))]
        return prepared

    def _prepare(self, scenario: Scenario, space: PlanSpace) -> _Prepared:
        step, plan, uncertainty_us = self.measured, scenario.plan, 0.0
        more_bytes: float | None = 0.0
        if plan != Plan():
            graph, uncertainty_us = transformed(self._compute, plan, space.transformations)
            step, more_bytes = replace(step, graph=graph), self._more_bytes(plan)
        step = self._scaled(step, scenario.scales)
        cluster = self._cluster_in(scenario)
        choice = None if self._all_reduces is None else self.all_reduce_choice(cluster)
        return _Prepared(
            step=step,
            jobs=HorovodJobs(step.graph, step.costs, (self.recorded, self.measured.cluster), cluster, choice),
            cluster=cluster,
            calibration=self._calibration_on(cluster, step.costs),
            as_recorded=self._is_recorded(scenario, cluster),
            uncertainty_us=uncertainty_us,
            more_bytes=more_bytes,
            sizes={tensor.name: tensor.size_bytes for tensor in step.graph.tensors},
            assumptions=self._assumptions(scenario, cluster),
        )

    def on_gpus(self, cluster: Cluster, ranks: int | None = None) -> GpuClusterJob:
        """Groups are a plan's, or neighbours up to the threshold: what a cycle finds enqueued is not known of another cluster."""
        graph, recorded = self.measured.graph, self.recorded
        number = {tensor.name: place for place, tensor in enumerate(self.tensors)}
        steps = tuple(rank_step_of(graph, rank) for rank in range(graph.ranks))

        def workload(plan: Plan, machines: Cluster) -> RankWorkload:
            named, threshold = plan.tensor_groups, HorovodSettings.of(plan).fusion_threshold_bytes
            if named is None and threshold is None:
                named = recorded.groups
            if named is None:
                named = threshold_groups(self.tensors, recorded.fusion_threshold_bytes if threshold is None else threshold)
            together = tuple(tuple(number[name] for name in group) for group in named)
            alone = tuple((place,) for place in number.values() if not any(place in group for group in together))
            return RankWorkload(steps=steps, groups=(*together, *alone))

        fusion = [each for each in self._space.transformations if "fusion_threshold_bytes" in each.fields]
        space = PlanSpace(self._facts, fusion)
        return GpuClusterJob(
            title=self.title,
            tensors=self.tensors,
            space=space,
            workload=workload,
            cluster=cluster,
            ranks=ranks,
            trace=self.trace,
        )

    def perfetto(self, lowered: Lowered, *, recorded: bool) -> bytes:
        if recorded:
            timeline = lowered.replayable.timeline()
            measured = measured_ops(self.trace, typical_step(self.trace, self.measured.graph))
            return perfetto_json(timeline, measured=measured, first_iteration=timeline.iterations - 1)
        schedule = horovod_schedule(lowered)
        measured = measured_ops(self.trace, int(schedule.graph.steps[0]))
        return perfetto_json(iteration_ops(schedule.logged(iterations=8)), measured=measured)

    def questions(self, scenario: Scenario) -> Mapping[str, Plan]:
        from dpro_search.kinds.horovod.diagnosis import questions

        return questions()

    def diagnose(self, here: JobInScenario) -> Diagnosis:
        from dpro_search.kinds.horovod.diagnosis import diagnosis

        gains = self.gains(here.scenario, self.questions(here.scenario))
        return diagnosis(self.trace, horovod_schedule(here.lowered(Plan())), gains)

    def objective(self, here: JobInScenario) -> HorovodObjective:
        return HorovodObjective(here, self)

    def tensor_groups(self, here: JobInScenario, step: int | None, best: Plan | None) -> TensorGroups | None:
        return tensor_groups(self.trace, lambda plan: horovod_schedule(here.lowered(plan)), step, best)

    # Memory.

    def _memory_bytes(self, plan: Plan, prepared: _Prepared) -> int | None:
        """Measured peak of the process, with the plan's fusion buffer in place of the recorded one, and changes of compute."""
        peak = self.measured.peak_rss_bytes
        if peak is None or prepared.more_bytes is None:
            return None
        buffers_bytes = self._buffer_bytes(plan, prepared.sizes) - self._buffer_bytes(Plan(), prepared.sizes)
        return max(round(peak + buffers_bytes + prepared.more_bytes), 0)

    def _buffer_bytes(self, plan: Plan, sizes: Mapping[str, int]) -> int:
        """Pages of the fusion buffer that are touched: the largest collective that is possible."""
        groups = plan.tensor_groups
        threshold = HorovodSettings.of(plan).fusion_threshold_bytes
        if groups is None and threshold is None:
            groups = self.recorded.groups
        if groups is not None:
            return max((sum(sizes[name] for name in group) for group in groups if len(group) > 1), default=0)
        threshold = self.recorded.fusion_threshold_bytes if threshold is None else threshold
        return min(threshold, sum(sizes.values()))

    def _more_bytes(self, plan: Plan) -> float | None:
        """Change of peak memory by changes of compute, from liveness; None if it is not known."""
        if plan.recomputed_ops is None and plan.micro_batches is None and plan.bfloat16_ops is None:
            return 0.0
        step = self.measured.graph.memory
        if step is None:
            return None
        changed = peak_bytes(
            step, recomputed=plan.recomputed_ops or (), micro_batches=plan.micro_batches or 1, bfloat16=plan.bfloat16_ops or ()
        )
        return changed.bytes - self._recorded_bytes

    @cached_property
    def _recorded_bytes(self) -> float:
        step = self.measured.graph.memory
        assert step is not None, "only asked for where it is known"
        return peak_bytes(step).bytes


class HorovodObjective(JobObjective[Horovod]):
    """A Horovod job as a search asks it; the collectives of an iteration tell samplers which tensors to group."""

    @property
    def guides(self) -> bool:
        """Whether plans may group tensors by name, so that `exchanges` is worth asking."""
        return self.job.names_groups

    def exchanges(self, plan: Plan) -> tuple[Exchange, ...]:
        """The collectives of an iteration under a legal plan with exact groups, in the order of their posts."""
        return horovod_exchanges(horovod_schedule(self.here.lowered(plan)), plan)


def horovod_schedule(lowered: Lowered) -> HorovodSchedule:
    """The runtime's schedule of a job that `Horovod.lower` made."""
    assert isinstance(lowered.replayable, HorovodSchedule)
    return lowered.replayable


def _slower(profile: RankProfile, factor: float) -> RankProfile:
    """A rank whose core times are that many times as long."""
    return replace(
        profile,
        post_us=profile.post_us * factor,
        main_us=profile.main_us * factor,
        releases=tuple(replace(release, work_us=release.work_us * factor) for release in profile.releases),
    )
