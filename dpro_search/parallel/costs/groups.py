"""`Groups`: which ranks of a strategy communicate with each other, and where on a cluster they are."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from dpro_search.cluster import Cluster
from dpro_search.collect.trace import CollectiveKind
from dpro_search.costmodel.collectives.nccl import Placement, ways_of
from dpro_search.costmodel.collectives.nccl.lines import Line
from dpro_search.errors import InputError
from dpro_search.parallel.costs.recorded import RecordedTimes
from dpro_search.parallel.costs.scales import Scales
from dpro_search.parallel.strategy import Strategy

_NAMES = {
    CollectiveKind.ALL_REDUCE: "all_reduce",
    CollectiveKind.ALL_GATHER: "all_gather",
    CollectiveKind.REDUCE_SCATTER: "reduce_scatter",
    CollectiveKind.ALL_TO_ALL: "all_to_all",
}
UNSCALED = Scales()
KnownAlgorithms = dict[tuple[str, Placement, float, int], tuple[Line, ...]]
"""Ways to do a collective on one cluster, by its name, its group's place, the factor on the links' rate, and copies of an item."""


class Groups:
    """Groups of a strategy on the first devices of a cluster.

    Axes: "tp", "cp", "dp" and "pp" as in `Strategy`; "replicas", all ranks that hold the same parameters (dp and cp); of these
    "shard", over which ZeRO splits, and "shard replicas"; "ep", "etp", "expert replicas", "expert shard" and "expert shard
    replicas" of experts; "first and last stage"; and "world".

    Parameters
    ----------
    scales
        Factors on the times.
    known
        What groups of other strategies on the same cluster have found; this one adds to it.
    shared
        Whether other groups like each of these, of the other ranks, exchange at the same time; False: each is alone.
    recorded
        What exchanges took that were timed, all groups of a kind at a time. Where groups are alone, they take less by what the cost
        model says that makes.

    Raises
    ------
    InputError
        The cluster has too few devices.
    """

    def __init__(
        self,
        strategy: Strategy,
        cluster: Cluster,
        scales: Scales = UNSCALED,
        known: KnownAlgorithms | None = None,
        *,
        shared: bool = True,
        recorded: RecordedTimes | None = None,
    ) -> None:
        if strategy.devices > cluster.ranks:
            raise InputError(f"{cluster.name} has {cluster.ranks} devices, and the strategy needs {strategy.devices}")
        self._strategy, self._cluster, self._scales, self._shared = strategy, cluster, scales, shared
        self._known: KnownAlgorithms = {} if known is None else known
        self._recorded = recorded if scales.bandwidth == 1.0 else None

    @cached_property
    def placements(self) -> dict[str, Placement]:
        """Placement of the group of the first rank, by axis."""
        return {axis: self._placement(stride, size) for axis, (stride, size) in self._strides.items()}

    def ranks(self, axis: str) -> range:
        """The group of the first rank along an axis."""
        stride, size = self._strides[axis]
        return range(0, stride * size, stride)

    @cached_property
    def _strides(self) -> dict[str, tuple[int, int]]:
        """Distance of neighbours, and number of ranks, by axis."""
        plan = self._strategy
        dense, experts = plan.tp * plan.cp, plan.ep * plan.etp
        return {
            "tp": (1, plan.tp),
            "cp": (plan.tp, plan.cp),
            "dp": (dense, plan.dp),
            "replicas": (plan.tp, plan.cp * plan.dp),
            "shard": (plan.tp, plan.zero_ways),
            "shard replicas": (plan.tp * plan.zero_ways, plan.dp_replicate),
            "pp": (dense * plan.dp, plan.pp),
            "first and last stage": (dense * plan.dp * max(plan.pp - 1, 1), min(plan.pp, 2)),
            "world": (1, plan.devices),
            "etp": (1, plan.etp),
            "ep": (plan.etp, plan.ep),
            "expert replicas": (experts, plan.expert_dp),
            "expert shard": (experts, plan.expert_zero_ways),
            "expert shard replicas": (experts * plan.expert_zero_ways, plan.dp_replicate),
        }

    def _placement(self, stride: int, size: int) -> Placement:
        per_host = self._per_host
        if stride >= per_host:
            concurrent = per_host if self._shared else 1
            return Placement(ranks_per_node=1, nodes=size, node_stride=max(stride // per_host, 1), concurrent=concurrent)
        on_one = stride * (size - 1) < per_host  # the last rank is on the host of the first
        inside = size if on_one else min(size, max(per_host // stride, 1))
        return Placement(
            ranks_per_node=inside,
            nodes=max(size // inside, 1),
            stride=stride if inside > 1 else 1,
            concurrent=max(per_host // inside, 1) if self._shared else 1,
        )

    def us(self, kind: CollectiveKind, size_bytes: float, axis: str, copies: int = 0) -> float:
        """Duration of a collective over an axis, or of one hop if all ranks send to the next one; 0 for one rank.

        `copies`: of an all-to-all whose items each cross to a host once (`costmodel.collectives.nccl.lines`).
        """
        if kind is CollectiveKind.SEND:
            return self.send_us(size_bytes, axis)
        placement = self.placements[axis]
        if placement.ranks == 1:
            return 0.0
        return self._fastest_us(_NAMES[kind], size_bytes, placement, axis, copies)

    def send_us(self, size_bytes: float, axis: str = "pp") -> float:
        """Duration of sending to the next rank along an axis, which every rank does at the same time."""
        placement = self.placements[axis]
        if placement.ranks == 1:
            return 0.0
        pair = Placement(
            ranks_per_node=min(2, placement.ranks_per_node),
            nodes=1 if placement.ranks_per_node > 1 else 2,
            stride=placement.stride if placement.ranks_per_node > 1 else 1,
            node_stride=placement.node_stride if placement.ranks_per_node == 1 else 1,
            concurrent=placement.concurrent,
        )
        return self._fastest_us("send_recv", size_bytes, pair, "send" if axis == "pp" else axis)

    def _fastest_us(self, collective: str, size_bytes: float, placement: Placement, axis: str, copies: int = 0) -> float:
        """`costmodel.collectives.nccl.collective_us` of one call, with the scales."""
        if axis in self._scales.free:
            return 0.0
        if self._recorded is not None:
            recorded_us = self._recorded.collective_us(collective, placement, size_bytes)
            if recorded_us is not None:
                return self._scales.communication * recorded_us * self._alone(collective, size_bytes, placement)
        return self._scales.communication * self._modelled_us(collective, size_bytes, placement, copies)

    def _alone(self, collective: str, size_bytes: float, placement: Placement) -> float:
        """Ratio of a group's time alone to its time beside the exchanges of other groups; 1 for groups that share links."""
        together = replace(placement, concurrent=max(self._per_host // placement.ranks_per_node, 1))
        if self._shared or together == placement:
            return 1.0
        alone_us, together_us = (self._modelled_us(collective, size_bytes, place) for place in (placement, together))
        return min(alone_us / together_us, 1.0) if together_us > 0 else 1.0

    def _modelled_us(self, collective: str, size_bytes: float, placement: Placement, copies: int = 0) -> float:
        key = collective, placement, self._scales.bandwidth, copies
        ways = self._known.get(key)
        if ways is None:
            ways = self._known[key] = ways_of(collective, self._cluster, placement, faster=self._scales.bandwidth, copies=copies)
        return min(way.latency_us + way.us_per_byte * size_bytes for way in ways)

    @property
    def _per_host(self) -> int:
        return min(self._cluster.ranks_per_host or self._cluster.ranks, self._strategy.devices)
