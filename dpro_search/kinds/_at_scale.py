"""`AtScale`: a recorded data-parallel job on a cluster of another kind, predicted through rings on that cluster's links.

What communication costs on the recorded hosts (a TCP stack on busy cores, say) tells nothing of GPUs on NVLink. There the compute
of the recorded ranks is kept, and gradients travel in ring all-reduces, message by message, over the cluster's links; ranks that
behave alike are folded (`space/data_parallel.py`, `folding.py`, `replay/grouping.py`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from dpro_search.cluster import Cluster
from dpro_search.collect.trace import Ints
from dpro_search.graph.ddp import DdpGraph
from dpro_search.kinds._base import Job, Table
from dpro_search.machine import Calibration, calibration, machine_constants
from dpro_search.replay.data_parallel_predictor import DataParallelPredictor
from dpro_search.replay.replayer import replay
from dpro_search.replay.timeline import Timeline
from dpro_search.space.cluster import differing_hosts
from dpro_search.space.data_parallel import DataParallelJob, RankStep, layered_step
from dpro_search.space.job_graph import build
from dpro_search.space.network import Network, Ring
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import ClusterChange, Scale
from dpro_search.space.transformations import PlanSpace

RING_EFFICIENCY, LEAST_EFFICIENCY, MOST_EFFICIENCY = 0.92, 0.50, 1.44
"""Bus bandwidth of large all-reduces over that of rings on the bare links: median over seven published systems with nodes of 1 to 8
GPUs, and their range (empirical: ``python -m experiments.costmodel.topology``)."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What a recorded job runs on each rank, and which tensors travel together under a plan.

    Attributes
    ----------
    steps
        Of each recorded rank; further ranks run them in turn.
    groups
        Of a plan: numbers of the tensors of each group, in the order of their enqueueing.
    """

    steps: tuple[RankStep, ...]
    groups: Callable[[Plan], tuple[tuple[int, ...], ...]]


class AtScale(Job):
    """Predictions of plans on the devices of a cluster, one rank on each; computation is as fast as recorded."""

    settings = ("compute",)

    def __init__(self, recorded: Job, steps: Steps, space: PlanSpace, cluster: Cluster, ranks: int | None = None) -> None:
        self.title, self.trace, self.tensors, self.recorded = recorded.title, recorded.trace, recorded.tensors, recorded.recorded
        self.space = space
        self.askable = tuple(name for name in recorded.askable if name in space.fields)
        self._cluster = cluster
        self._steps, self._network = steps, Network.of(cluster, ranks)
        self._compute_factor: dict[int | None, float] = {}

    def left_out(self, change: ClusterChange) -> tuple[str, ...]:
        return differing_hosts(self._cluster, len(self._network.host))

    def scaled(self, scale: Scale) -> AtScale:
        if scale.what != "compute":
            raise self.cannot(
                "scaled", f"be predicted with '{scale.text}' on another cluster: name the cluster's links in a file instead"
            )
        changed = copy.copy(self)
        changed._compute_factor = {**self._compute_factor, scale.rank: self._compute_factor.get(scale.rank, 1.0) * scale.factor}
        return changed

    def _job(self, plan: Plan, efficiency: float) -> DataParallelJob:
        network, ranks = self._network, len(self._network.host)
        factor = np.full(ranks, self._compute_factor.get(None, 1.0))
        for rank, own in self._compute_factor.items():
            if rank is not None:
                factor[rank] *= own
        return DataParallelJob(
            steps=self._steps.steps,
            step_of_rank=np.arange(ranks) % len(self._steps.steps),
            scheme=Ring(),
            network=replace(
                network,
                transmit_bytes_per_us=network.transmit_bytes_per_us * efficiency,
                receive_bytes_per_us=network.receive_bytes_per_us * efficiency,
                local_bytes_per_us=network.local_bytes_per_us * efficiency,
            ),
            groups=self._steps.groups(plan),
            compute_factor=factor,
            negotiate_us=0.0,
        )

    def _predict(self, plan: Plan) -> Prediction:
        middle, slow, fast = (
            DataParallelPredictor(self._job(plan, efficiency)).predict(Plan())
            for efficiency in (RING_EFFICIENCY, LEAST_EFFICIENCY, MOST_EFFICIENCY)
        )
        centre_us, model_error = middle.iteration_us, self.calibration.model_error[1] * middle.iteration_us
        below_us, above_us = max(centre_us - fast.iteration_us, 0.0), max(slow.iteration_us - centre_us, 0.0)
        return Prediction(
            iteration_us=centre_us,
            interval_us=(centre_us - math.hypot(below_us, model_error), centre_us + math.hypot(above_us, model_error)),
            breakdown_us=middle.breakdown_us,
            peak_memory_bytes=None,
            source="extrapolated",
        )

    @property
    def calibration(self) -> Calibration:
        """Of synthetic jobs on GPU hosts: no error of such predictions was measured."""
        return calibration(machine_constants(), "data_parallel", "gpu")

    @property
    def measured_iteration_us(self) -> float | None:
        return None

    def op_count(self, plan: Plan) -> int:
        return self._job(plan, 1.0).most_ops(len(self._network.host))

    def timeline(self, plan: Plan) -> Timeline:
        return replay(build(self._job(plan, RING_EFFICIENCY)))

    def diagnose(self) -> NoReturn:
        raise self.cannot("diagnose", "be diagnosed on another cluster: diagnose the recording")

    def tables(self, facts: Mapping[str, Any]) -> list[Table]:
        return []


def steps_of_ddp(graph: DdpGraph) -> tuple[RankStep, ...]:
    """What each recorded rank of a DistributedDataParallel job computes, means over the recorded steps.

    Forward until the first gradient is ready, a backward op for each gradient, and its copy out of the bucket; the optimizer comes
    after the last copy.
    """
    found = []
    for rank in range(graph.ranks):
        ready_us = np.maximum.accumulate(graph.ready_us[:, rank].mean(axis=0))
        backward_us = np.diff(ready_us, prepend=ready_us[0])
        update_us = graph.copy_us[:, rank].mean(axis=0)
        update_us[-1] += graph.after_us[:, rank].mean() + max(graph.backward_us[:, rank].mean() - ready_us[-1], 0.0)
        found.append(
            layered_step(
                [tensor.size_bytes for tensor in graph.tensors],
                forward_us=float(ready_us[0]),
                backward_us=backward_us,
                update_us=update_us,
                tensor_names=[tensor.name for tensor in graph.tensors],
            )
        )
    return tuple(found)


def members(group_of: Ints) -> tuple[tuple[int, ...], ...]:
    """Tensors of each group, by the group of each tensor."""
    return tuple(tuple(np.flatnonzero(group_of == number).tolist()) for number in range(int(group_of.max(initial=-1)) + 1))
