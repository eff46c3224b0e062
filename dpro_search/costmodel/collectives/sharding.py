"""`Sharding`: what the collectives of a fully sharded job take when fewer or more ranks share its parameters (HSDP).

Of N ranks, k neighbours each share all parameters, and the i-th ranks of these groups average their gradients: an all-gather and a
reduce-scatter among k ranks, and an all-reduce of a k-th of the bytes among N / k. The recorded transfers are scaled as the cost
model of NCCL's collectives (`costmodel.collectives.nccl`) differs between the two; an all-reduce that was not there takes the
model's time, as much longer as the recorded reduce-scatter took.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpro_search.cluster import Cluster
from dpro_search.costmodel.collectives.nccl import collective_us, placement_of


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """A change of the ranks that share parameters.

    Attributes
    ----------
    cluster, ranks
        Where the job runs, on how many ranks.
    was, becomes
        Ranks that share all parameters; both divide `ranks`.
    """

    cluster: Cluster
    ranks: int
    was: int
    becomes: int

    def gather_factor(self, size_bytes: float) -> float:
        """Ratio by which the time of an all-gather of a unit of so many bytes changes."""
        return self._shared_us("all_gather", size_bytes, self.becomes) / self._shared_us("all_gather", size_bytes, self.was)

    def scatter_factor(self, size_bytes: float) -> float:
        """Ratio by which the time of a reduce-scatter of so many bytes changes."""
        return self._shared_us("reduce_scatter", size_bytes, self.becomes) / self._shared_us("reduce_scatter", size_bytes, self.was)

    def copies_factor(self, size_bytes: float) -> float:
        """Ratio of the new to the recorded time of the all-reduce of a unit's gradients; 0 if it is no longer needed."""
        return self._copies_us(size_bytes, self.becomes) / self._copies_us(size_bytes, self.was)

    def copies_share(self, size_bytes: float) -> float:
        """The same over the recorded reduce-scatter, in a job without an all-reduce."""
        return self._copies_us(size_bytes, self.becomes) / self._shared_us("reduce_scatter", size_bytes, self.was)

    def _shared_us(self, collective: str, size_bytes: float, shared_by: int) -> float:
        place = placement_of(self.cluster, range(shared_by))
        return float(collective_us(collective, size_bytes, self.cluster, place))

    def _copies_us(self, size_bytes: float, shared_by: int) -> float:
        place = placement_of(self.cluster, range(0, self.ranks, shared_by))
        return float(collective_us("all_reduce", size_bytes / shared_by, self.cluster, place))
