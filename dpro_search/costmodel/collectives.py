"""What an all-reduce costs: one formula for each algorithm, its constants fitted to measured points.

Every algorithm sends a number of messages one after the other, moves bytes over the busiest link, and adds bytes up. The
counts follow from the algorithm (Thakur, Rabenseifner & Gropp, "Optimization of Collective Communication Operations in MPICH",
2005); what a message, a byte on the wire and an added byte cost is fitted.

A call on a limited link takes at least what its bytes take there, and at least what its messages and the processors take. While a
message is under way the link rests; a shaped one (a token bucket) saves up to a burst of bytes meanwhile and catches up, so that
only longer rests are lost. What processors do beside the link costs a part of it that is fitted: 0 where both run side by side, 1
where one waits for the other.

Ranks may share cores, as on a testbed of many hosts on one machine. Then a core moves and adds the bytes of all its ranks, and
each message waits for its rank's turn. While ranks wait for other things most of the time, turns cost little; more ranks on a core
come to wait for that alone. Where the time that cores are used was measured as well, this follows from it
(`costmodel/shared_cores.py`), and a call takes no less than its core is used.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import msgspec
import numpy as np
from scipy.optimize import least_squares
from scipy.special import expit, logit

from dpro_search.collect.trace import Floats
from dpro_search.costmodel.shared_cores import fit_uses, queued_us
from dpro_search.errors import InputError

_FEWEST = 4  # points to fit constants to
_LEAST_US = 1e-6  # below, a constant counts as none
_LOSS_SCALE = 0.1  # relative errors beyond this count less than their square
_BURST_BYTES = 100e3  # where the search for a burst begins
_BOUNDS = np.log(1e-9), np.log(1e9)  # of every constant, as a logarithm, and of the part exposed, as a logit
_MOST_TRIES = 100


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
        Of the processors, for each byte that the busiest core moves and adds up.
    exposed
        Part of the shorter of both, link and processors, that is not hidden behind the longer, from 0 to 1.
    turn_us
        Of each message, for each further rank or server on its core.
    crowding
        Further time on a limited link, as a part of it, where ranks share cores: one that has no turn does not empty its sockets,
        so that the other direction of an exchange waits.
    burst_bytes
        That a limited link saves up while it rests; 0: none, a rest is lost.
    buffer_bytes
        That a message may have before ranks which share a core crowd: what sockets hold.
    rested
        Where ranks meet before each call: how long links have rested by then, over what messages and calls take without a link.
    call_busy_us, message_busy_us, byte_busy_us
        What a rank uses its core for a call, for each message, and for each byte moved; 0: it was not measured.
    """

    algorithm: Algorithm
    overhead_us: float
    message_us: float
    wire_factor: float
    move_us_per_byte: float
    add_us_per_byte: float
    exposed: float
    turn_us: float = 0.0
    crowding: float = 0.0
    burst_bytes: float = 0.0
    buffer_bytes: float = 0.0
    rested: float = 0.0
    call_busy_us: float = 0.0
    message_busy_us: float = 0.0
    byte_busy_us: float = 0.0

    def parts_us(self, points: Points) -> tuple[Floats, Floats, Floats]:
        """Times of the messages, of the link and of the processors, [points] each; one rank has none."""
        counted = counts(self.algorithm, points.ranks, points.servers, points.cores)
        waited_us = self.overhead_us + counted.messages * (self.message_us + counted.turns * self.turn_us)
        used_us = self.call_busy_us + counted.messages * self.message_busy_us
        latency_us = np.where(points.ranks > 1, queued_us(waited_us, used_us, 1 + counted.turns), 0.0)
        beyond = _beyond_buffers(self.algorithm, points, counted, self.buffer_bytes)
        factor = self.wire_factor * np.where(counted.turns > 0, 1 + self.crowding * beyond, 1.0)
        wire_us = counted.wire * points.size_bytes / points.link_bytes_per_us * factor
        work_us = points.size_bytes * (counted.moved * self.move_us_per_byte + counted.added * self.add_us_per_byte)
        return latency_us, wire_us, work_us

    def busy_us(self, points: Points) -> Floats:
        """How long the busiest core is used in each all-reduce, us, [points]; 0: it was not measured."""
        counted = counts(self.algorithm, points.ranks, points.servers, points.cores)
        found: Floats = _uses(counted, points) @ np.array([self.call_busy_us, self.message_busy_us, self.byte_busy_us])
        return found

    def predict(self, points: Points) -> Floats:
        """Duration of each all-reduce in us, [points]."""
        latency_us, wire_us, work_us = self.parts_us(points)
        messages = counts(self.algorithm, points.ranks, points.servers, points.cores).messages
        saved_us = messages * self.burst_bytes / points.link_bytes_per_us
        lost_us = np.maximum(latency_us - saved_us, 0.0)
        if self.algorithm is Algorithm.PARAMETER_SERVER:
            # Pushes and pulls go opposite ways: one direction rests while the other is used.
            wire_us = np.maximum(wire_us - saved_us, wire_us / 2)
        else:
            rested_us = np.minimum(self.rested * latency_us, self.burst_bytes / points.link_bytes_per_us)
            wire_us = np.maximum(wire_us - rested_us, 0.0)
        found: Floats = np.maximum(wire_us + lost_us, latency_us + work_us) + self.exposed * np.minimum(wire_us, work_us)
        return np.maximum(found, self.busy_us(points))


