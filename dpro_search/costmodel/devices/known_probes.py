"""`known_probes`: the rates that public measurements show of bundled devices, from ``probes.toml``."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib.resources import files
from typing import Any

from dpro_search.cluster import Device
from dpro_search.costmodel.devices.profile import DeviceProfile, Probes


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    return tomllib.loads((files("dpro_search.costmodel.devices") / "probes.toml").read_text("utf-8"))


def known_probes(device: Device) -> Probes:
    """Of a device with the name of a bundled one; none of another."""
    found: dict[str, Any] = _table().get(device.name, {})
    return Probes(
        matrix_flops_per_s={precision: value[0] for precision, value in found.get("matrix", {}).items()},
        stream_bytes_per_s=found["stream"][0] if "stream" in found else None,
    )


def profile_of(device: Device) -> DeviceProfile:
    """A device with what is known of it, though nothing was measured here."""
    return DeviceProfile(device=device, probes=known_probes(device))
