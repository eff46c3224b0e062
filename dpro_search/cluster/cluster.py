"""`Cluster`: hosts and what joins them; ranks are its devices in order, host by host."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec

from dpro_search.cluster.device import Device, Provenance
from dpro_search.cluster.host import Host
from dpro_search.cluster.link import BETWEEN, INSIDE, Link, Torus
from dpro_search.errors import InputError

_MOST_HOSTS = 1_000_000


class HostGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Equal hosts that follow each other."""

    count: int
    host: Host

    def __post_init__(self) -> None:
        if not 1 <= self.count <= _MOST_HOSTS:
            raise InputError(f"a cluster has 1 to {_MOST_HOSTS} hosts of each kind, not {self.count}")


class _Place(NamedTuple):
    """The place of a rank: its group of hosts, its host among all hosts, and its device and its NIC on that host."""

    group: int
    host: int
    device: int
    nic: int
    rank: int


class Cluster(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The hosts, devices and links that a job runs on.

    Attributes
    ----------
    name
        For people.
    groups
        Its hosts; one group where they are all equal.
    links
        Between hosts, from near to far (`BETWEEN`), the last of which joins all; empty: a network of which only the NICs are known.
    torus
        Links between the chips of TPUs, which lead to neighbours, also of other hosts; None: GPUs or cores. With a torus, ranks are
        chips in the order of `Torus.coordinates`, slice by slice.
    price_per_device_hour_usd, power_per_device_w
        For each device, its share of the host included; None: not known.
    provenance
        Where the values come from; those of a device have their own.

    Raises
    ------
    InputError
        The parts do not fit together.
    """

    name: str
    groups: tuple[HostGroup, ...]
    links: tuple[Link, ...] = ()
    torus: Torus | None = None
    price_per_device_hour_usd: float | None = None
    power_per_device_w: float | None = None
    provenance: Provenance

    def __post_init__(self) -> None:
        if not self.groups:
            raise InputError("a cluster needs at least one host")
        levels = [link.level for link in self.links]
        if levels != [level for level in BETWEEN if level in levels]:
            raise InputError(f"links between hosts are {', '.join(BETWEEN)}, each once and in this order, not {', '.join(levels)}")
        if self.links and (self.links[-1].hosts is not None or self.links[-1].level == "rail"):
            raise InputError("the farthest link between hosts must be a leaf or spine without 'hosts': it joins all of them")
        for field in ("price_per_device_hour_usd", "power_per_device_w"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise InputError(f"{field} must be above 0, not {value:g}")
        if self.hosts > 1 and not self._reaches_all():
            raise InputError("several hosts need a 'nic': nothing else joins them")
        if self.torus is not None and self.torus.chips * self.torus.slices != self.ranks:
            raise InputError(f"torus: {self.torus.slices} x {self.torus.text} chips are not the {self.ranks} devices of the hosts")

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return sum(group.count for group in self.groups)

    @property
    def ranks(self) -> int:
        """Number of ranks: one for each device."""
        return sum(group.count * group.host.devices for group in self.groups)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each rank."""
        return tuple(itertools.chain.from_iterable((g.host.device,) * (g.count * g.host.devices) for g in self.groups))

    @property
    def ranks_per_host(self) -> int | None:
        """Devices of each host; None: hosts differ in it."""
        counts = {group.host.devices for group in self.groups}
        return counts.pop() if len(counts) == 1 else None

    @property
    def rate_bps(self) -> float | None:
        """Bits a second that each host sends to others, and receives, with all its NICs; the slowest host's where they differ.

        None: nothing limits it.
        """
        rates = [group.host.rate_bps for group in self.groups if group.host.rate_bps is not None]
        return min(rates) if rates else None

    def place(self, rank: int) -> tuple[int, int]:
        """Host of a rank, and its device there; raises `InputError` if there is no such rank."""
        group, host, device = self._find(rank)
        return self.firsts[group][1] + host, device

    def first_rank(self, host: int) -> int:
        """The first rank of a host, by the host's number."""
        group = bisect.bisect_right(self.firsts, host, key=lambda first: first[1]) - 1
        rank, first_host = self.firsts[group]
        return rank + (host - first_host) * self.groups[group].host.devices

    def host_of(self, rank: int) -> Host:
        """The host of a rank."""
        return self.groups[self._find(rank)[0]].host

    @property
    def has_tpus(self) -> bool:
        """Whether one of the devices is a TPU."""
        return any(group.host.device.kind == "tpu" for group in self.groups)

    def level_between(self, first: int, second: int) -> Link | None:
        """The nearest link that joins two ranks; None: they are one rank; raises `InputError` on a torus, which has no levels."""
        if self.torus is not None:
            raise InputError(f"{self.name} is a torus of TPUs, on which neither links nor collectives are those of GPUs")
        if first == second:
            self._find(first)
            return None
        (host, device), (other_host, other_device) = self.place(first), self.place(second)
        if host == other_host:
            return self.host_of(first).link_between(device, other_device)
        kind, other_kind = self.host_of(first), self.host_of(second)
        shared = _shared_link(kind, other_kind, host, other_host)
        if shared is not None:
            return shared
        one_rail = kind.nic_of(device) == other_kind.nic_of(other_device)
        for link in self.links:
            if link.joins_hosts(host, other_host) and (link.level != "rail" or one_rail):
                return link
        ends = [end.nics.link for end in (kind, other_kind) if end.nics is not None]
        return min(ends, key=lambda link: (link.each_way_bps, -link.latency_us))

    def slowest_level(self, ranks: Iterable[int]) -> Link | None:
        """The farthest of the links that join two of the ranks, of equally far ones the slowest; None: they are fewer than two."""
        pairs = itertools.combinations(_outermost(self._placed(ranks)), 2)
        links = [link for first, second in pairs if (link := self.level_between(first, second)) is not None]
        return max(links, key=lambda link: (link.distance, -link.each_way_bps, link.latency_us), default=None)

    def bandwidth_bytes_per_us(self, ranks: Iterable[int]) -> float:
        """Bytes a us that each of the ranks sends to the next while all do, in rings: the bound of an all-reduce's bus bandwidth.

        Within a host the rings take the nearest links that can form them. Between hosts there is a ring for each NIC of the host's
        ranks. Above leaf switches the worst is assumed: all hosts send at once, so that oversubscription divides the rate.
        Infinite where nothing limits it, and for one rank. Trees (between two hosts) and reductions in the switches (NVLink SHARP)
        move fewer bytes than rings do, so that the bus bandwidth that is measured with them may exceed this.
        """
        if self.torus is not None:
            raise InputError(f"{self.name} is a torus of TPUs: the rate of a group depends on the axes that it spans")
        everyone = self._placed(ranks)
        parts = {
            (group, tuple(place.device for place in places))  # equal for most hosts: each is asked once
            for (group, _), places in itertools.groupby(everyone, key=lambda place: (place.group, place.host))
        }
        used = [(self.groups[group].host, devices) for group, devices in sorted(parts)]
        inside = min((host.ring_bps(devices) for host, devices in used), default=float("inf"))
        if not everyone or everyone[0].host == everyone[-1].host:
            return inside / 8e6
        farthest = self.slowest_level(place.rank for place in everyone)
        assert farthest is not None, "ranks on several hosts"
        if farthest.level in INSIDE:  # it joins several hosts
            return min(inside, farthest.each_way_bps) / 8e6
        outside: float = min(host.nic_bps(devices) for host, devices in used) / farthest.oversubscription
        return min(inside, outside, _above(farthest)) / 8e6

    def host_bps(self, host: Host, farthest: Link) -> float:
        """Bits a second each way between one of the hosts, with all its devices, and those that the farthest link joins to it."""
        if farthest.level in INSIDE:  # NVLink of a rack
            return farthest.each_way_bps * (host.devices if farthest.sharing == "device" else 1)
        return min(host.nic_bps(range(host.devices)) / farthest.oversubscription, _above(farthest))

    def latency_us(self, ranks: Iterable[int]) -> float:
        """Latency of the slowest level of the ranks; 0 for one rank."""
        link = self.slowest_level(ranks)
        return 0.0 if link is None else link.latency_us

    def with_hosts(self, count: int) -> Cluster:
        """The same with another number of equal hosts; raises `InputError` where hosts differ, or form a torus."""
        if self.torus is not None:
            raise InputError(f"{self.name} is a torus: name another topology, like 2xv5p:4x4x4")
        if len(self.groups) > 1:
            raise InputError(f"{self.name} has hosts that differ: give their numbers in its file")
        return msgspec.structs.replace(self, groups=(HostGroup(count=count, host=self.groups[0].host),))

    def at_nic_rate(self, rate_bps: float | None, source: str) -> Cluster:
        """The same with another rate of each NIC, which `source` says the origin of; raises `InputError` if a host has no NIC."""
        groups = []
        for group in self.groups:
            nics = group.host.nics
            if nics is None:
                raise InputError(f"{self.name} has no NIC whose rate could change")
            nics = msgspec.structs.replace(nics, link=msgspec.structs.replace(nics.link, rate_bps=rate_bps))
            groups.append(msgspec.structs.replace(group, host=msgspec.structs.replace(group.host, nics=nics)))
        exceptions = {**dict(self.provenance.exceptions), "nic.rate": source}
        provenance = msgspec.structs.replace(self.provenance, exceptions=tuple(sorted(exceptions.items())))
        return msgspec.structs.replace(self, groups=tuple(groups), provenance=provenance)

    def describe(self) -> str:
        """One line for people: "HGX H100: 8 x NVIDIA H100 SXM5 80GB (nvlink 450 GB/s, nic 8 x 400 Gbit/s)"."""
        kinds = []
        for group in self.groups:
            host = group.host
            links = [f"{link.level} {_bytes_rate(link.rate_bps)}" for link in host.links if link.rate_bps is not None]
            if self.torus is not None:
                links.append(f"{'x'.join(_torus_axes(self.torus))} torus, {_bytes_rate(self.torus.link_bytes_per_us * 8e6)} a link")
            if host.nics is not None:
                links.append(f"nic {host.nics.count} x {_bits_rate(host.nics.link.rate_bps)}")
            hosts = f"{group.count} host{'s' if group.count > 1 else ''} of " if self.hosts > 1 else ""
            kinds.append(f"{hosts}{host.devices} x {host.device.name}" + (f" ({', '.join(links)})" if links else ""))
        between = [f"{link.level} {link.oversubscription:g}:1" for link in self.links if self.hosts > 1]
        return f"{self.name}: " + "; ".join([*kinds, *between])

    @cached_property
    def firsts(self) -> tuple[tuple[int, int], ...]:
        """First rank and first host of each group."""
        firsts, rank, host = [], 0, 0
        for group in self.groups:
            firsts.append((rank, host))
            rank, host = rank + group.count * group.host.devices, host + group.count
        return tuple(firsts)

    @cached_property
    def _last_rank(self) -> int:
        return self.ranks - 1

    def _find(self, rank: int) -> tuple[int, int, int]:
        """Group of a rank, its host there, and its device on the host."""
        if not 0 <= rank <= self._last_rank:
            raise InputError(f"{self.name} has no rank {rank}: ranks are 0 to {self._last_rank}")
        group = bisect.bisect_right(self.firsts, rank, key=lambda first: first[0]) - 1
        return group, *divmod(rank - self.firsts[group][0], self.groups[group].host.devices)

    def _placed(self, ranks: Iterable[int]) -> list[_Place]:
        """The places of ranks in ascending order, without repetition."""
        places: list[_Place] = []
        end = group = 0
        first = first_host = devices = 0
        for rank in sorted(set(ranks)):
            while not 0 <= rank < end:
                if rank < 0 or group == len(self.groups):
                    self._find(rank)  # raises
                (first, first_host), kind = self.firsts[group], self.groups[group]
                devices, end, group = kind.host.devices, first + kind.count * kind.host.devices, group + 1
            host, device = divmod(rank - first, devices)
            places.append(_Place(group - 1, first_host + host, device, kind.host.nic_of(device), rank))
        return places

    def _reaches_all(self) -> bool:
        first, last = self.groups[0].host, self.groups[-1].host
        return all(group.host.nics is not None for group in self.groups) or (
            len(self.groups) == 1 and _shared_link(first, last, 0, self.hosts - 1) is not None
        )


def _outermost(places: Sequence[_Place]) -> list[int]:
    """Ranks among which the farthest pair of all is: of each kind of host and NIC number those on the first and the last host.

    Links between hosts join blocks of neighbours, so that no pair of ranks is farther apart than the outermost of their kinds and
    NICs. On one host all are kept.
    """
    if not places or places[0].host == places[-1].host:
        return [place.rank for place in places]
    ends: dict[tuple[int, int], tuple[int, int]] = {}
    for place in places:  # in order of hosts
        first, _ = ends.get((place.group, place.nic), (place.rank, place.rank))
        ends[place.group, place.nic] = (first, place.rank)
    return sorted({rank for pair in ends.values() for rank in pair})


def _shared_link(kind: Host, other_kind: Host, host: int, other_host: int) -> Link | None:
    """A link inside both hosts that joins them, like the NVLink of a rack."""
    return next(
        (link for link in kind.links if link.hosts != 1 and link.joins_hosts(host, other_host) and link in other_kind.links), None
    )


def _above(link: Link) -> float:
    """Rate of switches' links for each host; the NICs' own is counted with the hosts."""
    return float("inf") if link.level == "nic" else link.each_way_bps


def _torus_axes(torus: Torus) -> Iterator[str]:
    """Each axis of a torus as text: its chips, and "line" where its ends are not joined."""
    for size, wraps in zip(torus.shape, torus.wraps, strict=True):
        yield f"{size}" if wraps or size == 1 else f"{size} (line)"


def _bytes_rate(rate_bps: float | None) -> str:
    return "unlimited" if rate_bps is None else f"{rate_bps / 8e9:g} GB/s"


def _bits_rate(rate_bps: float | None) -> str:
    return "unlimited" if rate_bps is None else f"{rate_bps / 1e9:g} Gbit/s"


def each_host(cluster: Cluster) -> Iterator[Host]:
    """The hosts in their order."""
    for group in cluster.groups:
        yield from itertools.repeat(group.host, group.count)
