"""`Prices`: how long the instructions of a compiled program take on its devices.

A TPU's compiler writes beside nearly every fusion how many cycles it expects, which is the best that is known without the device.
All other instructions of TPUs and those of GPUs are priced by a roofline over the work that `graph.hlo` counts; the libraries'
matrix products of GPUs by the latency model of `costmodel.devices`. Collectives are those of a torus
(`costmodel.collectives.torus`), or of NCCL.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search.cluster import Cluster, Device
from dpro_search.collect.readers.xla import Collective, HloComputation, HloInstruction, HloModule, HostTransfer
from dpro_search.costmodel.collectives import torus
from dpro_search.costmodel.collectives.nccl import collective_us, placement_of
from dpro_search.costmodel.collectives.torus_groups import GroupSpan, Places, places_of, spans_of
from dpro_search.costmodel.devices import Stack, gemm, latency_on
from dpro_search.errors import InputError
from dpro_search.graph.hlo import HloWork

Ints = npt.NDArray[np.int64]
Basis = Literal["compiler", "library", "roofline", "custom call", "measured", "fitted", "nothing"]

# Assumed, as no source states it: share of the peak that a Pallas kernel of a TPU reaches. Its true value is between this and 1.
PALLAS_SHARE = 0.5
# Share of the memory's rate that kernels of a GPU that only move data reach. Op tables of A100 and V100 show 0.87 and 0.90
# (experiments/truth, "Rates of memory-bound ops").
GPU_MEMORY_SHARE = 0.87
GPU_KERNEL_US = 2.0
"""Least time of a kernel of a GPU: the shortest ones of public profiles take 1 to 2 us (`costmodel.roofline.LEAST_US`)."""

_NARROW = re.compile(r"\b(?:f8\w*|s8|u8|s4|u4)\[")
_NCCL = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-broadcast": "broadcast",
    "collective-permute": "send_recv",
}
_TORUS = {**_NCCL, "collective-broadcast": "all_gather"}  # a broadcast needs no more than a gather of the same array
_GPU_PRECISIONS = {"f32": "tf32", "bf16": "bf16", "f16": "fp16", "f64": "fp64"}  # cuBLAS multiplies f32 in TF32 at JAX's default


class Price(NamedTuple):
    """Duration of one execution of an instruction."""

    us: float
    basis: Basis  # Origin of the duration.


NOTHING = Price(0.0, "nothing")


class Prices(ABC):
    """Durations on one kind of device, in microseconds. `bandwidth` multiplies the rate of links."""

    def __init__(self, module: HloModule, cluster: Cluster, bandwidth: float) -> None:
        self._module, self._cluster, self._bandwidth = module, cluster, bandwidth
        self._device = cluster.groups[0].host.device

    @abstractmethod
    def instruction(self, computation: HloComputation, instruction: HloInstruction, work: HloWork) -> Price:
        """The duration of an instruction that computes; `work` is its own."""

    @abstractmethod
    def collective_us(self, collective: Collective) -> float:
        """The duration of a collective from when all devices have started it."""

    @abstractmethod
    def copy_us(self, moved_bytes: float) -> float:
        """The duration of a copy between two memories of the device."""

    def outside_us(self, computed_us: float) -> float:
        """The part of a step that is in none of its instructions, which compute for `computed_us`: its start, and waiting."""
        return 0.0

    def transfer_us(self, transfer: HostTransfer) -> float:
        """The duration of a copy between a device and its host; raises `InputError` if the rate is not known."""
        link = next((link for link in self._cluster.groups[0].host.links if link.level == "pcie"), None)
        if link is None or link.rate_bps is None:
            raise InputError(
                f"{self._cluster.name}: how fast a device reaches its host's memory is not known: give pcie.rate in a file"
            )
        return link.latency_us + transfer.bytes / (link.rate_bps / 8e6 * self._bandwidth)


def prices_of(
    module: HloModule, cluster: Cluster, places: Places | None, bandwidth: float = 1.0, *, ranks: Sequence[int] = ()
) -> Prices:
    """The prices on a cluster.

    Parameters
    ----------
    places
        Chips of the program's devices (TPUs); None: the devices of the cluster in order.
    ranks
        Rank of each of the program's devices on the cluster (GPUs); empty: the same order.

    Raises
    ------
    InputError
        The cluster's devices have no such prices.
    """
    kind = cluster.groups[0].host.device.kind
    if kind == "tpu":
        assert cluster.torus is not None or cluster.ranks == 1, "several TPUs have a torus"
        return _TpuPrices(module, cluster, places, bandwidth)
    if kind == "gpu":
        return _GpuPrices(module, cluster, bandwidth, ranks)
    raise InputError(f"{cluster.name}: compiled programs have prices on TPUs and GPUs, none on processors")


def _peak(device: Device, precision: str) -> float:
    peak = device.peak_flops_per_s(precision) or device.peak_flops_per_s("bf16")
    if peak is None:
        raise InputError(f"{device.name}: its file has no peak for {precision}")
    return peak


def _memory_rate(device: Device) -> float:
    """Bytes a us of the device's memory."""
    if device.memory_bytes_per_s is None:
        raise InputError(f"{device.name}: its file has no memory_rate")
    return device.memory_bytes_per_s / 1e6


