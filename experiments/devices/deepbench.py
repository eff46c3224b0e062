"""Products of DeepBench (Apache-2.0): the vendors' libraries on devices of 2015 to 2018."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from dpro_search.cluster import Device
from dpro_search.costmodel.devices.ops import Stack, gemm
from dpro_search.errors import InputError
from experiments.devices.table import Table, device_of, table

PRECISION = {"Results FP32": "fp32", "Results - FP32": "fp32", "Results - FP16 ip, Mixed math": "fp16"}
"""By sheet. Sheets of inference leave the precision open, that of "pseudo fp16" computes in fp32 what it stores in fp16."""


_NEEDED = ("device", "phase", "sheet", "m", "n", "k", "ta", "tb", "ms")


def read(folder: Path, skipped: list[str], described: Mapping[str, Device] = MappingProxyType({})) -> list[Table]:
    """Tables by device and precision; what is left out is told in `skipped`."""
    path = folder / "deepbench" / "gemm.csv"
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        # The file also has convolutions, whose columns are other sizes under the same names.
        reader = csv.DictReader(file)
        missing = [
            name for name in ("device", "phase", "sheet", "m", "n", "k", "ta", "tb", "ms") if name not in (reader.fieldnames or ())
        ]
        if missing:
            skipped.append(f"{path.name}: has no column {', '.join(missing)}")
            return []
        rows = [row for row in reader if row["ta"] in ("N", "T") and row["tb"] in ("N", "T")]
    groups = defaultdict(list)
    for row in rows:
        groups[row["device"], PRECISION.get(row["sheet"]) if row["phase"] == "train" else None].append(row)
    found = []
    for (name, precision), chosen in sorted(groups.items(), key=str):
        try:
            device_of(name, described)
        except InputError as error:
            skipped.append(f"{path.name}: {len(chosen)} rows of {error}")
            continue
        if precision is None:
            skipped.append(f"{path.name}: {len(chosen)} rows of {name}: the precision is not said")
            continue
        m, n, k, ms = (np.array([float(row[key]) for row in chosen]) for key in ("m", "n", "k", "ms"))
        codes = np.array([(row["tb"] == "T") + 2 * (row["ta"] == "T") for row in chosen], dtype=float)
        ops = gemm(m, n, k, precision=precision, stack=Stack.LIBRARY, transposes=codes)
        found.append(table(ops, ms * 1e3, f"deepbench {name}"))
    return found
