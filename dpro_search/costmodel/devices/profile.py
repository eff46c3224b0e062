"""`DeviceProfile`: what is known of a device: its data sheet, and three to five probe measurements.

Probes say which part of the data sheet's rates ops reach: a large product at each precision, a large copy, the smallest op. They
are chosen by what ops compute and move, never by how long they took.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.cluster import Device
from dpro_search.cluster.device import PRECISIONS
from dpro_search.costmodel.devices.ops import ELEMENT_BYTES, KINDS, LEAST_OUTPUT_BYTES, STACKS, Floats, LibraryOpKind, Ops
from dpro_search.errors import InputError

PROBE_SIZE = 4096
"""Rows, columns and reduction of a large product: 1 to 20 ms on devices of 10 to 200 TFLOP/s, so that neither its launch nor its
last wave of tiles shows, and that vendors tune for."""
PROBE_BYTES = 4e8
"""Bytes of a large copy: several times the largest L2 cache (128 MiB)."""
MOST_PRECISIONS = 3
CACHE_BYTES_PER_CYCLE = 18.0
"""Bytes that a core and the L2 cache exchange in a cycle (empirical: quantization of tensors that fit in the cache, in tables of
aiconfigurator-core: 15 to 18 on Ada and RTX Blackwell, 19 to 20 on Hopper, 21 to 23 on B200 and its siblings)."""
USUAL_SHARE = 0.8
"""Share of a data sheet's rates that ops reach (the median of the shares that probes show on public data)."""
BEYOND_PEAK = 4.0
"""Measured rates above so many times the data sheet's are an error of units: matrix units that a data sheet leaves out double a
rate (AMD CDNA), caches raise that of a copy less."""
BELOW_PEAK = 200.0  # likewise below: the slowest probe in public data reaches a twentieth of its peak
_PRODUCTS = tuple(
    KINDS.index(kind) for kind in (LibraryOpKind.GEMM, LibraryOpKind.CONVOLUTION, LibraryOpKind.ATTENTION, LibraryOpKind.LOSS)
)
_GEMM = KINDS.index(LibraryOpKind.GEMM)
_ELEMENT_BYTES = np.array([ELEMENT_BYTES[precision] for precision in PRECISIONS])
_PLAIN = (_GEMM, KINDS.index(LibraryOpKind.ELEMENTWISE))  # One kernel, whose least time is that of a launch.


