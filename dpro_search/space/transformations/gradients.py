"""Transformations that change a Horovod job's graph for its gradients.

Gradient accumulation takes a step's batch in parts, after the last of which gradients are communicated. Compression is Horovod's
fp16, which is lossy: it changes the numbers, so it is only for who allows that.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import msgspec
import numpy as np

from dpro_search.collect.trace import Floats, TensorInfo
from dpro_search.graph.dataflow import DataflowGraph, RankProfile, Release
from dpro_search.space.plan import Plan
from dpro_search.space.transformations._base import RECORDED, Choice, Knob, PlanningFacts, grid
from dpro_search.space.transformations.compute import ComputeGraph, GraphTransformation, with_added_work
from dpro_search.space.transformations.gradient_compression import GradientCompression

_TRIED_PARTS = (2, 4, 8, 16)
_MOST_PARTS = 64


class GradientAccumulation(Knob, GraphTransformation):
    """Every part runs all ops on its share of the batch, at least for as long as an op takes that has nothing to do.

    The gradients of all parts but the first are added up, at what the recorded updates take for a byte. The graph's posts are those
    of the last part.
    """

    name = "accumulation"
    fields = ("micro_batches",)

    def __init__(self, job: PlanningFacts, compute: ComputeGraph, *, allow_lossy: bool = False) -> None:
        memory = compute.graph.memory
        self._batch = 0 if memory is None else memory.batch  # 0: not known
        normalised = any(op_type.lstrip("_").startswith("FusedBatchNorm") for op_type in compute.graph.op_type)
        self._changes_numbers = normalised and not allow_lossy
        GraphTransformation.__init__(self, job, compute)

    def legal(self, plan: Plan) -> str | None:
        parts = plan.micro_batches
        if parts is None or parts == 1:
            return None
        if self._changes_numbers:
            return "micro_batches: batch normalisation sees smaller batches, which changes the numbers; only with --allow-lossy"
        if self._batch and parts > self._batch:
            return f"micro_batches={parts}: a batch of {self._batch} cannot be cut into so many parts"
        return f"micro_batches={parts}: at most {_MOST_PARTS} parts" if parts > _MOST_PARTS else None

    def simplest(self, plan: Plan) -> Plan:
        return plan.changed(micro_batches=None) if plan.micro_batches == 1 else plan

    def apply(self, graph: DataflowGraph, plan: Plan) -> DataflowGraph:
        parts = plan.micro_batches or 1
        if parts == 1:
            return graph
        compute, sizes = self.compute, np.array([tensor.size_bytes for tensor in graph.tensors], dtype=np.float64)
        # What does not shrink with the batch, and so is there once more with each further part.
        least = compute.by_due(np.minimum(compute.graph.op_work_us, compute.launch_us), compute.due)
        profiles = []
        for rank, profile in enumerate(graph.profiles):
            place = compute.place[rank]
            fixed = np.cumsum(least[:, rank], axis=1)
            adds = np.zeros(len(sizes))
            adds[place] = sizes * self._add_us_per_byte(graph, rank)
            added = np.cumsum(adds)
            whole = (profile.main_us + (parts - 1) * fixed[:, -1]) / parts  # of a part, without adding
            post = (profile.post_us + (parts - 1) * fixed[:, place]) / parts + added[place]
            before = (parts - 1) * whole + (parts - 2) * added[-1]
            profiles.append(replace(profile, post_us=before[:, None] + post, main_us=before + whole + added[-1]))
        return replace(graph, profiles=tuple(profiles))

    @cached_property
    def choice(self) -> Choice | None:
        tried = [parts for parts in _TRIED_PARTS if self.legal(Plan(micro_batches=parts)) is None]
        grids = {RECORDED: ({},), "set": grid("micro_batches", tried)}
        return Choice(name=self.name, fields=self.fields, grids={name: points for name, points in grids.items() if points})

    @staticmethod
    def _add_us_per_byte(graph: DataflowGraph, rank: int) -> float:
        """An addition reads and writes as many bytes as the plainest update."""
        updates = sum(float(release.work_us.mean()) for release in graph.profiles[rank].releases)
        total = sum(tensor.size_bytes for tensor in graph.tensors)
        return updates / total if total else 0.0


class Fp16Compression(GradientCompression, GraphTransformation):
    """Half the bytes of every float32 gradient, for a cast before its post and one before its update."""

    def __init__(self, job: PlanningFacts, compute: ComputeGraph, *, copy_us_per_byte: float, allow_lossy: bool) -> None:
        """`copy_us_per_byte` is what a copy of a gradient takes: a cast moves about as much."""
        GradientCompression.__init__(self, job, ("fp16",), allow_lossy=allow_lossy)
        GraphTransformation.__init__(self, job, compute)
        self._copy_us_per_byte = copy_us_per_byte

    def apply(self, graph: DataflowGraph, plan: Plan) -> DataflowGraph:
        if plan.compression is None:
            return graph
        cast = np.array([t.size_bytes * self._copy_us_per_byte if t.dtype == "float32" else 0.0 for t in graph.tensors])
        samples, ranks, count = len(graph.steps), graph.ranks, len(graph.tensors)
        added = np.zeros((samples, ranks, count + 1))
        for rank in range(ranks):
            added[:, rank, self.compute.place[rank]] = cast
        graph = with_added_work(graph, self.compute.place, added)
        return replace(
            graph,
            tensors=tuple(map(_halved, graph.tensors)),
            profiles=tuple(_with_releases(profile, cast) for profile in graph.profiles),
        )


def _halved(tensor: TensorInfo) -> TensorInfo:
    return msgspec.structs.replace(tensor, size_bytes=tensor.size_bytes // 2) if tensor.dtype == "float32" else tensor


def _with_releases(profile: RankProfile, work_us: Floats) -> RankProfile:
    """A profile with more work on each tensor when it is back, [tensors]: in the releases that wait for one tensor."""
    alone = {release.tensors[0]: number for number, release in enumerate(profile.releases) if len(release.tensors) == 1}
    releases = list(profile.releases)
    for tensor, us in enumerate(work_us.tolist()):
        if not us:
            continue
        if tensor in alone:
            number = alone[tensor]
            releases[number] = replace(releases[number], work_us=releases[number].work_us + us)
        else:
            releases.append(Release(tensors=(tensor,), work_us=np.full(len(profile.main_us), us)))
    return replace(profile, releases=tuple(releases))
