"""Places of the ranks of a group in a cluster, and the links that join them: ``paths(cluster, placement)``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from dpro_search.cluster import Cluster
from dpro_search.cluster.host import Host
from dpro_search.cluster.link import Link
from dpro_search.errors import InputError

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A group of ranks, as many on each of its hosts."""

    ranks_per_node: int  # On each host.
    nodes: int = 1  # Hosts.
    stride: int = 1  # Distance of neighbouring ranks on a host, in devices: 4 for ranks 0 and 4 of a host.
    node_stride: int = 1  # Distance of neighbouring hosts, in hosts: 2 where a pipeline alternates between two.
    # Groups like this one that communicate at the same time on each of its hosts, this one included: they share the host's NICs
    # and links that a host has as a whole. At most devices / ranks_per_node.
    concurrent: int = 1

    def __post_init__(self) -> None:
        for name in ("ranks_per_node", "nodes", "stride", "node_stride", "concurrent"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} of a group must be at least 1, not {getattr(self, name)}")

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.ranks_per_node * self.nodes


@dataclass(frozen=True, kw_only=True)
class Paths:
    """Links that join the ranks of a group. A *domain* is what one kind of link inside hosts joins: a host, or a rack of NVLink."""

    ranks: int
    domains: int  # Over which the ranks are spread evenly.
    inside: Literal["nvlink", "pcie"]  # Links inside a domain: NVLink, xGMI and the like; or PCIe, sockets and host memory.
    ring_bytes_per_us: float  # Each rank sends so much to the next while all do, within a domain; infinite for one rank there.
    nic_bytes_per_us: float  # All of the group's ranks of a domain together send so much to other domains; infinite for one domain.
    nic_latency_us: float  # Latency of a message between domains.
    nic_link_bytes_per_us: float  # The most that one NIC sends; infinite for one domain.
    staged: bool  # Whether NICs take bytes from copies in the host's memory, not from the devices.
    fabric: str  # As of `cluster.host.Nics`; "" without NICs.
    switched: bool  # Whether one switch joins the devices of a domain, all to all: what reductions in the switch need.
    device: str  # Name of the device, as its vendor gives it.

    def faster(self, factor: float) -> Paths:
        """These paths with links of that many times the rate."""
        return replace(
            self,
            ring_bytes_per_us=self.ring_bytes_per_us * factor,
            nic_bytes_per_us=self.nic_bytes_per_us * factor,
            nic_link_bytes_per_us=self.nic_link_bytes_per_us * factor,
        )

    @property
    def ranks_per_domain(self) -> int:
        """Ranks of a domain."""
        return self.ranks // self.domains


