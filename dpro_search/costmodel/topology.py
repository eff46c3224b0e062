"""Collectives on a `Cluster` without measurements: latencies and rates of its links, nothing for the processors.

A ring all-reduce of n bytes on p ranks takes ``2 (p - 1) alpha + 2 (p - 1) / p * n / B``: alpha is the latency of the slowest level
of the ranks, B what each sends to its neighbour (`Cluster.bandwidth_bytes_per_us`). What calls and reductions cost on top must be
fitted to measured points (`all_reduce_fit`).
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from dpro_search.cluster import Cluster
from dpro_search.collect.trace import Floats
from dpro_search.costmodel.all_reduce_cost import AllReduceCost
from dpro_search.costmodel.collectives import Algorithm, Points


def ring_all_reduce_us(cluster: Cluster, ranks: Collection[int], size_bytes: Floats) -> Floats:
    """Duration of ring all-reduces among some ranks of a cluster, us, [sizes]; a lower bound where nothing else uses the links."""
    return ring_cost(cluster, ranks).predict(points_on(cluster, ranks, size_bytes))


def points_on(cluster: Cluster, ranks: Collection[int], size_bytes: Floats) -> Points:
    """All-reduces among some ranks of a cluster, [sizes], as the cost models take them."""
    sizes = np.asarray(size_bytes, np.float64)
    return Points(
        size_bytes=sizes, ranks=np.array(len(set(ranks))), link_bytes_per_us=np.array(cluster.bandwidth_bytes_per_us(ranks))
    )


def ring_cost(cluster: Cluster, ranks: Collection[int]) -> AllReduceCost:
    """What the links alone cost: the latency of each message, and the bare bytes."""
    return AllReduceCost(
        algorithm=Algorithm.RING,
        overhead_us=0.0,
        message_us=cluster.latency_us(ranks),
        wire_factor=1.0,
        move_us_per_byte=0.0,
        add_us_per_byte=0.0,
        exposed=0.0,
    )
