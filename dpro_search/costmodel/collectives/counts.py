"""Counts for all-reduce algorithms: messages one after the other, bytes on the busiest link and on the busiest core.

The counts follow from the algorithm (Thakur, Rabenseifner & Gropp, "Optimization of Collective Communication Operations in MPICH",
2005); what they cost is in `all_reduce_formula`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.errors import InputError

# Algorithms that Open MPI can be set to.
MpiAlgorithm = Literal["nonoverlapping", "recursive-doubling", "ring", "segmented-ring", "rabenseifner", "hierarchy"]
HIERARCHY: MpiAlgorithm = "hierarchy"


class Algorithm(enum.StrEnum):
    """Ways to sum a tensor over all ranks."""

    RING = "ring"
    RECURSIVE_DOUBLING = "recursive-doubling"
    HALVING_DOUBLING = "halving-doubling"
    TREE = "tree"
    CHAIN = "chain"  # reduced, then broadcast, along a chain of ranks in segments
    PARAMETER_SERVER = "parameter-server"
    # Reduced within each host, added up among the hosts' first ranks (two hosts: by one exchange; more: a ring), broadcast.
    HIERARCHY = "hierarchy"
    GATHER = "gather"  # every rank sends all it has to all others
    DIRECT = "direct"  # every rank sums one part, and sends the sum to all others


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Messages and bytes of an algorithm, arrays of one shape; bytes are for each byte of the tensor."""

    messages: Floats  # One after the other.
    wire: Floats  # Bytes on the busiest link.
    # moved, added: Bytes that the busiest core moves and sums.
    moved: Floats
    added: Floats
    turns: Floats  # Further ranks and servers on that core.


def counts(
    algorithm: Algorithm,
    ranks: Floats,
    servers: Floats | float = 1.0,
    cores: Floats | float = np.inf,
    ranks_per_host: int = 1,
) -> Counts:
    """Count the messages and bytes of an algorithm on a number of ranks.

    Parameters
    ----------
    ranks
        At least 1, [...]; one rank costs nothing.
    servers
        Of a parameter server, whose links carry what all workers send.
    cores
        That all ranks and servers share; infinite: each has its own.
    ranks_per_host
        That share a host's link: the first so many are on the first host, and so on.

    Notes
    -----
    Where the number of ranks is no power of two, the recursive algorithms begin and end with a message of the ranks beyond it.
    With several ranks on a host, messages within it are none of its link's, and those that leave it together share the link.
    """
    p = np.asarray(ranks, dtype=np.float64)
    some = p > 1
    p = np.maximum(p, 1.0)
    together = np.maximum(np.ceil(p / cores), 1.0)
    turns = together - 1
    rounds = np.ceil(np.log2(p))
    beyond = np.where(2.0 ** np.floor(np.log2(p)) < p, 1.0, 0.0)
    within = np.floor(np.log2(p))
    match algorithm:
        case Algorithm.RING:
            messages, wire, added = 2 * (p - 1), 2 * (p - 1) / p, (p - 1) / p
        case Algorithm.RECURSIVE_DOUBLING:
            messages, wire, added = within + 2 * beyond, within + 2 * beyond, within + beyond
        case Algorithm.HALVING_DOUBLING:
            q = 2.0**within
            messages, wire, added = 2 * within + 2 * beyond, 2 * (q - 1) / q + 2 * beyond, (q - 1) / q + beyond
        case Algorithm.TREE:
            messages, wire, added = 2 * rounds, 2 * rounds, rounds
        case Algorithm.CHAIN:
            messages, wire, added = 2 * (p - 1), np.full_like(p, 2.0), np.full_like(p, 1.0)
        case Algorithm.GATHER:
            messages, wire, added = np.ones_like(p), p - 1, p - 1
        case Algorithm.DIRECT:
            messages, wire, added = np.full_like(p, 2.0), 2 * (p - 1) / p, (p - 1) / p
        case Algorithm.PARAMETER_SERVER:
            messages, wire, added = np.full_like(p, 2.0), 2 * np.maximum(p / servers, 1.0), p / servers
        case Algorithm.HIERARCHY:
            hosts, levels = np.maximum(p / ranks_per_host, 1.0), np.ceil(np.log2(ranks_per_host))
            messages = 2 * levels + np.where(hosts == 2, 1, 2 * (hosts - 1))
            wire = 2 * (hosts - 1) / hosts
            added = levels + np.where(hosts == 2, 1, (hosts - 1) / hosts)
    moved, added = wire * together, added * together
    if algorithm is Algorithm.HIERARCHY:  # a host's first rank also gets and gives within the host
        moved = moved + 2 * np.ceil(np.log2(ranks_per_host)) * together
    if ranks_per_host > 1 and algorithm in _MESSAGES:
        wire = np.vectorize(lambda count: _leaves_a_host(algorithm, int(count), ranks_per_host), otypes=[np.float64])(p)
    if algorithm is Algorithm.PARAMETER_SERVER:
        serving = np.maximum(np.ceil(np.asarray(servers) / cores), 1.0)
        shared = np.isfinite(np.broadcast_to(cores, p.shape))
        # A worker moves the tensor, a server each worker's part of it.
        moved = np.where(shared, 2 * (together + serving * p / servers), wire)
        added = serving * p / servers
        turns = np.where(shared, together + serving - 1, 0.0)
    columns = {"messages": messages, "wire": wire, "moved": moved, "added": added, "turns": turns}
    return Counts(**{name: np.where(some, column, 0.0) for name, column in columns.items()})


