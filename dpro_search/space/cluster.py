"""`ClusterSpec`: on what a job runs. Changing it asks "what if the same job ran there"."""

from __future__ import annotations

import math

import msgspec

from dpro_search.collect.trace import TraceMeta
from dpro_search.errors import InputError


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts and links.

    Attributes
    ----------
    cores
        Core of each rank; ranks with one number share it. The number of ranks is its length.
    rate_bps
        Link rate per host and direction in bits a second; None: not limited, the processors are the limit.
    ranks_per_host
        Side by side on each host; None: hosts differ.
    """

    cores: tuple[int, ...]
    rate_bps: float | None = None
    ranks_per_host: int | None = 1

    def __post_init__(self) -> None:
        if not self.cores:
            raise InputError("a cluster needs at least one rank")
        if self.rate_bps is not None and self.rate_bps <= 0:
            raise InputError(f"rate_bps must be > 0, not {self.rate_bps}")

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.cores)

    @staticmethod
    def of(meta: TraceMeta) -> ClusterSpec:
        """The cluster of a recording; a rank that was not pinned has a core of its own."""
        free = max((*meta.cores, -1)) + 1
        cores = tuple(core if core >= 0 else free + rank for rank, core in enumerate(meta.cores))
        return ClusterSpec(cores=cores, rate_bps=meta.rate_bps, ranks_per_host=meta.ranks_per_host)

    def with_ranks(self, ranks: int, physical_cores: int | None = None) -> ClusterSpec:
        """The same with another number of ranks; they share cores round-robin if there are fewer cores than ranks."""
        if ranks < 1:
            raise InputError(f"ranks must be >= 1, not {ranks}")
        count = ranks if physical_cores is None else physical_cores
        if count < 1:
            raise InputError(f"cores must be >= 1, not {count}")
        per_host = self.ranks_per_host
        return msgspec.structs.replace(
            self,
            cores=tuple(rank % count for rank in range(ranks)),
            ranks_per_host=None if per_host is None or ranks % per_host else per_host,
        )

    def changed(self, *, ranks: int | None = None, cores: int | None = None, rate_bps: float | None = None) -> ClusterSpec:
        """The same with what is named changed; None leaves it. Ranks share `cores` in turn; `math.inf` is a rate without limit."""
        found = self
        if ranks is not None or cores is not None:
            found = found.with_ranks(self.ranks if ranks is None else ranks, cores)
        if rate_bps is not None:
            found = msgspec.structs.replace(found, rate_bps=None if math.isinf(rate_bps) else rate_bps)
        return found

    def faster(self, factor: float, text: str) -> ClusterSpec:
        """The same with links that many times as fast; raises `InputError` that shows `text` if they have no limit."""
        if self.rate_bps is None:
            raise InputError(f"'{text}': the rate of the recording's links is not known; use rate=1gbit")
        return msgspec.structs.replace(self, rate_bps=self.rate_bps * factor)
