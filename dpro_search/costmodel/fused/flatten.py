"""Makes arrays of clusters, so that compiled passes can look at many at a time.

The record of an op, which follows from its type and shapes, is computed once for each distinct op and kept, because clusters have
many ops in common. Convolutions and matrix products are described as a compiler computes them: products of two matrices, perhaps
many of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from math import prod, sqrt
from typing import Any, NamedTuple

import numpy as np

from dpro_search.collect.tables.clusters import ROLES, OpCluster
from dpro_search.collect.trace import Ints
from dpro_search.costmodel.fused import op_parts
from dpro_search.costmodel.fused.flat import OP, TENSOR, FlatClusters, Records, pointers
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

_NARROW = ("float32", "int32", "bool")  # what nearly all measured ops compute with
_LEADING = ("conv", "depthwise", "matmul")  # kinds that the framework fuses with what follows
_CHEAP_TYPES = frozenset(["ZerosLike", "OnesLike", "Fill", "Range"])  # made of nothing
_SCATTERS = frozenset(["UnsortedSegmentSum", "ResourceScatterAdd", "ScatterNd"])
_WAY_OF_KIND = {
    "reduction": op_parts.REDUCTION,
    "norm": op_parts.NORM,
    "norm_grad": op_parts.NORM,
    "softmax": op_parts.SOFTMAX,
    "pool": op_parts.WHOLE,
    "pool_grad": op_parts.WHOLE,
    OTHER: op_parts.WHOLE,
    "layout": op_parts.TRANSPOSE,
    "movement": op_parts.MOVE,
    "transcendental": op_parts.COSTLY,
    "free": op_parts.ALIAS,
}
_WAY_OF_VARIABLE = {"ReadVariableOp": op_parts.READ, "AssignVariableOp": op_parts.ASSIGN}
_PRODUCT_FIELDS = ("batches", "rows", "depth", "columns", "pixels", "holes", "swapped", "pairs")
_REMEMBERED = 1 << 16  # distinct ops


def flatten(clusters: Sequence[OpCluster]) -> FlatClusters:
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
    """Records of distinct ops, `OP`."""
    return np.array([_op_record(op) for op in ops], dtype=OP)


def type_records(types: Iterable[tuple[str, Shape]]) -> tuple[Records, Ints]:
    """Records of distinct tensors, `TENSOR`, and the lengths of their axes."""
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
    across = _across(kind, product) if product is not None else op_parts.ALONG
    way = _way_of(op.type, kind, name)
    part = op_parts.SCATTER if way == op_parts.WHOLE_MOVE else name if name in op_parts.PART_CLASSES else op_parts.LOOP
    return (
        way,
        KINDS.index(kind),
        CLASSES.index(name),
        REFINED.index(name) if name in REFINED else -1,
        HEAVY.index(name) if name in HEAVY else -1,
        op_parts.PART_CLASSES.index(part),
        flops(op),
        int(kind in _LEADING),
        int(op.type in EPILOGUES),
        int(is_strided(op)),
        int(product is not None),
        *(0.0 if product is None else float(getattr(product, field)) for field in _PRODUCT_FIELDS),
        across.elements,
        across.misses(*op_parts.NEAR),
        across.misses(*op_parts.FAR),
    )


def _way_of(op_type: str, kind: str, name: str) -> int:
    """Computation of an op, one of the constants of `op_parts`."""
    if kind == "variable":
        return _WAY_OF_VARIABLE.get(op_type, op_parts.UPDATE)
    if op_type in _CHEAP_TYPES:
        return op_parts.FILL
    if name in HEAVY:
        return op_parts.PRODUCT
    if kind == "gather":
        return op_parts.WHOLE_MOVE if op_type in _SCATTERS else op_parts.PICK
    return _WAY_OF_KIND.get(kind, op_parts.PLAIN)


def _across(kind: str, product: Product) -> op_parts.Strided:
    """Elements read across rows: a transposed right operand, the filters of an input's gradient, the image of a filter's."""
    if kind == "conv_filter_grad":
        channels = product.rows / product.pixels
        return op_parts.Strided(product.rows * product.depth, product.depth, int(4 * channels))
    if kind == "conv_input_grad":
        return op_parts.Strided(product.depth * product.columns, product.columns, int(4 * product.depth / product.pixels))
    if kind in ("matmul", "batch_matmul") and product.right_swapped:
        return op_parts.Strided(product.batches * product.depth * product.columns, product.columns, int(4 * product.depth))
    return op_parts.ALONG


class Product(NamedTuple):
    """`batches` times [rows, depth] x [depth, columns]."""

    batches: float
    rows: float
    depth: float
    columns: float
    pixels: float = 1.0  # Pixels of a convolution's filter; 1 for others.
    holes: float = 1.0  # In a gradient of a strided convolution, pixels of the image for one of the result, along an axis.
    # swapped, right_swapped: Operands that are stored as their transpose; whether the right one is.
    swapped: float = 0.0
    right_swapped: bool = False
    # Channels of the filter gradient of a depthwise convolution, because XLA computes the product for each pair of channels and
    # takes the diagonal (`ConvolutionGroupConverter`); 1 for others.
    pairs: float = 1.0


def product_of(op: TypedOp) -> Product | None:
    """The product that an op computes, from the shapes of its tensors; None where these do not fit its type."""
    kind = kind_of(op.type)
    shapes, made = op.read, op.made[0] if op.made else ()
    if kind in ("matmul", "batch_matmul"):
        if len(shapes) < 2:
            return None
        if op.equation:
            return _einsum(op.equation, shapes)
        return _matrices(shapes[0], shapes[1], made)
    gradient = kind.endswith("_grad")
    if len(shapes) < (3 if gradient else 2):
        return None
    if kind.endswith("input_grad"):
        image, filters, result = made, shapes[1], shapes[2]
    elif kind.endswith("filter_grad"):
        image, filters, result = shapes[0], made, shapes[2]
    else:
        image, filters, result = shapes[0], shapes[1], made
    if not (len(image) == len(filters) == len(result) == 4 and min(*image, *filters, *result) > 0):
        return None
    return _convolution(kind, image, filters, result)


def _convolution(kind: str, image: Shape, filters: Shape, result: Shape) -> Product:
    """Images and results are [n, height, width, channels], filters [height, width, in, out] or, depthwise, [.., channels, each]."""
    pixels, positions = float(filters[0] * filters[1]), float(prod(result[:3]))
    groups, inner, outer = (filters[2], 1, filters[3]) if kind.startswith("depthwise") else (1, filters[2], filters[3])
    if kind.endswith("input_grad"):  # every pixel of the image from all results around it, also where none exist
        sizes = float(prod(image[:3])), pixels * outer, float(inner)
    elif kind.endswith("filter_grad"):  # every pixel of the filter from all positions
        sizes = pixels * inner, positions, float(outer)
    else:
        sizes = positions, pixels * inner, float(outer)
    holes = float(max(1, round(image[1] / result[1]))) if kind.endswith("_grad") else 1.0
    pairs = float(groups) if kind.endswith("filter_grad") else 1.0
    return Product(float(groups), *sizes, pixels=pixels, holes=holes, pairs=pairs)


def _matrices(left: Shape, right: Shape, made: Shape) -> Product | None:
    if min(len(left), len(right), len(made)) < 2 or min(*left, *right, *made) <= 0:
        return None
    rows, columns = made[-2:]
    batches = float(prod(made[:-2]))
    depth = round(sqrt(prod(left) / prod(left[:-2]) * prod(right) / prod(right[:-2]) / (rows * columns)))
    turned = right[-1] != columns and right[-2] == columns
    swapped = float(left[-2] != rows and left[-1] == rows) + turned
    return Product(batches, float(rows), float(max(depth, 1)), float(columns), swapped=swapped, right_swapped=turned)


def _einsum(equation: str, shapes: tuple[Shape, ...]) -> Product | None:
    """Indices of both operands and the result count batches, of both operands only the depth."""
    operands, _, result = equation.replace(" ", "").partition("->")
    terms = operands.split(",")
    if len(terms) != 2 or len(shapes) < 2 or any(len(term) != len(shape) for term, shape in zip(terms, shapes, strict=False)):
        return None
    size = {letter: length for term, shape in zip(terms, shapes, strict=False) for letter, length in zip(term, shape, strict=True)}
    left, right = map(set, terms)

    def length(letters: set[str]) -> float:
        return float(prod(size[letter] for letter in letters))

    both = left & right
    over = both - set(result)
    turned = bool(over) and terms[1][-1] in over
    swapped = float(bool(over) and terms[0][-1] not in over) + turned
    batches, rows, columns = length(both & set(result)), length(left - both), length(right - both)
    return Product(batches, rows, length(over), columns, swapped=swapped, right_swapped=turned)
