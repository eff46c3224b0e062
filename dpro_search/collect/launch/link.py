"""Model of a shaped link: a token bucket, which fills while the link is idle."""

from __future__ import annotations

_LEAST_BURST_BYTES = 128 * 1024
_BURST_US = 500.0  # at high rates, what the kernel's timers need


def burst_bytes(rate_bps: float) -> int:
    """Bytes that a link lets pass at once when it has rested long enough."""
    return max(_LEAST_BURST_BYTES, int(rate_bps / 8e6 * _BURST_US))


def burst_us(rate_bps: float | None) -> float:
    """Time that a link has to rest to save that up, which is what it is ahead by then; 0 without a limit."""
    return 0.0 if rate_bps is None else burst_bytes(rate_bps) * 8e6 / rate_bps
