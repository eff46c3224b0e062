"""`Exchange`: when the gradients of a collective are ready, enqueued and back; what guides a search."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A collective of one iteration; times are from the iteration's start, on the rank that is last."""

    # tensors, ready_us: Names of what it carries, and when each of them is ready, in that order.
    tensors: tuple[str, ...]
    ready_us: tuple[float, ...]
    size_bytes: float  # Of all of it.
    # posted_us, ended_us: When the last tensor was posted, and when all were back.
    posted_us: float
    ended_us: float
