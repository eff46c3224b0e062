"""The machines and devices that come with the package: TOML files, found by name or alias; and devices that the user added."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from dpro_search._text import near_names
from dpro_search.cluster import user_devices
from dpro_search.cluster.base import Kind
from dpro_search.cluster.cluster import Cluster
from dpro_search.cluster.device import Device
from dpro_search.cluster.files import load_cluster, load_device
from dpro_search.errors import InputError

_FOLDERS: dict[Kind, Path] = {"machine": Path(__file__).parent / "machines", "device": Path(__file__).parent / "devices"}


def names(kind: Kind) -> tuple[str, ...]:
    """Names of the bundled machines or devices: those of their files."""
    return tuple(sorted(path.stem for path in _FOLDERS[kind].glob("*.toml")))


def aliases(kind: Kind) -> dict[str, str]:
    """Every name and alias, in lower case, and the name that it stands for."""
    return {alias: path.stem for alias, path in _index(kind).items()}


def find(kind: Kind, name: str) -> Path:
    """The file of a bundled machine or device, or of a device of the user's; raises `InputError` with the nearest names."""
    path = _FOLDERS[kind] / f"{plain(name)}.toml"
    if path.is_file() and path.parent == _FOLDERS[kind]:
        return path
    index = _index(kind)
    if plain(name) in index:
        return index[plain(name)]
    user_file = user_devices.file_of(plain(name)) if kind == "device" else None
    if user_file is not None:
        return user_file
    users = user_devices.names() if kind == "device" else ()
    raise InputError(f"no {kind} is called '{name}'; {nearest(plain(name), (*index, *users), (*names(kind), *users))}")


def nearest(name: str, options: Iterable[str], listed: Iterable[str]) -> str:
    """A text that suggests the nearest names. If no name is near, it lists all names."""
    near = near_names(name, options)
    return f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(listed)}"


def plain(name: str) -> str:
    """A name as it is compared: lower case, hyphens for spaces and underscores."""
    return "-".join(name.lower().replace("_", " ").split())


@cache
def machine(name: str) -> Cluster:
    """A bundled machine; raises `InputError` if none exists."""
    return load_cluster(find("machine", name), find)


@cache
def device(name: str) -> Device:
    """A bundled device; raises `InputError` if none exists."""
    return load_device(find("device", name), find)


@cache
def device_named(vendors_name: str) -> Device | None:
    """The bundled device of a vendor's name, whatever a file has changed of it; None without one."""
    return next((candidate for candidate in map(device, names("device")) if candidate.name == vendors_name), None)


def is_called(one: Device, drivers_name: str) -> bool:
    """Whether a device's driver calls it so, as far as bundled devices and the device's own name tell."""
    known = aliases("device").get(plain(drivers_name))
    return plain(drivers_name) == plain(one.name) or (known is not None and device(known).name == one.name)


def usual_machine(name: str) -> str | None:
    """The machine that a device usually is part of, None if none exists."""
    machine: str | None = tomllib.loads(find("device", name).read_text("utf-8")).get("machine")
    return machine


@cache
def _index(kind: Kind) -> dict[str, Path]:
    """Files by name and alias; the names that a device's driver reports are aliases as well."""
    path_of_name: dict[str, Path] = {}
    for path in sorted(_FOLDERS[kind].glob("*.toml")):
        for alias in (path.stem, *tomllib.loads(path.read_text("utf-8")).get("aliases", ())):
            path_of_name.setdefault(plain(alias), path)
    return path_of_name
