"""`pcie_hosts`: hosts of a card of which nothing else is known, as servers with PCIe slots are built."""

from __future__ import annotations

from typing import Literal

import msgspec

from dpro_search.cluster.cluster import Cluster, HostGroup
from dpro_search.cluster.device import Device, Provenance
from dpro_search.cluster.host import Host, Nics
from dpro_search.cluster.link import Link
from dpro_search.errors import InputError

_LANES_BPS = {3: 15.75e9 * 8, 4: 31.5e9 * 8, 5: 63e9 * 8}
_SOCKET_SHARE = 0.65  # Of a slot's rate, what all peer-to-peer traffic between two sockets has.
_CARDS_PER_SOCKET = 4
_NIC_BPS = 200e9


def pcie_hosts(device: Device, *, devices: int = 8, hosts: int = 1, generation: Literal[3, 4, 5] = 4) -> Cluster:
    """Servers with some cards each: x16 slots, up to four cards at a CPU socket, two network cards of 200 Gbit/s.

    Raises
    ------
    InputError
        A number is below 1.
    """
    if devices < 1 or hosts < 1:
        raise InputError(f"hosts and devices must be at least 1, not {hosts} and {devices}")
    rate_bps = _LANES_BPS[generation]
    one_socket = devices <= _CARDS_PER_SOCKET
    links = [Link(level="pcie", rate_bps=rate_bps, latency_us=1.0, devices=None if one_socket else _CARDS_PER_SOCKET)]
    if not one_socket:
        links.append(Link(level="socket", rate_bps=rate_bps * _SOCKET_SHARE, latency_us=1.0, sharing="host"))
    nics = Nics(count=2 if devices % 2 == 0 else 1, link=Link(level="nic", rate_bps=_NIC_BPS, latency_us=2.7))
    host = Host(device=device, devices=devices, links=tuple(links) if devices > 1 else (), nics=nics)
    return Cluster(
        name=f"{hosts} x {devices} x {device.name}, PCIe {generation}.0",
        groups=(HostGroup(count=hosts, host=host),),
        provenance=Provenance(
            source="estimated: servers with PCIe cards differ; latencies of NCCL's tuning table (src/graph/tuning.cc)"
        ),
    )


def with_device(cluster: Cluster, device: Device) -> Cluster:
    """The same hosts with another device."""
    groups = tuple(
        msgspec.structs.replace(group, host=msgspec.structs.replace(group.host, device=device)) for group in cluster.groups
    )
    return msgspec.structs.replace(cluster, name=f"{cluster.name} with {device.name}", groups=groups)
