"""`ClusterSpec`: on what a job runs, as today's predictors take it. Changing it answers "what if the same job ran there".

`spec_on` makes it of a `Cluster`, which knows more than the predictors use: it reports what is left out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from dpro_search.cluster import Cluster, Host, Link
from dpro_search.collect.trace import TraceMeta
from dpro_search.errors import InputError


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts and links."""

    cores: tuple[int, ...]  # Core of each rank; ranks with one number share it. The number of ranks is its length.
    # Link rate per host and direction in bits a second; None: not limited, the processors are the limit.
    rate_bps: float | None = None
    ranks_per_host: int | None = 1  # Side by side on each host; None: hosts differ.

    def __post_init__(self) -> None:
        if not self.cores:
            raise InputError("a cluster needs at least one rank")
        if self.rate_bps is not None and self.rate_bps <= 0:
            raise InputError(f"rate_bps must be > 0, not {self.rate_bps}")

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.cores)

    @staticmethod
    def of(meta: TraceMeta) -> ClusterSpec:
        """The cluster of a recording; a rank that was not pinned has a core of its own."""
        free = max((*meta.cores, -1)) + 1
        cores = tuple(core if core >= 0 else free + rank for rank, core in enumerate(meta.cores))
        return ClusterSpec(cores=cores, rate_bps=meta.rate_bps, ranks_per_host=meta.ranks_per_host)

    def with_ranks(self, ranks: int, physical_cores: int | None = None) -> ClusterSpec:
        """The same with another number of ranks; they share cores round-robin if there are fewer cores than ranks."""
        if ranks < 1:
            raise InputError(f"ranks must be >= 1, not {ranks}")
        count = ranks if physical_cores is None else physical_cores
        if count < 1:
            raise InputError(f"cores must be >= 1, not {count}")
        per_host = self.ranks_per_host
        return msgspec.structs.replace(
            self,
            cores=tuple(rank % count for rank in range(ranks)),
            ranks_per_host=None if per_host is None or ranks % per_host else per_host,
        )

    def changed(self, *, ranks: int | None = None, cores: int | None = None, rate_bps: float | None = None) -> ClusterSpec:
        """The same with the given values; None keeps one. Ranks share `cores` round-robin; `math.inf` is a rate without limit."""
        cluster = self
        if ranks == self.ranks and cores is None:
            ranks = None
        if ranks is not None or cores is not None:
            cluster = cluster.with_ranks(self.ranks if ranks is None else ranks, cores)
        if rate_bps is not None:
            cluster = msgspec.structs.replace(cluster, rate_bps=None if math.isinf(rate_bps) else rate_bps)
        return cluster

    def faster(self, factor: float, text: str) -> ClusterSpec:
        """The same with links that many times as fast; raises `InputError` that shows `text` if they have no limit."""
        if self.rate_bps is None:
            raise InputError(f"'{text}': the rate of the recording's links is not known; use rate=1gbit")
        return msgspec.structs.replace(self, rate_bps=self.rate_bps * factor)


class SpecOn(NamedTuple):
    """The `ClusterSpec` of a job on a cluster."""

    spec: ClusterSpec  # What the predictors take.
    left_out: tuple[str, ...]  # What of the cluster they do not know, a sentence each; empty: nothing that matters to this job.


def spec_on(cluster: Cluster, ranks: int | None = None) -> SpecOn:
    """How a job of so many ranks (None: one on each device) runs on a cluster: on its first devices, in order.

    Each rank has a core of its own. A host's rate is that of all its NICs together (or its NVLinks, where these reach other hosts);
    where hosts differ, the slowest is taken for all. Oversubscribed switches divide it, as if all hosts sent at once. On one host
    nothing is limited.

    Raises
    ------
    InputError
        The cluster has fewer devices than ranks.
    """
    count = cluster.ranks if ranks is None else ranks
    if not 1 <= count <= cluster.ranks:
        raise InputError(f"{count} ranks do not fit on {cluster.name}: it has {cluster.ranks} devices")
    hosts, kinds = _used(cluster, count)
    farthest = cluster.slowest_level(range(count))
    left_out = [*_differing(kinds), *_inside(kinds, hosts), *_oversubscribed(farthest)]
    per_host = set(hosts.values())
    spec = ClusterSpec(
        cores=tuple(range(count)),
        rate_bps=_rate_bps(cluster, kinds, farthest) if len(hosts) > 1 else None,
        ranks_per_host=per_host.pop() if len(per_host) == 1 else None,
    )
    return SpecOn(spec, tuple(left_out))


def differing_hosts(cluster: Cluster, ranks: int) -> tuple[str, ...]:
    """How the devices and NICs of a cluster's first ranks differ from each other and from the recorded ones, a sentence each."""
    return tuple(_differing(_used(cluster, ranks)[1]))


def _used(cluster: Cluster, ranks: int) -> tuple[dict[int, int], list[Host]]:
    """Number of ranks on each host, and those hosts."""
    hosts: dict[int, int] = {}
    kinds: list[Host] = []
    for rank in range(ranks):
        host, _ = cluster.place(rank)
        if host not in hosts:
            kinds.append(cluster.host_of(rank))
        hosts[host] = hosts.get(host, 0) + 1
    return hosts, kinds


def _rate_bps(cluster: Cluster, kinds: list[Host], farthest: Link | None) -> float | None:
    assert farthest is not None, "several hosts"
    rate_bps = min(cluster.host_bps(kind, farthest) for kind in kinds)
    return rate_bps if math.isfinite(rate_bps) else None


def _differing(kinds: list[Host]) -> list[str]:
    sentences = []
    if len({kind.rate_bps for kind in kinds}) > 1:
        sentences.append("hosts have NICs of several rates: the slowest is taken for all")
    devices = sorted({kind.device.name for kind in kinds})
    if len(devices) > 1:
        sentences.append(f"hosts have several kinds of devices ({', '.join(devices)}): all are taken as the recorded one")
    elif kinds[0].device.kind == "gpu":
        sentences.append(f"computation is as fast as it was recorded, not as on {devices[0]}")
    return sentences


def _inside(kinds: list[Host], hosts: dict[int, int]) -> list[str]:
    shared = {kind.links[0].level for kind, count in zip(kinds, hosts.values(), strict=True) if count > 1 and kind.links}
    return [f"links inside a host ({', '.join(sorted(shared))}) do not limit the ranks that share it"] if shared else []


def _oversubscribed(farthest: Link | None) -> list[str]:
    if farthest is None or farthest.oversubscription == 1:
        return []
    return [f"{farthest.level} switches are oversubscribed {farthest.oversubscription:g} to 1: each host has that part of its rate"]
