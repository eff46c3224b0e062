"""Features of clusters for the cost model: numbers of the clusters as a whole and of each of their parts.

Two sets: without shapes, an op's type, its time by itself and the wiring, which every trace has; with shapes also bytes,
floating-point operations, and the kernels that a compiler makes. Those of the whole say how far a cluster is from measured ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search._compiled import njit
from dpro_search.collect.tables.clusters import OpCluster
from dpro_search.collect.trace import Floats, Ints
from dpro_search.costmodel.fused.flat import FlatClusters
from dpro_search.costmodel.fused.flatten import flatten
from dpro_search.costmodel.fused.op_classes import CLASSES, HEAVY, REFINED
from dpro_search.costmodel.fused.op_parts import op_parts
from dpro_search.costmodel.fused.timed import TIMED_FEATURES, TimedOps, leaders, timed_ops, timed_parts, timed_whole

_SIZES = ("flops", "in_bytes", "out_bytes", "inner_bytes", "variable_tensor_bytes", "largest_tensor_bytes")
_SIZED = (
    *_SIZES,
    "other_dtype_ops",
    "strided_grad_us",
    *(f"{name}_us" for name in REFINED),
    *(f"{name}_bytes" for name in CLASSES),
    *(f"{name}_flops" for name in HEAVY),
)
FEATURES = (*TIMED_FEATURES, *_SIZED)
# Columns of `_SIZED`
_FLOPS, _IN_BYTES, _OUT_BYTES, _INNER_BYTES, _VARIABLE_BYTES, _LARGEST_BYTES, _OTHER_DTYPE, _STRIDED_US, _FIRST = range(9)
_IN, _VARIABLE, _INNER, _OUT = 0, 2, 3, 4  # places in `ROLES`


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


def shaped_features(clusters: Sequence[OpCluster] | FlatClusters) -> ClusterFeatures:
    """Features of clusters whose tensors' shapes are known."""
    flat = clusters if isinstance(clusters, FlatClusters) else flatten(clusters)
    leads = leaders(flat)
    parts, of = op_parts(flat, leads)
    sized = np.zeros((len(flat.op_ptr) - 1, len(_SIZED)))
    _add_sizes(flat, leads, _FIRST + len(REFINED), _FIRST + len(REFINED) + len(CLASSES), sized)
    return ClusterFeatures(whole=np.hstack([timed_whole(timed_ops(flat, leads)), sized]), parts=parts, of=of)


def timed_features(clusters: TimedOps) -> ClusterFeatures:
    """Features of clusters without shapes."""
    parts, of = timed_parts(clusters)
    return ClusterFeatures(whole=timed_whole(clusters), parts=parts, of=of)


@njit(nogil=True)
def _add_sizes(flat: FlatClusters, leads: Ints, classes_at: int, heavy_at: int, sized: Floats) -> None:
    """The values of `_SIZED`, [n, features]; columns of classes begin at `classes_at`, those of heavy ones at `heavy_at`."""
    for cluster in range(len(sized)):
        row, tensors = sized[cluster], flat.tensor_ptr[cluster]
        for at in range(tensors, flat.tensor_ptr[cluster + 1]):
            role = flat.role[at]
            size = flat.types[flat.tensor[at]].bytes
            row[_LARGEST_BYTES] = max(row[_LARGEST_BYTES], size)
            if role == _IN:
                row[_IN_BYTES] += size
            elif role == _OUT:
                row[_OUT_BYTES] += size
            elif role == _INNER:
                row[_INNER_BYTES] += size
            elif role == _VARIABLE:
                row[_VARIABLE_BYTES] += size
        for i in range(flat.op_ptr[cluster], flat.op_ptr[cluster + 1]):
            known = flat.ops[flat.op[i]]
            leader = flat.ops[flat.op[leads[i]]]
            if leader.refined >= 0:
                row[_FIRST + leader.refined] += flat.us[i]
            if leader.strided_grad:
                row[_STRIDED_US] += flat.us[i]
            size, wide = 0.0, 0.0
            for at in range(flat.input_ptr[i], flat.input_ptr[i + 1]):
                size += flat.types[flat.tensor[tensors + flat.inputs[at]]].bytes
            for at in range(flat.output_ptr[i], flat.output_ptr[i + 1]):
                made = flat.types[flat.tensor[tensors + flat.outputs[at]]]
                size += made.bytes
                if not made.narrow:
                    wide = 1.0
            row[_OTHER_DTYPE] += wide
            if leads[i] != i:
                continue  # a trace has the chain as one op
            row[classes_at + known.class_] += size
            row[_FLOPS] += known.flops
            if known.heavy >= 0:
                row[heavy_at + known.heavy] += known.flops
