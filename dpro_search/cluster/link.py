"""`Link`: what joins devices, on one level of the way from a device to another; `Torus`: chips that links join to their neighbours.

Levels, from near to far: inside a host ``loopback`` (processes of one host), ``nvlink`` (NVLink, NVSwitch, xGMI), ``pcie`` (one
PCIe switch or root complex), ``socket`` (between CPU sockets); between hosts ``nic`` (a network of which nothing else is known),
``rail`` (NICs of one number on several hosts, under one switch), ``leaf`` (hosts under one switch), ``spine`` (all else).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Literal

import msgspec

from dpro_search.errors import InputError

Level = Literal["loopback", "nvlink", "pcie", "socket", "nic", "rail", "leaf", "spine"]
INSIDE: tuple[Level, ...] = ("loopback", "nvlink", "pcie", "socket")
BETWEEN: tuple[Level, ...] = ("rail", "leaf", "spine")
LEVELS: tuple[Level, ...] = (*INSIDE, "nic", *BETWEEN)


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """Links of one level."""

    level: Level  # One of `LEVELS`.
    # Bits a second in each direction, for each of those that `sharing` names; None: as fast as what it joins.
    rate_bps: float | None = None
    latency_us: float = 0.0  # Of a message, before its bytes move.
    duplex: Literal["full", "half"] = "full"  # "full": both directions at once at that rate; "half": they share it.
    # What has that rate for itself: each "device" (or each NIC), each "pair" of devices, or a "host" as a whole.
    sharing: Literal["device", "pair", "host"] = "device"
    devices: int | None = None  # How many neighbouring devices of a host it joins; None: all of them.
    hosts: int | None = 1  # How many neighbouring hosts it joins; None: all of them.
    # Triples (device, device, number) where it joins only some pairs of a host's devices: a device's rate is divided evenly among
    # its wires.
    wires: tuple[tuple[int, int, int], ...] = ()
    oversubscription: float = 1.0  # Between hosts: by what the hosts' NICs together exceed the links above them.

    def __post_init__(self) -> None:
        if self.rate_bps is not None and not self.rate_bps > 0:
            raise InputError(f"{self.level}.rate must be above 0, not {self.rate_bps:g}")
        if not self.latency_us >= 0:
            raise InputError(f"{self.level}.latency must be at least 0, not {self.latency_us:g}")
        if not self.oversubscription >= 1:
            raise InputError(f"{self.level}.oversubscription must be at least 1 (1: none), not {self.oversubscription:g}")
        for what in ("devices", "hosts"):
            count = getattr(self, what)
            if count is not None and count < 1:
                raise InputError(f"{self.level}.{what} must be at least 1, not {count}")
        for first, second, count in self.wires:
            if min(first, second) < 0 or first == second or count < 1:
                raise InputError(f"{self.level}.wires: [{first}, {second}, {count}] is not [device, other device, number of wires]")

    @property
    def each_way_bps(self) -> float:
        """Bits a second in one direction while the other is used as well; infinite without a limit."""
        if self.rate_bps is None:
            return float("inf")
        return self.rate_bps if self.duplex == "full" else self.rate_bps / 2

    @property
    def distance(self) -> int:
        """Place among the levels, from near to far."""
        return LEVELS.index(self.level)

    def joins(self, first: int, second: int) -> bool:
        """Whether it joins two devices of a host, directly."""
        if self.devices is not None and first // self.devices != second // self.devices:
            return False
        return not self.wires or any({first, second} == {a, b} for a, b, _ in self.wires)

    def joins_hosts(self, first: int, second: int) -> bool:
        """Whether it reaches from one host to another (or the same)."""
        return first == second or self.hosts is None or first // self.hosts == second // self.hosts

    @property
    def wire_bps(self) -> float:
        """Rate of one wire in one direction."""
        counts: dict[int, int] = {}
        for first, second, count in self.wires:
            counts[first] = counts.get(first, 0) + count
            counts[second] = counts.get(second, 0) + count
        return self.each_way_bps / max(counts.values(), default=1)


HOST_SHAPE = (2, 2, 1)
"""Chips of one host along each axis, as libtpu and Cloud's machines with four chips have them."""

Coordinates = tuple[int, int, int]


class Torus(msgspec.Struct, frozen=True, kw_only=True):
    """The shape and the links of slices of TPUs.

    Attributes
    ----------
    shape
        Chips of a slice along each axis, two or three numbers.
    wraps
        For each axis, whether its last chip has a link to its first.
    slices
        Number of equal slices; only their hosts' NICs join them.
    link_bytes_per_us
        Bytes a us that one link carries in one direction, while it carries as much in the other.
    hop_us
        Latency of one link.
    devices_per_chip
        Devices that JAX lists for a chip: its cores where each is a device of its own, else 1.

    Raises
    ------
    InputError
        A number is impossible, or hosts of `HOST_SHAPE` do not fill the slice.
    """

    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    slices: int = 1
    link_bytes_per_us: float
    hop_us: float
    devices_per_chip: int = 1

    def __post_init__(self) -> None:
        if not 2 <= len(self.shape) <= 3 or any(size < 1 for size in self.shape):
            raise InputError(f"torus.shape must be two or three numbers of chips, not {list(self.shape)}")
        if len(self.wraps) != len(self.shape):
            raise InputError(f"torus.wraps must say true or false for each of {len(self.shape)} axes")
        if any(size % chips for size, chips in zip(self.shape, HOST_SHAPE, strict=False)):
            raise InputError(f"torus.shape {self.text}: hosts have 2 x 2 chips, so that the first two axes must be even")
        if min(self.slices, self.devices_per_chip) < 1:
            raise InputError("torus.slices and torus.devices_per_chip must be at least 1")
        if not 0 < self.link_bytes_per_us < math.inf or not 0 <= self.hop_us < math.inf:
            raise InputError("torus.link_rate must be above 0, and torus.hop at least 0, both finite")

    @property
    def text(self) -> str:
        """The shape as people write it: "4x4x8"."""
        return "x".join(map(str, self.shape))

    @property
    def chips(self) -> int:
        """Chips of one slice."""
        return math.prod(self.shape)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Chips along three axes, 1 along a third that the slice does not have."""
        first, second, *third = self.shape
        return (first, second, third[0] if third else 1)

    @property
    def closed(self) -> tuple[bool, bool, bool]:
        """For each of three axes whether it wraps around."""
        first, second, *third = self.wraps
        return (first, second, bool(third and third[0]))

    def coordinates(self) -> tuple[Coordinates, ...]:
        """The place of each chip of a slice in the order in which libtpu lists them: host by host, the first axis fastest."""
        return tuple(self._listed())

    def _listed(self) -> Iterator[Coordinates]:
        hosts = [range(0, size, chips) for size, chips in zip(self.sizes, HOST_SHAPE, strict=True)]
        for z, y, x in itertools.product(*reversed(hosts)):
            for dz, dy, dx in itertools.product(*(range(chips) for chips in reversed(HOST_SHAPE))):
                yield (x + dx, y + dy, z + dz)
