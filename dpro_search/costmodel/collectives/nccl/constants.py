"""`NcclConstants`: what no data sheet says of NCCL's collectives, with its provenance; values are in ``constants.toml``."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

PROTOCOLS = ("LL", "LL128", "Simple")
"""NCCL's protocols: flags beside every 4 bytes, beside every 120 bytes, and synchronisation by chunk."""

ByProtocol = tuple[float, float, float]  # one for each of `PROTOCOLS`


class GpuArchitecture(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs that start collectives and pass flags alike."""

    name: str
    devices: str  # A pattern of their names, as vendors give them; the first architecture that fits a device is its.
    launch_us: float  # Time to launch a collective, before its first step (LL).
    hop_us: float  # Time of a step between two ranks of a domain (LL).
    # Highest rate of a channel of a tree, both ways together, between two domains, and between more: NCCL's perChMaxTreeBws.
    tree_channel_bytes_per_us: tuple[float, float]


MANY_DOMAINS = 10
"""Hosts, or racks that NVLink joins: beyond so many, errors have an interval of their own, from few systems of that size."""


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """Distance of times of systems that were left out of the fit from the predictions: a 90 % interval.

    The interval of a prediction t is t / factor to t * factor.
    """

    small: float  # Factor for less than 1 MiB.
    large: float


class NcclConstants(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of `lines`. Ratios are of the bare rate of links."""

    architectures: tuple[GpuArchitecture, ...]
    launch_more: ByProtocol  # Time to launch beyond that of LL, in us.
    hop_more: ByProtocol  # Time of a step within a domain beyond that of LL, in us.
    net_hop: ByProtocol  # A step between domains, in latencies of the network.
    # nvlink_ratio, pcie_ratio, net_ratio: What of a link's rate the bytes of rings reach.
    nvlink_ratio: ByProtocol
    pcie_ratio: ByProtocol
    net_ratio: ByProtocol
    staged_ratio: float  # Share of that which is left where NICs read copies in the host's memory.
    slingshot_ratio: float  # Share of that which is left on Slingshot.
    direct_ratio: float  # Rate of messages among all pairs over that of rings, within a domain.
    pair_ratio: float  # Rate of messages between two ranks over that of rings, within a domain.
    direct_us: float  # Launch of messages between pairs over that of LL (Simple).
    own_part: float  # The rank's own part is copied or reduced in place: it counts as so much of the part that it sends.
    tree_ratio: float  # Rate of trees over that of rings.
    switch_ratio: float  # Bytes that are reduced in the switch, over NVLink's rate.
    switch_us: float  # More launch of reductions in the switch.
    peer_us: tuple[float, float]  # All-to-all: each further rank of the domain (LL, Simple).
    net_peer: float  # All-to-all: each rank of another domain, in latencies of the network.
    pipeline_us: ByProtocol  # A broadcast's chunks at each further rank.
    inside_interval: Interval
    between_interval: Interval
    far_interval: Interval  # Between more than `MANY_DOMAINS` domains.
    source: str  # Measurements that they were fitted to, and how to do it again.

    def architecture(self, device: str) -> GpuArchitecture:
        """The architecture of a device, by its name; the last one for devices that no pattern fits."""
        return next((one for one in self.architectures if re.search(one.devices, device)), self.architectures[-1])


@cache
def nccl_constants() -> NcclConstants:
    """The constants that come with the package."""
    return constants_of(tomllib.loads((Path(__file__).parent / "constants.toml").read_text("utf-8")))


def constants_of(values: dict[str, Any]) -> NcclConstants:
    """Constants from a table of values; raises `msgspec.ValidationError` if one is missing or of another type."""
    return msgspec.convert(values, NcclConstants)
