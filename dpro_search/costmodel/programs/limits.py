"""Limits of a compute unit by architecture: threads, blocks, shared memory, lanes of a warp."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GpuLimits:
    """Limits of one streaming multiprocessor (NVIDIA) or compute unit (AMD).

    Attributes
    ----------
    threads, blocks
        Most resident threads and blocks.
    shared_bytes
        Shared memory (NVIDIA: its largest part of the L1 cache; AMD: LDS of a unit, of a pair of them on RDNA).
    warp
        Lanes of a warp or wavefront.
    """

    architecture: str
    vendor: str
    threads: int
    blocks: int
    shared_bytes: int
    warp: int


_KIB = 1024
ARCHITECTURES = {
    limits.architecture: limits
    for limits in (
        # CUDA C++ Programming Guide 12.8, table "Technical Specifications per Compute Capability".
        GpuLimits(architecture="Pascal", vendor="NVIDIA", threads=2048, blocks=32, shared_bytes=64 * _KIB, warp=32),
        GpuLimits(architecture="Volta", vendor="NVIDIA", threads=2048, blocks=32, shared_bytes=96 * _KIB, warp=32),
        GpuLimits(architecture="Turing", vendor="NVIDIA", threads=1024, blocks=16, shared_bytes=64 * _KIB, warp=32),
        GpuLimits(architecture="Ampere", vendor="NVIDIA", threads=2048, blocks=32, shared_bytes=164 * _KIB, warp=32),
        GpuLimits(architecture="Ampere (GA10x)", vendor="NVIDIA", threads=1536, blocks=16, shared_bytes=100 * _KIB, warp=32),
        GpuLimits(architecture="Ada", vendor="NVIDIA", threads=1536, blocks=24, shared_bytes=100 * _KIB, warp=32),
        GpuLimits(architecture="Hopper", vendor="NVIDIA", threads=2048, blocks=32, shared_bytes=228 * _KIB, warp=32),
        GpuLimits(architecture="Blackwell", vendor="NVIDIA", threads=2048, blocks=32, shared_bytes=228 * _KIB, warp=32),
        GpuLimits(architecture="Blackwell (GB20x)", vendor="NVIDIA", threads=1536, blocks=24, shared_bytes=100 * _KIB, warp=32),
        # AMD: HIP documentation, "GPU hardware specifications" and "Hardware implementation".
        GpuLimits(architecture="GCN", vendor="AMD", threads=2560, blocks=40, shared_bytes=64 * _KIB, warp=64),
        GpuLimits(architecture="CDNA", vendor="AMD", threads=2048, blocks=32, shared_bytes=64 * _KIB, warp=64),
        GpuLimits(architecture="RDNA", vendor="AMD", threads=1024, blocks=32, shared_bytes=64 * _KIB, warp=32),
    )
}

_BY_NAME = (  # the first that matches a device's name
    ("Blackwell (GB20x)", r"RTX 50|RTX PRO"),
    ("Blackwell", r"\bG?B[23]00"),
    ("Hopper", r"\bG?H[128]00|\bGH200|\bH20\b"),
    ("Ada", r"\bL4\b|\bL20\b|\bL40S?\b|RTX 40|\bAda\b"),
    ("Ampere (GA10x)", r"\bA(2|10G?|16|40)\b|RTX 30|\bA[2-6][05]00\b"),
    ("Ampere", r"\bA[138]00|\bA30\b"),
    ("Turing", r"\bT4\b|RTX 20|T(ITAN|itan) RTX|RTX T(ITAN|itan)|Quadro RTX|GTX 16"),
    ("Volta", r"\bV100|TITAN V|Titan V"),
    ("Pascal", r"\bP4\b|\bP40\b|\bP100|GTX 10|TITAN X|Titan X"),
    ("CDNA", r"\bMI[1-9]\d\d"),
    ("GCN", r"\bMI(25|50|60)\b|Vega|Radeon VII"),
    ("RDNA", r"\bW[5-9][0-9]00|\bRX [5-9]\d\d\d"),
)

SAME_ARCHITECTURE, SAME_VENDOR, OTHER = 1.0, 0.1, 0.01
"""Weights of another device's times where nothing was measured: programs order alike on devices of an architecture."""


def limits_of(name: str) -> GpuLimits | None:
    """Limits of a device by its name; None for one of an architecture that is not known."""
    spaced = name.replace("_", " ")
    return next((ARCHITECTURES[one] for one, pattern in _BY_NAME if re.search(pattern, spaced)), None)


def likeness(one: GpuLimits | None, other: GpuLimits | None) -> float:
    """How much the times on one device tell of the order on another, above 0."""
    if one is None or other is None:
        return SAME_VENDOR
    if one.architecture == other.architecture:
        return SAME_ARCHITECTURE
    return SAME_VENDOR if one.vendor == other.vendor else OTHER
