"""What a cost model sees of a cluster: numbers, each with a unit in its name, of the cluster as a whole and of each of its parts.

Two sets: without shapes, an op's type, its time by itself and the wiring, which every trace has; with shapes also bytes,
floating-point operations, and the kernels that a compiler makes. Those of the whole say how far a cluster is from measured ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.collect.clusters.table import Cluster
from dpro_search.collect.trace import Floats, Ints
from dpro_search.costmodel.learned.kernels import kernel_rows
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
    own_us,
    tensor_bytes,
)
from dpro_search.costmodel.learned.parts import NAMES_OF, TIMED_CLASSES

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


@dataclass(frozen=True, kw_only=True)
class ClusterFeatures:
    """Features of n clusters; all are finite and not negative. A mask or numbers of clusters pick some of them.

    Attributes
    ----------
    whole : array [n, features]
        Of the cluster as a whole: `FEATURES`, or `TIMED_FEATURES`.
    parts : array [parts, features]
        Of what it consists of: `PART_FEATURES`, or `TIMED_PARTS`.
    of : array [parts], ascending
        The cluster of each part; each cluster has at least one.
    """

    whole: Floats
    parts: Floats
    of: Ints

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, chosen: npt.NDArray[Any]) -> ClusterFeatures:
        numbers = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        first = np.searchsorted(self.of, np.arange(len(self) + 1))
        counts = first[numbers + 1] - first[numbers]
        of = np.repeat(np.arange(len(numbers)), counts)
        offset = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
        return ClusterFeatures(whole=self.whole[numbers], parts=self.parts[first[numbers][of] + offset], of=of)


def feature_names(sees: str) -> tuple[str, ...]:
    """Columns of `ClusterFeatures.whole` with "shapes" or with "times" only."""
    return {"shapes": FEATURES, "times": TIMED_FEATURES}[sees]


def shaped_features(clusters: Sequence[Cluster]) -> ClusterFeatures:
    """Features of clusters whose tensors' shapes are known."""
    return _joined([cluster_features(cluster) for cluster in clusters], [kernel_rows(cluster) for cluster in clusters], "shapes")


def timed_features(clusters: Sequence[TimedOps]) -> ClusterFeatures:
    """Features of clusters without shapes."""
    return _joined([_timed_whole(cluster) for cluster in clusters], [_timed_parts(cluster) for cluster in clusters], "times")


def _joined(whole: Sequence[Sequence[float]], parts: Sequence[Sequence[Sequence[float]]], sees: str) -> ClusterFeatures:
    count, width = len(feature_names(sees)), len(NAMES_OF[sees])
    return ClusterFeatures(
        whole=np.array(whole, dtype=np.float64).reshape(len(whole), count),
        parts=np.array([row for rows in parts for row in rows], dtype=np.float64).reshape(-1, width),
        of=np.repeat(np.arange(len(parts)), [len(rows) for rows in parts]).astype(np.int64),
    )


def _timed_parts(cluster: TimedOps) -> list[tuple[float, ...]]:
    """`TIMED_PARTS` of the call, then of the ops of each kind."""
    found: dict[str, list[float]] = defaultdict(list)
    for kind, own in zip(cluster.kinds, cluster.us, strict=True):
        found[kind].append(own)
    whole = sum(cluster.us), len(cluster.us), cluster.inputs, cluster.outputs, cluster.depth, cluster.width
    kinds = [(TIMED_CLASSES.index(kind), sum(own), len(own), max(own), *whole) for kind, own in found.items()]
    return [(0.0, 0.0, 0.0, 0.0, *whole), *kinds]


def _timed_whole(cluster: TimedOps) -> list[float]:
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
    leads, own = leaders(cluster), own_us(cluster)
    ran = [us > 0 for us in own]
    maker = {number: i for i, op in enumerate(cluster.ops) for number in op.outputs}
    needs = [[maker[number] for number in op.inputs if maker.get(number, i) < i] for i, op in enumerate(cluster.ops)]
    roles = [tensor.role for tensor in cluster.tensors]
    depth, width = extent(needs, ran)
    return TimedOps(
        kinds=tuple(kind_of(cluster.ops[leads[i]].type) for i, did in enumerate(ran) if did),
        us=tuple(us for us in own if us > 0),
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
    own = own_us(cluster)
    for i, lead in enumerate(leaders(cluster)):
        op, leader = cluster.ops[i], cluster.ops[lead]
        refined = f"{class_of(cluster, leader)}_us"
        if refined in _REFINED_US:
            value[refined] += own[i]
        if is_strided(cluster, leader):
            value["strided_grad_us"] += own[i]
        value["other_dtype_ops"] += any(cluster.tensors[number].dtype not in _NARROW for number in op.outputs)
        if i != lead:
            continue  # a trace has the chain as one op
        name, work = class_of(cluster, op), flops(cluster, op)
        value[f"{name}_bytes"] += sum(sizes[number] for number in (*op.inputs, *op.outputs))
        value["flops"] += work
        if name in HEAVY:
            value[f"{name}_flops"] += work
    value["largest_tensor_bytes"] = max(sizes, default=0.0)
    return _timed_whole(timed_ops(cluster)) + [value[name] for name in FEATURES[len(TIMED_FEATURES) :]]