def fit_all_reduce(
    algorithm: Algorithm, points: Points, duration_us: Floats, busy_us: Floats | None = None, *, meets: bool = False
) -> AllReduceCost:
    """Fit the constants of an algorithm to measured points: robust least squares of the relative error.

    A byte added up costs a fixed part of a byte moved where the counts of both go together in all points (ring); the prediction
    does not depend on how the sum is divided.

    Parameters
    ----------
    busy_us
        How long the busiest core was used in each, [points]; NaN where that was not measured.
    meets
        Whether ranks met before each call, so that their links had rested.

    Raises
    ------
    InputError
        There are too few points, or a duration that is no positive number.
    """
    return _fitted(algorithm, points, duration_us, busy_us, meets)[0]


def fit_best(
    algorithms: Sequence[Algorithm], points: Points, duration_us: Floats, busy_us: Floats | None = None, *, meets: bool = False
) -> AllReduceCost:
    """The best fit of several algorithms: for a library that does not tell which one it uses.

    Parameters and errors as of `fit_all_reduce`.
    """
    if len(np.unique(points.ranks)) == 1:  # all formulas are alike: the constants take up what differs
        return fit_all_reduce(algorithms[0], points, duration_us, busy_us, meets=meets)
    return min((_fitted(algorithm, points, duration_us, busy_us, meets) for algorithm in algorithms), key=lambda found: found[1])[0]


