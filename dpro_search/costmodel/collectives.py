"""What an all-reduce costs: one formula for each algorithm, its constants fitted to measured points.

Every algorithm sends a number of messages one after the other, moves bytes over the busiest link, and adds bytes up. The three
counts follow from the algorithm (Thakur, Rabenseifner & Gropp, "Optimization of Collective Communication Operations in MPICH",
2005); what a message, a byte on the wire and an added byte cost is fitted. Link and processors work side by side, more or less:
their times are joined by a norm whose exponent is fitted as well (1: one after the other; large: the slower alone counts).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
from scipy.optimize import least_squares

from dpro_search.collect.trace import Floats
from dpro_search.errors import InputError

_LEAST_US = 1e-6  # below, a constant counts as none
_MOST_OVERLAP = 8.0  # of the norm's exponent: more makes no difference
_LOSS_SCALE = 0.1  # relative errors beyond this count less than their square


class Algorithm(enum.StrEnum):
    """Ways to add up a tensor over all ranks."""

    RING = "ring"
    RECURSIVE_DOUBLING = "recursive-doubling"
    HALVING_DOUBLING = "halving-doubling"
    TREE = "tree"
    PARAMETER_SERVER = "parameter-server"


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What an algorithm does for each byte of the tensor: arrays of one shape."""

    messages: Floats
    wire: Floats
    added: Floats


