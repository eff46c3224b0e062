"""Times of NCCL's collectives: ``collective_us(collective, bytes, cluster, placement)`` and, with an interval, ``estimate``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dpro_search.cluster import Cluster
from dpro_search.collect.trace import Floats
from dpro_search.costmodel.collectives.nccl.constants import nccl_constants
from dpro_search.costmodel.collectives.nccl.lines import Line, lines
from dpro_search.costmodel.collectives.nccl.placement import Placement, paths

SMALL_BYTES = 2**20  # Below, times are mostly latency: an interval of their own.


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a collective takes."""

    time_us: float  # From when the last rank has started it.
    interval_us: tuple[float, float]  # 90 %: errors on systems that were left out of the fit.
    algorithm: str  # "ring", "tree", "switch", "switch and tree", "direct", or "none" for one rank.
    protocol: str  # "LL", "LL128" or "Simple".
    origin: str  # "model".


def collective_us(collective: str, size_bytes: npt.ArrayLike, cluster: Cluster, placement: Placement) -> Floats:
    """What collectives of one group take, [...].

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
    found = np.full(size.shape, np.inf)
    for way in ways:
        np.minimum(found, way.latency_us + way.us_per_byte * size, out=found)
    return found


def bytes_in(collective: str, time_us: npt.ArrayLike, cluster: Cluster, placement: Placement) -> Floats:
    """The bytes of collectives that take so long, the inverse of `collective_us`; 0 for less than the least time, [...]."""
    time = np.asarray(time_us, np.float64)
    found = np.zeros(time.shape)
    for way in ways_of(collective, cluster, placement):
        if way.us_per_byte > 0:
            np.maximum(found, (time - way.latency_us) / way.us_per_byte, out=found)
    return found


def estimate(collective: str, size_bytes: float, cluster: Cluster, placement: Placement) -> Estimate:
    """What one collective takes, with its interval; arguments and errors as `collective_us`."""
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
    """By what a time may differ from the prediction, either way (90 %)."""
    constants = nccl_constants()
    width = constants.inside_interval if domains == 1 else constants.between_interval
    return width.small if size_bytes < SMALL_BYTES else width.large


@lru_cache(maxsize=65536)
def ways_of(collective: str, cluster: Cluster, placement: Placement, *, faster: float = 1.0, copies: int = 0) -> tuple[Line, ...]:
    """Algorithms and protocols that are the fastest for some size, the slowest start first; links are `faster` by a factor.

    `copies`: see `lines`.
    """
    found = lines(collective, paths(cluster, placement).faster(faster), nccl_constants(), copies)
    kept: list[Line] = []
    for way in sorted(found, key=lambda way: (way.us_per_byte, way.latency_us)):
        if not kept or way.latency_us < kept[-1].latency_us:
            kept.append(way)
    return tuple(kept)
