"""`Table`: measured latencies of ops, with the device and the model that each comes from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.cluster import Device, bundled
from dpro_search.costmodel.devices.ops import Floats, Ops, joined
from dpro_search.errors import InputError

Texts = npt.NDArray[np.str_]


@dataclass(frozen=True, kw_only=True)
class Table:
    """n measured ops."""

    ops: Ops
    us: Floats
    target: Texts  # "source device", [n]: one device under one way to run and time ops.
    model: Texts  # That the op is part of; "" where it is of no model.
    spread: Floats  # Of the logarithm between repeated measurements of the op; NaN where there is one.

    def __len__(self) -> int:
        return len(self.us)

    def __getitem__(self, chosen: npt.NDArray[Any]) -> Table:
        return Table(
            ops=self.ops[chosen],
            us=self.us[chosen],
            target=self.target[chosen],
            model=self.model[chosen],
            spread=self.spread[chosen],
        )


def table(ops: Ops, us: Floats, target: str, model: Sequence[str] | str = "") -> Table:
    """Measured ops of a device, equal ones joined at their median."""
    us = np.asarray(us, dtype=np.float64)
    models = np.full(len(ops), model) if isinstance(model, str) else np.asarray(model)
    good = np.isfinite(us) & (us > 0)
    ops, us, models = ops[good], us[good], models[good]
    numbers = np.unique(models, return_inverse=True)[1]
    keys = np.ascontiguousarray(np.column_stack([ops.matrix, numbers]) + 0.0)
    rows = keys.view(np.dtype((np.void, keys.dtype.itemsize * keys.shape[1]))).reshape(-1)
    first, of = np.unique(rows, return_index=True, return_inverse=True)[1:]
    of = of.reshape(-1)
    order = np.lexsort((us, of))
    starts = np.searchsorted(of[order], np.arange(len(first)))
    counts = np.diff(np.append(starts, len(of)))
    logs = np.log(us[order])
    middle = (logs[starts + (counts - 1) // 2] + logs[starts + counts // 2]) / 2
    spread = np.where(counts > 1, logs[starts + counts - 1] - logs[starts], np.nan)
    return Table(ops=ops[first], us=np.exp(middle), target=np.full(len(first), target), model=models[first], spread=spread)


def read_columns(path: Path, needed: Sequence[str], skipped: list[str]) -> dict[str, npt.NDArray[Any]] | None:
    """Columns of a Parquet file by name, those that exist of others too; None, and why in `skipped`, if it has not all it needs."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        rows = parquet.read_table(path)
    except (OSError, arrow.ArrowException) as error:
        skipped.append(f"{path.name}: cannot be read: {' '.join(str(error).split())[:120]}")
        return None
    missing = [name for name in needed if name not in rows.column_names]
    if missing:
        skipped.append(f"{path.name}: has no column {', '.join(missing)}")
        return None
    return {name: rows[name].to_numpy(zero_copy_only=False) for name in rows.column_names}


def joined_tables(parts: Sequence[Table]) -> Table:
    """Tables one after the other."""
    return Table(
        ops=joined([part.ops for part in parts]),
        us=np.concatenate([part.us for part in parts]),
        target=np.concatenate([part.target for part in parts]),
        model=np.concatenate([part.model for part in parts]),
        spread=np.concatenate([part.spread for part in parts]),
    )


_NAMES = {  # as sources write them -> bundled device
    "rtx-2080": "rtx-2080-ti",
    "gh-96": "gh200-96gb",
    "v100-16": "v100-sxm2-16gb",
    "v100-32": "v100-sxm2-32gb",
    "a100-40": "a100-sxm-40gb",
    "tesla-p100-pcie-16gb": "p100-pcie-16gb",
    "tesla-p4": "p4",
    "tesla-t4": "t4",
    "nv-v100": "v100-pcie-32gb",
    "nv-p100": "p100-pcie-16gb",
    "nv-t4": "t4",
    "nv-titanxp": "titan-xp",
    "nv-titanx-pascal": "titan-x-pascal",
}


def plain_name(name: str) -> str:
    """A source's name as it is compared."""
    return re.sub(r"[\s_]+", "-", name.strip().lower())


def device_of(name: str, described: Mapping[str, Device] = MappingProxyType({})) -> Device:
    """The bundled device that a source's name means, else the one that the source describes under its `plain_name`.

    Raises `InputError` if there is none.
    """
    plain = plain_name(name)
    for one in (_NAMES.get(plain, plain), re.sub(r"^(nv|amd|nvidia)-", "", plain)):
        try:
            return bundled.device(one)
        except InputError:
            continue
    if plain in described:
        return described[plain]
    raise InputError(
        f"{name}: no bundled device has this name; its peak, memory_rate, cores, clock and l2_cache are needed, in a file in "
        "dpro_search/cluster/devices or in neusight/devices.json"
    )


# Devices of one architecture are left out together. A name is that of the first pattern that is found in the device's.
FAMILIES = (
    ("blackwell", r"B200|B300|RTX PRO|RTX 50"),
    ("hopper", r"H100|H200|H800|H20\b"),
    ("ada", r"\bL4\b|L20\b|L40|RTX 40|RTX .* Ada"),
    ("ampere", r"A100|A10G?\b|A30|A40|RTX 30|RTX A\d|A800"),
    ("turing", r"T4\b|RTX 20|TITAN RTX"),
    ("volta", r"V100|TITAN V\b"),
    ("pascal", r"P100|P40?\b|TITAN X[p ]|GTX 10"),
    ("maxwell", r"M40|GTX TITAN X"),
    ("cdna", r"MI1\d\d|MI2\d\d|MI3\d\d"),
    ("gcn", r"MI25\b|MI50|MI60|Vega"),
)


def family_of(device: Device) -> str:
    """The architecture of a device; of one that is not listed, its name."""
    order = ("maxwell", "gcn", *(name for name, _ in FAMILIES))
    patterns = dict(FAMILIES)
    return next((name for name in order if re.search(patterns[name], device.name, re.IGNORECASE)), device.name)
