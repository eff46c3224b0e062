"""`GpuClusterJob`: a data-parallel job on a cluster of GPUs, predicted through the cost model of NCCL's collectives.

What communication costs on recorded hosts (a TCP stack on busy cores, say) tells nothing of GPUs on NVLink. There the compute of
the known ranks is kept, and a collective takes what NCCL's takes on that cluster (`costmodel.collectives.nccl`); ranks that behave
alike are folded (`space/data_parallel_graph.py`). A job that was recorded on processors is lowered to such a job where a scenario
names GPUs; a kind whose ranks run on GPUs to begin with can be a subclass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from dpro_search.cluster import Cluster
from dpro_search.collect.trace import CollectiveKind, Floats, Ints, TensorInfo, Trace
from dpro_search.costmodel.collectives.nccl import interval_factor, paths, placement_of, ways_of
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.graph.ddp import DdpGraph
from dpro_search.graph.measured import ProfiledSteps
from dpro_search.kinds._comparison import MeasuredIterations
from dpro_search.kinds._diagnosis import (
    Diagnosis,
    PredictedGain,
    RankFacts,
    Table,
    critical_ops,
    critical_table,
    gain_table,
    sorted_gains,
)
from dpro_search.kinds._job import Job, JobInScenario, ranks_in_turn
from dpro_search.machine import calibration, machine_constants
from dpro_search.quantities import time_text
from dpro_search.replay.iterations import IterationTimes
from dpro_search.replay.lowered import ErrorModel, Lowered
from dpro_search.replay.path.findings import best_gain, path_findings
from dpro_search.replay.path.segments import PathSegment, path_segments, path_totals
from dpro_search.replay.replayer import replay, settled_us
from dpro_search.replay.timeline import Timeline
from dpro_search.space.cluster import differing_hosts, spec_on
from dpro_search.space.data_parallel import DataParallelJob, LinearCost, RankStep, layered_step
from dpro_search.space.data_parallel_graph import FoldedJob, fold
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import SCALES, ClusterChange, Scale, Scenario
from dpro_search.space.transformations import PlanSpace

_COLLECTIVES = {
    CollectiveKind.ALL_REDUCE: "all_reduce",
    CollectiveKind.ALL_GATHER: "all_gather",
    CollectiveKind.REDUCE_SCATTER: "reduce_scatter",
}
_PART = re.compile(r"\.(allreduce|allgather|reducescatter)@\d+$")  # at the end of the name of a rank's part
_MOST_ROWS = 16  # of the table of ranks


@dataclass(frozen=True, kw_only=True)
class RankWorkload:
    """The work of the ranks under a plan, and the tensors that are communicated together.

    Attributes
    ----------
    steps
        Of each known rank; further ranks run them in turn.
    groups
        Numbers of the tensors of each group, in the order of their enqueueing.
    collectives
        Those of `DataParallelJob`.
    """

    steps: tuple[RankStep, ...]
    groups: tuple[tuple[int, ...], ...]
    collectives: Ints = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True, kw_only=True)
class DataParallelReplay:
    """A data-parallel job on a cluster, with ranks that behave alike folded.

    Attributes
    ----------
    slow, fast
        The job with collectives at both ends of their interval.
    """

    machines: Cluster
    job: DataParallelJob
    slow: DataParallelJob
    fast: DataParallelJob

    @cached_property
    def folded(self) -> FoldedJob:
        """The graph of one rank of each class."""
        return fold(self.job)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.job.step_of_rank)

    @property
    def op_count(self) -> int:
        return self.job.most_ops(self.ranks)

    @cached_property
    def iteration_us(self) -> float:
        """The settled iteration time."""
        return settled_us(self.folded.graph)[0]

    def iterations(self, *, detailed: bool = False) -> IterationTimes:
        middle_us = self.iteration_us
        slow_us, fast_us = (settled_us(fold(job).graph)[0] for job in (self.slow, self.fast))
        step_us = np.array([float(step.duration_us.sum()) for step in self.job.steps])
        compute_us = float((step_us[self.job.step_of_rank] * self.job.compute_factor).max())
        return IterationTimes(
            iteration_us=middle_us,
            settled=True,
            breakdown_us={"compute": compute_us, "exposed_communication": max(middle_us - compute_us, 0.0)},
            interval_us=(min(fast_us, middle_us), max(slow_us, middle_us)),
        )

    def sampled_us(self, *, samples: int, seed: int = 0, on_sample: Callable[[], None] = lambda: None) -> Floats:
        raise InputError("a data-parallel job on a cluster of GPUs has one duration of each op: no others can be drawn")

    def timeline(self) -> Timeline:
        """One rank of each class of ranks that behave alike."""
        return replay(self.folded.graph)


class GpuClusterJob(Job):
    """Predictions of plans on the devices of a cluster, one rank on each; computation is as fast as the workload says.

    Parameters
    ----------
    workload
        The work under a plan, on a cluster.
    cluster, ranks
        On the first devices; None: one on each.
    questions
        Plans that a diagnosis asks about, by how they are written.
    """

    settings = ("ranks", "rate", *SCALES)
    abilities = ()

    def __init__(
        self,
        *,
        title: str,
        tensors: tuple[TensorInfo, ...],
        space: PlanSpace,
        workload: Callable[[Plan, Cluster], RankWorkload],
        cluster: Cluster,
        ranks: int | None = None,
        trace: Trace | None = None,
        questions: Mapping[str, Plan] | None = None,
    ) -> None:
        self.title, self.tensors, self._space, self.trace = title, tensors, space, trace
        self.askable = space.fields
        self._workload, self._questions = workload, dict(questions or {})
        self._machines, self._ranks = cluster, cluster.ranks if ranks is None else ranks

    def lower(self, scenario: Scenario, *, steps: ProfiledSteps | None = None) -> Lowered:
        self.check_changes(scenario, steps)
        self._space.check(scenario.plan)
        replayable = self._replay(scenario)
        known = calibration(machine_constants(), "data_parallel", "gpu")  # no error of such predictions was measured
        return Lowered(
            replayable=replayable,
            error=ErrorModel(model=known.model_error[1]),
            as_recorded=False,
            cluster=spec_on(replayable.machines, replayable.ranks).spec,
            calibration=known,
            assumptions=self._assumptions(replayable),
        )

    def _replay(self, scenario: Scenario) -> DataParallelReplay:
        machines, ranks = self._place(scenario.cluster)
        placement, workload = placement_of(machines, range(ranks), concurrent=1), self._workload(scenario.plan, machines)
        speeds = _speeds(scenario.scales, ranks)

        def costs(slower: float) -> tuple[LinearCost, ...]:
            """Costs of collectives that take `slower` times as long as the cost model says."""
            factor = slower * speeds.communication
            return tuple(
                LinearCost(kind=kind, latency_us=way.latency_us * factor, us_per_byte=way.us_per_byte * factor)
                for kind, name in _COLLECTIVES.items()
                for way in ways_of(name, machines, placement, faster=speeds.links)
            )

        job = DataParallelJob(
            steps=workload.steps,
            step_of_rank=np.arange(ranks) % len(workload.steps),
            costs=costs(1.0),
            groups=tuple(sorted(workload.groups, key=max)),  # of groups posted together, the one with the earlier last tensor first
            collectives=workload.collectives,
            compute_factor=speeds.compute,
        )
        largest = max((tensor.size_bytes for tensor in self.tensors), default=0)
        factor = interval_factor(largest, paths(machines, placement).domains)
        return DataParallelReplay(
            machines=machines, job=job, slow=replace(job, costs=costs(factor)), fast=replace(job, costs=costs(1 / factor))
        )

    def _place(self, change: ClusterChange) -> tuple[Cluster, int]:
        """The machines under a change, and the number of ranks on them."""
        if change == ClusterChange():
            return self._machines, self._ranks
        if change.machines is not None and not change.on_gpus:
            raise InputError(f"{change.machines.name}: {self.title} runs on machines with GPUs, like 16xhgx-h100")
        machines = (change if change.machines is not None else replace(change, machines=self._machines)).gpu_machines
        return machines, machines.ranks if change.ranks is None else change.ranks

    def _assumptions(self, replayable: DataParallelReplay) -> tuple[str, ...]:
        """Assumptions of predictions on a cluster, a sentence each."""
        recorded = len(replayable.job.steps)
        return (*differing_hosts(replayable.machines, replayable.ranks), *ranks_in_turn(replayable.ranks, recorded))

    def plans(self, scenario: Scenario) -> PlanSpace:
        return self._space

    def measurement(self, scenario: Scenario) -> MeasuredIterations:
        return MeasuredIterations()

    def questions(self, scenario: Scenario) -> Mapping[str, Plan]:
        return self._questions

    def diagnose(self, here: JobInScenario) -> Diagnosis:
        replayable = self._replay(here.scenario)
        timeline = replayable.timeline()
        gained, path = (
            self._gains(here.scenario, replayable.iteration_us),
            _of_one_iteration(path_segments(timeline), timeline.iterations),
        )
        advice = best_gain(gained, tuple(self.askable), timeline.iteration_us, "no other plan that was asked about would gain")
        return GpuClusterDiagnosis(
            iteration_us=timeline.iteration_us,
            measured_iteration_us=None,
            critical_path=path_totals(timeline),
            critical_ops=critical_ops(timeline),
            ranks=_rank_facts(replayable, timeline),
            gains=gained,
            findings=path_findings(path, gained, timeline.iteration_us, advice=advice if self._questions else ""),
            warnings=() if self.trace is None else self.trace.meta.warnings,
        )

    def _gains(self, scenario: Scenario, base_us: float) -> tuple[PredictedGain, ...]:
        changes = {text: Scenario(scales=(Scale.parse(text),)) for text in ("compute=0.9", "communication=0", "bandwidth=2")}
        changes |= {text: Scenario(plan=plan) for text, plan in self._questions.items()}
        return sorted_gains(base_us, {text: self._replay(scenario.then(change)).iteration_us for text, change in changes.items()})


class GpuClusterDiagnosis(Diagnosis, frozen=True, kw_only=True, omit_defaults=True):
    """The diagnosis of a job on a cluster of GPUs; a rank stands for all that behave like it."""

    @property
    def tables(self) -> Sequence[Table]:
        path = [
            (row.kind.lower() + (f" of rank {row.rank}" if row.rank >= 0 else ""), time_text(row.duration_us))
            for row in self.critical_path
        ]
        ranks = [
            (
                str(row.rank),
                str(row.host),
                str(row.alike),
                *(time_text(row.parts_us[part]) for part in ("compute", "exposed_communication")),
            )
            for row in self.ranks[:_MOST_ROWS]
        ]
        return [
            Table(title="critical path", columns=("what", "time"), rows=path[:_MOST_ROWS]),
            critical_table(self.critical_ops),
            Table(title="ranks", columns=("rank", "on", "alike", "compute", "exposed comm. and waits"), rows=ranks),
            gain_table(self.gains, self.iteration_us),
        ]


def _rank_facts(replayable: DataParallelReplay, timeline: Timeline) -> tuple[RankFacts, ...]:
    folded = replayable.folded
    graph = folded.graph
    computes = np.isin(graph.op_kind, (OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE))
    facts = []
    for number, rank in enumerate(folded.representative.tolist()):
        compute_us = float(graph.duration_us[computes & (graph.rank_of_op == number)].sum())
        exposed_us = max(timeline.iteration_us - compute_us, 0.0)
        facts.append(
            RankFacts(
                rank=rank,
                host=f"host {replayable.machines.place(rank)[0]}",
                alike=int(folded.multiplicity[number]),
                breakdown_us={"compute": compute_us, "exposed_communication": exposed_us},
                last_pct=None,
                waited_us=None,
            )
        )
    return tuple(facts)


class _Speeds(NamedTuple):
    """Changes of speed: factors on the ranks' computation, [ranks], of links' rates, and on the time of collectives."""

    compute: Floats
    links: float
    communication: float


def _speeds(scales: Sequence[Scale], ranks: int) -> _Speeds:
    """The product of all scales; raises `InputError` for a rank that is not there, or communication of a single one."""
    compute, links, communication = np.ones(ranks), 1.0, 1.0
    for scale in scales:
        scale.check_rank(ranks)
        if scale.what == "compute":
            compute[slice(None) if scale.rank is None else scale.rank] *= scale.factor
        elif scale.what == "bandwidth":
            links *= scale.factor
        elif scale.rank is None:
            communication *= scale.factor
        else:
            raise InputError(f"'{scale.text}': communication of all ranks can be scaled, not of one")
    return _Speeds(compute, links, communication)


def _of_one_iteration(path: Sequence[PathSegment], iterations: int) -> list[PathSegment]:
    """Stretches of a path through several iterations, as long as in one, with the group in place of a rank's part of it."""
    return [
        msgspec.structs.replace(
            segment,
            duration_us=segment.duration_us / iterations,
            name=_PART.sub("", segment.name),
        )
        for segment in path
    ]


