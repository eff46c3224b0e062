"""``kernel_ratio(name, dtype, before, after)``: ratio by which a kernel's time changes from one GPU to another.

A kernel is bound by arithmetic or by memory; its class says by which (`graph.event_names.kernel_class`). Its time then changes as
the peak rates of the data sheets do (Williams et al., Roofline, CACM 2009); of memories as measured rates of copies, where both are
known. How much of a peak a kernel reaches differs between GPUs, so the interval is wide: it spans both ratios, and `EFFICIENCY`
beyond.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from dpro_search.cluster import Device
from dpro_search.costmodel.devices.profile import known_probes
from dpro_search.errors import InputError
from dpro_search.graph.event_names import kernel_class

COMPUTE_BOUND = ("gemm", "convolution", "attention")
EFFICIENCY = 1.3
"""Uncertainty factor of the share of peak that kernels reach on another GPU (estimated; one model has profiles on two)."""

LEAST_US = 2.0
"""Time of a kernel that no faster GPU shortens: the shortest ones of public profiles take 1 to 2 us (estimated)."""

_HALF = re.compile(
    r"(?<![a-z0-9])(?:fp16|f16|half|hmma|h\d{3,}|bf16|bfloat16)|s\d+16(?:gemm|fprop|dgrad|wgrad)|_f16|16f", re.IGNORECASE
)
_BRAIN = re.compile("bf16|bfloat16", re.IGNORECASE)
_TENSOR = re.compile(r"tf32|s1688|tensorop|xmma.*tf|s\d{2,}gemm", re.IGNORECASE)
_HALVES = ("float16", "bfloat16", "half", "c10::half", "c10::bfloat16")
_EIGHT_BITS = re.compile(r"e4m3|e5m2|float8|fp8|nvjet_(?:sm\d+_)?qq", re.IGNORECASE)
_SINGLE = re.compile(r"[sc]gemm|scudnn|simt|ffma|float|f32f32|_SB_")
OTHER = "other"  # than floating-point numbers of 16 or 32 bits
_WIDE = ("float32", "float", "c10::float")


class Ratio(NamedTuple):
    """New time over old time."""

    middle: float
    low: float
    high: float


def kernel_ratio(name: str, dtype: str, before: Device, after: Device) -> Ratio:
    """Ratio by which a kernel's time changes, with a 90 % interval that was estimated, not measured.

    Parameters
    ----------
    name
        Of the kernel.
    dtype
        Of its first tensor; empty: not known.

    Raises
    ------
    InputError
        A device's file lacks the memory's rate or all peaks.
    """
    if before == after:
        return Ratio(1.0, 1.0, 1.0)
    memory = _memory_ratio(before, after)
    kind = kernel_class(name)
    if kind not in COMPUTE_BOUND:
        return Ratio(memory, memory / EFFICIENCY, memory * EFFICIENCY)
    arithmetic = _peak(before, name, dtype) / _peak(after, name, dtype)
    ends = sorted((memory, arithmetic))
    return Ratio(arithmetic, ends[0] / EFFICIENCY, ends[1] * EFFICIENCY)


def dtype_of_kernel(name: str) -> str:
    """The element type that a kernel's name tells; a name that tells none is one of single precision."""
    return "float16" if _HALF.search(name) else "float32"


def product_precision(name: str, dtype: str) -> str:
    """The precision of a matrix product's kernel, one of `cluster.device.PRECISIONS`, from its name and its first tensor's type."""
    if dtype.lower() in _HALVES or _HALF.search(name):
        return "bf16" if "bf" in dtype.lower() or _BRAIN.search(name) else "fp16"
    return "tf32" if _TENSOR.search(name) else "fp32"


def product_precisions(name: str, dtype: str) -> tuple[str, ...]:
    """Precisions that a matrix product's kernel may have, by its name and its first tensor's type; empty: neither tells any.

    Unlike `product_precision` nothing is assumed of a name that tells nothing.
    """
    lower = dtype.lower()
    if _EIGHT_BITS.search(name) or "float8" in lower:
        return ("fp8",)
    if _HALF.search(name) or lower in _HALVES or _TENSOR.search(name):
        return (product_precision(name, dtype),)
    if _SINGLE.search(name):
        return ("fp32",)
    return ("fp32", "tf32") if lower in _WIDE else ()


def element_precision(name: str, dtype: str) -> str:
    """The type of what a kernel reads ("fp32", "bf16", "fp16", `OTHER`), by its name and first tensor's type; empty: not known."""
    lower = dtype.lower()
    if lower in _WIDE or lower in _HALVES:
        return "fp32" if lower in _WIDE else "bf16" if "bf" in lower else "fp16"
    if lower:
        return OTHER
    if _BRAIN.search(name):
        return "bf16"
    return "fp16" if re.search("half", name, re.IGNORECASE) else "fp32" if "float" in name else ""


def _memory_ratio(before: Device, after: Device) -> float:
    """Ratio of the rates that copies were measured to reach, where they were on both devices; else of the data sheets'."""
    probed = [known_probes(device).stream_bytes_per_s for device in (before, after)]
    return probed[0] / probed[1] if probed[0] and probed[1] else _memory(before) / _memory(after)


def _memory(device: Device) -> float:
    if device.memory_bytes_per_s is None:
        raise InputError(f"{device.name}: the rate of its memory is not known; give memory_rate in a device file")
    return device.memory_bytes_per_s


def _peak(device: Device, name: str, dtype: str) -> float:
    """Operations a second at the precision that a kernel has."""
    peak = device.peak
    half = dtype.lower() in _HALVES or bool(_HALF.search(name))
    # PyTorch lets cuDNN take TF32 where there is such a unit (torch.backends.cudnn.allow_tf32), cuBLAS only where asked.
    tf32 = peak.tf32 if _TENSOR.search(name) or kernel_class(name) == "convolution" else None
    order = (peak.fp16, peak.bf16, peak.fp32) if half else (tf32, peak.fp32, peak.fp16)
    known_peak = next((one for one in order if one is not None), None)
    if known_peak is None:
        raise InputError(f"{device.name}: no peak of its arithmetic is known; give [peak] in a device file")
    return known_peak
