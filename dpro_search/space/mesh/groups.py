"""`Groups`: which ranks of a strategy communicate with each other, and where on a cluster they are."""

from __future__ import annotations

from functools import cached_property

from dpro_search.cluster import Cluster
from dpro_search.collect.trace import CollectiveKind
from dpro_search.costmodel.nccl import Placement, ways_of
from dpro_search.costmodel.nccl.lines import Line
from dpro_search.errors import InputError
from dpro_search.space.mesh.scales import Scales
from dpro_search.space.mesh.strategy import Strategy

_NAMES = {
    CollectiveKind.ALL_REDUCE: "all_reduce",
    CollectiveKind.ALL_GATHER: "all_gather",
    CollectiveKind.REDUCE_SCATTER: "reduce_scatter",
    CollectiveKind.ALL_TO_ALL: "all_to_all",
}
UNSCALED = Scales()
KnownWays = dict[tuple[str, Placement, float], tuple[Line, ...]]
"""Ways to do a collective on one cluster, by its name, its group's place and the factor on the links' rate."""


class Groups:
    """Groups of a strategy on the first devices of a cluster.

    Axes: "tp", "cp", "dp" and "pp" as in `Strategy`; "replicas", all ranks that hold the same parameters (dp and cp); "ep", "etp"
    and "expert replicas" of experts.

    Parameters
    ----------
    scales
        Factors on the times.
    known
        What groups of other strategies on the same cluster have found; this one adds to it.

    Raises
    ------
    InputError
        The cluster has too few devices.
    """

    def __init__(self, strategy: Strategy, cluster: Cluster, scales: Scales = UNSCALED, known: KnownWays | None = None) -> None:
        if strategy.devices > cluster.ranks:
            raise InputError(f"{cluster.name} has {cluster.ranks} devices, and the strategy needs {strategy.devices}")
        self._strategy, self._cluster, self._scales = strategy, cluster, scales
        self._known: KnownWays = {} if known is None else known

    @cached_property
    def placements(self) -> dict[str, Placement]:
        """Where the group of the first rank is, by axis."""
        plan = self._strategy
        dense, experts = plan.tp * plan.cp, plan.ep * plan.etp
        strides = {
            "tp": (1, plan.tp),
            "cp": (plan.tp, plan.cp),
            "dp": (dense, plan.dp),
            "replicas": (plan.tp, plan.cp * plan.dp),
            "pp": (dense * plan.dp, plan.pp),
            "etp": (1, plan.etp),
            "ep": (plan.etp, plan.ep),
            "expert replicas": (experts, plan.expert_dp),
        }
        return {axis: self._placement(stride, size) for axis, (stride, size) in strides.items()}

    def _placement(self, stride: int, size: int) -> Placement:
        per_host = min(self._cluster.ranks_per_host or self._cluster.ranks, self._strategy.devices)
        if stride >= per_host:
            return Placement(ranks_per_node=1, nodes=size, node_stride=max(stride // per_host, 1), concurrent=per_host)
        inside = min(size, max(per_host // stride, 1))
        return Placement(
            ranks_per_node=inside,
            nodes=max(size // inside, 1),
            stride=stride if inside > 1 else 1,
            concurrent=max(per_host // inside, 1),
        )

    def us(self, kind: CollectiveKind, size_bytes: float, axis: str) -> float:
        """What a collective over an axis takes; 0 for one rank."""
        placement = self.placements[axis]
        if placement.ranks == 1:
            return 0.0
        return self._fastest_us(_NAMES[kind], size_bytes, placement, axis)

    def send_us(self, size_bytes: float) -> float:
        """What it takes to send to the next pipeline stage; every rank does at the same time."""
        placement = self.placements["pp"]
        if placement.ranks == 1:
            return 0.0
        pair = Placement(
            ranks_per_node=min(2, placement.ranks_per_node),
            nodes=1 if placement.ranks_per_node > 1 else 2,
            stride=placement.stride if placement.ranks_per_node > 1 else 1,
            node_stride=placement.node_stride if placement.ranks_per_node == 1 else 1,
            concurrent=placement.concurrent,
        )
        return self._fastest_us("send_recv", size_bytes, pair, "send")

    def _fastest_us(self, collective: str, size_bytes: float, placement: Placement, axis: str) -> float:
        """`costmodel.nccl.collective_us` of one call, with the scales."""
        if axis in self._scales.free:
            return 0.0
        key = collective, placement, self._scales.bandwidth
        ways = self._known.get(key)
        if ways is None:
            ways = self._known[key] = ways_of(collective, self._cluster, placement, faster=self._scales.bandwidth)
        return self._scales.communication * min(way.latency_us + way.us_per_byte * size_bytes for way in ways)
