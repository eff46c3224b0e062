"""Which of NCCL's algorithms and protocols is the fastest for which size: ``choices(collective, cluster, placement)``."""

from __future__ import annotations

import math
from typing import NamedTuple

from dpro_search.cluster import Cluster
from dpro_search.costmodel.collectives.nccl.model import ways_of
from dpro_search.costmodel.collectives.nccl.placement import Placement


class Choice(NamedTuple):
    """The fastest way for sizes from `from_bytes` on, as far as the next one's."""

    from_bytes: int
    algorithm: str  # As in `lines.Line`.
    protocol: str


def choices(collective: str, cluster: Cluster, placement: Placement) -> tuple[Choice, ...]:
    """The choices for all sizes, the first from 0 bytes; parameters and errors are those of `collective_us`."""
    ways = sorted(ways_of(collective, cluster, placement), key=lambda way: (way.latency_us, way.us_per_byte))
    found, starts = [ways[0]], [0]
    while True:
        now = found[-1]
        # The next one is the first that crosses the present one.
        crossings = [
            ((way.latency_us - now.latency_us) / (now.us_per_byte - way.us_per_byte), way.us_per_byte, way)
            for way in ways
            if way.us_per_byte < now.us_per_byte
        ]
        if not crossings:
            break
        at, _, following = min(crossings, key=lambda one: one[:2])
        found.append(following)
        starts.append(math.ceil(at))
    listed: list[Choice] = []
    for start, way in zip(starts, found, strict=True):
        if listed and listed[-1].from_bytes == start:
            listed.pop()
        if not listed or (listed[-1].algorithm, listed[-1].protocol) != (way.algorithm, way.protocol):
            listed.append(Choice(start, way.algorithm, way.protocol))
    return tuple(listed)
