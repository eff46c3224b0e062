"""`Achieved`: the shares of a device's peaks that ops reach, from ``achieved.toml``."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from dpro_search.cluster import Device


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
    return tomllib.loads((files("dpro_search.costmodel.gpu_ops") / "achieved.toml").read_text())


@lru_cache(maxsize=64)
def achieved_by(device: Device) -> Achieved:
    """The shares of a device's architecture; of one that was not measured, those between all that were."""
    table = _table()
    word = re.compile(
        r"\b(" + "|".join(name for part in table.values() if isinstance(part, dict) for name in part.get("devices", ())) + r")\b"
    )
    found = word.search(device.name.upper().replace("-", " "))
    family = next(
        (name for name, part in table.items() if isinstance(part, dict) and found and found.group(1) in part.get("devices", ())),
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