def steps_of_ddp(graph: DdpGraph) -> tuple[RankStep, ...]:
    """Computation of each recorded rank of a DistributedDataParallel job: means over the recorded steps.

    Forward until the first gradient is ready, a backward op for each gradient, and its copy out of the bucket; the optimizer comes
    after the last copy.
    """
    steps = []
    for rank in range(graph.ranks):
        ready_us = np.maximum.accumulate(graph.ready_us[:, rank].mean(axis=0))
        backward_us = np.diff(ready_us, prepend=ready_us[0])
        update_us = graph.copy_us[:, rank].mean(axis=0)
        update_us[-1] += graph.after_us[:, rank].mean() + max(graph.backward_us[:, rank].mean() - ready_us[-1], 0.0)
        steps.append(
            layered_step(
                [tensor.size_bytes for tensor in graph.tensors],
                forward_us=float(ready_us[0]),
                backward_us=backward_us,
                update_us=update_us,
                tensor_names=[tensor.name for tensor in graph.tensors],
            )
        )
    return tuple(steps)


def members(group_of: Ints) -> tuple[tuple[int, ...], ...]:
    """Tensors of each group, by the group of each tensor."""
    return tuple(tuple(np.flatnonzero(group_of == number).tolist()) for number in range(int(group_of.max(initial=-1)) + 1))
