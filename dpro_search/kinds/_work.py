"""`Work`: what an iteration of a job does, and on what, for tokens a second, MFU, price and energy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Work:
    """What an iteration does, and on what; None where it is not known."""

    devices: int = 1
    device: str = ""  # Name of the devices; empty: not known.
    tokens: float | None = None  # Of an iteration of all devices.
    flops: float | None = None  # Of an iteration of one device.
    flops_note: str = ""  # What they leave out.
    peak_flops_per_s: float | None = None  # Of a device, at the precision of most FLOPs.
    precision: str = ""
    price_per_device_hour_usd: float | None = None
    price_source: str = ""  # The source of the price; empty: it was given.
    given: frozenset[str] = frozenset()  # Options that were given in place of what is known: "flops", "peak"...
    power_per_device_w: float | None = None  # The most that a device takes, with `power_with_host` its share of the host included.
    power_with_host: bool = False
