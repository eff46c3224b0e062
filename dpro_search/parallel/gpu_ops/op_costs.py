"""`OpCosts`: durations of a model's ops on a device, by a roofline whose compute roof has the steps of tiles and waves.

A matmul is computed in tiles, one on each multiprocessor at a time: time is that of whole waves of tiles, of the tile shape that is
fastest, with the reduction split where there are too few tiles. Memory-bound ops take their bytes at the achieved rate, in as many
passes as their kernels make. Kernels take a floor at least. ``achieved.toml`` has the shares of a device's peaks that ops reach.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from statistics import NormalDist
from typing import Any, NamedTuple

from dpro_search.cluster import Device, bundled
from dpro_search.cluster.device import BLOCK_SCALED
from dpro_search.errors import InputError
from dpro_search.parallel.gpu_ops.kernels import AttentionKernels, Kernels
from dpro_search.parallel.model import Op, OpType, elements
from dpro_search.parallel.model.op import RANK, OpRole, Shape

SPLITS = (1, 2, 4, 8, 16, 32)
"""Parts of a product's reduction that multiprocessors compute apart and then sum, where there are fewer tiles than multiprocessors
(split-k of cuBLAS and cuDNN): gradients of a convolution's weights are few sums over very many positions."""
WIDE_TILE = 256 * 128  # elements of the largest tile
HALF_BYTES, WIDE_BYTES = 2.0, 4.0
PADDING_PASSES = 2.0
"""Over the tokens at experts that compute in 8 bits: their rows are copied to multiples of 16 or 32 before the products, and back
behind them (Transformer Engine's Fp8Padding and Fp8Unpadding in Megatron-Core 0.16, moe/experts.py)."""
CAST_BYTES = 6.0  # of an element that is cast from fp32 to 16 bits, or back
BACKWARD_ATTENTION = 2.5  # FLOPs of the backward pass over those of the forward pass (Dao 2023, section 3.2)
BACKWARD_ATTENTION_SHARE = (
    0.8  # of the forward pass's speed: 550 of 700 TFLOP/s on an H100 (Shah et al. 2024, flash-attention 3, figure 6)
)
TRITON_ATTENTION = 0.71  # of the speed of flash-attention 2, which is 1.3 to 1.5 times as fast (Dao 2023, section 4.1)
CONVOLUTION_TILES = ((256, 32, 0.7), (128, 32, 0.65))
"""Further tiles, for the few channels of convolutions (cuDNN's kernels of tile size 256 x 32 and 128 x 32; shares estimated)."""
ALIGNED_BYTES = 16
"""Kernels of batched products for matrix units load so many bytes at a time (cuBLAS, "Tensor Core Usage"). Heads lie beside each
other, so that a head size that is no multiple of 8 leaves only the first one aligned: vector units compute such products."""
IMAGE_DIMS = 2  # a volume has three
SPLIT_REDUCTION = 512.0
"""Columns of a reduction, at least, that a core of several computes of a tile (split-k kernels of cuDNN; estimated)."""
SPREAD = 0.015
"""Standard deviation of the time of compute-bound kernels over equal GPUs, relative to the mean. Of five clusters the box plots'
whiskers, 5.4 standard deviations apart, span 8 % on average, for chips differ in the clock that their power limit leaves them; what
waits for memory differs little (Sinha et al. 2022, "Not all GPUs are created equal", SC)."""


class Narrow(NamedTuple):
    """A type of less than 16 bits in which products multiply."""

    element_bytes: float  # With the scales of its blocks.
    reads: int  # Of a tensor in 16 bits: one, and one before for its largest element, where a scale of the whole needs that.


NARROW: Mapping[str, Narrow] = {
    "fp8": Narrow(1.0, 1),
    "mxfp8": Narrow(1 + 1 / 32, 1),  # A scale of 8 bits for each 32 (OCP Microscaling Formats 1.0, table 1).
    "mxfp4": Narrow(0.5 + 1 / 32, 1),
    # A scale of 8 bits for each 16, and one in fp32 for the tensor (NVIDIA 2025, "Pretraining LLMs with NVFP4", arXiv 2509.25149).
    "nvfp4": Narrow(0.5 + 1 / 16, 2),
}


