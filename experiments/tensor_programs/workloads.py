"""Tasks to measure: the ops of published models, as an op with its dims and the models that run it.

Architectures list all ops of a forward pass at several sizes; those that differ in nothing are one task. An op that takes a core
about 50 ms or more even with a good schedule is left out, because nine of ten random schedules are several times slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from experiments.tensor_programs.architectures import convolutional, recommendation_and_speech, transformers

Dims = tuple[int, ...]
MOST_MULTIPLY_ADDS = 130_000_000
MOST_ELEMENTS = 40_000_000


@dataclass(frozen=True, kw_only=True)
class Task:
    """An op that a schedule is drawn for."""

    op: str  # A key of `operators.BUILDERS`, which tells the dims.
    dims: Dims
    models: tuple[str, ...]

    @property
    def name(self) -> str:
        """Tells tasks apart."""
        return f"{self.op}_{'x'.join(map(str, self.dims))}"


def tasks() -> list[Task]:
    """All tasks; one that several models run stands once."""
    users: dict[tuple[str, Dims], list[str]] = {}
    for architectures in (convolutional, transformers, recommendation_and_speech):
        for model, ops in architectures.ops().items():
            for op, dims in dict.fromkeys(ops):
                if multiply_adds(op, dims) <= MOST_MULTIPLY_ADDS and elements(op, dims) <= MOST_ELEMENTS:
                    users.setdefault((op, dims), []).append(model)
    return [Task(op=op, dims=dims, models=tuple(models)) for (op, dims), models in users.items()]


def multiply_adds(op: str, dims: Dims) -> int:
    """Products that are summed, or elements of the result of an op without products."""
    match op, dims:
        case "conv2d", (channels, height, filters, kernel, stride, padding, *batch):
            return math.prod(batch) * channels * filters * (kernel * _out(height, kernel, stride, padding)) ** 2
        case "grouped_conv2d", (channels, height, filters, kernel, stride, padding, groups, *batch):
            return math.prod(batch) * channels * filters * (kernel * _out(height, kernel, stride, padding)) ** 2 // groups
        case "depthwise", (channels, height, kernel, stride, padding, *batch):
            return math.prod(batch) * channels * (kernel * _out(height, kernel, stride, padding)) ** 2
        case "transposed_conv2d", (channels, height, filters, kernel, stride, _, *batch):
            return math.prod(batch) * channels * filters * (height * kernel * stride) ** 2  # Zeros between rows count, too.
        case "rectangular_conv2d", (channels, height, width, filters, rows, columns, down, right, *rest):
            return math.prod(rest[2:]) * channels * filters * rows * columns * (height // down) * (width // right)
        case "conv1d", (channels, length, filters, kernel, stride, padding, *batch):
            return math.prod(batch) * channels * filters * kernel * _out(length, kernel, stride, padding)
        case "grouped_conv1d", (channels, length, filters, kernel, stride, padding, groups, *batch):
            return math.prod(batch) * channels * filters * kernel * _out(length, kernel, stride, padding) // groups
        case "transposed_conv1d", (channels, length, filters, kernel, stride, *_):
            return channels * filters * length * kernel * stride
        case "cross", (rows, width):
            return rows * width * width
        case _:
            return math.prod(dims) if op not in ("lookup", "bag") else math.prod(dims[:-1])


def elements(op: str, dims: Dims) -> int:
    """Numbers in the largest argument or result, roughly."""
    match op, dims:
        case "dense" | "dense_relu", (rows, columns, inner):
            return rows * columns + columns * inner + rows * inner
        case "batch_matmul" | "masked_batch_matmul", (batch, rows, columns, inner):
            return batch * (rows * columns + columns * inner + rows * inner)
        case "lookup" | "bag", (*_, width, table):
            return width * table
        case "max_pool" | "average_pool" | "mean_pool" | "channel_scale" | "depthwise", (channels, height, *_):
            return channels * height * height
        case _:
            return 0


def _out(size: int, kernel: int, stride: int, padding: int) -> int:
    return (size + 2 * padding - kernel) // stride + 1
