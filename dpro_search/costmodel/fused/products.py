"""Convolutions and matrix products as what a compiler makes of them: products of two matrices, perhaps many of them."""

from __future__ import annotations

from math import prod, sqrt
from typing import NamedTuple

from dpro_search.costmodel.fused.op_classes import Shape, TypedOp, kind_of


class Product(NamedTuple):
    """`batches` times [rows, depth] x [depth, columns]."""

    batches: float
    rows: float
    depth: float
    columns: float
    pixels: float = 1.0  # Of a convolution's filter; 1 for others.
    holes: float = 1.0  # Of a gradient of a strided convolution: pixels of the image for one of the result, along an axis.
    # swapped, right_swapped: Operands that are stored as their transpose; whether the right one is.
    swapped: float = 0.0
    right_swapped: bool = False
    # Of the filter gradient of a depthwise convolution: its channels, for XLA computes the product for each pair of channels and
    # takes the diagonal (`ConvolutionGroupConverter`); 1 for others.
    pairs: float = 1.0


def product_of(op: TypedOp) -> Product | None:
    """What an op multiplies, from the shapes of its tensors; None where these do not fit its type."""
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
    if kind.endswith("input_grad"):  # every pixel of the image from all results around it, also where there are none
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