def counts(algorithm: Algorithm, ranks: Floats, servers: Floats | float = 1.0) -> Counts:
    """Messages one after the other, bytes on the busiest link and bytes added up, these two for each byte of the tensor.

    Parameters
    ----------
    ranks
        At least 1, [...]; one rank costs nothing.
    servers
        Of a parameter server, whose links carry what all workers send.

    Notes
    -----
    Where the number of ranks is no power of two, the recursive algorithms begin and end with a message of the ranks beyond it.
    """
    p = np.asarray(ranks, dtype=np.float64)
    some = p > 1
    p = np.maximum(p, 1.0)
    rounds = np.ceil(np.log2(p))
    beyond = np.where(2.0 ** np.floor(np.log2(p)) < p, 1.0, 0.0)
    within = np.floor(np.log2(p))
    match algorithm:
        case Algorithm.RING:
            found = 2 * (p - 1), 2 * (p - 1) / p, (p - 1) / p
        case Algorithm.RECURSIVE_DOUBLING:
            found = within + 2 * beyond, within + 2 * beyond, within + beyond
        case Algorithm.HALVING_DOUBLING:
            q = 2.0**within
            found = 2 * within + 2 * beyond, 2 * (q - 1) / q + 2 * beyond, (q - 1) / q + beyond
        case Algorithm.TREE:
            found = 2 * rounds, 2 * rounds, rounds
        case Algorithm.PARAMETER_SERVER:
            share = np.maximum(p / servers, 1.0)
            found = np.full_like(p, 2.0), 2 * share, p / servers
    return Counts(messages=np.where(some, found[0], 0.0), wire=np.where(some, found[1], 0.0), added=np.where(some, found[2], 0.0))


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
    """

    size_bytes: Floats
    ranks: Floats
    link_bytes_per_us: Floats = field(default_factory=lambda: np.array(np.inf))
    servers: Floats = field(default_factory=lambda: np.array(1.0))

    def __post_init__(self) -> None:
        columns = [np.asarray(getattr(self, name), dtype=np.float64) for name in self.__dataclass_fields__]
        for name, column in zip(self.__dataclass_fields__, np.broadcast_arrays(*columns), strict=True):
            object.__setattr__(self, name, column)
        if (
            (self.size_bytes < 0).any()
            or (self.ranks < 1).any()
            or not (self.link_bytes_per_us > 0).all()
            or (self.servers < 1).any()
        ):
            raise InputError("an all-reduce needs sizes of at least 0, at least one rank and server, and links with a rate above 0")

    def __len__(self) -> int:
        return len(self.size_bytes)

    def select(self, mask: np.ndarray) -> Points:
        """The points that a mask or index takes."""
        return Points(**{name: getattr(self, name)[mask] for name in self.__dataclass_fields__})


class AllReduceCost(msgspec.Struct, frozen=True, kw_only=True):
    """Fitted constants of one algorithm on one network.

    Attributes
    ----------
    overhead_us
        Of a call, whatever the ranks.
    message_us
        Of each message that follows another.
    wire_factor
        Time on a limited link over that of the bare bytes: headers, acknowledgements, pauses.
    move_us_per_byte, add_us_per_byte
        Of the processors, for each byte on the busiest link and for each byte added up.
    overlap
        Exponent of the norm that joins link and processors.
    """

    algorithm: Algorithm
    overhead_us: float
    message_us: float
    wire_factor: float
    move_us_per_byte: float
    add_us_per_byte: float
    overlap: float

    def predict(self, points: Points) -> Floats:
        """Duration of each all-reduce in us, [points]."""
        counted = counts(self.algorithm, points.ranks, points.servers)
        wire_us = counted.wire * points.size_bytes / points.link_bytes_per_us * self.wire_factor
        work_us = points.size_bytes * (counted.wire * self.move_us_per_byte + counted.added * self.add_us_per_byte)
        most_us = np.maximum(np.maximum(wire_us, work_us), _LEAST_US)
        joined_us = most_us * ((wire_us / most_us) ** self.overlap + (work_us / most_us) ** self.overlap) ** (1 / self.overlap)
        found: Floats = np.where(points.ranks > 1, self.overhead_us + counted.messages * self.message_us + joined_us, 0.0)
        return found


def fit_all_reduce(algorithm: Algorithm, points: Points, duration_us: Floats) -> AllReduceCost:
    """Fit the constants of an algorithm to measured points: robust least squares of the relative error.

    A byte added up costs a fixed part of a byte moved where the counts of both go together in all points (ring); the prediction
    does not depend on how the sum is divided.

    Raises
    ------
    InputError
        There are too few points, or a duration that is no positive number.
    """
    duration = np.asarray(duration_us, dtype=np.float64)
    taken = points.ranks > 1
    points, duration = points.select(taken), duration[taken]
    if len(duration) < 4:
        raise InputError(f"{algorithm}: {len(duration)} points of at least two ranks; at least 4 are needed to fit an all-reduce")
    if not (np.isfinite(duration) & (duration > 0)).all():
        raise InputError(f"{algorithm}: a measured duration is not a positive number")
    limited = bool(np.isfinite(points.link_bytes_per_us).any())

    def cost(constants: Floats) -> AllReduceCost:
        overhead, message, move, add, wire, overlap = np.exp(constants)
        return AllReduceCost(
            algorithm=algorithm,
            overhead_us=float(overhead),
            message_us=float(message),
            wire_factor=float(wire) if limited else 1.0,
            move_us_per_byte=float(move),
            add_us_per_byte=float(add),
            overlap=float(min(1 + overlap, _MOST_OVERLAP)),
        )

    logarithm = np.log(duration)

    def residuals(constants: Floats) -> Floats:
        found: Floats = np.log(np.maximum(cost(constants).predict(points), _LEAST_US)) - logarithm
        return found

    counted = counts(algorithm, points.ranks, points.servers)
    quickest = duration.min()
    per_byte = float(np.median(duration / np.maximum(counted.wire * points.size_bytes, 1.0)))
    best = None
    for share in (0.5, 0.05):  # of the shortest call that messages take: the sum is not convex
        start = np.log([quickest / 2, share * quickest / counted.messages.max(), per_byte, per_byte / 10, 1.05, 1.0])
        found = least_squares(residuals, start, loss="soft_l1", f_scale=_LOSS_SCALE, bounds=(np.log(1e-9), np.log(1e9)))
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None  # both starts end somewhere
    return cost(best.x)


def hierarchical_us(inner: AllReduceCost, outer: AllReduceCost, points: Points, ranks_per_host: int) -> Floats:
    """Reduce-scatter within each host, all-reduce of each rank's share among the hosts, all-gather within each host.

    Parameters
    ----------
    inner, outer
        Costs within a host and between hosts; the links of `points` are those between hosts.
    """
    inside = Points(size_bytes=points.size_bytes, ranks=np.minimum(points.ranks, ranks_per_host))
    between = Points(
        size_bytes=points.size_bytes / ranks_per_host,
        ranks=np.maximum(np.ceil(points.ranks / ranks_per_host), 1.0),
        link_bytes_per_us=points.link_bytes_per_us,
    )
    found: Floats = inner.predict(inside) + outer.predict(between)
    return found


def cheapest(costs: Mapping[str, AllReduceCost], points: Points) -> tuple[list[str], Floats]:
    """The algorithm that is predicted fastest at each point, and its time: (names [points], us [points])."""
    if not costs:
        raise InputError("no algorithm to choose from")
    names = list(costs)
    times = np.stack([costs[name].predict(points) for name in names])
    winner = times.argmin(axis=0)
    return [names[number] for number in winner.tolist()], times.min(axis=0)