class _TpuPrices(Prices):
    def __init__(self, module: HloModule, cluster: Cluster, places: Places | None, bandwidth: float) -> None:
        super().__init__(module, cluster, bandwidth)
        if self._device.clock_hz is None:
            raise InputError(f"{self._device.name}: its file has no clock, so that the compiler's cycles are no time")
        self._cycle_us = 1e6 / self._device.clock_hz
        self._places = places or (places_of(cluster.torus) if cluster.torus is not None else None)
        # A device of JAX may be one of several cores of a chip, which share its peak and memory.
        cores = 1 if cluster.torus is None else cluster.torus.devices_per_chip
        self._peak_per_us = _peak(self._device, "bf16") / 1e6 / cores
        self._memory_per_us = _memory_rate(self._device) / cores
        self._spans = lru_cache(maxsize=None)(self._span)
        self._rows = lru_cache(maxsize=None)(_rows)

    def instruction(self, computation: HloComputation, instruction: HloInstruction, work: HloWork) -> Price:
        cycles = self._cycles(instruction)
        if cycles is not None:
            return Price(cycles * self._cycle_us, "compiler")
        if instruction.opcode == "custom-call":
            matrix_us = work.matrix_flops / self._peak_per_us / PALLAS_SHARE
            return Price(max(matrix_us, self._moved_us(computation, instruction, work)), "custom call") if work.bytes else NOTHING
        if not work.bytes:
            return NOTHING
        return Price(max(work.matrix_flops / self._peak_per_us, self._moved_us(computation, instruction, work)), "roofline")

    def _cycles(self, instruction: HloInstruction) -> int | None:
        """Cycles that the compiler expects, of an asynchronous start those of what it runs."""
        if instruction.estimated_cycles is not None:
            return instruction.estimated_cycles
        if instruction.opcode != "async-start":
            return None
        cycles = [each.estimated_cycles for inner in self._module.called_by(instruction) for each in inner]
        known = [each for each in cycles if each is not None]
        return sum(known) if known else None

    def _moved_us(self, computation: HloComputation, instruction: HloInstruction, work: HloWork) -> float:
        """The time of an instruction's operands and results that are in the main memory; those in vector memory are near."""
        shapes = [operand.shape for operand in computation.operands(instruction)] + [instruction.shape]
        leaves = [leaf for shape in shapes for leaf in shape.leaves() if leaf.memory_space == 0]
        return min(work.bytes, sum(leaf.padded_bytes for leaf in leaves)) / self._memory_per_us

    def copy_us(self, moved_bytes: float) -> float:
        return moved_bytes / self._memory_per_us

    def collective_us(self, collective: Collective) -> float:
        if collective.group_size == 1 or self._places is None:
            return 0.0
        if collective.pairs is not None:
            size, pairs = collective.operand_bytes / self._bandwidth, collective.pairs.astype(np.int64).tobytes()
            return torus.permute_us(
                size, self._cluster, self._places, [(source, target) for source, target in self._rows(pairs, 2)]
            )
        size = collective.output_bytes if collective.kind == "all-gather" else collective.operand_bytes
        groups = collective.device_groups
        assert groups is not None, "no permute"
        spans = self._spans(groups.astype(np.int64).tobytes(), groups.shape[1])
        return float(torus.collective_us(_TORUS[collective.kind], size / self._bandwidth, self._cluster, spans))

    def _span(self, devices: bytes, size: int) -> Sequence[GroupSpan]:
        """The places of groups of `size` devices, which stand one behind the other as int64."""
        assert self._places is not None, "asked of several devices"
        assert self._cluster.torus is not None, "several TPUs have a torus"
        return spans_of(self._cluster.torus, self._places, self._rows(devices, size))


