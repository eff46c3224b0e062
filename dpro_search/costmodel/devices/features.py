"""Features of an op on a device for the predictor, and the time that its prediction is a ratio to.

The base is a roofline at the rates that the device was measured to reach: launch, then the longer of arithmetic and memory, then
what is streamed beside. Features are ratios and logarithms, so that devices of other sizes lie among those that were measured.
"""

from __future__ import annotations

import math

import numpy as np

from dpro_search.cluster import Device
from dpro_search.cluster.device import PRECISIONS
from dpro_search.costmodel.devices.ops import ELEMENT_BYTES, KINDS, STACKS, Floats, LibraryOpKind, Ops, Singles, Stack
from dpro_search.costmodel.devices.profile import DeviceProfile, Rates, UsualShares

TILES = ((256, 128), (128, 128), (128, 64), (64, 64))
"""Rows and columns that a multiprocessor computes at a time in the vendors' libraries (CUTLASS's default shapes)."""
CACHE_HELD, CACHE_FULL = 0.5, 1.0
"""Shares of the L2 cache up to which all streamed bytes hit, and from which on none does (empirical: H100 and L40S)."""
_ELEMENT_BYTES = np.array([ELEMENT_BYTES[precision] for precision in PRECISIONS])
_TF32 = PRECISIONS.index("tf32")
_ATTENTION = KINDS.index(LibraryOpKind.ATTENTION)
_SMALLEST = 1e-3  # us, of a part of an op that is absent: its logarithm stays finite
_KINDS = tuple(kind for kind in KINDS if kind is not LibraryOpKind.OPTIMIZER)  # An optimizer's step is element-wise.
_ELEMENTWISE, _OPTIMIZER = KINDS.index(LibraryOpKind.ELEMENTWISE), KINDS.index(LibraryOpKind.OPTIMIZER)
_OP = (
    *(f"is_{kind}" for kind in _KINDS),
    "stack",
    "element_bytes",
    "tf32",
    "backward",
    "products",
    "kernels",
    "special",
    "window",
    "transposes",
    "log_batch",
    "log_m",
    "log_n",
    "log_k",
    "aligned_m",
    "aligned_n",
    "aligned_k",
    "log_flops",
    "log_matrix_bytes",
    "log_stream_bytes",
)
_BOTH = (
    "compute_over_memory",
    "compute_over_floor",
    "memory_over_floor",
    "stream_over_rest",
    "log_base_us",
    "log_bytes_over_l2",
    *(f"{name}_{rows}x{columns}" for rows, columns in TILES for name in ("log_tiles_over_cores", "wave_share", "padding")),
    "least_waste",
    "rows_over_cores",
)
_DEVICE = (
    "log_peak",
    "log_memory_rate",
    "log_balance",
    "log_cores",
    "log_clock",
    "log_flops_per_core_cycle",
    "log_l2",
    "matrix_share",
    "stream_share",
    "log_floor_us",
    "amd",
)
FEATURES = (*_OP, *_BOTH, *_DEVICE)
DEVICE_FEATURES = frozenset(_DEVICE)
OP_FEATURES = frozenset(_OP)


def base_us(ops: Ops, profile: DeviceProfile, usual: UsualShares) -> Floats:
    """The roofline's time, us, [n]."""
    rates = profile.rates(usual)
    compute, memory, stream = parts_us(ops, rates)
    return np.asarray(rates.floor_us[ops.stack.astype(int)] + np.maximum(compute, memory) + stream)


def parts_us(ops: Ops, rates: Rates) -> tuple[Floats, Floats, Floats]:
    """Arithmetic, memory of products, and streamed bytes, us, [n] each."""
    peak = rates.matrix_flops_per_s[ops.precision.astype(int)]
    compute = ops.flops / peak * 1e6
    memory = ops.matrix_bytes / rates.stream_bytes_per_s * 1e6
    in_engine = ops.stack == STACKS.index(Stack.SERVING)
    return (
        compute,
        memory,
        np.where(in_engine, cached_us(ops.stream_bytes, rates), ops.stream_bytes / rates.stream_bytes_per_s * 1e6),
    )


