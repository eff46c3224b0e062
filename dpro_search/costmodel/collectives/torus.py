"""Durations of collectives on a torus of TPUs: a function of collective, bytes, groups of devices, and `Cluster`.

    cluster = parse_cluster("v5p:4x4x8")
    spans = spans_of(cluster.torus, places_of(cluster.torus), replica_groups)
    collective_us("all_gather", 2**30, cluster, spans)

A group sends along rings in both directions on each axis that wraps around, and along lines on the others. A collective over
several axes splits its bytes over them, so that all links carry some. The formulas for rings are those of "How to Scale Your
Model" (jax-ml/scaling-book, sharding):

====================  =========================================  ========================  ==========================
collective            time by bytes                              hops on a ring of n       hops on a line of n
====================  =========================================  ========================  ==========================
all-gather            V (n - 1) / n / R                          n / 2                     n - 1
reduce-scatter        the same                                   n / 2                     n - 1
all-reduce            twice that                                 n                         2 (n - 1)
all-to-all            V / 8 r on a ring, V / 4 r on a line       n / 2                     n - 1
collective-permute    messages on the busiest link, over r       those of the longest way  those of the longest way
====================  =========================================  ========================  ==========================

* V is the whole array in bytes: the result of an all-gather, the input of a reduce-scatter or all-reduce on each device, n times
  what a device of an all-to-all has.
* r is the rate of a link in one direction, over the number of groups that share the link.
* R is the sum of r over the links by which a chip receives: two for each ring, one for each line, because the chip at the end of a
  line has only one. Over several axes R is a bound. Splitting the bytes by axis reaches it where the axes are alike.
* An all-to-all is bound by the links in the middle of an axis (bisection): of n chips that exchange with each other, n^2 / 8 pairs
  cross a link of a ring in each direction, and n^2 / 4 a link of a line.

Several slices exchange what their chips hold over the data centre network: an all-reduce scatters within the slices, reduces
between chips of the same place, and gathers within the slices. Devices on one chip exchange without links (no rate is published).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro_search.cluster import Cluster, Torus
from dpro_search.costmodel.collectives.torus_groups import GroupSpan, Places, check_places, link_loads
from dpro_search.errors import InputError

Floats = npt.NDArray[np.float64]
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, kw_only=True)
class TorusConstants:
    """Constants that no data sheet has."""

    start_us: float  # Time before the first byte moves, beside the latency of links.
    link_share: float  # Bytes a us that links carry, over their published rate.


# "How to Scale Your Model" (jax-ml/scaling-book, tpus) takes 45 and 90 GB/s of links whose documented rates are 50 and 100 GB/s.
PUBLISHED = TorusConstants(start_us=0.0, link_share=0.9)
"""Nothing but what is published."""

# Empirical: fitted to published microbenchmarks of v5e, v6e and TPU7x (python -m experiments.costmodel.torus).
FITTED = TorusConstants(start_us=3.0, link_share=0.9)


def collective_us(
    collective: str,
    size_bytes: npt.ArrayLike,
    cluster: Cluster,
    spans: Sequence[GroupSpan],
    constants: TorusConstants = FITTED,
) -> Floats:
    """Durations of a collective of groups that communicate at the same time, the slowest group's, [...].

    Parameters
    ----------
    collective
        One of `COLLECTIVES`.
    size_bytes
        Bytes of the whole array on a device, [...]: the result of an all-gather, the input of the others.
    spans
        Places of the groups (`torus_groups.spans_of`).

    Returns
    -------
    ndarray of float64
        Times in us, in the shape of `size_bytes`; 0 for groups of one device.

    Raises
    ------
    InputError
        No such collective, the cluster is no torus, or the rate between slices is not known.
    """
    if collective not in COLLECTIVES:
        raise InputError(f"collective '{collective}': use {', '.join(COLLECTIVES)}")
    torus, size = torus_of(cluster), np.asarray(size_bytes, np.float64)
    time_us = np.zeros(size.shape)
    for span in spans:
        if span.devices > 1:
            np.maximum(time_us, _group_us(collective, size, cluster, torus, span, constants), out=time_us)
    return time_us


def permute_us(
    size_bytes: float,
    cluster: Cluster,
    places: Places,
    pairs: Sequence[tuple[int, int]],
    constants: TorusConstants = FITTED,
) -> float:
    """Duration of a collective-permute: each source device sends so many bytes to its target, all at the same time.

    Messages take the shorter way along one axis after the other; the busiest link decides.

    Raises
    ------
    InputError
        A number is of no device, a device is not on the torus, or the rate between slices is not known.
    """
    torus = torus_of(cluster)
    check_places(torus, places)
    ends = np.asarray(pairs, np.int64).reshape(-1, 2)
    if ends.size and (ends.min() < 0 or ends.max() >= len(places.slices)):
        raise InputError(f"pairs must be numbers of the program's {len(places.slices)} devices")
    from_slice, to_slice = places.slices[ends].T
    longest, busiest = 0, 0
    for number in np.unique(from_slice):
        inside = ends[(from_slice == number) & (to_slice == number)]
        loads, hops = link_loads(torus, places.coordinates[inside[:, 0]], places.coordinates[inside[:, 1]])
        longest, busiest = max(longest, hops), max(busiest, int(loads.max()))
    time_us = longest * torus.hop_us + busiest * size_bytes / (torus.link_bytes_per_us * constants.link_share)
    crossing = ends[from_slice != to_slice]
    if len(crossing):
        chips = np.column_stack([places.slices, places.coordinates])
        messages = max(int(np.unique(chips[side], axis=0, return_counts=True)[1].max()) for side in crossing.T)
        time_us = max(time_us, _dcn_latency_us(cluster) + messages * size_bytes / _dcn_bytes_per_us(cluster))
    return float(constants.start_us + time_us) if time_us > 0 else 0.0


def torus_of(cluster: Cluster) -> Torus:
    """The torus of a cluster; raises `InputError` if it has none."""
    if cluster.torus is None:
        raise InputError(f"{cluster.name} is no torus of TPUs; name a topology, like v5p:4x4x4")
    return cluster.torus


def _group_us(collective: str, size: Floats, cluster: Cluster, torus: Torus, span: GroupSpan, constants: TorusConstants) -> Floats:
    inside = _Slice(torus, span, constants)
    part = _Between(cluster, span) if span.slices > 1 else None
    if collective == "all_to_all":
        crossing = part.exchange_us(size) if part is not None else 0.0
        return constants.start_us + np.maximum(inside.all_to_all_us(size), crossing)
    if part is None:
        rounds = 2 if collective == "all_reduce" else 1
        return constants.start_us + rounds * inside.gather_us(size)
    scattered = size / span.chips  # what a chip holds while its slice holds the whole array
    if collective == "all_reduce":
        return constants.start_us + 2 * inside.gather_us(size) + part.reduce_us(scattered)
    return constants.start_us + inside.gather_us(size) + part.gather_us(scattered)


class _Slice:
    """Times of a group's part in one slice."""

    def __init__(self, torus: Torus, span: GroupSpan, constants: TorusConstants) -> None:
        self.torus, self.span = torus, span
        self.link_bytes_per_us = torus.link_bytes_per_us * constants.link_share

    def gather_us(self, size: Floats) -> Floats:
        """All-gather of an array of so many bytes, or reduce-scatter."""
        if self.span.chips == 1:
            return np.zeros(size.shape)
        return self._hops() * self.torus.hop_us + size * (self.span.chips - 1) / self.span.chips / self._received_per_us()

    def all_to_all_us(self, size: Floats) -> Floats:
        """Exchange of so many bytes that each device has, an equal part for each device.

        Along an axis, all chips of a line exchange all their bytes, whatever chips of other lines they are for.
        """
        chip_bytes = size * self.span.devices / (self.span.chips * self.span.slices)
        if self.span.ring_sharing:  # on average, bytes pass a quarter of the ring in each direction
            passed = chip_bytes * self.span.chips / 8 * self.span.ring_sharing
            return self._hops() * self.torus.hop_us + passed / self.link_bytes_per_us
        time_us = np.zeros(size.shape)
        for axis in self.span.axes:
            pairs = axis.size**2 // 8 if axis.closed else axis.size // 2 * ((axis.size + 1) // 2)
            crossing = chip_bytes * max(pairs, 0.5) / axis.size * axis.sharing
            np.maximum(time_us, crossing / self.link_bytes_per_us, out=time_us)
        return self._hops() * self.torus.hop_us + time_us

    def _received_per_us(self) -> float:
        """Bytes a us that a chip receives over the links of all axes."""
        if self.span.ring_sharing:  # two rings, one in each direction
            return 2 * self.link_bytes_per_us / self.span.ring_sharing
        return sum((2 if axis.closed else 1) * self.link_bytes_per_us / axis.sharing for axis in self.span.axes)

    def _hops(self) -> int:
        if self.span.ring_sharing:
            return self.span.ring_hops * (self.span.chips // 2)
        return sum(axis.hops // 2 if axis.closed else axis.hops for axis in self.span.axes)


class _Between:
    """Times of what chips of the same place exchange between slices, each chip over its share of its host's network."""

    def __init__(self, cluster: Cluster, span: GroupSpan) -> None:
        self.slices = span.slices
        self.latency_us = _dcn_latency_us(cluster)
        self.bytes_per_us = _dcn_bytes_per_us(cluster) / span.dcn_sharing
        self.devices_per_chip = span.devices / (span.chips * span.slices)

    def gather_us(self, size: Floats) -> Floats:
        """All-gather of an array of so many bytes between the slices, or reduce-scatter."""
        return self.latency_us * (self.slices - 1) + size * (self.slices - 1) / self.slices / self.bytes_per_us

    def reduce_us(self, size: Floats) -> Floats:
        """All-reduce between the slices."""
        return 2 * self.gather_us(size)

    def exchange_us(self, size: Floats) -> Floats:
        """All-to-all: what each device has for devices of other slices."""
        crossing = size * self.devices_per_chip * (self.slices - 1) / self.slices
        return self.latency_us + crossing / self.bytes_per_us


def _dcn_bytes_per_us(cluster: Cluster) -> float:
    """Bytes a us that a chip sends to other slices while all chips of its host do."""
    host = cluster.groups[0].host
    rate_bps = math.inf if host.nics is None else host.nic_bps(range(host.devices))
    if math.isinf(rate_bps):
        raise InputError(f"{cluster.name}: the rate between slices is not known; give it behind the name, like @400gbit")
    return rate_bps / 8e6 / host.devices


def _dcn_latency_us(cluster: Cluster) -> float:
    nics = cluster.groups[0].host.nics
    return 0.0 if nics is None else nics.link.latency_us
