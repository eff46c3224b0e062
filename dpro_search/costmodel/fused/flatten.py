"""Makes arrays of clusters, so that compiled passes can look at many at a time.

What an op's type and shapes say of it is worked out once for each distinct op and kept, for clusters have many ops in common.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dpro_search.collect.clusters.table import ROLES, Cluster
from dpro_search.collect.trace import Ints
from dpro_search.costmodel.fused import lowering
from dpro_search.costmodel.fused.flat import OP, TENSOR, FlatClusters, Records, pointers
from dpro_search.costmodel.fused.lowering import KERNELS, LOOP, SCATTER
from dpro_search.costmodel.fused.op_classes import (
    CLASSES,
    EPILOGUES,
    HEAVY,
    KINDS,
    OTHER,
    REFINED,
    Shape,
    TypedOp,
    class_of,
    flops,
    is_strided,
    kind_of,
    size_bytes,
)
from dpro_search.costmodel.fused.products import Product, product_of

_NARROW = ("float32", "int32", "bool")  # what nearly all measured ops compute with
_LEADING = ("conv", "depthwise", "matmul")  # kinds that the framework fuses with what follows
_CHEAP_TYPES = frozenset(["ZerosLike", "OnesLike", "Fill", "Range"])  # made of nothing
_SCATTERS = frozenset(["UnsortedSegmentSum", "ResourceScatterAdd", "ScatterNd"])
_OF_KIND = {
    "reduction": lowering.REDUCTION,
    "norm": lowering.NORM,
    "norm_grad": lowering.NORM_GRAD,
    "softmax": lowering.SOFTMAX,
    "pool": lowering.WHOLE,
    "pool_grad": lowering.WHOLE,
    OTHER: lowering.WHOLE,
    "layout": lowering.TURN,
    "movement": lowering.MOVE,
    "transcendental": lowering.COSTLY,
    "free": lowering.FREE,
}
_OF_VARIABLE = {"ReadVariableOp": lowering.READ, "AssignVariableOp": lowering.ASSIGN}
_PRODUCT_FIELDS = ("batches", "rows", "depth", "columns", "pixels", "holes", "swapped", "pairs")
_REMEMBERED = 1 << 16  # distinct ops


def flatten(clusters: Sequence[Cluster]) -> FlatClusters:
    """Clusters as arrays."""
    ops: dict[TypedOp, int] = {}
    types: dict[tuple[str, Shape], int] = {}
    op: list[int] = []
    tensor: list[int] = []
    role: list[int] = []
    inputs: list[int] = []
    outputs: list[int] = []
    roles = {name: number for number, name in enumerate(ROLES)}
    for cluster in clusters:
        shapes = [one.shape for one in cluster.tensors]
        tensor += [types.setdefault((one.dtype, one.shape), len(types)) for one in cluster.tensors]
        role += [roles[one.role] for one in cluster.tensors]
        for one in cluster.ops:
            read, made = tuple([shapes[i] for i in one.inputs]), tuple([shapes[i] for i in one.outputs])
            op.append(ops.setdefault(TypedOp(one.type, read, made, one.attributes.get("equation", "")), len(ops)))
            inputs += one.inputs
            outputs += one.outputs
    known, lengths = type_records(types)
    every = [one for cluster in clusters for one in cluster.ops]
    return FlatClusters(
        op_ptr=pointers(len(cluster.ops) for cluster in clusters),
        op=np.array(op, dtype=np.int64),
        us=np.array([us for cluster in clusters for us in cluster.op_us], dtype=np.float64),
        input_ptr=pointers(len(one.inputs) for one in every),
        inputs=np.array(inputs, dtype=np.int64),
        output_ptr=pointers(len(one.outputs) for one in every),
        outputs=np.array(outputs, dtype=np.int64),
        tensor_ptr=pointers(len(cluster.tensors) for cluster in clusters),
        tensor=np.array(tensor, dtype=np.int64),
        role=np.array(role, dtype=np.int64),
        ops=op_records(ops),
        types=known,
        lengths=lengths,
    )


def op_records(ops: Iterable[TypedOp]) -> Records:
    """What is known of distinct ops, `OP`."""
    return np.array([_op_record(op) for op in ops], dtype=OP)


def type_records(types: Iterable[tuple[str, Shape]]) -> tuple[Records, Ints]:
    """What is known of distinct tensors, `TENSOR`, and the lengths of their axes."""
    rows, lengths = [], list[int]()
    for dtype, shape in types:
        start = len(lengths)
        lengths += shape
        rows.append((float(size_bytes(dtype, shape)), start, len(lengths), int(dtype in _NARROW)))
    return np.array(rows, dtype=TENSOR), np.array(lengths, dtype=np.int64)


@functools.lru_cache(_REMEMBERED)
def _op_record(op: TypedOp) -> tuple[Any, ...]:
    kind, name = kind_of(op.type), class_of(op)
    product = product_of(op) if name in HEAVY else None
    across = _across(kind, product) if product is not None else lowering.ALONG
    return (
        _lowered(op.type, kind, name),
        KINDS.index(kind),
        CLASSES.index(name),
        REFINED.index(name) if name in REFINED else -1,
        HEAVY.index(name) if name in HEAVY else -1,
        KERNELS.index(SCATTER if op.type in _SCATTERS else name if name in KERNELS else LOOP),
        flops(op),
        int(kind in _LEADING),
        int(op.type in EPILOGUES),
        int(is_strided(op)),
        int(product is not None),
        *(0.0 if product is None else float(getattr(product, field)) for field in _PRODUCT_FIELDS),
        across.elements,
        across.misses(*lowering.NEAR),
        across.misses(*lowering.FAR),
    )


def _lowered(op_type: str, kind: str, name: str) -> int:
    """How an op becomes kernels."""
    if kind == "variable":
        return _OF_VARIABLE.get(op_type, lowering.UPDATE)
    if op_type in _CHEAP_TYPES:
        return lowering.NOTHING
    if name in HEAVY:
        return lowering.PRODUCT
    if kind == "gather":
        return lowering.WHOLE_MOVE if op_type in _SCATTERS else lowering.PICK
    return _OF_KIND.get(kind, lowering.PLAIN)


def _across(kind: str, product: Product) -> lowering.Strided:
    """Of a product: a transposed right operand, the filters of an input's gradient, the image of a filter's."""
    if kind == "conv_filter_grad":
        channels = product.rows / product.pixels
        return lowering.Strided(product.rows * product.depth, product.depth, int(4 * channels))
    if kind == "conv_input_grad":
        return lowering.Strided(product.depth * product.columns, product.columns, int(4 * product.depth / product.pixels))
    if kind in ("matmul", "batch_matmul") and product.right_swapped:
        return lowering.Strided(product.batches * product.depth * product.columns, product.columns, int(4 * product.depth))
    return lowering.ALONG
