"""`Host`: devices, the links that join them, and the NICs that lead to other hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from dpro_search.cluster.device import Device
from dpro_search.cluster.link import INSIDE, Link
from dpro_search.cluster.rings import MOST_DEVICES, disjoint_rings
from dpro_search.errors import InputError

_KEYS = {"memory_bytes": "host_memory", "memory_bytes_per_s": "host_memory_rate", "device_link_bytes_per_s": "host_link_rate"}


class Nics(msgspec.Struct, frozen=True, kw_only=True):
    """Network cards that carry the job's traffic (not those for storage or management)."""

    count: int  # On each host. With fewer than devices, neighbouring devices share one; with more, each device has several.
    link: Link  # Level "nic"; its rate is of one card.
    # What they read and write: "device" memory (GPUDirect RDMA), or copies in the "host"'s.
    buffers: Literal["device", "host"] = "device"
    fabric: Literal["rdma", "slingshot"] = "rdma"  # InfiniBand, RoCE, EFA and the like; or HPE's Slingshot.

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(f"nic.count must be at least 1, not {self.count}")
        if self.link.level != "nic":
            raise InputError(f"NICs need a link of level nic, not {self.link.level}")


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """One machine as its operating system sees it.

    Attributes
    ----------
    device, devices
        What it computes with, and how many of them.
    links
        Inside the host, from near to far; one that joins several hosts (NVLink of a rack) is here as well.
    nics
        None: it is not connected to others.
    cpu_cores
        Physical cores; of a cloud's machine the virtual ones (its provider states no others).
    memory_bytes, memory_bytes_per_s
        Of the host's own memory, all sockets together; None: not known.
    device_link_bytes_per_s
        What each device reads of that memory, or writes, where that does not go over PCIe (NVLink-C2C).

    Raises
    ------
    InputError
        The parts do not fit together.
    """

    device: Device
    devices: int = 1
    links: tuple[Link, ...] = ()
    nics: Nics | None = None
    cpu_cores: int | None = None
    memory_bytes: float | None = None
    memory_bytes_per_s: float | None = None
    device_link_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise InputError(f"devices must be at least 1, not {self.devices}")
        if self.cpu_cores is not None and self.cpu_cores < 1:
            raise InputError(f"cpu_cores must be at least 1, not {self.cpu_cores}")
        for what in ("memory_bytes", "memory_bytes_per_s", "device_link_bytes_per_s"):
            value = getattr(self, what)
            if value is not None and not 0 < value < float("inf"):
                raise InputError(f"{_KEYS[what]} must be above 0 and finite, not {value:g}")
        levels = [link.level for link in self.links]
        if levels != [level for level in INSIDE if level in levels]:
            raise InputError(f"links inside a host are {', '.join(INSIDE)}, each once and in this order, not {', '.join(levels)}")
        if self.devices > 1 and not any(link.devices in (None, self.devices) and not link.wires for link in self.links):
            raise InputError("no link joins all devices of the host: give one of nvlink, pcie, socket, loopback without 'devices'")
        if any(link.hosts != 1 and (link.devices not in (None, self.devices) or link.wires) for link in self.links):
            raise InputError("a link that joins several hosts joins all devices of each: leave out its 'devices' and 'wires'")
        if self.nics is not None and self.devices % self.nics.count and self.nics.count % self.devices:
            raise InputError(f"{self.nics.count} NICs cannot be shared evenly by {self.devices} devices")
        for link in self.links:
            if len({device for wire in link.wires for device in wire[:2]}) > MOST_DEVICES:
                raise InputError(
                    f"{link.level}.wires join more than {MOST_DEVICES} devices: leave them out and give a rate of each device"
                )
            outside = [wire for wire in link.wires if max(wire[:2]) >= self.devices]
            if outside:
                raise InputError(f"{link.level}.wires name device {max(outside[0][:2])} of {self.devices}")

    @property
    def rate_bps(self) -> float | None:
        """Bits a second that all NICs together send (and receive); None: not limited, or no NIC."""
        if self.nics is None or self.nics.link.rate_bps is None:
            return None
        return self.nics.count * self.nics.link.each_way_bps

    @property
    def copy_bytes_per_s(self) -> float | None:
        """Bytes a second that a device copies to the host's memory, or from it, before what copies lose; None: not known."""
        pcie = next((link.each_way_bps / 8 for link in self.links if link.level == "pcie" and link.rate_bps is not None), None)
        return pcie if self.device_link_bytes_per_s is None else self.device_link_bytes_per_s

    def nic_of(self, device: int) -> int:
        """The NIC of a device, the first if it has several."""
        return 0 if self.nics is None else device * self.nics.count // self.devices

    def nic_bps(self, devices: Sequence[int]) -> float:
        """Bits a second each way through the NICs of some devices; infinite if they are not limited."""
        if self.nics is None:
            return float("inf")
        nics_per_device = max(self.nics.count // self.devices, 1)
        return len({self.nic_of(device) for device in devices}) * nics_per_device * self.nics.link.each_way_bps

    def link_between(self, first: int, second: int) -> Link:
        """The nearest link that joins two devices of the host."""
        return next(link for link in self.links if link.joins(first, second))

    def ring_bps(self, devices: Sequence[int]) -> float:
        """Bits a second that each of some devices sends to the next of a ring, on the nearest links that can form one."""
        members = tuple(sorted(devices))
        if len(members) < 2:
            return float("inf")
        link = self.ring_link(members)
        lower = self.links[: self.links.index(link)]
        below = [one.each_way_bps for one in lower if one.level == "pcie"]  # what the socket link feeds
        return min([_ring_bps(link, members), *below])

    def ring_link(self, devices: Sequence[int]) -> Link:
        """The nearest link that can form a ring through some devices."""
        members = tuple(sorted(devices))
        for link in self.links:
            if link.devices is not None and len({device // link.devices for device in members}) > 1:
                continue
            if _ring_bps(link, members) > 0:
                return link
        raise AssertionError("one link joins all devices")

    def with_devices(self, count: int) -> Host:
        """The host with its first devices only, and their NICs; raises `InputError` if it has fewer."""
        if not 1 <= count <= self.devices:
            raise InputError(f"a host of {self.devices} x {self.device.name} has no {count} devices")
        if count == self.devices:
            return self
        links = tuple(kept for link in self.links if (kept := _first_devices(link, count)) is not None)
        nics = self.nics
        if nics is not None:
            used = {self.nic_of(device) for device in range(count)}
            nics = msgspec.structs.replace(nics, count=len(used) * max(nics.count // self.devices, 1))
            if count % nics.count and nics.count % count:  # the last NIC would have fewer devices than the others
                nics = msgspec.structs.replace(nics, count=1, link=_times(nics.link, nics.count))
        return msgspec.structs.replace(self, devices=count, links=links, nics=nics)


def _ring_bps(link: Link, members: tuple[int, ...]) -> float:
    """Rate of rings over one link; 0 where its wires cannot form one."""
    if link.wires:
        return disjoint_rings(link.wires, members) * link.wire_bps
    if link.sharing == "pair":  # as many rings as each device has neighbours
        return (len(members) - 1) * link.each_way_bps
    return link.each_way_bps


def _first_devices(link: Link, count: int) -> Link | None:
    """The part of a link that remains if a host has only its first devices; None if nothing remains."""
    wires = tuple(wire for wire in link.wires if max(wire[:2]) < count)
    if wires == link.wires:
        # What joined a part of the host joins all of what is left, if that is no more.
        return msgspec.structs.replace(link, devices=None) if link.devices is not None and link.devices >= count else link
    if not wires:
        return None
    kept = msgspec.structs.replace(link, wires=wires)
    return _times(kept, link.wire_bps / kept.wire_bps)  # a wire has the rate that it had


def _times(link: Link, factor: float) -> Link:
    return msgspec.structs.replace(link, rate_bps=None if link.rate_bps is None else link.rate_bps * factor)
