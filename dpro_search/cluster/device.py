"""`Device`: what computes, a GPU, a TPU or a core of a CPU, as its data sheet describes it."""

from __future__ import annotations

from typing import Literal

import msgspec

from dpro_search.errors import InputError

Precision = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8"]
BLOCK_SCALED = {"mxfp8": "fp8", "mxfp4": "fp4", "nvfp4": "fp4"}
"""Types with a scale for each block of elements, and the peak that they have on matrix units that read such scales.

Those are the units that have fp4: Blackwell, CDNA 4. Blocks of nvfp4, of 16 in place of 32 elements, are NVIDIA's.
"""
PRECISIONS: tuple[Precision, ...] = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """The sources of a file's values."""

    source: str  # Of all values but the exceptions: a data sheet with its year, say.
    # Pairs (key, source), like ("nic.rate", "derived: ..."). The source of a value that no document states begins with "derived:"
    # (computed from what documents state), "estimated:" or "measured:".
    exceptions: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise InputError("source: name where the values come from")

    def of(self, key: str) -> str:
        """Source of a value by its key in the file ("nic.rate"); a table's source ("nic") is that of its keys."""
        source_of = dict(self.exceptions)
        while key:
            if key in source_of:
                return source_of[key]
            key = key.rpartition(".")[0]
        return self.source


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """Operations a second at each precision: dense (without sparsity), on tensor or matrix units where the device has them.

    fp64 and fp32 are of the vector units. None: the device has no units for the precision, or its vendor does not state it.
    """

    fp64: float | None = None
    fp32: float | None = None
    tf32: float | None = None
    fp16: float | None = None
    bf16: float | None = None
    fp8: float | None = None
    fp4: float | None = None
    int8: float | None = None

    def __post_init__(self) -> None:
        for precision in PRECISIONS:
            peak = getattr(self, precision)
            if peak is not None and not peak > 0:
                raise InputError(f"peak.{precision} must be above 0, not {peak:g}")


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """An op that was measured on a device.

    Attributes
    ----------
    op
        In a line of text, "gemm bf16 m=4096 n=4096 k=1024" (`costmodel.devices.OpSpec`).
    us
        Its latency.
    spread_pct
        By how much repetitions differ: half the distance of the quartiles, of the median.
    """

    op: str
    us: float
    spread_pct: float = 0.0

    def __post_init__(self) -> None:
        if not self.op.strip() or not 0 < self.us < float("inf") or not 0 <= self.spread_pct < float("inf"):
            raise InputError(f"'{self.op}' needs a time in microseconds above 0, and a spread of at least 0")


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """The device that one rank computes on.

    Attributes
    ----------
    name, vendor
        As the vendor gives them.
    kind
        "gpu" and "tpu" are a whole device (a chip with all its TensorCores), "cpu" is one core.
    peak
        Operations a second by precision.
    memory_bytes, memory_bytes_per_s
        What the driver reports as total, and the peak rate.
    l2_cache_bytes, cores, clock_hz
        Of a GPU: L2 cache, streaming multiprocessors or compute units, boost clock. A TPU has no L2 cache; its cores are
        TensorCores.
    vector_memory_bytes
        Vector memory (VMEM) of all cores of a TPU together.
    launch_us
        Least time between two kernels that are launched one by one; None: not known.
    power_w
        Most power (TDP).
    samples
        Ops that were measured on it.
    provenance
        Where the values come from.

    Raises
    ------
    InputError
        A value is impossible.
    """

    name: str
    vendor: str
    kind: Literal["gpu", "cpu", "tpu"]
    peak: Peaks = Peaks()
    memory_bytes: int | None = None
    memory_bytes_per_s: float | None = None
    l2_cache_bytes: int | None = None
    vector_memory_bytes: int | None = None
    cores: int | None = None
    clock_hz: float | None = None
    launch_us: float | None = None
    power_w: float | None = None
    samples: tuple[Sample, ...] = ()
    provenance: Provenance

    def __post_init__(self) -> None:
        if not self.name.strip() or not self.vendor.strip():
            raise InputError("a device needs a name and a vendor")
        for field in (
            *("memory_bytes", "memory_bytes_per_s", "l2_cache_bytes", "vector_memory_bytes"),
            *("cores", "clock_hz", "launch_us", "power_w"),
        ):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise InputError(f"{field} of {self.name} must be above 0, not {value:g}")

    def peak_flops_per_s(self, precision: str) -> float | None:
        """Operations a second at a precision, None if they are not known; raises `InputError` for a word that is no precision."""
        if precision in BLOCK_SCALED:
            reads_scales = self.peak.fp4 is not None and (precision != "nvfp4" or self.vendor == "NVIDIA")
            return self.peak_flops_per_s(BLOCK_SCALED[precision]) if reads_scales else None
        if precision not in PRECISIONS:
            raise InputError(f"precision '{precision}': use {', '.join(PRECISIONS)}")
        peak: float | None = getattr(self.peak, precision)
        return peak
