"""FLOPs of matrix products and convolutions, from their shapes and dimension numbers (xla/service/hlo_cost_analysis.cc)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from dpro_search.collect.readers.xla import HloInstruction, HloShape
from dpro_search.errors import TraceFormatError

_LABELS = re.compile(r"([\w?]+)_([\w?]+)->([\w?]+)")
_LIBRARY_PRODUCTS = ("__cublas$", "__triton_gemm", "__onednn$matmul")
_LIBRARY_CONVOLUTIONS = ("__cudnn$conv",)
_MOST_KERNEL = 1 << 22  # elements of a kernel along a dimension; a text with more is damaged
_MOST_SIZE = 1 << 40


def dot_flops(instruction: HloInstruction, left: HloShape, result: HloShape) -> float:
    """FLOPs of a ``dot``: two for each element of the result and each element of the contracted dimensions."""
    contracted = math.prod(left.dimensions[dim] for dim in instruction.dims("lhs_contracting_dims"))
    return 2.0 * result.size * contracted


def convolution_flops(instruction: HloInstruction, left: HloShape, kernel: HloShape, result: HloShape) -> float:
    """FLOPs of a ``convolution``, without the products with padding and with the zeros of dilation.

    A TPU's matrix products are convolutions: without a window, or with one that slides over batches.
    """
    labels = _LABELS.search(instruction.attributes.get("dim_labels", ""))
    if labels is None:
        return 0.0
    inputs, kernels, outputs = labels[1], labels[2], labels[3]
    window = _window(instruction.attributes.get("window", ""), len(kernels) - 2)
    feature_groups = instruction.number("feature_group_count") or 1
    batch_groups = instruction.number("batch_group_count") or 1
    positions = 1
    for place in range(len(kernels) - 2):
        label = str(place)
        positions *= _valid_positions(
            left.dimensions[inputs.index(label)],
            kernel.dimensions[kernels.index(label)],
            result.dimensions[outputs.index(label)],
            *window[place],
        )
    features = left.dimensions[inputs.index("f")] // feature_groups
    batch = left.dimensions[inputs.index("b")] // batch_groups
    return 2.0 * features * kernel.dimensions[kernels.index("o")] * batch * positions


def library_product_flops(instruction: HloInstruction, operands: Sequence[HloShape]) -> float | None:
    """FLOPs of a custom call of cuBLAS, cuDNN or oneDNN; None if it is no product that is known."""
    target = instruction.custom_call_target
    results = list(instruction.shape.leaves())
    if target.startswith(_LIBRARY_PRODUCTS) and operands and results:
        return _product_call(instruction, operands[0], results[0])
    if target.startswith(_LIBRARY_CONVOLUTIONS) and len(operands) >= 2:
        # The labels are those of the forward convolution: of its gradients one operand is the result, and the other way round.
        if target.startswith("__cudnn$convBackwardInput"):
            return convolution_flops(instruction, results[0], operands[1], operands[0])
        if target.startswith("__cudnn$convBackwardFilter"):
            return convolution_flops(instruction, operands[0], results[0], operands[1])
        return convolution_flops(instruction, operands[0], operands[1], results[0])
    return None


def _product_call(instruction: HloInstruction, left: HloShape, result: HloShape) -> float | None:
    for part in instruction.backend_config.values():
        numbers = part.get("dot_dimension_numbers") if isinstance(part, dict) else None
        if isinstance(numbers, dict):
            dims = [int(dim) for dim in numbers.get("lhs_contracting_dimensions", ())]
            return 2.0 * result.size * math.prod(left.dimensions[dim] for dim in dims)
    return None


def _window(text: str, dimensions: int) -> list[tuple[int, int, int, int]]:
    """Stride, padding before, dilation of the input and of the kernel, for each dimension of a window."""
    fields = dict(part.partition("=")[::2] for part in text.strip("{}").split())

    def numbers(key: str, default: str) -> list[str]:
        return fields[key].split("x") if key in fields else [default] * dimensions

    columns = zip(
        numbers("stride", "1"), numbers("pad", "0_0"), numbers("lhs_dilate", "1"), numbers("rhs_dilate", "1"), strict=True
    )
    return [(int(stride), int(pad.partition("_")[0]), int(left), int(kernel)) for stride, pad, left, kernel in columns]


@lru_cache(maxsize=1 << 12)
def _valid_positions(size: int, kernel: int, result: int, stride: int, before: int, dilation: int, kernel_dilation: int) -> int:
    """Pairs of a kernel's element and a place of the result that meet an element of the input, along one dimension."""
    if max(kernel, dilation) > _MOST_KERNEL or max(size, result, stride, before, kernel_dilation) > _MOST_SIZE or stride < 1:
        raise TraceFormatError(f"a convolution has a dimension of {size}, a kernel of {kernel} and a stride of {stride}")
    offsets = np.arange(kernel, dtype=np.int64) * kernel_dilation - before  # place of the input that the first result meets
    lowest = np.maximum(0, -(offsets // stride))  # ceil(-offset / stride)
    highest = np.minimum(result - 1, ((size - 1) * dilation - offsets) // stride)
    total = 0
    for remainder in range(dilation):  # of the result's places divided by the dilation: they meet zeros, or elements, all alike
        meets = (offsets + remainder * stride) % dilation == 0
        places = (highest - remainder) // dilation - (lowest - 1 - remainder) // dilation
        total += int(np.sum(np.maximum(0, places), where=meets))
    return total
