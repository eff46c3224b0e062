"""What a cost model sees of a cluster: a row of numbers, each with a unit in its name.

Two sets: `TIMED_FEATURES` need an op's type, its time by itself and the wiring, which every trace has; `FEATURES` adds what needs
shapes: bytes, floating-point operations, and what a compiler makes of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpro_search.collect.clusters.table import Cluster
from dpro_search.collect.trace import Floats
from dpro_search.costmodel.learned.op_classes import (
    CLASSES,
    HEAVY,
    KINDS,
    REFINED,
    class_of,
    flops,
    is_strided,
    kind_of,
    leaders,
    tensor_bytes,
)

_EXTENT = ("ops", "depth", "width", "inputs", "outputs")
TIMED_FEATURES = (
    "members_us",
    "largest_member_us",
    *_EXTENT,
    *(f"{kind}_count" for kind in KINDS),
    *(f"{kind}_us" for kind in KINDS),
)
_SIZES = ("flops", "in_bytes", "out_bytes", "inner_bytes", "variable_bytes", "largest_tensor_bytes")
_REFINED_US = tuple(f"{name}_us" for name in REFINED)
FEATURES = (
    *TIMED_FEATURES,
    *_SIZES,
    "other_dtype_ops",
    "strided_grad_us",
    *_REFINED_US,
    *(f"{name}_bytes" for name in CLASSES),
    *(f"{name}_flops" for name in HEAVY),
)
# Products and pooling compute more than they stream: their bytes say nothing that their work does not.
STREAMED_BYTES = tuple(f"{name}_bytes" for name in CLASSES if name not in (*HEAVY, "pool", "pool_grad"))
CLASS_FLOPS = tuple(f"{name}_flops" for name in HEAVY)
CLASS_US = tuple(f"{name}_us" for name in CLASSES)
KIND_US = tuple(f"{kind}_us" for kind in KINDS)
_NARROW = ("float32", "int32", "bool")  # what nearly all measured ops compute with


@dataclass(frozen=True, kw_only=True)
class TimedOps:
    """The ops of a cluster that did work by themselves, as a trace knows them.

    Attributes
    ----------
    kinds, us
        Kind (one of `KINDS`) and time of each op.
    depth, width
        Ops on the longest chain; most ops at one distance from the cluster's inputs.
    inputs, outputs
        Tensors that come from outside, constants not counted; tensors that are needed outside.
    """

    kinds: tuple[str, ...]
    us: tuple[float, ...]
    depth: int
    width: int
    inputs: int
    outputs: int


def feature_matrix(clusters: Sequence[Cluster]) -> Floats:
    """Features of n clusters, [n, len(FEATURES)]; all are finite and not negative."""
    rows = [cluster_features(cluster) for cluster in clusters]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(FEATURES))


def timed_matrix(clusters: Sequence[TimedOps]) -> Floats:
    """Features of n clusters without shapes, [n, len(TIMED_FEATURES)]."""
    rows = [timed_features(cluster) for cluster in clusters]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(TIMED_FEATURES))


def timed_features(cluster: TimedOps) -> list[float]:
    """The values of `TIMED_FEATURES` for one cluster."""
    value: dict[str, float] = dict.fromkeys(TIMED_FEATURES, 0.0)
    for kind, us in zip(cluster.kinds, cluster.us, strict=True):
        value[f"{kind}_count"] += 1
        value[f"{kind}_us"] += us
    value["members_us"] = sum(cluster.us)
    value["largest_member_us"] = max(cluster.us, default=0.0)
    extent = (len(cluster.us), cluster.depth, cluster.width, cluster.inputs, cluster.outputs)
    value |= dict(zip(_EXTENT, map(float, extent), strict=True))
    return [value[name] for name in TIMED_FEATURES]


def timed_ops(cluster: Cluster) -> TimedOps:
    """A measured cluster as a trace would know it."""
    leads, ran = leaders(cluster), [us > 0 for us in cluster.op_us]
    maker = {number: i for i, op in enumerate(cluster.ops) for number in op.outputs}
    needs = [[maker[number] for number in op.inputs if maker.get(number, i) < i] for i, op in enumerate(cluster.ops)]
    roles = [tensor.role for tensor in cluster.tensors]
    depth, width = extent(needs, ran)
    return TimedOps(
        kinds=tuple(kind_of(cluster.ops[leads[i]].type) for i, did in enumerate(ran) if did),
        us=tuple(us for us in cluster.op_us if us > 0),
        depth=depth,
        width=width,
        inputs=roles.count("in") + roles.count("variable"),
        outputs=roles.count("out"),
    )


def extent(needs: Sequence[Sequence[int]], ran: Sequence[bool]) -> tuple[int, int]:
    """Depth and width, as `TimedOps` has them, of k ops in topological order: the earlier ones that each needs, and which count."""
    level: list[int] = []
    at_level: dict[int, int] = defaultdict(int)
    for sources, counts in zip(needs, ran, strict=True):
        own = max((level[source] for source in sources), default=0) + counts
        level.append(own)
        at_level[own] += counts
    return max(level, default=0), max(at_level.values(), default=0)


def cluster_features(cluster: Cluster) -> list[float]:
    """The values of `FEATURES` for one cluster."""
    value: dict[str, float] = dict.fromkeys(FEATURES[len(TIMED_FEATURES) :], 0.0)
    sizes = [float(tensor_bytes(cluster, number)) for number in range(len(cluster.tensors))]
    for tensor, size in zip(cluster.tensors, sizes, strict=True):
        if tensor.role != "const":
            value[f"{tensor.role}_bytes"] += size
    for i, lead in enumerate(leaders(cluster)):
        op, leader = cluster.ops[i], cluster.ops[lead]
        refined = f"{class_of(cluster, leader)}_us"
        if refined in _REFINED_US:
            value[refined] += cluster.op_us[i]
        if is_strided(cluster, leader):
            value["strided_grad_us"] += cluster.op_us[i]
        value["other_dtype_ops"] += any(cluster.tensors[number].dtype not in _NARROW for number in op.outputs)
        if i != lead:
            continue  # a trace has the chain as one op
        name, work = class_of(cluster, op), flops(cluster, op)
        value[f"{name}_bytes"] += sum(sizes[number] for number in (*op.inputs, *op.outputs))
        value["flops"] += work
        if name in HEAVY:
            value[f"{name}_flops"] += work
    value["largest_tensor_bytes"] = max(sizes, default=0.0)
    return timed_features(timed_ops(cluster)) + [value[name] for name in FEATURES[len(TIMED_FEATURES) :]]
