"""`Achieved`: the shares of a device's peaks that ops reach, from ``achieved.toml``; `slowest`: the slowest of many equal GPUs."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from statistics import NormalDist
from typing import Any

from dpro_search.cluster import Device, bundled


@dataclass(frozen=True, kw_only=True)
class Achieved:
    """Shares of peaks, and how far predictions with them are off."""

    matmul: float  # Of the peak at a precision, by matmuls that fill the device.
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


SPREAD = 0.015
"""Standard deviation of the time of compute-bound kernels over equal GPUs, relative to the mean. Of five clusters the box plots'
whiskers, 5.4 standard deviations apart, span 8 % on average, for chips differ in the clock that their power limit leaves them; what
waits for memory differs little (Sinha et al. 2022, "Not all GPUs are created equal", SC)."""


@lru_cache(maxsize=1024)
def expected_largest(count: int) -> float:
    """Expected largest of so many standard normal values (Blom 1958)."""
    return max(NormalDist().inv_cdf((count - 0.375) / (count + 0.25)), 0.0) if count > 1 else 0.0


def slowest(devices: int) -> float:
    """The time of the slowest of many equal GPUs, for which all others wait, over that of the usual one."""
    return 1.0 + SPREAD * expected_largest(devices)
