"""Parser for the names of clusters that people write, as for ``--cluster``:

==================  =================================================================================
``64xhgx-h100``     64 hosts of a bundled machine
``hgx-h100``        one
``512xh100``        512 devices, in hosts of the machine that they usually are part of
``4xtestbed@1gbit`` a machine with another rate of each NIC
``4xmy-h100``       likewise with devices that the user added (`user_devices`)
``2xv5p:4x4x8``     slices of TPUs, as JAX or Cloud (``v5p-256``) names them (`tpu_topologies`)
``my.toml``         a file (`files`); ``8xmy.toml`` is eight times as many hosts
``this-machine``    what this process runs on
==================  =================================================================================

Upper and lower case are one. Devices that do not fill their last host are refused: a job on an incomplete host is another job. Only
fewer than one host has are a smaller host: ``4xh100`` is half a machine.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from dpro_search._text import visible
from dpro_search.cluster import bundled, user_devices
from dpro_search.cluster.cluster import Cluster, HostGroup
from dpro_search.cluster.device import Device, Provenance
from dpro_search.cluster.files import load_cluster, load_device
from dpro_search.cluster.generic import with_device
from dpro_search.cluster.host import Host
from dpro_search.cluster.tpu_topologies import tpu_cluster
from dpro_search.errors import InputError
from dpro_search.quantities import parse_rate_bps

THIS_MACHINE = "this-machine"
_COUNTED = re.compile(r"\s*(\d{1,9})\s*[x*]\s*(.+)", re.IGNORECASE | re.DOTALL)


def parse_cluster(text: str) -> Cluster:
    """The cluster that a name stands for.

    Raises
    ------
    InputError
        There is none (the nearest names are given), its file has an error, or the number does not fit.
    """
    name = visible(text.strip())
    if not name:
        raise InputError("no cluster named: write it like 64xhgx-h100, 512xh100, this-machine or a file my.toml")
    if _looks_like_file(name) and Path(name).is_file():
        return _named(name, None)
    rest, at, rate = name.rpartition("@")
    if at and not _looks_like_file(rate):
        return _with_rate(parse_cluster(rest), rate, name)
    counted = _COUNTED.fullmatch(name)
    if counted is None:
        return _named(name, None)
    count = int(counted[1])
    if count < 1:
        raise InputError(f"'{name}': at least one")
    return _named(counted[2].strip(), count)


def known_names() -> tuple[str, ...]:
    """Every name that `parse_cluster` takes beside files, aliases left out."""
    return (*bundled.names("machine"), *bundled.names("device"), *user_devices.names(), THIS_MACHINE)


def _named(name: str, count: int | None) -> Cluster:
    if _looks_like_file(name):
        return _times(load_cluster(Path(name), bundled.find), count)
    plain = bundled.plain(name)
    machines, devices = bundled.aliases("machine"), bundled.aliases("device")
    if plain in machines:
        return _times(bundled.machine(machines[plain]), count)
    if plain in devices:
        return _of_devices(devices[plain], bundled.device(plain), count or 1)
    if plain == THIS_MACHINE:
        from dpro_search.cluster.this_machine import this_machine  # only who asks for it reads the machine

        return _times(this_machine(), count)
    user_file = user_devices.file_of(plain)
    if user_file is not None:
        return _of_devices(plain, load_device(user_file, bundled.find), count or 1)
    slices = tpu_cluster(name, count or 1)
    if slices is not None:
        return slices
    hint = bundled.nearest(plain, (*machines, *devices, *user_devices.names(), THIS_MACHINE), known_names())
    raise InputError(f"no cluster is called '{name}'; {hint}")


def file_beside(text: str, folder: Path) -> tuple[str, Path | None]:
    """A text that `parse_cluster` takes whose file is looked for in a folder first, and that file; None: it names none."""
    counted = _COUNTED.fullmatch(text)
    name = counted[2].strip() if counted and not Path(text).is_file() else text
    if not _looks_like_file(name):
        return text, None
    path = folder / name if (folder / name).is_file() else Path(name)
    return (f"{counted[1]}x{path}" if counted and name != text else str(path)), path


def names_file(text: str) -> bool:
    """Whether a text that `parse_cluster` takes is, or counts, a file."""
    counted = _COUNTED.fullmatch(text)
    return _looks_like_file(counted[2] if counted else text)


def _looks_like_file(name: str) -> bool:
    return name.lower().endswith(".toml") or "/" in name


def _times(machine: Cluster, count: int | None) -> Cluster:
    """So many of a machine: one may be several hosts, like the trays of a rack."""
    if count is None or count == 1:
        return machine
    grown = machine.with_hosts(machine.hosts * count)
    return msgspec.structs.replace(grown, name=f"{count} x {machine.name}")


def _of_devices(name: str, device: Device, count: int) -> Cluster:
    usual = bundled.usual_machine(name)
    if usual is None:
        if count > 1 and device.kind == "tpu":
            raise InputError(f"{count}x{name}: name the topology that joins the chips, like v5p:2x2x1 or v6e:4x4")
        if count > 1:
            raise InputError(f"{count}x{name}: no usual machine of {device.name} is known; name one, or write a file")
        alone = HostGroup(count=1, host=Host(device=device))
        source = Provenance(source="one device without a machine: nothing is known of its host")
        return Cluster(name=device.name, groups=(alone,), provenance=source)
    machine = bundled.machine(usual)
    if machine.groups[0].host.device != device:
        machine = with_device(machine, device)
    host = machine.groups[0].host
    if count < host.devices:
        part = HostGroup(count=1, host=host.with_devices(count))
        name = f"{count} of the {host.devices} devices of {machine.name}"
        return msgspec.structs.replace(machine, name=name, groups=(part,))
    if count % host.devices:
        below = count - count % host.devices
        raise InputError(
            f"{count}x{name}: {usual} has {host.devices} devices a host, and {count} do not fill the last one; "
            f"use {below}x{name} or {below + host.devices}x{name}, or a file with [[host]] tables"
        )
    hosts = count // host.devices
    grown = machine.with_hosts(hosts)
    return msgspec.structs.replace(grown, name=f"{hosts} x {machine.name}" if hosts != machine.hosts else machine.name)


def _with_rate(cluster: Cluster, rate: str, name: str) -> Cluster:
    """The cluster with another rate of each NIC."""
    try:
        changed = cluster.at_nic_rate(parse_rate_bps(rate), f"given as '@{rate}'")
    except InputError as error:
        raise InputError(f"'{name}': {error}") from error
    return msgspec.structs.replace(changed, name=f"{cluster.name} at {rate}")