def _fitted(
    algorithm: Algorithm, points: Points, duration_us: Floats, busy_us: Floats | None, meets: bool
) -> tuple[AllReduceCost, float]:
    """The constants, and the loss that is left."""
    duration = np.asarray(duration_us, dtype=np.float64)
    busy = np.broadcast_to(np.nan if busy_us is None else busy_us, duration.shape)
    taken = points.ranks > 1
    points, duration, busy = points.select(taken), duration[taken], busy[taken]
    if len(duration) < _FEWEST:
        raise InputError(
            f"{algorithm}: {len(duration)} points of at least two ranks; at least {_FEWEST} are needed to fit an all-reduce"
        )
    if not (np.isfinite(duration) & (duration > 0)).all():
        raise InputError(f"{algorithm}: a measured duration is not a positive number")
    counted = counts(algorithm, points.ranks, points.servers, points.cores)
    limited = bool(np.isfinite(points.link_bytes_per_us).any())
    crowded, sometimes = bool(counted.turns.any()), len(np.unique(counted.turns > 0)) > 1
    shared = (counted.turns > 0) & (busy > 0)
    if shared.sum() >= _FEWEST:  # a rank that has a core for itself uses it more: it wakes up for each message
        busy = np.where(shared, busy, np.nan)
    call_busy_us, message_busy_us, byte_busy_us = fit_uses(_uses(counted, points), busy, duration).tolist()

    def cost(constants: Floats) -> AllReduceCost:
        overhead, message, move, add, wire, turn, crowding, burst, *more = np.exp(constants[:-1])
        buffer, rested = more or (0.0, 0.0)
        return AllReduceCost(
            algorithm=algorithm,
            overhead_us=float(overhead),
            message_us=float(message),
            wire_factor=float(wire) if limited else 1.0,
            move_us_per_byte=float(move),
            add_us_per_byte=float(add),
            exposed=float(expit(constants[-1])) if limited else 0.0,
            turn_us=float(turn) if crowded else 0.0,
            crowding=float(crowding) if limited and sometimes else 0.0,
            burst_bytes=float(burst) if limited else 0.0,
            buffer_bytes=float(buffer) if limited and sometimes else 0.0,
            rested=float(rested) if limited else 0.0,
            call_busy_us=call_busy_us,
            message_busy_us=message_busy_us,
            byte_busy_us=byte_busy_us,
        )

    logarithm = np.log(duration)

    def residuals(constants: Floats) -> Floats:
        found: Floats = np.log(np.maximum(cost(constants).predict(points), _LEAST_US)) - logarithm
        return found

    quickest = duration.min()
    per_byte = float(np.median(duration / np.maximum(counted.moved * points.size_bytes, 1.0)))
    best = None
    # What messages take, hardly anything to all of the shortest call, and what links save up: the sum is not convex.
    half = 0.5 * quickest / counted.messages.max()
    messages = 0.1 * half, half, quickest / counted.messages.min()
    for message, burst in product(messages, (1.0, _BURST_BYTES) if limited else (1.0,)):
        positive = np.log(
            [
                quickest / 2,
                message,
                per_byte,
                per_byte / 10,
                1.05,
                message / 10,
                0.1,
                burst,
                *([_BURST_BYTES, 0.5] if meets else []),
            ]
        )
        start = np.append(positive, logit(0.1))
        found = least_squares(residuals, start, loss="soft_l1", f_scale=_LOSS_SCALE, bounds=_BOUNDS, max_nfev=_MOST_TRIES)
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None  # all starts end somewhere
    return cost(best.x), float(best.cost)


def _beyond_buffers(algorithm: Algorithm, points: Points, counted: Counts, buffer_bytes: float) -> Floats:
    """Part of the bytes that messages have beyond what sockets' buffers hold, [points]."""
    size, p = points.size_bytes, np.maximum(points.ranks, 1.0)
    if algorithm is not Algorithm.HALVING_DOUBLING:
        message_bytes = counted.wire * size / np.maximum(counted.messages, 1.0)
        return np.maximum(1 - buffer_bytes / np.maximum(message_bytes, 1.0), 0.0)
    within = np.floor(np.log2(p))
    total = np.where(2.0**within < p, 1.0, 0.0) * size
    over = np.where(2.0**within < p, np.maximum(size - buffer_bytes, 0.0), 0.0)
    for halved in range(1, int(within.max(initial=0)) + 1):
        part = np.where(halved <= within, size / 2.0**halved, 0.0)
        total, over = total + part, over + np.maximum(part - buffer_bytes, 0.0)
    found: Floats = over / np.maximum(total, 1.0)
    return found


def _uses(counted: Counts, points: Points) -> Floats:
    """What the busiest core is used for in each all-reduce: its ranks' calls, their messages, bytes moved, [points, 3]."""
    sharing = np.where(points.ranks > 1, 1 + counted.turns, 0.0)
    return np.stack([sharing, sharing * counted.messages, points.size_bytes * counted.moved], axis=1)


def hierarchical_us(inner: AllReduceCost, outer: AllReduceCost, points: Points, ranks_per_host: int) -> Floats:
    """Reduce-scatter within each host, all-reduce of each rank's share among the hosts, all-gather within each host.

    Parameters
    ----------
    inner, outer
        Costs within a host and between hosts; the links of `points` are those between hosts.
    """
    inside = Points(size_bytes=points.size_bytes, ranks=np.minimum(points.ranks, ranks_per_host), cores=points.cores)
    between = Points(
        size_bytes=points.size_bytes / ranks_per_host,
        ranks=np.maximum(np.ceil(points.ranks / ranks_per_host), 1.0),
        link_bytes_per_us=points.link_bytes_per_us,
        cores=points.cores,
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
