"""A small data-parallel step as a `DataflowGraph`: layers of forward, backward, weight gradient, all-reduce and update."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from dpro_search.collect.trace import CommSettings, TensorInfo
from dpro_search.graph.dataflow import DataflowGraph, OpKind, RankProfile, Release, TensorOps
from dpro_search.space.transformations import PlanSpace, horovod_facts, horovod_space
from dpro_search.space.transformations.compute import ComputeGraph
from dpro_search.space.transformations.gradients import Fp16Compression, GradientAccumulation
from dpro_search.space.transformations.op_fusion import OpFusion
from dpro_search.space.transformations.precision import Precision
from dpro_search.space.transformations.recomputation import Recomputation

HOST_US = 50.0
RECORDED = CommSettings(fusion_threshold_bytes=2**20, cycle_time_us=1000.0)


def layered(layers: int = 3, ranks: int = 2, samples: int = 2, *, work_us: Sequence[float] | None = None) -> DataflowGraph:
    """Ops f0.. (forward), b.. (backward), w.. (weight gradients), c.. (all-reduces), u.. (updates), the last layer posted first.

    A rank runs f0 f1 .. b(n-1) w(n-1) b(n-2) .. w0, one after the other. `work_us` is what each of these takes, in that order; left
    out, 10 us more than the one before. Samples differ by 1 %, ranks not at all.
    """
    backward = [name for layer in reversed(range(layers)) for name in (f"b{layer}", f"w{layer}")]
    main = [*(f"f{layer}" for layer in range(layers)), *backward]
    work = np.array(work_us if work_us is not None else 100.0 + 10 * np.arange(len(main)))
    names = [*main, *(f"{kind}{layer}" for layer in range(layers) for kind in "cu")]
    needs = {f"f{layer}": [f"f{layer - 1}"] if layer else [] for layer in range(layers)}
    needs |= {f"b{layer}": [f"b{layer + 1}" if layer + 1 < layers else f"f{layer}", f"f{layer}"] for layer in range(layers)}
    needs |= {f"w{layer}": [f"b{layer}"] for layer in range(layers)}
    needs |= {f"u{layer}": [f"c{layer}"] for layer in range(layers)}
    number = {(name, rank): rank * len(names) + i for rank in range(ranks) for i, name in enumerate(names)}
    ptr, idx = [0], list[int]()
    for rank in range(ranks):
        for name in names:
            if name[0] == "c":
                idx += [number[f"w{name[1:]}", other] for other in range(ranks)]
            else:
                idx += sorted({number[source, rank] for source in needs[name]})
            ptr.append(len(idx))
    types = {"f": "MatMul", "b": "ReluGrad", "w": "MatMul", "c": "HorovodAllreduce", "u": "AssignSubVariableOp"}
    kinds = {"f": OpKind.FORWARD, "b": OpKind.BACKWARD, "w": OpKind.BACKWARD, "c": OpKind.COMM, "u": OpKind.UPDATE}
    costs = dict(zip(main, work.tolist(), strict=True))
    scale = 1 + 0.01 * np.arange(samples)
    one = np.array([costs.get(name, 20.0 if name[0] == "u" else 0.0) for name in names])
    ends = dict(zip(main, np.cumsum(work).tolist(), strict=True))
    order = [f"w{layer}" for layer in reversed(range(layers))]
    profile = RankProfile(
        post_us=np.outer(scale, [ends[name] for name in order]),
        main_us=scale * work.sum(),
        releases=tuple(Release(tensors=(tensor,), work_us=scale * 20.0) for tensor in range(layers)),
        host_us=np.full(samples, HOST_US),
        concurrency=1.0,
    )
    tensors, placements = [], []
    for layer in reversed(range(layers)):
        size = 4000 * (layer + 1)
        tensors.append(TensorInfo(name=f"t{layer}", node=f"c{layer}", dtype="float32", shape=(size // 4,), size_bytes=size))
        placements.append(
            TensorOps(
                producer=tuple(number[f"w{layer}", rank] for rank in range(ranks)),
                comm=tuple(number[f"c{layer}", rank] for rank in range(ranks)),
                consumers=tuple((number[f"u{layer}", rank],) for rank in range(ranks)),
            )
        )
    return DataflowGraph(
        op_name=tuple(names) * ranks,
        op_type=tuple(types[name[0]] for name in names) * ranks,
        op_rank=np.repeat(np.arange(ranks), len(names)),
        op_kind=np.tile([int(kinds[name[0]]) for name in names], ranks),
        op_work_us=np.tile(np.outer(scale, one), (1, ranks)),
        pred_ptr=np.array(ptr),
        pred_idx=np.array(idx),
        tensors=tuple(tensors),
        placements=tuple(placements),
        profiles=(profile,) * ranks,
        steps=np.arange(samples),
        unplaced={},
    )


class Factor:
    """Cost models that are a factor: of every cluster's ops one after the other, or of any type's time in float32."""

    cast_share = 0.0

    def __init__(self, graph: DataflowGraph, factor: float = 0.5, half_width: float = 0.1) -> None:
        self._us = dict(zip(graph.op_name, np.median(graph.op_work_us, axis=0).tolist(), strict=True))
        self._factor, self._half_width = factor, half_width

    def times(self, clusters: Sequence[Sequence[str]]) -> SimpleNamespace:
        members = np.array([sum(self._us[name] for name in cluster) for cluster in clusters])
        us = members * self._factor
        return SimpleNamespace(
            us=us, low_us=us - members * self._half_width, high_us=us + members * self._half_width, members_us=members
        )

    def ratio(self, op_type: str, float32_us: float | None = None) -> tuple[float, float, float] | None:
        return None if op_type == "ReluGrad" else (self._factor, self._factor - self._half_width, self._factor + self._half_width)

    def cast_us(self, elements: float) -> float:
        return 0.01 * elements


def space_of(graph: DataflowGraph, *, factor: float = 0.5, lossy: bool = True) -> tuple[ComputeGraph, PlanSpace]:
    """All transformations of compute, with cost models that are a factor."""
    compute, facts = ComputeGraph(graph), horovod_facts(graph.tensors, RECORDED)
    transformations = (
        OpFusion(facts, compute, Factor(graph, factor)),
        Precision(facts, compute, Factor(graph, factor)),
        Recomputation(facts, compute),
        GradientAccumulation(facts, compute, allow_lossy=lossy),
        Fp16Compression(facts, compute, copy_us_per_byte=0.001, allow_lossy=lossy),
    )
    return compute, horovod_space(graph.tensors, RECORDED, others=transformations)