@dataclass(frozen=True, kw_only=True)
class Achieved:
    """Shares of peaks, and how far predictions with them are off."""

    matmul: float  # Of the peak at a precision, by matmuls that fill the device.
    wheels: float  # Share of `matmul` by the cuBLAS of PyTorch's wheels in 16 and 8 bits.
    sustained: float  # Of `matmul`, what is left where the power limit lowers the clock: under continuous load, in 16 bits.
    sustained_fp8: float  # The same in fp8.
    fp32_joules: float  # Of an operation at the power limit, in 1e-12 J; 0: not known, the limit does not count.
    half_joules: float  # The same in 16 bits.
    fp32_units: float  # Peak in fp32 of the units that multiply matrices, over that of vector units.
    convolution: float  # Of a matmul's speed, by the fastest convolutions in 16 bits.
    attention: float  # Of the peak at a precision, by fused attention, forward.
    flash_2: float  # Of `attention`, what flash-attention 2 reaches.
    memory: float  # Of the memory's rate.
    fp32: float  # Of the peak of vector units in fp32, by matmuls that are no convolutions; 0: as `matmul`.
    floor_us: float  # Least time of a kernel.
    error: float  # Mean absolute relative error of matmuls on devices that were not used to fit.
    tiles: tuple[
        tuple[int, int, float], ...
    ]  # Rows and columns that one multiprocessor computes at a time, and their relative speed.
    reduction: float  # A tile costs as much as one with so much more to reduce.
    blend: float  # Exponent that joins compute and memory time.
    origin: str  # Which devices the values were fitted to.


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    return tomllib.loads((files("dpro_search.parallel.gpu_ops") / "achieved.toml").read_text())


@lru_cache(maxsize=64)
def capped_clock(device: Device) -> tuple[float, float]:
    """Share of its usual clock that a power limit below the rated one leaves a device: the likely and the least; 1: not limited.

    Dynamic power is that of the clock times the square of the voltage. Where the voltage falls with the clock, the clock is the
    cube root of the power (Mudge 2001, "Power: a first-class architectural design constraint"); where it can fall no further, it
    is proportional. Both are estimates: no measured training step under a power limit was at hand to choose between them.
    """
    rated = bundled.device_named(device.name)
    rated_w = None if rated is None else rated.power_w
    if rated_w is None or device.power_w is None or device.power_w >= rated_w:
        return 1.0, 1.0
    share = device.power_w / rated_w
    return share ** (1 / 3), share


