"""`Fsdp`: a fully sharded job, whose plans set how its units gather and keep their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from dpro_search.cluster import Cluster
from dpro_search.collect.trace import Trace
from dpro_search.costmodel.collectives.ddp import fit_fsdp_costs
from dpro_search.costmodel.collectives.horovod import CommCosts
from dpro_search.graph.fsdp import FsdpGraph, Purpose, build_fsdp_graph
from dpro_search.kinds._diagnosis import PredictedGain, Table
from dpro_search.kinds._gpu_cluster import GpuClusterJob, RankWorkload
from dpro_search.kinds._job import JobInScenario
from dpro_search.kinds._measured import MeasuredStep
from dpro_search.kinds._options import PlanOptions, refuse_compute
from dpro_search.kinds._program import ProgramDiagnosis, ProgramJob, program_replay
from dpro_search.quantities import size_text, time_text
from dpro_search.replay.path.findings import exposed_us, path_findings
from dpro_search.replay.path.segments import PathSegment
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.plan import Plan
from dpro_search.space.programs.ddp_job import LabelledJob
from dpro_search.space.programs.fsdp_job import apply_fsdp, fsdp_steps
from dpro_search.space.scenario import Scenario
from dpro_search.space.schemes import FsdpSettings
from dpro_search.space.transformations import PlanningFacts, PlanSpace
from dpro_search.space.transformations.sharding import KeepParameters, Prefetch

_QUESTIONS = {"prefetch=1": Plan.of(prefetch=True), "reshard_after_forward=0": Plan.of(reshard_after_forward=False)}


class Fsdp(ProgramJob[FsdpGraph]):
    """A job whose plans set prefetching and resharding.

    Parameters
    ----------
    trace
        The recording; None: the step was made up, and only predictions are available.
    """

    title = "a fully sharded job"
    askable = ("prefetch", "reshard_after_forward")
    core_times = ("work_us", "after_us")

    @classmethod
    def of(cls, trace: Trace, options: PlanOptions) -> Fsdp:
        refuse_compute(options, trace, cls.askable)
        return cls(cls.measured_step(trace), trace)

    def __init__(self, measured: MeasuredStep[FsdpGraph], trace: Trace | None = None) -> None:
        super().__init__(measured, trace)
        facts = PlanningFacts(name=self.title, tensors=self.tensors)
        self._space = PlanSpace(facts, [Prefetch(facts), KeepParameters(facts, possible=self.regathered_bytes > 0)])

    def plans(self, scenario: Scenario) -> PlanSpace:
        return self._space

    @staticmethod
    def _graph_of(trace: Trace, steps: tuple[int, ...] | None, *, with_profiler: bool) -> FsdpGraph:
        return build_fsdp_graph(trace, steps, with_profiler=with_profiler)

    @staticmethod
    def _costs_of(trace: Trace, graph: FsdpGraph) -> CommCosts:
        return fit_fsdp_costs(trace, graph)

    def _error_bar(self, costs: CommCosts) -> str:
        return "fsdp"

    def _unlike(self, cluster: ClusterSpec) -> str:
        return "" if cluster.ranks == self.measured.cluster.ranks else "this number of ranks"

    def _of_step(self, measured: MeasuredStep[FsdpGraph]) -> Fsdp:
        return Fsdp(measured, self.trace)

    @property
    def regathered_bytes(self) -> int:
        """Parameters that are given up after the forward pass and gathered again, as each rank holds them then."""
        graph = self.measured.graph
        return int(graph.size_bytes[graph.purpose == Purpose.BACKWARD].sum())

    def _program(self, graph: FsdpGraph, costs: CommCosts, cluster: ClusterSpec, plan: Plan) -> LabelledJob:
        settings = FsdpSettings.of(plan)
        return apply_fsdp(
            graph,
            costs,
            self.measured.cluster,
            prefetch=bool(settings.prefetch),
            reshard=settings.reshard_after_forward is None,
            cluster=cluster,
        )

    def _memory_bytes(self, graph: FsdpGraph, plan: Plan) -> int | None:
        """Measured peak of the process; not known where units hold more parameters at a time."""
        return self.measured.peak_rss_bytes if plan == Plan() else None

    def on_gpus(self, cluster: Cluster, ranks: int | None = None) -> GpuClusterJob:
        """Units as recorded, gathered and scattered in rings over all ranks."""

        def workload(plan: Plan, machines: Cluster) -> RankWorkload:
            settings = FsdpSettings.of(plan)
            reshard = settings.reshard_after_forward is None
            steps, collectives = fsdp_steps(self.measured.graph, prefetch=bool(settings.prefetch), reshard=reshard)
            alone = tuple((place,) for place in range(len(collectives)))
            return RankWorkload(steps=steps, groups=alone, collectives=collectives)

        return GpuClusterJob(
            title=self.title,
            tensors=self.tensors,
            space=self._space,
            workload=workload,
            cluster=cluster,
            ranks=ranks,
            trace=self.trace,
            questions=_QUESTIONS,
        )

    def questions(self, scenario: Scenario) -> Mapping[str, Plan]:
        return _QUESTIONS

    def findings(self, path: Sequence[PathSegment], gains: Sequence[PredictedGain], iteration_us: float) -> tuple[str, ...]:
        sentences = {
            "prefetch=1": "Gathering each unit's parameters while the unit before it computes (set_modules_to_forward_prefetch, "
            "with asynchronous all-gathers) would gain {}.",
            "reshard_after_forward=0": "Keeping parameters after the forward pass (reshard_after_forward=False) would gain {}, and "
            f"take up to {size_text(self.regathered_bytes)} more on each rank.",
        }
        gathers_us = sum(value for name, value in exposed_us(path).items() if name.startswith("all-gather"))
        return path_findings(path, gains, iteration_us, sentences=sentences, parts_us={"all-gathers": gathers_us})

    def diagnose(self, here: JobInScenario) -> FsdpDiagnosis:
        program = program_replay(here.lowered(Plan()))
        replayed, graph = program.iterations(), self.measured.graph
        transfer_us = (replayed.collective_us[..., 1] - replayed.collective_us[..., 0]).mean(axis=0).tolist()
        collectives = tuple(
            ShardedCollective(name=label, size_bytes=int(size_bytes), transfer_us=us)
            for label, size_bytes, us in zip(graph.labels, graph.size_bytes.tolist(), transfer_us, strict=True)
        )
        return FsdpDiagnosis(collectives=collectives, **self._diagnosis(here.scenario, replayed, program.timeline()))


class ShardedCollective(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded collective: its name, the bytes of the whole tensor, and its transfer."""

    name: str
    size_bytes: int = msgspec.field(name="bytes")
    transfer_us: float


class FsdpDiagnosis(ProgramDiagnosis, frozen=True, kw_only=True, omit_defaults=True):
    """The diagnosis of a fully sharded job; collectives are in the order in which they are enqueued."""

    collectives: tuple[ShardedCollective, ...]

    @property
    def collective_table(self) -> Table:
        rows = [(row.name, size_text(row.size_bytes), time_text(row.transfer_us)) for row in self.collectives]
        return Table(title="collectives", columns=("collective", "whole tensor", "transfer"), rows=rows)
