"""Duration of NCCL's collectives on a cluster of GPUs: a function of collective, bytes, placement of the ranks, and `Cluster`.

    collective_us("all_reduce", [2**20, 2**30], parse_cluster("8xhgx-h100"), Placement(ranks_per_node=8, nodes=8))

`Placement` says where a group's ranks are, `placement_of` makes it of their numbers. Times are the least over NCCL's algorithms and
protocols (`lines`). Few constants are fitted, to systems of several kinds (`constants`; ``python -m experiments.costmodel.nccl``).
"""

from dpro_search.costmodel.collectives.nccl.lines import COLLECTIVES
from dpro_search.costmodel.collectives.nccl.model import (
    Estimate,
    FastestWay,
    bytes_in,
    choices,
    collective_us,
    estimate,
    interval_factor,
    ways_of,
)
from dpro_search.costmodel.collectives.nccl.placement import Paths, Placement, paths, placement_of

__all__ = [
    "COLLECTIVES",
    "Estimate",
    "FastestWay",
    "Paths",
    "Placement",
    "bytes_in",
    "choices",
    "collective_us",
    "estimate",
    "interval_factor",
    "paths",
    "placement_of",
    "ways_of",
]