def _rows(devices: bytes, size: int) -> tuple[tuple[int, ...], ...]:
    """Rows of so many devices, from int64 numbers."""
    return tuple(map(tuple, np.frombuffer(devices, np.int64).reshape(-1, size).tolist()))


class _GpuPrices(Prices):
    def __init__(self, module: HloModule, cluster: Cluster, bandwidth: float, ranks: Sequence[int]) -> None:
        super().__init__(module, cluster, bandwidth)
        self._ranks = tuple(ranks) or tuple(range(module.devices))
        self._latency = latency_on(self._device)
        self._memory_per_us = _memory_rate(self._device) * GPU_MEMORY_SHARE
        self._product_us = lru_cache(maxsize=None)(self._predicted_product_us)

    def instruction(self, computation: HloComputation, instruction: HloInstruction, work: HloWork) -> Price:
        if not work.bytes and not work.flops:
            return NOTHING
        moved_us = max(work.bytes / self._memory_per_us, GPU_KERNEL_US)
        if not work.matrix_flops:
            return Price(moved_us, "custom call" if work.unknown else "roofline")
        operands = computation.operands(instruction)
        if instruction.opcode == "custom-call" and len(operands) >= 2:
            shapes = [each.shape for each in operands[:2]]
            result = next(instruction.shape.leaves())
            batch = int(np.prod(result.dimensions[:-2])) if len(result.dimensions) > 2 else 1
            m, n = (*result.dimensions, 1, 1)[len(result.dimensions) - 2 :][:2] if len(result.dimensions) >= 2 else (result.size, 1)
            k = max(round(work.matrix_flops / 2 / max(result.size, 1)), 1)
            precision = "fp8" if _NARROW.match(f"{shapes[0].dtype}[") else _GPU_PRECISIONS.get(shapes[0].dtype)
            if precision is None:
                raise InputError(
                    f"line {instruction.line}: a product of {shapes[0].dtype} has no known time on {self._device.name}"
                )
            return Price(max(self._product_us(batch, m, n, k, precision), moved_us), "library")
        peak = _peak(self._device, "bf16") / 1e6
        return Price(max(work.matrix_flops / peak, moved_us), "roofline")

    def _predicted_product_us(self, batch: int, m: int, n: int, k: int, precision: str) -> float:
        us = float(self._latency.predict(gemm(m, n, k, batch=batch, precision=precision, stack=Stack.LIBRARY)).us[0])
        if np.isnan(us):
            raise InputError(f"{self._device.name}: no measured op is like a product in {precision}; its time is not known")
        return us

    def copy_us(self, moved_bytes: float) -> float:
        return max(2 * moved_bytes / self._memory_per_us, GPU_KERNEL_US)

    def collective_us(self, collective: Collective) -> float:
        name = _NCCL[collective.kind]
        if collective.pairs is not None:
            groups = [tuple(pair) for pair in collective.pairs.tolist() if pair[0] != pair[1]]
        else:
            assert collective.device_groups is not None, "no permute"
            groups = [tuple(group) for group in collective.device_groups.tolist() if len(group) > 1]
        # Groups of one collective mostly lie alike; where they do not, the slowest decides.
        placements = {placement_of(self._cluster, [self._ranks[device] for device in group]) for group in groups}
        size = collective.output_bytes if collective.kind == "all-gather" else collective.operand_bytes
        times = [float(collective_us(name, size / self._bandwidth, self._cluster, each)) for each in placements]
        return max(times, default=0.0)
