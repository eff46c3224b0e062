"""What a cost model sees of a cluster: a row of numbers, each with a unit in its name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from dpro_search.collect.clusters.table import Cluster
from dpro_search.collect.trace import Floats
from dpro_search.costmodel.learned.op_classes import CLASSES, HEAVY, class_of, flops, tensor_bytes

_SIZES = (
    "members_us", "largest_member_us", "flops", "in_bytes", "out_bytes", "inner_bytes", "variable_bytes", "largest_tensor_bytes",
)  # fmt: skip
_COUNTS = ("ops", "depth", "width", "inputs", "outputs", "other_dtype_ops")
FEATURES = (
    *_SIZES,
    *_COUNTS,
    *(f"{kind}_count" for kind in CLASSES),
    *(f"{kind}_us" for kind in CLASSES),
    *(f"{kind}_bytes" for kind in CLASSES),
    *(f"{kind}_flops" for kind in HEAVY),
)
CLASS_US = tuple(f"{kind}_us" for kind in CLASSES)
CLASS_BYTES = tuple(f"{kind}_bytes" for kind in CLASSES)
CLASS_FLOPS = tuple(f"{kind}_flops" for kind in HEAVY)
_NARROW = ("float32", "int32", "bool")  # what nearly all measured ops compute with


def feature_matrix(clusters: Sequence[Cluster]) -> Floats:
    """Features of n clusters, [n, len(FEATURES)]; all are finite and not negative."""
    rows = [cluster_features(cluster) for cluster in clusters]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(FEATURES))


def cluster_features(cluster: Cluster) -> list[float]:
    """The values of `FEATURES` for one cluster."""
    value: dict[str, float] = dict.fromkeys(FEATURES, 0.0)
    sizes = [float(tensor_bytes(cluster, number)) for number in range(len(cluster.tensors))]
    for tensor, size in zip(cluster.tensors, sizes, strict=True):
        if tensor.role != "const":
            value[f"{tensor.role}_bytes"] += size
    for op, us in zip(cluster.ops, cluster.op_us, strict=True):
        kind = class_of(cluster, op)
        work = flops(cluster, op)
        touched = sum(sizes[number] for number in (*op.inputs, *op.outputs))
        value[f"{kind}_count"] += 1
        value[f"{kind}_us"] += us
        value[f"{kind}_bytes"] += touched
        value["flops"] += work
        if kind in HEAVY:
            value[f"{kind}_flops"] += work
        value["other_dtype_ops"] += any(cluster.tensors[number].dtype not in _NARROW for number in op.outputs)
    roles = [tensor.role for tensor in cluster.tensors]
    depth, width = _extent(cluster)
    value |= {
        "members_us": sum(cluster.op_us),
        "largest_member_us": max(cluster.op_us),
        "largest_tensor_bytes": max(sizes, default=0.0),
        "ops": len(cluster.ops),
        "depth": depth,
        "width": width,
        "inputs": roles.count("in") + roles.count("variable"),
        "outputs": roles.count("out"),
    }
    return [value[name] for name in FEATURES]


def _extent(cluster: Cluster) -> tuple[int, int]:
    """(ops on the longest chain, most ops at one distance from the cluster's inputs)."""
    level_of: dict[int, int] = {}
    at_level: dict[int, int] = defaultdict(int)
    for op in cluster.ops:
        level = 1 + max((level_of.get(number, 0) for number in op.inputs), default=0)
        at_level[level] += 1
        for number in op.outputs:
            level_of[number] = level
    return max(at_level), max(at_level.values())
