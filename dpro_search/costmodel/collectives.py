"""What all-reduce algorithms do: messages one after the other, bytes on the busiest link, bytes that the busiest core handles.

The counts follow from the algorithm (Thakur, Rabenseifner & Gropp, "Optimization of Collective Communication Operations in MPICH",
2005); what they cost is said by `all_reduce_cost`, and fitted to measured points by `all_reduce_fit`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.errors import InputError

# What Open MPI can be told.
MpiAlgorithm = Literal["nonoverlapping", "recursive-doubling", "ring", "segmented-ring", "rabenseifner"]


class Algorithm(enum.StrEnum):
    """Ways to add up a tensor over all ranks."""

    RING = "ring"
    RECURSIVE_DOUBLING = "recursive-doubling"
    HALVING_DOUBLING = "halving-doubling"
    TREE = "tree"
    CHAIN = "chain"  # reduced, then broadcast, along a chain of ranks in segments
    PARAMETER_SERVER = "parameter-server"


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What an algorithm does, arrays of one shape; bytes are for each byte of the tensor.

    Attributes
    ----------
    messages
        One after the other.
    wire
        Bytes on the busiest link.
    moved, added
        Bytes that the busiest core moves and adds up.
    turns
        Further ranks and servers on that core.
    """

    messages: Floats
    wire: Floats
    moved: Floats
    added: Floats
    turns: Floats


def counts(algorithm: Algorithm, ranks: Floats, servers: Floats | float = 1.0, cores: Floats | float = np.inf) -> Counts:
    """What an algorithm does on a number of ranks.

    Parameters
    ----------
    ranks
        At least 1, [...]; one rank costs nothing.
    servers
        Of a parameter server, whose links carry what all workers send.
    cores
        That all ranks and servers share; infinite: each has its own.

    Notes
    -----
    Where the number of ranks is no power of two, the recursive algorithms begin and end with a message of the ranks beyond it.
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
        case Algorithm.PARAMETER_SERVER:
            messages, wire, added = np.full_like(p, 2.0), 2 * np.maximum(p / servers, 1.0), p / servers
    moved, added = wire * together, added * together
    if algorithm is Algorithm.PARAMETER_SERVER:
        serving = np.maximum(np.ceil(np.asarray(servers) / cores), 1.0)
        shared = np.isfinite(np.broadcast_to(cores, p.shape))
        # A worker moves the tensor, a server each worker's part of it.
        moved = np.where(shared, 2 * (together + serving * p / servers), wire)
        added = serving * p / servers
        turns = np.where(shared, together + serving - 1, 0.0)
    found = {"messages": messages, "wire": wire, "moved": moved, "added": added, "turns": turns}
    return Counts(**{name: np.where(some, column, 0.0) for name, column in found.items()})


@dataclass(frozen=True, kw_only=True, eq=False)
class Points:
    """Measured or wanted all-reduces, all arrays of [points].

    Attributes
    ----------
    size_bytes, ranks
        Tensor and ranks.
    link_bytes_per_us
        What a rank's link carries in each direction; infinite where nothing limits it but the processors.
    servers
        Of a parameter server; 1 for all else.
    cores
        That all ranks and servers share; infinite where each has its own.
    """

    size_bytes: Floats
    ranks: Floats
    link_bytes_per_us: Floats = field(default_factory=lambda: np.array(np.inf))
    servers: Floats = field(default_factory=lambda: np.array(1.0))
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
    def joined(parts: Sequence[Points]) -> Points:
        """All points, part after part."""
        return Points(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in POINT_COLUMNS})

    def matrix(self) -> Floats:
        """The columns of `POINT_COLUMNS`, [points, 5]."""
        return np.stack([getattr(self, name) for name in POINT_COLUMNS], axis=1)

    @staticmethod
    def of_matrix(matrix: Floats) -> Points:
        """What `matrix` gives, as points; raises `InputError` for another shape or impossible values."""
        matrix = np.asarray(matrix, dtype=np.float64)
        if matrix.ndim != 2 or matrix.shape[1] != len(POINT_COLUMNS):
            raise InputError(f"all-reduces of shape {matrix.shape}, expected [n, {len(POINT_COLUMNS)}] from Points.matrix()")
        return Points(**dict(zip(POINT_COLUMNS, matrix.T, strict=True)))


POINT_COLUMNS = tuple(Points.__dataclass_fields__)
