"""`OpCosts`: durations of a model's ops on a device, by a roofline whose compute roof has the steps of tiles and waves.

A matmul is computed in tiles, one on each multiprocessor at a time: time is that of whole waves of tiles, of the tile shape that is
fastest. Memory-bound ops take their bytes at the achieved rate. Kernels take a floor at least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dpro_search.cluster import Device
from dpro_search.costmodel.gpu_ops.achieved import achieved_by
from dpro_search.errors import InputError
from dpro_search.graph.model import Op, OpType, elements
from dpro_search.graph.model.op import Shape

BACKWARD_ATTENTION = 2.5  # FLOPs of the backward pass over those of the forward pass (Dao 2023, section 3.2)
BACKWARD_ATTENTION_SHARE = (
    0.8  # of the forward pass's speed: 550 of 700 TFLOP/s on an H100 (Shah et al. 2024, flash-attention 3, figure 6)
)


@dataclass(frozen=True)
class OpCosts:
    """Durations on one device at one precision.

    Raises
    ------
    InputError
        The device's peak, its memory rate or its number of multiprocessors is not known.
    """

    device: Device
    precision: str = "bf16"  # Of matmuls and attention.
    bytes_per_element: float = 2.0  # Of activations and of the weights that ops read.

    def __post_init__(self) -> None:
        for what, value in (
            (f"its peak in {self.precision}", self.device.peak_flops_per_s(self.precision)),
            ("its memory's rate", self.device.memory_bytes_per_s),
            ("its number of multiprocessors", self.device.cores),
        ):
            if value is None:
                raise InputError(f"{self.device.name}: {what} is not known: name it in the cluster's file")

    def forward_us(self, op: Op, sizes: Mapping[str, float]) -> float:
        """Of an op whose dims have the given local sizes."""
        if op.type is OpType.MATMUL:
            return self._matmul(op, sizes, op.rows, op.reduction, op.columns)
        if op.type is OpType.CONVOLUTION:
            return self._convolution(op, sizes, op.rows, op.reduction, op.columns)
        if op.type is OpType.ATTENTION:
            return self._attention(op, sizes, 1.0, 1.0)
        if op.type is OpType.LOSS:  # the largest logit, the sum, and what is left: three times over the logits
            return self._moved(3 * elements(op.reads, sizes) * self.bytes_per_element)
        return self._moved((elements(op.reads or op.output, sizes) + elements(op.output, sizes)) * self.bytes_per_element)

    def backward_us(self, op: Op, sizes: Mapping[str, float], *, frozen: bool = False) -> float:
        """Of the gradients of an op's inputs and, unless they are frozen, of its weights."""
        if op.type is OpType.MATMUL:
            inputs = self._matmul(op, sizes, op.rows, op.columns, op.reduction)
            return inputs if frozen else inputs + self._matmul(op, sizes, op.reduction, op.rows, op.columns)
        if op.type is OpType.CONVOLUTION:
            inputs = self._convolution(op, sizes, op.rows, op.columns, op.reduction)
            return inputs if frozen else inputs + self._convolution(op, sizes, op.reduction, op.rows, op.columns)
        if op.type is OpType.ATTENTION:
            return self._attention(op, sizes, BACKWARD_ATTENTION, BACKWARD_ATTENTION_SHARE)
        if op.type is OpType.LOSS:
            return self._moved(2 * elements(op.reads, sizes) * self.bytes_per_element)
        read = 2 * elements(op.reads or op.output, sizes)
        return self._moved((read + elements(op.output, sizes)) * self.bytes_per_element)

    def moved_us(self, count_bytes: float) -> float:
        """Of a kernel that reads and writes so many bytes."""
        return self._moved(count_bytes)

    def _matmul(self, op: Op, sizes: Mapping[str, float], rows: Shape, reduction: Shape, columns: Shape) -> float:
        batch = sizes["experts"] if "experts" in sizes and any("experts" in term for term in op.rows) else 1.0
        m, k, n = (elements(shape, sizes) for shape in (rows, reduction, columns))
        if batch > 1:  # grouped: rows are those of all experts
            m, k = (m / batch, k) if rows is op.rows else (m, k / batch) if reduction is op.rows else (m, k)
            n = n / batch if columns is op.rows else n
        return self.matmul_us(m, k, n, batch)

    def _convolution(self, op: Op, sizes: Mapping[str, float], rows: Shape, reduction: Shape, columns: Shape) -> float:
        """An implicit matrix product for each group, which moves the input, the output and the weight once."""
        groups = sizes.get(f"{op.name}.groups", 1.0)
        m, k, n = (elements(shape, sizes) / (groups if shape is op.columns else 1.0) for shape in (rows, reduction, columns))
        weight = elements(op.reduction, sizes) * elements(op.columns, sizes)
        if self.precision == "fp32":  # not on matrix units
            k *= op.winograd_share
        return self.matmul_us(m, k, n, groups, moved=elements(op.reads, sizes) + elements(op.output, sizes) + weight)

    def matmul_us(self, m: float, k: float, n: float, batch: float = 1.0, *, moved: float | None = None) -> float:
        """Of `batch` products of m x k with k x n matrices; `moved` elements, where it is not all three matrices once."""
        achieved = achieved_by(self.device)
        peak, rate, cores = self.device.peak_flops_per_s(self.precision), self.device.memory_bytes_per_s, self.device.cores
        assert peak is not None
        assert rate is not None
        assert cores is not None
        compute_us = math.inf
        for rows, columns, share in achieved.tiles:
            tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
            flops = math.ceil(tiles / cores) * cores * rows * columns * 2 * (k + achieved.reduction)
            compute_us = min(compute_us, flops / (peak * achieved.matmul * share) * 1e6)
        count = batch * (m * k + k * n + m * n) if moved is None else moved
        memory_us = self.bytes_per_element * count / (rate * achieved.memory) * 1e6
        power = achieved.blend
        return float(achieved.floor_us + (compute_us**power + memory_us**power) ** (1 / power))

    def _attention(self, op: Op, sizes: Mapping[str, float], factor: float, share: float) -> float:
        achieved = achieved_by(self.device)
        peak = self.device.peak_flops_per_s(self.precision)
        assert peak is not None
        compute_us = factor * op.forward_flops(sizes) / (peak * achieved.attention * share) * 1e6
        memory_us = self._moved(factor * (elements(op.reads, sizes) + elements(op.output, sizes)) * self.bytes_per_element)
        return max(compute_us, memory_us) + achieved.floor_us

    def _moved(self, count_bytes: float) -> float:
        achieved, rate = achieved_by(self.device), self.device.memory_bytes_per_s
        assert rate is not None
        return achieved.floor_us + count_bytes / (rate * achieved.memory) * 1e6