_Message = tuple[int, int, float]  # from rank, to rank, part of the tensor


@cache
def _leaves_a_host(algorithm: Algorithm, ranks: int, ranks_per_host: int) -> float:
    """Bytes on the busiest host's link for each byte of the tensor: messages of one round are under way together."""
    total = 0.0
    for messages in _MESSAGES[algorithm](ranks):
        used: dict[tuple[int, bool], float] = {}
        for source, target, part in messages:
            for end in ((source // ranks_per_host, True), (target // ranks_per_host, False)):
                if source // ranks_per_host != target // ranks_per_host:
                    used[end] = used.get(end, 0.0) + part
        total += max(used.values(), default=0.0)
    return total


def _tree(ranks: int) -> Iterator[list[_Message]]:
    """Up a binomial tree and down."""
    reach = 1
    while reach < ranks:
        up = [(rank, rank - reach, 1.0) for rank in range(reach, ranks, 2 * reach)]
        yield from (up, [(target, source, part) for source, target, part in up])
        reach *= 2


def _doubling(ranks: int) -> Iterator[list[_Message]]:
    yield from _exchanges(ranks, lambda _: 1.0)


def _halving(ranks: int) -> Iterator[list[_Message]]:
    """Open MPI's begins with the nearest rank, to which the largest part goes, and comes back the same way."""
    for _ in range(2):
        yield from _exchanges(ranks, lambda reach: 0.5 / reach, ends=1)


def _to_all(ranks: int) -> Iterator[list[_Message]]:
    yield [(source, target, 1.0) for source in range(ranks) for target in range(ranks) if source != target]


def _direct(ranks: int) -> Iterator[list[_Message]]:
    for messages in _to_all(ranks):
        for _ in range(2):
            yield [(source, target, 1.0 / ranks) for source, target, _ in messages]


def _exchanges(ranks: int, part: Callable[[int], float], ends: int = 2) -> Iterator[list[_Message]]:
    """Each rank with those at distances 1, 2, 4, ..., after those beyond a power of two gave theirs to a neighbour."""
    within = 1 << (ranks.bit_length() - 1)
    beyond = ranks - within
    for _ in range(ends if beyond else 0):
        yield [(2 * pair, 2 * pair + 1, 1.0) for pair in range(beyond)]
    taking_part = [2 * rank + 1 if rank < beyond else rank + beyond for rank in range(within)]
    reach = 1
    while reach < within:
        yield [(taking_part[rank], taking_part[rank ^ reach], part(reach)) for rank in range(within)]
        reach *= 2


# Rings and chains send what leaves a host once, as the counts have it.
_MESSAGES: dict[Algorithm, Callable[[int], Iterator[list[_Message]]]] = {
    Algorithm.TREE: _tree,
    Algorithm.RECURSIVE_DOUBLING: _doubling,
    Algorithm.HALVING_DOUBLING: _halving,
    Algorithm.GATHER: _to_all,
    Algorithm.DIRECT: _direct,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Points:
    """Measured all-reduces, or those to predict, all arrays of [points]."""

    # size_bytes, ranks: Tensor and ranks.
    size_bytes: Floats
    ranks: Floats
    # Rate of a rank's link in each direction; infinite where nothing limits it but the processors.
    link_bytes_per_us: Floats = field(default_factory=lambda: np.array(np.inf))
    servers: Floats = field(default_factory=lambda: np.array(1.0))  # Servers of a parameter server; 1 for all else.
    # Cores that all ranks and servers share; infinite where each has its own.
    cores: Floats = field(default_factory=lambda: np.array(np.inf))

    def __post_init__(self) -> None:
        columns = [np.asarray(getattr(self, name), dtype=np.float64) for name in POINT_COLUMNS]
        for name, column in zip(POINT_COLUMNS, np.broadcast_arrays(*columns), strict=True):
            object.__setattr__(self, name, column)
        if (
            not (self.size_bytes >= 0).all()
            or not (self.ranks >= 1).all()
            or not (self.link_bytes_per_us > 0).all()
            or not (self.servers >= 1).all()
            or not (self.cores >= 1).all()
        ):
            raise InputError("an all-reduce needs a size of at least 0, at least one rank, server and core, and a rate above 0")

    def __len__(self) -> int:
        return len(self.size_bytes)

    def select(self, mask: np.ndarray) -> Points:
        """The points that a mask or index takes."""
        return Points(**{name: getattr(self, name)[mask] for name in POINT_COLUMNS})

    @staticmethod
    def on(rate_bps: float | None, cores: float, *, size_bytes: Floats, ranks: int, servers: Floats | float = 1.0) -> Points:
        """All-reduces of some sizes on one cluster, whose links have a rate in bit/s (None: no limit)."""
        link_bytes_per_us = np.array(np.inf if rate_bps is None else rate_bps / 8e6)
        return Points(
            size_bytes=size_bytes,
            ranks=np.array(ranks),
            link_bytes_per_us=link_bytes_per_us,
            servers=np.array(servers),
            cores=np.array(cores),
        )

    @staticmethod
    def joined(parts: Sequence[Points]) -> Points:
        """All points, part after part."""
        return Points(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in POINT_COLUMNS})

    def matrix(self) -> Floats:
        """The columns of `POINT_COLUMNS`, [points, 5]."""
        return np.stack([getattr(self, name) for name in POINT_COLUMNS], axis=1)


POINT_COLUMNS = tuple(Points.__dataclass_fields__)