def placement_of(cluster: Cluster, ranks: Iterable[int], concurrent: int | None = None) -> Placement:
    """The placement of ranks of a cluster.

    Parameters
    ----------
    concurrent
        Groups that communicate at the same time on each host; None: as many as fit beside this one, for other ranks do likewise.

    Raises
    ------
    InputError
        The cluster has no such rank, or there are no ranks.

    Notes
    -----
    Hosts with fewer of the ranks than others are taken to have as many.
    """
    host, device = _places(cluster, sorted(set(ranks)))
    if not len(host):
        raise InputError("a group needs at least one rank")
    hosts, begin, count = np.unique(host, return_index=True, return_counts=True)
    fullest = int(count.argmax())
    per_node = int(count[fullest])
    first = device[begin[fullest] :]
    return Placement(
        ranks_per_node=per_node,
        nodes=len(hosts),
        stride=int(first[1] - first[0]) if per_node > 1 else 1,
        node_stride=max(int(hosts[-1] - hosts[0]) // max(len(hosts) - 1, 1), 1),
        concurrent=max((cluster.ranks_per_host or per_node) // per_node, 1) if concurrent is None else concurrent,
    )


def _places(cluster: Cluster, ranks: Sequence[int]) -> tuple[Int32s, Int32s]:
    """Hosts of ascending ranks, and their devices there, [ranks] each: `Cluster.place` of many at once."""
    last = cluster.ranks - 1
    missing = next((rank for rank in ranks if not 0 <= rank <= last), None)
    if missing is not None:
        cluster.place(missing)  # raises
    firsts = np.array(cluster.firsts, np.int32)
    per_host = np.array([group.host.devices for group in cluster.groups], np.int32)
    numbers = np.array(ranks, np.int32)
    group = np.searchsorted(firsts[:, 0], numbers, side="right") - 1
    host, device = np.divmod(numbers - firsts[group, 0], per_host[group])
    return firsts[group, 1] + host, device


@lru_cache(maxsize=4096)
def paths(cluster: Cluster, placement: Placement) -> Paths:
    """Links that join the ranks of a group from a cluster's first device on; where hosts differ, the slowest are taken for all.

    Raises
    ------
    InputError
        The group does not fit on the cluster, or the cluster has TPUs.
    """
    if cluster.has_tpus:
        raise InputError(f"{cluster.name} has TPUs, whose collectives are not NCCL's: `costmodel.collectives.torus` predicts them")
    used, last_host = _devices(placement), (placement.nodes - 1) * placement.node_stride
    kinds, before = [], 0
    for group in cluster.groups:
        if before <= last_host:
            kinds.append(group.host)
        before += group.count
    largest = max(kinds, key=lambda kind: kind.devices)
    if max(used) >= largest.devices or last_host >= cluster.hosts:
        raise InputError(
            f"a group with {placement.ranks_per_node} ranks (every {placement.stride}.) on each of {placement.nodes} hosts does "
            f"not fit on {cluster.name}: it has {cluster.hosts} hosts with {largest.devices} devices"
        )
    of_kinds = [_on(cluster, kind, tuple(device for device in used if device < kind.devices), placement) for kind in kinds]
    slowest = min(of_kinds, key=lambda one: one.ring_bytes_per_us)
    return replace(
        slowest,
        nic_bytes_per_us=min(one.nic_bytes_per_us for one in of_kinds),
        staged=any(one.staged for one in of_kinds),
        switched=all(one.switched for one in of_kinds),
    )


def _on(cluster: Cluster, host: Host, used: tuple[int, ...], placement: Placement) -> Paths:
    """The paths if all hosts were like one of them."""
    wide = next((link for link in host.links if link.hosts != 1), None)
    together = _hosts_joined(wide, placement) if wide is not None else 1
    domains = placement.nodes // together
    inside, ring = _inside(host, used, wide if together > 1 else None, placement)
    nic, latency_us = math.inf, 0.0
    if domains > 1:
        nic, latency_us = _between(cluster, host, used, placement)
    fastest = host.links[0] if host.links else None
    return Paths(
        ranks=placement.ranks,
        domains=domains,
        inside=inside,
        ring_bytes_per_us=ring,
        nic_bytes_per_us=nic * together,
        nic_link_bytes_per_us=math.inf if domains == 1 or host.nics is None else host.nics.link.each_way_bps / 8e6,
        nic_latency_us=latency_us,
        staged=host.nics is not None and host.nics.buffers == "host",
        fabric="" if host.nics is None else host.nics.fabric,
        switched=fastest is not None and fastest.level == "nvlink" and not fastest.wires and fastest.sharing == "device",
        device=host.device.name,
    )


def _devices(placement: Placement) -> tuple[int, ...]:
    return tuple(range(0, placement.ranks_per_node * placement.stride, placement.stride))


def _hosts_joined(wide: Link, placement: Placement) -> int:
    """Number of the group's hosts that a link across hosts joins: the largest even part."""
    fit = placement.nodes if wide.hosts is None else max(wide.hosts // placement.node_stride, 1)
    return next(count for count in range(min(fit, placement.nodes), 0, -1) if placement.nodes % count == 0)


def _inside(host: Host, used: tuple[int, ...], wide: Link | None, placement: Placement) -> tuple[Literal["nvlink", "pcie"], float]:
    """Kind and rate of the links of rings within a domain."""
    if wide is not None:
        return ("nvlink" if wide.level == "nvlink" else "pcie"), wide.each_way_bps / 8e6
    if len(used) == 1:
        return "nvlink" if host.links and host.links[0].level == "nvlink" else "pcie", math.inf
    link = host.ring_link(used)
    rate = host.ring_bps(used) / 8e6
    if link.sharing == "host":
        rate /= placement.concurrent
    return ("nvlink" if link.level == "nvlink" else "pcie"), rate


def _between(cluster: Cluster, host: Host, used: tuple[int, ...], placement: Placement) -> tuple[float, float]:
    """Bytes a us that the ranks of a host send to other hosts, and the latency."""
    last = (placement.nodes - 1) * placement.node_stride
    ends = [min(cluster.first_rank(at) + device, cluster.ranks - 1) for at in (0, last) for device in used]
    farthest = cluster.slowest_level(ends)
    assert farthest is not None, "ranks on two hosts"
    everyone = host.nic_bps(range(host.devices)) / placement.concurrent
    nic_bps = min(host.nic_bps(used), everyone)
    rate = nic_bps / farthest.oversubscription
    if farthest.level != "nic" and math.isfinite(farthest.each_way_bps):
        rate = min(rate, farthest.each_way_bps)
    return rate / 8e6, farthest.latency_us
