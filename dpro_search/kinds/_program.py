"""`ProgramJob`: a PyTorch job recorded on processors whose ranks' main threads run a program (`DdpJob`), and its diagnosis."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from dpro_search.costmodel.collectives.horovod import CommCosts
from dpro_search.graph.measured import measured_iteration_us
from dpro_search.kinds._diagnosis import Diagnosis, PredictedGain, Table, critical_ops, gain_table, rank_facts, rank_table
from dpro_search.kinds._job import JobInScenario
from dpro_search.kinds._measured import Graph, MeasuredJob
from dpro_search.quantities import time_text
from dpro_search.replay.ddp.program_replay import ProgramReplay
from dpro_search.replay.ddp.timeline import DdpTimeline
from dpro_search.replay.lowered import ErrorModel, Lowered
from dpro_search.replay.outputs import measured_ops, perfetto_json
from dpro_search.replay.path.segments import PathSegment, path_segments
from dpro_search.replay.timeline import Timeline
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.plan import Plan
from dpro_search.space.programs.ddp_job import DdpJob
from dpro_search.space.scenario import Scenario
from dpro_search.space.transformations import PlanSpace

_SCALED = ("alpha_busy_us", "alpha_more_us", "alpha_tail_us", "beta_busy_us", "beta_tail_us", "cpu_us", "collective_cpu_us")
_LEAST = 1e-9  # of a cost


class ProgramJob(MeasuredJob[Graph]):
    """A job that becomes a program under a plan."""

    _space: PlanSpace  # The plans in the recorded setting.
    core_times: ClassVar[tuple[str, ...]]  # Fields of the graph that hold core time, [samples, ranks, ...].

    @abstractmethod
    def _program(self, graph: Graph, costs: CommCosts, cluster: ClusterSpec, plan: Plan) -> DdpJob:
        """The program of a step under a legal plan on a cluster."""

    @abstractmethod
    def _memory_bytes(self, graph: Graph, plan: Plan) -> int | None:
        """Peak memory of a process; None: not known."""

    def _uncertainty_us(self, graph: Graph, plan: Plan) -> float:
        """Uncertainty of the costs of changes that the plan makes."""
        return 0.0

    def _cheaper(self, costs: CommCosts, factor: float) -> CommCosts:
        return replace(costs, **{name: max(getattr(costs, name) * factor, _LEAST) for name in _SCALED})

    def _faster(self, graph: Graph, factor: float, rank: int | None) -> Graph:
        scale = np.full(graph.ranks, factor) if rank is None else np.where(np.arange(graph.ranks) == rank, factor, 1.0)
        columns = {name: getattr(graph, name) for name in self.core_times}
        return replace(
            graph, **{name: values * scale.reshape((1, -1) + (1,) * (values.ndim - 2)) for name, values in columns.items()}
        )

    def _lower_on_processors(self, scenario: Scenario) -> Lowered:
        plan = scenario.plan
        space = self._space if plan.settings.keys() <= set(self._space.fields) else self.plans(scenario)
        space.check(plan)
        step, cluster = self._scaled(self.measured, scenario.scales), self._cluster_in(scenario)
        known = self._calibration_on(cluster, step.costs)
        as_recorded = self._is_recorded(scenario, cluster)
        program = self._program(step.graph, step.costs, cluster, plan)
        return Lowered(
            replayable=ProgramReplay(job=program, op_count=len(step.graph)),
            error=ErrorModel(model=known.model_error[0 if as_recorded else 1], plan_us=self._uncertainty_us(step.graph, plan)),
            as_recorded=as_recorded,
            cluster=cluster,
            calibration=known,
            assumptions=self._assumptions(scenario, cluster),
            peak_memory_bytes=self._memory_bytes(step.graph, plan),
        )

    def perfetto(self, lowered: Lowered, *, recorded: bool) -> bytes:
        timeline, measured = lowered.replayable.timeline(), None
        if recorded:
            replayed = program_replay(lowered).iterations()
            measured = measured_ops(self.trace, int(self.measured.graph.steps[replayed.sample_of[replayed.typical]]))
        return perfetto_json(timeline, measured=measured, first_iteration=timeline.iterations - 1)

    # The diagnosis.

    @abstractmethod
    def findings(self, path: Sequence[PathSegment], gains: Sequence[PredictedGain], iteration_us: float) -> tuple[str, ...]:
        """Sentences with numbers and the setting to change, the costliest first."""

    @abstractmethod
    def diagnose(self, here: JobInScenario) -> ProgramDiagnosis:
        """The diagnosis, with facts about each recorded collective."""

    def _diagnosis(self, scenario: Scenario, replayed: DdpTimeline, ops: Timeline) -> dict[str, Any]:  # Any: types differ
        """The fields that the diagnosis of any such job has; of a replay of a scenario without a plan, also op by op."""
        gains, path = self.gains(scenario, self.questions(scenario)), path_segments(ops)
        return {
            "iteration_us": replayed.iteration_us,
            "measured_iteration_us": measured_iteration_us(self.trace),
            "critical_path": path,
            "critical_ops": critical_ops(ops),
            "ranks": rank_facts(self.trace, replayed.rank_breakdown_us),
            "gains": gains,
            "findings": self.findings(path, gains, replayed.iteration_us),
            "warnings": self.trace.meta.warnings,
        }


def program_replay(lowered: Lowered) -> ProgramReplay:
    """The replay of a job that `ProgramJob.lower` made."""
    assert isinstance(lowered.replayable, ProgramReplay)
    return lowered.replayable


class ProgramDiagnosis(Diagnosis, frozen=True, kw_only=True, omit_defaults=True):
    """The diagnosis of such a job."""

    @property
    def tables(self) -> Sequence[Table]:
        path = [
            (
                {"compute": "compute", "late_rank": f"others wait for it, {row.name}"}.get(row.kind, row.name),
                "" if row.rank < 0 else str(row.rank),
                time_text(row.start_us),
                time_text(row.duration_us),
            )
            for row in self.critical_path
        ]
        return (
            Table(title="critical path", columns=("what", "rank", "from", "takes"), rows=path),
            rank_table(self.ranks),
            self.collective_table,
            gain_table(self.gains, self.iteration_us),
        )

    @property
    def collective_table(self) -> Table:
        """The table of what the kind of job exchanges."""
        raise NotImplementedError
