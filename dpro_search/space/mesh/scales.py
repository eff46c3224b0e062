"""`Scales`: parts of a step that take another time than they would."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from dpro_search.cluster import Device
from dpro_search.cluster.device import PRECISIONS


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Factors on times."""

    compute: float = 1.0  # Of FLOPs and of the bytes that ops move in a device's memory; the least time of a kernel stays.
    communication: float = 1.0  # Of collectives and messages.
    bandwidth: float = 1.0  # Links are that many times as fast; latencies stay.
    host: float = 1.0  # Of what the host takes to start a layer.
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