@dataclass(frozen=True, kw_only=True)
class Probes:
    """Rates that a device was measured to reach."""

    matrix_flops_per_s: Mapping[str, float] = field(default_factory=dict)  # By precision.
    stream_bytes_per_s: float | None = None
    floor_us: float | None = None  # Time of the smallest op.


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates that ops on a device are compared with."""

    matrix_flops_per_s: Floats  # By precision, in the order of `PRECISIONS`.
    stream_bytes_per_s: float
    cache_bytes: float  # Size of the L2 cache.
    cache_bytes_per_s: float  # Between cores and the L2 cache.
    floor_us: Floats  # By `STACKS`.
    matrix_share: Floats  # Share of the data sheet's peak, by precision.
    stream_share: float


@dataclass(frozen=True, kw_only=True)
class UsualShares:
    """Rates that devices usually reach, for those not probed: medians of the probes in public measurements."""

    matrix: float = USUAL_SHARE
    eight_bits: float = 0.45  # Share in fp8 and int8: engines quantize beside the product, and power limits the clock.
    four_bits: float = 0.3
    stream: float = USUAL_SHARE
    floor_us: tuple[float, ...] = (36.0, 70.0, 12.0, 3.5)  # By `STACKS`.

    @property
    def matrix_by_precision(self) -> dict[str, float]:
        """Usual share of the data sheet's peak by precision."""
        shares = {"fp8": self.eight_bits, "int8": self.eight_bits, "fp4": self.four_bits}
        return {precision: shares.get(precision, self.matrix) for precision in PRECISIONS}


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """A device and its probes.

    Raises
    ------
    InputError
        Specs are missing that predictions need, or a probe contradicts them by orders of magnitude.
    """

    device: Device
    probes: Probes = field(default_factory=Probes)

    def __post_init__(self) -> None:
        device = self.device
        if device.kind == "tpu":
            raise InputError(f"{device.name}: latencies of ops are known of GPUs and cores of CPUs, not of TPUs yet")
        missing = [
            key
            for key, value in (
                ("memory_rate", device.memory_bytes_per_s),
                ("cores", device.cores),
                ("clock", device.clock_hz),
                ("l2_cache", device.l2_cache_bytes),
                ("[peak]", peak_flops_per_s(device, "fp32") or peak_flops_per_s(device, "fp16")),
            )
            if value is None
        ]
        if missing:
            raise InputError(f"{device.name}: {', '.join(missing)} not known; give them in a device file")
        rate = device.memory_bytes_per_s
        assert rate is not None
        if self.probes.stream_bytes_per_s is not None:
            _check_units(f"{device.name}: a copy at", self.probes.stream_bytes_per_s, rate, "B/s")
        for precision, flops_per_s in self.probes.matrix_flops_per_s.items():
            peak = peak_flops_per_s(device, precision)
            if peak is not None:
                _check_units(f"{device.name}: a product in {precision} at", flops_per_s, peak, "FLOP/s")

    def rates(self, usual: UsualShares) -> Rates:
        """Rates from probes where there are, else usual shares of the data sheet's."""
        device, probes = self.device, self.probes
        assert device.memory_bytes_per_s is not None
        assert device.l2_cache_bytes is not None
        assert device.cores is not None
        assert device.clock_hz is not None
        shares = {
            precision: flops_per_s / peak
            for precision, flops_per_s in probes.matrix_flops_per_s.items()
            if (peak := peak_flops_per_s(device, precision)) is not None
        }
        usual_shares = usual.matrix_by_precision
        # Precisions that were not probed reach more or less than usual as those do that were, first those of 16 bits and wider.
        wide = [precision for precision in shares if ELEMENT_BYTES[precision] >= LEAST_OUTPUT_BYTES]
        factors = [shares[precision] / usual_shares[precision] for precision in wide or shares]
        other = float(np.median(factors)) if factors else 1.0
        share = np.array([shares.get(precision, usual_shares[precision] * other) for precision in PRECISIONS])
        peaks = np.array([peak_flops_per_s(device, precision) or np.nan for precision in PRECISIONS])
        stream = probes.stream_bytes_per_s or usual.stream * device.memory_bytes_per_s
        return Rates(
            matrix_flops_per_s=peaks * share,
            stream_bytes_per_s=stream,
            cache_bytes=float(device.l2_cache_bytes),
            cache_bytes_per_s=max(CACHE_BYTES_PER_CYCLE * device.cores * device.clock_hz, stream),
            floor_us=np.array(usual.floor_us) if probes.floor_us is None else np.full(len(STACKS), probes.floor_us),
            matrix_share=share,
            stream_share=stream / device.memory_bytes_per_s,
        )


def peak_flops_per_s(device: Device, precision: str) -> float | None:
    """At a precision; of one that has no units, that of the precision whose units compute it."""
    for one in {"tf32": ("tf32", "fp32"), "bf16": ("bf16", "fp16", "fp32"), "fp16": ("fp16", "bf16", "fp32")}.get(
        precision, (precision,)
    ):
        peak = device.peak_flops_per_s(one)
        if peak is not None:
            return peak
    return None


def probe_places(ops: Ops, device: Device) -> npt.NDArray[np.int64]:
    """Places of the ops among n to measure as probes, [at most 8]: products, the copy, the smallest op.

    Only what the ops are decides. Products, two where there is one precision, are those nearest to `PROBE_SIZE` on each side;
    the copy is the one nearest to `PROBE_BYTES` of those that memory bounds. Ops that training runs are asked first: of the others
    only products in 8 and 4 bits are probes beside these, for they have rates of their own.
    """
    usual, narrow = np.flatnonzero(ops.of_training), np.flatnonzero(_ELEMENT_BYTES[ops.precision.astype(int)] < LEAST_OUTPUT_BYTES)
    if not len(usual):
        return _places(ops, device)
    products = _products(ops[narrow], _commonest(ops[narrow].precision[ops[narrow].flops > 0]), 1)
    return np.concatenate([usual[_places(ops[usual], device)], narrow[products]])


def _places(ops: Ops, device: Device) -> npt.NDArray[np.int64]:
    compute, memory = _at_data_sheet(ops, device)
    precisions = _commonest(ops.precision[ops.flops > 0])
    places = _products(ops, precisions, max(MOST_PRECISIONS - len(precisions), 1)).tolist()
    streams = np.flatnonzero((memory > 0) & (compute < 0.3 * memory))
    if len(streams):
        other = ops.kernels[streams] + np.abs(ops.special[streams]) + (ops.flops[streams] > 0) + 2 * ops.backward[streams]
        cost = np.abs(np.log10(ops.moved_bytes[streams] / PROBE_BYTES)) + 0.3 * other
        places.append(int(streams[np.argmin(cost)]))
    size = (compute + memory) * (1 + ops.backward) * ops.kernels
    plain = np.isin(ops.kind, _PLAIN)
    places.append(int(np.argmin(np.where(plain, size, np.inf) if plain.any() else size)))
    return np.array(list(dict.fromkeys(places)), dtype=np.int64)