@lru_cache(maxsize=64)
def achieved_by(device: Device) -> Achieved:
    """The shares of a device's architecture; of one that was not measured, those between all that were."""
    table = _table()
    word = re.compile(
        r"\b(" + "|".join(name for part in table.values() if isinstance(part, dict) for name in part.get("devices", ())) + r")\b"
    )
    match = word.search(device.name.upper().replace("-", " "))
    family = next(
        (name for name, part in table.items() if isinstance(part, dict) and match and match.group(1) in part.get("devices", ())),
        "any",
    )
    values = {**table["any"], **table[family]}
    values.pop("devices", None)
    return Achieved(
        **values,
        tiles=tuple((int(rows), int(columns), share) for rows, columns, share in table["tiles"]),
        reduction=table["reduction"],
        blend=table["blend"],
        origin=f"fitted to {family} GPUs"
        if family != "any"
        else "no GPU of this architecture was measured: between those that were",
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
    kernels: Kernels = field(default_factory=Kernels)
    continuous: bool = False  # Whether the device computes without rest, so that the power limit lowers its clock.

    def __post_init__(self) -> None:
        for what, value in (
            (f"its peak in {self.precision}", self.device.peak_flops_per_s(self.precision)),
            ("its memory's rate", self.device.memory_bytes_per_s),
            ("its number of multiprocessors", self.device.cores),
        ):
            if value is None and what.endswith(tuple(BLOCK_SCALED)):
                units = f"{self.device.name} has no units for {self.precision}"
                raise InputError(f"{units}, whose blocks have scales: its peak is not known; use fp8 or bf16")
            if value is None:
                raise InputError(f"{self.device.name}: {what} is not known: name it in the cluster's file")

    def forward_us(self, op: Op, sizes: Mapping[str, float]) -> float:
        """Duration of an op whose dims have the given local sizes."""
        if op.type is OpType.MATMUL:
            beside_us = self._quantized_us(op, elements(op.reads or op.rows, sizes)) + self._cast_us(op, sizes)
            return beside_us + self._matmul(op, sizes, op.rows, op.reduction, op.columns)
        if op.type is OpType.CONVOLUTION:
            beside_us = self._cast_us(op, sizes) + self._transposed_us(op, sizes)
            if len(op.weight) > 1 and not self.kernels.fused:  # the sum with a bias
                beside_us += self.moved_us(2.0 * self.bytes_per_element * elements(op.output, sizes))
            return beside_us + self._convolution(op, sizes, op.rows, op.reduction, op.columns)
        return self._without_weights(op, sizes, backward=False)

    def backward_us(self, op: Op, sizes: Mapping[str, float]) -> float:
        """Duration of the gradients of an op's inputs and, if they are trained, of its weights."""
        if op.frozen:
            return 0.0
        if op.type in (OpType.MATMUL, OpType.CONVOLUTION):
            return self.input_gradient_us(op, sizes) + (0.0 if op.fixed else self.weight_gradient_us(op, sizes))
        return self._without_weights(op, sizes, backward=True)

    def input_gradient_us(self, op: Op, sizes: Mapping[str, float]) -> float:
        """Duration of the gradient of the input of a matmul or convolution."""
        if op.type is OpType.CONVOLUTION:
            return self._transposed_us(op, sizes) + self._convolution(op, sizes, op.rows, op.columns, op.reduction)
        quantized_us = self._quantized_us(op, elements(op.output, sizes))
        return quantized_us + self._matmul(op, sizes, op.rows, op.columns, op.reduction)

    def weight_gradient_us(self, op: Op, sizes: Mapping[str, float]) -> float:
        """Duration of the gradient of the weight of a matmul or convolution."""
        cast_us = self._cast_us(op, sizes)
        if op.type is OpType.CONVOLUTION:
            beside_us = cast_us + self._transposed_us(op, sizes, weights=True)
            if len(op.weight) > 1:  # the gradient of a bias is a sum over positions
                beside_us += self.moved_us(self.bytes_per_element * elements(op.output, sizes))
            return beside_us + self._convolution(op, sizes, op.reduction, op.rows, op.columns)
        return cast_us + self._matmul(op, sizes, op.reduction, op.rows, op.columns)

    def launches(self, op: Op, *, backward: bool) -> int:
        """Kernels that an op starts."""
        if op.type in (OpType.MATMUL, OpType.CONVOLUTION):
            return 2 if backward else 1
        if op.type is OpType.ATTENTION:
            if not self.kernels.stores_scores:
                return 2 if backward else 1
            return (4 if backward else 2) + self.kernels.score_passes(backward=backward, wide=self._casts).kernels + 1
        if op.type is OpType.LOSS:
            return self.kernels.loss_bytes().kernels[backward]
        if op.moved_bytes is not None:
            return op.kernels[backward]
        return self.kernels.passes(op, backward=backward).kernels

    def moved_us(self, count_bytes: float) -> float:
        """Duration of a kernel that reads and writes so many bytes."""
        achieved, rate = achieved_by(self.device), self.device.memory_bytes_per_s
        assert rate is not None
        return achieved.floor_us + count_bytes / (rate * achieved.memory) * 1e6

    def _matmul(self, op: Op, sizes: Mapping[str, float], rows: Shape, reduction: Shape, columns: Shape) -> float:
        m, k, n = (elements(shape, sizes) for shape in (rows, reduction, columns))
        precision = "bf16" if self._in_16_bits(op) else self.precision
        batch = sizes["experts"] if any("experts" in term for term in op.rows) else 1.0
        if batch > 1:  # rows are those of all experts, each of which has a matmul of its own
            m, k = (m / batch, k) if rows is op.rows else (m, k / batch) if reduction is op.rows else (m, k)
            n = n / batch if columns is op.rows else n
        floor_us = achieved_by(self.device).floor_us
        return batch * (self.matmul_us(m, k, n, 1.0, precision) - floor_us) + floor_us

    def _in_16_bits(self, op: Op) -> bool:
        """Whether a matmul is, though others are in 8 bits: the head, routers and adapters."""
        return self.precision in NARROW and any({"vocab", "choices", RANK} & set(term) for term in (*op.columns, *op.reduction))

    def _quantized_us(self, op: Op, count: float) -> float:
        """Duration of reading elements of 16 bits and writing them in fewer, as they are and transposed."""
        narrow = NARROW.get(self.precision)
        if narrow is None or self._in_16_bits(op):
            return 0.0
        return self.moved_us((narrow.reads * HALF_BYTES + 2 * narrow.element_bytes) * count)

    @property
    def _casts(self) -> bool:
        """Whether products are in 16 bits and their parameters in fp32."""
        return self.kernels.autocast and self.bytes_per_element == HALF_BYTES

    def _cast_us(self, op: Op, sizes: Mapping[str, float]) -> float:
        """Duration of the casts of a product's parameters, or of their gradients."""
        count = elements(op.weight, sizes)
        return self.moved_us(CAST_BYTES * count) if self._casts and count else 0.0

    def _transposed_us(self, op: Op, sizes: Mapping[str, float], *, weights: bool = False) -> float:
        """Duration of bringing a convolution's input and output into the order of matrix units, and back.

        A window of one position is a matmul in either order but for the gradient of its weights: in a profile of ResNet-50 in TF32
        (A100, PyTorch) kernels nchwToNhwc read and write what the gradients of all 53 convolutions' weights need.
        """
        times = self.kernels.image_transposes(self.precision, volume=sizes[f"{op.name}.dims"] > IMAGE_DIMS)
        if sizes[f"{op.name}.window"] == 1 and not weights:
            times = 0
        moved = elements(op.reads, sizes) + elements(op.output, sizes)
        return times * (self.moved_us(2.0 * self.bytes_per_element * moved) + achieved_by(self.device).floor_us)

    def _convolution(self, op: Op, sizes: Mapping[str, float], rows: Shape, reduction: Shape, columns: Shape) -> float:
        """An implicit matrix product for each group, which moves the input, the output and the weight once."""
        groups = sizes.get(f"{op.name}.groups", 1.0)
        m, k, n = (elements(shape, sizes) / (groups if shape is op.columns else 1.0) for shape in (rows, reduction, columns))
        weight = elements(op.reduction, sizes) * elements(op.columns, sizes)
        if self.precision == "fp32":  # not on matrix units
            k *= op.winograd_share
        return self.matmul_us(m, k, n, groups, moved=elements(op.reads, sizes) + elements(op.output, sizes) + weight)

    def matmul_us(
        self, m: float, k: float, n: float, batch: float = 1.0, precision: str | None = None, *, moved: float | None = None
    ) -> float:
        """Duration of `batch` products of m x k with k x n matrices, by default at the precision of matmuls.

        `moved`: elements, where it is not all three matrices once.
        """
        achieved, precision = achieved_by(self.device), precision or self.precision
        peak, rate, cores = self._matmul_peak(precision), self.device.memory_bytes_per_s, self.device.cores
        assert rate is not None
        assert cores is not None
        # What the start of a tile costs is time: fewer columns of a reduction where the units are slower.
        matrix_peak = self.device.peak_flops_per_s("bf16") or self.device.peak_flops_per_s("fp16") or peak
        start = achieved.reduction * min(peak / matrix_peak, 1.0)
        implicit = 1.0
        if moved is not None and precision != "fp32":
            implicit = achieved.convolution
        reached = achieved.fp32 if precision == "fp32" and achieved.fp32 and moved is None else achieved.matmul
        if self.kernels.wheels and precision not in ("fp32", "tf32", "fp64"):
            reached *= achieved.wheels
        compute_us = math.inf
        narrow = batch * m * n < cores * WIDE_TILE
        for rows, columns, share in (*achieved.tiles, *(CONVOLUTION_TILES if moved is not None else ())):
            tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
            splits = SPLITS if narrow else SPLITS[:1]
            if moved is not None:  # a weight's gradient has few tiles, and a reduction over all positions that is split among cores
                splits = (max(min(cores // tiles, k // SPLIT_REDUCTION), 1.0),)
            for parts in splits:
                flops = math.ceil(tiles * parts / cores) * cores * rows * columns * 2 * (k / parts + start)
                sums_us = 0.0
                if parts > 1 and moved is None:  # fp32, written and read
                    sums_us = 2 * 4.0 * parts * batch * m * n / (rate * achieved.memory) * 1e6
                compute_us = min(compute_us, flops / (peak * reached * share * implicit) * 1e6 + sums_us)
        count = batch * (m * k + k * n + m * n) if moved is None else moved
        memory_us = self.bytes_per_element * count / (rate * achieved.memory) * 1e6
        power = achieved.blend
        return float(achieved.floor_us + (compute_us**power + memory_us**power) ** (1 / power))

    def _matmul_peak(self, precision: str) -> float:
        """Peak of the units that multiply matrices, at the clock that the power limit leaves them."""
        achieved, peak = achieved_by(self.device), self.device.peak_flops_per_s(precision)
        assert peak is not None
        if precision == "fp32":
            peak *= achieved.fp32_units
        elif self.continuous and precision != "fp64":  # matrix units draw the power
            peak *= achieved.sustained_fp8 if precision in (*NARROW, "int8") else achieved.sustained
        joules = {"fp32": achieved.fp32_joules, "fp16": achieved.half_joules, "bf16": achieved.half_joules}.get(precision, 0.0)
        if joules and self.device.power_w:
            return min(peak, self.device.power_w / (joules * 1e-12 * achieved.matmul))
        return peak * capped_clock(self.device)[0]

    def _without_weights(self, op: Op, sizes: Mapping[str, float], *, backward: bool) -> float:
        """Duration of a pass of an op that is neither a matmul nor a convolution."""
        if op.type is OpType.ATTENTION:
            return self._attention(op, sizes, backward=backward)
        if op.type is OpType.LOSS:
            moved = self.kernels.loss_bytes()
            return self.moved_us((moved.backward if backward else moved.forward) * elements(op.reads, sizes))
        return self._memory_bound(op, sizes, backward=backward)

    def _memory_bound(self, op: Op, sizes: Mapping[str, float], *, backward: bool) -> float:
        if op.moved_bytes is not None:
            kernels = op.kernels[backward]
            if not kernels:
                return 0.0
            return self.moved_us(elements(op.moved_bytes[backward], sizes)) + (kernels - 1) * achieved_by(self.device).floor_us
        passes, achieved = self.kernels.passes(op, backward=backward), achieved_by(self.device)
        moved = passes.reads * elements(op.reads or op.output, sizes) + passes.output * elements(op.output, sizes)
        if self.precision in NARROW and op.type in (OpType.DISPATCH, OpType.COMBINE) and "capacity" in op.dims:
            moved += PADDING_PASSES * elements(op.output if op.type is OpType.DISPATCH else op.reads, sizes)
        count_bytes, kernels = moved * self.bytes_per_element, passes.kernels
        if self._casts and self.kernels.stays_wide(op):
            count_bytes *= WIDE_BYTES / HALF_BYTES
            if op.role is OpRole.NORM and not self.kernels.fused:  # what it gives is cast, and backward its gradient
                count_bytes, kernels = count_bytes + CAST_BYTES * elements(op.output, sizes), kernels + 1
        return self.moved_us(count_bytes) + (kernels - 1) * achieved.floor_us

    def _attention(self, op: Op, sizes: Mapping[str, float], *, backward: bool) -> float:
        if self.kernels.stores_scores:
            return self._scores(sizes, backward=backward)
        achieved = achieved_by(self.device)
        factor = BACKWARD_ATTENTION if backward else 1.0
        speed = self._attention_share(achieved) * (BACKWARD_ATTENTION_SHARE if backward else 1.0)
        peak = self.device.peak_flops_per_s("bf16" if self.precision in NARROW else self.precision)
        assert peak is not None
        compute_us = factor * op.forward_flops(sizes) / (peak * speed * capped_clock(self.device)[0]) * 1e6
        memory_us = self.moved_us(factor * (elements(op.reads, sizes) + elements(op.output, sizes)) * self.bytes_per_element)
        return max(compute_us, memory_us) + achieved.floor_us

    def _attention_share(self, achieved: Achieved) -> float:
        if self.kernels.attention is AttentionKernels.NEWEST:
            return achieved.attention
        triton = TRITON_ATTENTION if self.kernels.attention is AttentionKernels.FLASH_TRITON else 1.0
        return achieved.attention * achieved.flash_2 * triton

    def _scores(self, sizes: Mapping[str, float], *, backward: bool) -> float:
        """Attention that stores its scores: batched matmuls over all keys, masked ones too, and the ops between them."""
        batch, queries, keys = sizes["batch"] * sizes["heads"], sizes["sequence"], sizes["keys"]
        passes, achieved = self.kernels.score_passes(backward=backward, wide=self._casts), achieved_by(self.device)
        total_us = passes.kernels * achieved.floor_us
        total_us += self.moved_us(passes.passes * batch * queries * keys * self.bytes_per_element)
        for width in (sizes["head_dim"], sizes["value_dim"]):
            aligned = width * self.bytes_per_element % ALIGNED_BYTES == 0
            precision = self.precision if aligned or self.precision in ("fp32", "tf32", "fp64") else "fp32"
            total_us += self.matmul_us(queries, width, keys, batch, precision)
            if backward:
                total_us += self.matmul_us(keys, queries, width, batch, precision)
        return total_us


@lru_cache(maxsize=1024)
def expected_largest(count: int) -> float:
    """Expected largest of so many standard normal values (Blom 1958)."""
    return max(NormalDist().inv_cdf((count - 0.375) / (count + 0.25)), 0.0) if count > 1 else 0.0


def slowest(devices: int) -> float:
    """The time of the slowest of many equal GPUs, for which all others wait, over that of the usual one."""
    return 1.0 + SPREAD * expected_largest(devices)
