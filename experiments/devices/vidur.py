"""Profiles of transformer layers in the format of Vidur's (MIT), ``vidur/DEVICE/MODEL/{mlp,attention}.csv``: times of kernels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from dpro_search.cluster import Device
from dpro_search.costmodel.devices.ops import Stack
from dpro_search.costmodel.devices.profile_tables import read_profile_table
from dpro_search.costmodel.devices.written import ops_of
from dpro_search.errors import InputError
from experiments.devices.table import Table, device_of, table


def read(folder: Path, skipped: list[str], described: Mapping[str, Device] = MappingProxyType({})) -> list[Table]:
    """A table for each file; what is left out is told in `skipped`."""
    root = folder / "vidur"
    tables = []
    for path in sorted(root.rglob("*.csv")):
        name, *model = path.relative_to(root).parts[:-1] or ("",)
        try:
            device_of(name, described)
            measured = read_profile_table(path)
        except InputError as error:
            skipped.append(str(error))
            continue
        skipped += measured.left_out
        if measured.specs:
            ops = ops_of(measured.specs, Stack.SERVING)
            tables.append(table(ops, measured.us, f"vidur {name}", f"vidur {'/'.join(model)}" if model else ""))
    return tables
