"""`Link`: what joins devices, on one level of the way from a device to another.

Levels, from near to far: inside a host ``loopback`` (processes of one host), ``nvlink`` (NVLink, NVSwitch, xGMI), ``pcie`` (one
PCIe switch or root complex), ``socket`` (between CPU sockets); between hosts ``nic`` (a network of which nothing else is known),
``rail`` (NICs of one number on several hosts, under one switch), ``leaf`` (hosts under one switch), ``spine`` (all else).
"""

from __future__ import annotations

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
