"""`Scales`: parts of a step that take another time than the cost models say, as measured steps show or as somebody asks."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from dpro_search.cluster import Device
from dpro_search.cluster.device import PRECISIONS


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Factors on times; 1: as the cost models say. What measured steps say (`MEASURED`) and what is asked multiply."""

    compute: float = 1.0  # Of FLOPs and of the bytes that ops move in a device's memory; the least time of a kernel stays.
    matmul: float = 1.0  # And convolutions.
    attention: float = 1.0
    memory: float = 1.0  # Of memory-bound ops, losses, updates.
    communication: float = 1.0  # Of collectives and messages.
    inside: float = 1.0  # Of collectives within a host.
    between: float = 1.0  # Of collectives between hosts.
    bandwidth: float = 1.0  # Links are that many times as fast; latencies stay.
    host: float = 1.0  # Of what the host takes to start a layer.
    checks: float = 1.0  # Of checks that all ranks call the same collective.
    free: frozenset[str] = frozenset()  # Axes whose communication takes no time; "send" is that between pipeline stages.

    def device(self, device: Device) -> Device:
        """The device that computes so much slower."""
        if self.compute == 1.0:
            return device
        speed = 1 / max(self.compute, 1e-9)
        peaks = {name: getattr(device.peak, name) for name in PRECISIONS}
        rate = device.memory_bytes_per_s
        return msgspec.structs.replace(
            device,
            peak=msgspec.structs.replace(device.peak, **{name: peak * speed for name, peak in peaks.items() if peak is not None}),
            memory_bytes_per_s=None if rate is None else rate * speed,
        )


MEASURED = ("matmul", "attention", "memory", "inside", "between", "host", "checks")
"""Factors learned from measured steps of a device and framework."""