def _products(ops: Ops, precisions: Floats, count: int) -> npt.NDArray[np.int64]:
    """Places of the `count` most usual products at each precision."""
    places: list[int] = []
    for precision in precisions:
        of = np.flatnonzero((ops.precision == precision) & np.isin(ops.kind, _PRODUCTS) & (ops.flops > 0))
        of = of[ops.kind[of] == _GEMM] if (ops.kind[of] == _GEMM).any() else of
        places += of[np.argsort(_from_usual_product(ops[of]), kind="stable")][:count].tolist()
    return np.array(places, dtype=np.int64)


def probes_of(ops: Ops, us: Floats, device: Device) -> Probes:
    """The rates that measured probes show, [n] each."""
    compute, memory = _at_data_sheet(ops, device)
    bound = compute > 0.5 * memory
    smallest = int(np.argmin(np.maximum(compute, memory)))
    floor_us = float(us[smallest] - np.maximum(compute, memory)[smallest] * 1e6 / USUAL_SHARE)
    matrix: dict[str, float] = {}
    for place in np.flatnonzero(bound):
        precision = PRECISIONS[int(ops.precision[place])]
        rate = float(ops.flops[place] / us[place] * 1e6)
        matrix[precision] = max(rate, matrix.get(precision, 0.0))
    # A copy that takes no longer than launches does says nothing about memory.
    streams = np.flatnonzero(~bound & (memory * 1e6 > 2 * max(floor_us, 0.0)))
    rates = ops.moved_bytes[streams] / us[streams] * 1e6
    return Probes(
        matrix_flops_per_s=matrix,
        stream_bytes_per_s=float(rates.max()) if len(streams) else None,
        floor_us=floor_us if floor_us > us[smallest] / 2 else None,  # else the smallest op is not small enough to tell
    )


def _at_data_sheet(ops: Ops, device: Device) -> tuple[Floats, Floats]:
    """Seconds of arithmetic and of memory at the rates of the data sheet, [n] each."""
    assert device.memory_bytes_per_s is not None
    peaks = np.array([peak_flops_per_s(device, precision) or np.inf for precision in PRECISIONS])
    return ops.flops / peaks[ops.precision.astype(int)], ops.moved_bytes / device.memory_bytes_per_s


def _from_usual_product(ops: Ops) -> Floats:
    """Distance of products from one of `PROBE_SIZE` on each side whose sizes are multiples of 128."""
    distance = np.log2(ops.batch) + 4.0 * ops.backward + 0.1 * ops.transposes + 2.0 * (ops.stream_bytes > ops.matrix_bytes)
    distance = distance + ops.special * (ops.kind == _GEMM)  # with a scale for each block
    for size in (ops.m, ops.n, ops.k):
        distance = distance + np.abs(np.log2(size / PROBE_SIZE)) + (np.round(size) % 128 != 0)
    return np.asarray(distance)


def _commonest(values: Floats) -> Floats:
    distinct, counts = np.unique(values, return_counts=True)
    return np.asarray(distinct[np.argsort(-counts, kind="stable")][:MOST_PRECISIONS])


def _check_units(what: str, measured: float, stated: float, unit: str) -> None:
    if not stated / BELOW_PEAK <= measured <= stated * BEYOND_PEAK:
        raise InputError(
            f"{what} {measured:.3g} {unit} contradicts the data sheet's {stated:.3g} {unit}; "
            "are the times in microseconds, and the rates in whole units (not Gi or M)?"
        )


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    return tomllib.loads((files("dpro_search.costmodel.devices") / "probes.toml").read_text("utf-8"))


def known_probes(device: Device) -> Probes:
    """Rates that public measurements show of a bundled device, by its name; none of another."""
    rates: dict[str, Any] = _table().get(device.name, {})
    return Probes(
        matrix_flops_per_s={precision: value[0] for precision, value in rates.get("matrix", {}).items()},
        stream_bytes_per_s=rates["stream"][0] if "stream" in rates else None,
    )


def profile_of(device: Device) -> DeviceProfile:
    """A device with its known probes, for one of which nothing was measured here."""
    return DeviceProfile(device=device, probes=known_probes(device))