def cached_us(moved: Floats, rates: Rates) -> Floats:
    """Time of bytes that an engine's op streams, us, [n]: at the rate of the L2 cache where they fit, else at that of the memory.

    What such an op streams was just written by another op of the CUDA graph, or is read again by the next one. Between half of the
    cache and all of it the part that hits falls to nothing. Together with the launch this is a ramp: small tensors do not reach the
    memory's rate. Ops that are launched one by one take their launch at these sizes, and trees know what they take beside it.
    """
    hits = np.clip((CACHE_FULL - moved / rates.cache_bytes) / (CACHE_FULL - CACHE_HELD), 0.0, 1.0)
    return np.asarray(moved * (hits / rates.cache_bytes_per_s + (1 - hits) / rates.stream_bytes_per_s) * 1e6)


def features(ops: Ops, profile: DeviceProfile, usual: UsualShares) -> Singles:
    """`FEATURES` of n ops on a device, [n, features]."""
    device, rates = profile.device, profile.rates(usual)
    compute, memory, stream = parts_us(ops, rates)
    floor = rates.floor_us[ops.stack.astype(int)]
    base = floor + np.maximum(compute, memory) + stream
    cores, l2_bytes = device.cores, device.l2_cache_bytes
    assert cores is not None
    assert l2_bytes is not None
    both = [
        _log(compute + _SMALLEST) - _log(memory + stream + _SMALLEST),
        _log((compute + _SMALLEST) / floor),
        _log((memory + stream + _SMALLEST) / floor),
        stream / base,
        _log(base),
        _log((ops.moved_bytes + 1) / l2_bytes),
        *_tile_features(ops, cores),
        _log(ops.batch * ops.m / cores),
    ]
    columns = [*_op_features(ops), *both, *_device_features(ops, device, rates)]
    return np.stack([np.broadcast_to(column, len(ops)) for column in columns], axis=1).astype(np.float32)


def _op_features(ops: Ops) -> list[Floats]:
    kinds = np.where(ops.kind == _OPTIMIZER, _ELEMENTWISE, ops.kind)
    return [
        *((kinds == KINDS.index(kind)).astype(float) for kind in _KINDS),
        ops.stack,
        _ELEMENT_BYTES[ops.precision.astype(int)],
        (ops.precision == _TF32).astype(float),
        ops.backward,
        ops.products,
        ops.kernels,
        ops.special,
        ops.window,
        ops.transposes,
        *(_log(size) for size in (ops.batch, ops.m, ops.n, ops.k)),
        *(_aligned(size) for size in (ops.m, ops.n, ops.k)),
        *(_log(size + 1) for size in (ops.flops, ops.matrix_bytes, ops.stream_bytes)),
    ]


def _tile_features(ops: Ops, cores: int) -> list[Floats]:
    """Features by tile shape: tiles for each core, filled part of the last wave, and share that padding to whole tiles adds.

    Fused attention is tiled along its queries only.
    """
    tile_features: list[Floats] = []
    waste = np.full(len(ops), np.inf)
    attention = ops.kind == _ATTENTION
    for rows, columns in TILES:
        across = np.where(attention, 1.0, np.ceil(ops.n / columns))
        tiles = ops.batch * np.ceil(ops.m / rows) * across
        waves = np.ceil(tiles / cores)
        share = tiles / (waves * cores)
        padding = _log(np.ceil(ops.m / rows) * rows / ops.m * np.ceil(ops.n / columns) * columns / ops.n)
        waste = np.minimum(waste, padding - _log(share))
        tile_features += [_log(tiles / cores), share, padding]
    return [*tile_features, waste]


def _device_features(ops: Ops, device: Device, rates: Rates) -> list[Floats]:
    places = ops.precision.astype(int)
    peak = rates.matrix_flops_per_s[places]
    share = rates.matrix_share[places]
    assert device.cores is not None
    assert device.clock_hz is not None
    assert device.l2_cache_bytes is not None
    one = np.ones(len(ops))
    return [
        _log(peak),
        _log(rates.stream_bytes_per_s) * one,
        _log(peak / rates.stream_bytes_per_s),
        math.log2(device.cores) * one,
        math.log2(device.clock_hz) * one,
        _log(peak / share / device.cores / device.clock_hz),
        math.log2(device.l2_cache_bytes) * one,
        share,
        rates.stream_share * one,
        _log(rates.floor_us[ops.stack.astype(int)]),
        float(device.vendor.upper().startswith("AMD")) * one,
    ]


def _aligned(size: Floats) -> Floats:
    """The power of two that divides a size, at most 2^8: loads and matrix units are vectors of 8 to 256 elements."""
    whole = np.maximum(np.round(size), 1).astype(np.int64)
    return np.asarray(np.minimum(np.log2((whole & -whole).astype(float)), 8.0))


def _log(value: Floats | float) -> Floats:
    return np.asarray(np.log2(value))
