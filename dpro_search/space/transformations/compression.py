"""Lossy compression of gradients: Horovod's fp16. Changes the numbers, so it is only for who allows that."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from dpro_search.collect.trace import Floats, TensorInfo
from dpro_search.graph.dataflow import DataflowGraph, RankProfile, Release
from dpro_search.space.plan import Plan
from dpro_search.space.transformations._base import JobFacts
from dpro_search.space.transformations.compute import ComputeGraph, GraphTransformation, with_added_work
from dpro_search.space.transformations.gradient_compression import GradientCompression


class Compression(GradientCompression, GraphTransformation):
    """Half the bytes of every float32 gradient, for a cast before its post and one before its update."""

    def __init__(self, job: JobFacts, compute: ComputeGraph, *, copy_us_per_byte: float, allow_lossy: bool) -> None:
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
