"""`AtScale`: a data-parallel job on a cluster of GPUs, predicted through the cost model of NCCL's collectives.

What communication costs on recorded hosts (a TCP stack on busy cores, say) tells nothing of GPUs on NVLink. There the compute of
the known ranks is kept, and a collective takes what NCCL's takes on that cluster (`costmodel.collectives.nccl`); ranks that behave
alike are folded (`space/data_parallel_graph.py`). A recorded job comes here by `Job.at_scale`; a kind whose ranks run on GPUs to
begin with can be a subclass.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from dpro_search.cluster import Cluster
from dpro_search.collect.trace import CollectiveKind, Ints, TensorInfo, Trace
from dpro_search.costmodel.collectives.nccl import interval_factor, paths, placement_of, ways_of
from dpro_search.graph.dataflow import OpKind
from dpro_search.graph.ddp import DdpGraph
from dpro_search.kinds._facts import critical_ops, critical_table, gain_table
from dpro_search.kinds._job import Job, Table, ranks_in_turn
from dpro_search.machine import Calibration, calibration, machine_constants
from dpro_search.quantities import time_text
from dpro_search.replay.path_findings import best_gain, path_findings
from dpro_search.replay.path_segments import PathSegment, path_segments, path_totals
from dpro_search.replay.replayer import replay, settled_us
from dpro_search.replay.timeline import Timeline
from dpro_search.space.cluster import ClusterSpec, differing_hosts, spec_on
from dpro_search.space.data_parallel import DataParallelJob, LinearCost, RankStep, layered_step
from dpro_search.space.data_parallel_graph import FoldedJob, fold
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import SCALES, ClusterChange, Scale
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


class AtScale(Job):
    """Predictions of plans on the devices of a cluster, one rank on each; computation is as fast as the workload says.

    Parameters
    ----------
    workload
        Of a plan.
    cluster, ranks
        On the first devices; None: one on each.
    questions
        Plans that a diagnosis asks about, by how they are written.
    """

    settings = ("ranks", "rate", *SCALES)

    def __init__(
        self,
        *,
        title: str,
        tensors: tuple[TensorInfo, ...],
        space: PlanSpace,
        workload: Callable[[Plan], RankWorkload],
        cluster: Cluster,
        ranks: int | None = None,
        trace: Trace | None = None,
        questions: Mapping[str, Plan] | None = None,
    ) -> None:
        self.title, self.tensors, self.space, self.trace = title, tensors, space, trace
        self.askable = space.fields
        self._workload, self._questions = workload, dict(questions or {})
        self._placed(cluster, ranks)
        self._compute_factor: dict[int | None, float] = {}
        self._faster_links, self._communication = 1.0, 1.0

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self._ranks

    @property
    def cluster(self) -> ClusterSpec:
        return spec_on(self._machines, self.ranks).spec

    @property
    def recorded_ranks(self) -> int:
        return len(self._workload(Plan()).steps)

    def left_out(self, change: ClusterChange) -> tuple[str, ...]:
        return (*differing_hosts(self._machines, self.ranks), *ranks_in_turn(self.ranks, self.recorded_ranks))

    def moved(self, change: ClusterChange) -> Job:
        """On other machines, or on other devices and NICs of these."""
        return super().moved(change if change.machines is not None else replace(change, machines=self._machines))

    def at_scale(self, cluster: Cluster, ranks: int | None = None) -> Job:
        changed = copy.copy(self)
        changed._placed(cluster, ranks)
        return changed

    def _placed(self, cluster: Cluster, ranks: int | None) -> None:
        self._machines, self._ranks = cluster, cluster.ranks if ranks is None else ranks
        self._placement = placement_of(cluster, range(self._ranks), concurrent=1)

    def scaled(self, scale: Scale) -> AtScale:
        scale.check_rank(self.ranks)
        changed = copy.copy(self)
        if scale.what == "compute":
            rank_factor = self._compute_factor.get(scale.rank, 1.0) * scale.factor
            changed._compute_factor = {**self._compute_factor, scale.rank: rank_factor}
        elif scale.what == "bandwidth":
            changed._faster_links = self._faster_links * scale.factor
        elif scale.rank is None:
            changed._communication = self._communication * scale.factor
        else:
            raise self.cannot("scaled", f"be asked '{scale.text}': communication of all ranks can be scaled, not of one")
        return changed

    def _job(self, plan: Plan) -> DataParallelJob:
        """The job under a plan."""
        ranks, workload = self.ranks, self._workload(plan)
        factor = np.full(ranks, self._compute_factor.get(None, 1.0))
        for rank, rank_factor in self._compute_factor.items():
            if rank is not None:
                factor[rank] *= rank_factor
        return DataParallelJob(
            steps=workload.steps,
            step_of_rank=np.arange(ranks) % len(workload.steps),
            costs=self._collective_costs(),
            groups=tuple(sorted(workload.groups, key=max)),  # of groups posted together, the one with the earlier last tensor first
            collectives=workload.collectives,
            compute_factor=factor,
        )

    def _collective_costs(self, slower: float = 1.0) -> tuple[LinearCost, ...]:
        """Costs of collectives that take `slower` times as long as the cost model says."""
        factor = slower * self._communication
        return tuple(
            LinearCost(kind=kind, latency_us=way.latency_us * factor, us_per_byte=way.us_per_byte * factor)
            for kind, name in _COLLECTIVES.items()
            for way in ways_of(name, self._machines, self._placement, faster=self._faster_links)
        )

    def _iteration_us(self, plan: Plan) -> float:
        return _iteration_us(self._job(plan))

    def _predict(self, plan: Plan) -> Prediction:
        largest = max((tensor.size_bytes for tensor in self.tensors), default=0)
        factor = interval_factor(largest, paths(self._machines, self._placement).domains)
        job = self._job(plan)
        centre_us = _iteration_us(job)
        slow_us, fast_us = (_iteration_us(replace(job, costs=self._collective_costs(slower))) for slower in (factor, 1 / factor))
        model_error_us = self.calibration.model_error[1] * centre_us
        below_us, above_us = max(centre_us - fast_us, 0.0), max(slow_us - centre_us, 0.0)
        step_us = np.array([float(step.duration_us.sum()) for step in job.steps])
        compute_us = float((step_us[job.step_of_rank] * job.compute_factor).max())
        return Prediction(
            iteration_us=centre_us,
            interval_us=(centre_us - math.hypot(below_us, model_error_us), centre_us + math.hypot(above_us, model_error_us)),
            breakdown_us={"compute": compute_us, "exposed_communication": max(centre_us - compute_us, 0.0)},
            peak_memory_bytes=None,
            source="extrapolated",
        )

    @property
    def calibration(self) -> Calibration:
        """The calibration of synthetic jobs on GPU hosts: no error of such predictions was measured."""
        return calibration(machine_constants(), "data_parallel", "gpu")

    @property
    def measured_iteration_us(self) -> float | None:
        return None

    def op_count(self, plan: Plan) -> int:
        return self._job(plan).most_ops(self.ranks)

    def _folded(self, plan: Plan) -> FoldedJob:
        return fold(self._job(plan))

    def timeline(self, plan: Plan) -> Timeline:
        """One rank of each class of ranks that behave alike."""
        return replay(self._folded(plan).graph)

    @property
    def questions(self) -> Mapping[str, Plan]:
        return self._questions

    def diagnose(self) -> dict[str, Any]:
        """The facts of `Job.diagnose`; of ranks that behave alike one, with how many they are (``alike``)."""
        folded = self._folded(Plan())
        timeline = replay(folded.graph)
        gained, path = self._gains(), _of_one_iteration(path_segments(timeline), timeline.iterations)
        advice = best_gain(gained, tuple(self.askable), timeline.iteration_us, "no other plan that was asked about would gain")
        return {
            "iteration_us": timeline.iteration_us,
            "measured_iteration_us": None,
            "critical_path": msgspec.to_builtins(path_totals(timeline)),
            "critical_ops": critical_ops(timeline),
            "ranks": self._rank_facts(folded, timeline),
            "gains": gained,
            "findings": list(path_findings(path, gained, timeline.iteration_us, advice=advice if self._questions else "")),
            "warnings": [] if self.trace is None else list(self.trace.meta.warnings),
        }

    def _gains(self) -> list[dict[str, Any]]:
        base_us = self._iteration_us(Plan())
        scales = ("compute=0.9", "communication=0", "bandwidth=2")
        iteration_us = {text: self.scaled(Scale.parse(text))._iteration_us(Plan()) for text in scales}
        iteration_us |= {text: self._iteration_us(plan) for text, plan in self._questions.items()}
        rows = [{"what_if": text, "predicted_iteration_us": us, "gain_us": base_us - us} for text, us in iteration_us.items()]
        return sorted(rows, key=lambda row: -float(row["gain_us"]))

    def _rank_facts(self, folded: FoldedJob, timeline: Timeline) -> list[dict[str, Any]]:
        graph = folded.graph
        computes = np.isin(graph.op_kind, (OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE))
        facts = []
        for number, rank in enumerate(folded.representative.tolist()):
            compute_us = float(graph.duration_us[computes & (graph.rank_of_op == number)].sum())
            exposed_us = max(timeline.iteration_us - compute_us, 0.0)
            facts.append(
                {
                    "rank": rank,
                    "host": f"host {self._machines.place(rank)[0]}",
                    "alike": int(folded.multiplicity[number]),
                    "breakdown_us": {"compute": compute_us, "exposed_communication": exposed_us},
                    "last_pct": None,
                    "waited_us": None,
                }
            )
        return facts

    def tables(self, facts: Mapping[str, Any]) -> list[Table]:
        path = [
            (f"{row['kind'].lower()}" + (f" of rank {row['rank']}" if row["rank"] >= 0 else ""), time_text(row["duration_us"]))
            for row in facts["critical_path"]
        ]
        ranks = [
            (
                str(row["rank"]),
                row["host"],
                str(row["alike"]),
                *(time_text(row["breakdown_us"][part]) for part in ("compute", "exposed_communication")),
            )
            for row in facts["ranks"][:_MOST_ROWS]
        ]
        return [
            Table(title="critical path", columns=("what", "time"), rows=path[:_MOST_ROWS]),
            critical_table(facts["critical_ops"]),
            Table(title="ranks", columns=("rank", "on", "alike", "compute", "exposed comm. and waits"), rows=ranks),
            gain_table(facts["gains"], facts["iteration_us"]),
        ]


def _iteration_us(job: DataParallelJob) -> float:
    """The settled iteration time of a job."""
    return settled_us(fold(job).graph)[0]


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
