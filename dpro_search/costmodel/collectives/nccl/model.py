"""Times of NCCL's collectives: ``collective_us(collective, bytes, cluster, placement)`` and, with an interval, ``estimate``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search.cluster import Cluster
from dpro_search.collect.trace import Floats
from dpro_search.costmodel.collectives.nccl.constants import MANY_DOMAINS, nccl_constants
from dpro_search.costmodel.collectives.nccl.lines import Line, lines
from dpro_search.costmodel.collectives.nccl.placement import Placement, paths

SMALL_BYTES = 2**20  # Below, times are mostly latency: an interval of their own.


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predicted duration of a collective."""

    time_us: float  # From when the last rank has started it.
    interval_us: tuple[float, float]  # 90 %: errors on systems that were left out of the fit.
    algorithm: str  # "ring", "tree", "switch", "switch and tree", "direct", or "none" for one rank.
    protocol: str  # "LL", "LL128" or "Simple".
    origin: str  # "model".


def collective_us(collective: str, size_bytes: npt.ArrayLike, cluster: Cluster, placement: Placement) -> Floats:
    """Durations of collectives of one group, [...].

    Parameters
    ----------
    collective
        One of `COLLECTIVES`.
    size_bytes
        Of the whole tensor on a rank (of an all-gather its result, of a reduce-scatter its input), [...]. At most 2**53.

    Returns
    -------
    ndarray of float64
        Times in us, in the shape of `size_bytes`; 0 for a group of one rank.

    Raises
    ------
    InputError
        No such collective, or the group does not fit on the cluster.
    """
    size = np.asarray(size_bytes, np.float64)
    ways = ways_of(collective, cluster, placement)
    time_us = np.full(size.shape, np.inf)
    for way in ways:
        np.minimum(time_us, way.latency_us + way.us_per_byte * size, out=time_us)
    return time_us


def bytes_in(collective: str, time_us: npt.ArrayLike, cluster: Cluster, placement: Placement) -> Floats:
    """The bytes of collectives that take so long, the inverse of `collective_us`; 0 for less than the least time, [...]."""
    time = np.asarray(time_us, np.float64)
    size_bytes = np.zeros(time.shape)
    for way in ways_of(collective, cluster, placement):
        if way.us_per_byte > 0:
            np.maximum(size_bytes, (time - way.latency_us) / way.us_per_byte, out=size_bytes)
    return size_bytes


def estimate(collective: str, size_bytes: float, cluster: Cluster, placement: Placement) -> Estimate:
    """Duration of one collective with its interval; arguments and errors are those of `collective_us`."""
    best = min(ways_of(collective, cluster, placement), key=lambda way: way.latency_us + way.us_per_byte * size_bytes)
    time_us = best.latency_us + best.us_per_byte * size_bytes
    factor = interval_factor(size_bytes, paths(cluster, placement).domains)
    return Estimate(
        time_us=time_us,
        interval_us=(time_us / factor, time_us * factor),
        algorithm=best.algorithm,
        protocol=best.protocol,
        origin="model",
    )


def interval_factor(size_bytes: float, domains: int) -> float:
    """Factor by which a time may differ from the prediction, either way (90 %)."""
    constants = nccl_constants()
    between = constants.far_interval if domains > MANY_DOMAINS else constants.between_interval
    width = constants.inside_interval if domains == 1 else between
    return width.small if size_bytes < SMALL_BYTES else width.large


@lru_cache(maxsize=65536)
def ways_of(collective: str, cluster: Cluster, placement: Placement, *, faster: float = 1.0, copies: int = 0) -> tuple[Line, ...]:
    """Algorithms and protocols that are the fastest for some size, the slowest start first; links are `faster` by a factor.

    `copies`: see `lines`.
    """
    all_ways = lines(collective, paths(cluster, placement).faster(faster), nccl_constants(), copies)
    kept: list[Line] = []
    for way in sorted(all_ways, key=lambda way: (way.us_per_byte, way.latency_us)):
        if not kept or way.latency_us < kept[-1].latency_us:
            kept.append(way)
    return tuple(kept)


class FastestWay(NamedTuple):
    """The fastest way for sizes from `from_bytes` on, as far as the next one's."""

    from_bytes: int
    algorithm: str  # As in `lines.Line`.
    protocol: str


def choices(collective: str, cluster: Cluster, placement: Placement) -> tuple[FastestWay, ...]:
    """The choices for all sizes, the first from 0 bytes; parameters and errors are those of `collective_us`."""
    ways = sorted(ways_of(collective, cluster, placement), key=lambda way: (way.latency_us, way.us_per_byte))
    fastest, starts = [ways[0]], [0]
    while True:
        now = fastest[-1]
        # The next one is the first that crosses the present one.
        crossings = [
            ((way.latency_us - now.latency_us) / (now.us_per_byte - way.us_per_byte), way.us_per_byte, way)
            for way in ways
            if way.us_per_byte < now.us_per_byte
        ]
        if not crossings:
            break
        at, _, following = min(crossings, key=lambda one: one[:2])
        fastest.append(following)
        starts.append(math.ceil(at))
    listed: list[FastestWay] = []
    for start, way in zip(starts, fastest, strict=True):
        if listed and listed[-1].from_bytes == start:
            listed.pop()
        if not listed or (listed[-1].algorithm, listed[-1].protocol) != (way.algorithm, way.protocol):
            listed.append(FastestWay(start, way.algorithm, way.protocol))
    return tuple(listed)
