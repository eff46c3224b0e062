"""Duration of an all-reduce on CPU hosts: one formula for each algorithm, whose constants are fitted to measured points.

A call on a limited link takes at least what its bytes take there, and at least what its messages and the processors take. While a
message is under way the link is idle; a shaped one (a token bucket) accumulates up to a burst of bytes meanwhile and catches up, so
that only longer pauses are lost. A fitted part of the processors' work is not hidden behind the link: 0 where both overlap, 1
where one waits for the other.

Ranks may share cores, as on a testbed of many hosts on one machine. Then a core moves and sums the bytes of all its ranks, and
each message waits until its rank has the core. While ranks wait for other things most of the time, that costs little; the more
ranks a core has, the more they wait for the core alone. Where the time that cores are used was measured as well, waiting follows
from it (`queued_us`), and a call takes no less than its core is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import msgspec
import numpy as np
from scipy.optimize import least_squares
from scipy.special import expit, logit

from dpro_search.collect.trace import Floats
from dpro_search.costmodel.collectives.counts import Algorithm, Counts, Points, counts
from dpro_search.errors import InputError

FEWEST_POINTS = 4
"""Measured points that a formula's constants need."""
LEAST_US = 1e-6
"""Below this duration, a logarithm is taken of it instead."""
_LOSS_SCALE = 0.1  # relative errors beyond this count less than their square
_BOUNDS = np.log(1e-9), np.log(1e9)  # of constants, which are fitted as logarithms
_BURST_BYTES = 100e3  # where the search for a burst begins
_MOST_TRIES = 100


class AllReduceCost(msgspec.Struct, frozen=True, kw_only=True):
    """Fitted constants of one algorithm on one network."""

    algorithm: Algorithm
    overhead_us: float  # Fixed time of a call, whatever the ranks.
    message_us: float  # Time of each message that follows another.
    wire_factor: float  # Time on a limited link over that of the bare bytes: headers, acknowledgements, pauses.
    # move_us_per_byte, add_us_per_byte: Processor time for each byte that the busiest core moves and sums.
    move_us_per_byte: float
    add_us_per_byte: float
    exposed: float  # Part of the shorter of both, link and processors, that is not hidden behind the longer, from 0 to 1.
    turn_us: float = 0.0  # Further time of each message for each further rank or server on its core.
    # Further time on a limited link, as a part of it, where ranks share cores: one without the core does not empty its sockets, so
    # that the other direction of an exchange waits.
    crowding: float = 0.0
    burst_bytes: float = 0.0  # Bytes that a limited link accumulates while it is idle; 0: none, idle time is lost.
    buffer_bytes: float = 0.0  # Size of a message that sockets hold: larger ones crowd where ranks share a core.
    # If ranks meet before each call: the idle time of links until then, relative to the time of messages and calls without a link.
    rested: float = 0.0
    # call_busy_us, message_busy_us, byte_busy_us: Time for which a rank uses its core: for a call, for each message, and for each
    # byte moved; 0: it was not measured.
    call_busy_us: float = 0.0
    message_busy_us: float = 0.0
    byte_busy_us: float = 0.0
    ranks_per_host: int = 1  # The constants hold for this number only.

    def counted(self, points: Points) -> Counts:
        """Count what the algorithm does in each all-reduce."""
        return counts(self.algorithm, points.ranks, points.servers, points.cores, self.ranks_per_host)

    def parts_us(self, points: Points, counted: Counts | None = None) -> tuple[Floats, Floats, Floats]:
        """Times of the messages, of the link and of the processors, [points] each; one rank has none.

        `counted` is what `counted` returns of the points, for callers that ask several times.
        """
        counted = self.counted(points) if counted is None else counted
        waited_us = self.overhead_us + counted.messages * (self.message_us + counted.turns * self.turn_us)
        used_us = self.call_busy_us + counted.messages * self.message_busy_us
        latency_us = np.where(points.ranks > 1, queued_us(waited_us, used_us, 1 + counted.turns), 0.0)
        beyond = _beyond_buffers(self.algorithm, points, counted, self.buffer_bytes)
        factor = self.wire_factor * np.where(counted.turns > 0, 1 + self.crowding * beyond, 1.0)
        wire_us = counted.wire * points.size_bytes / points.link_bytes_per_us * factor
        work_us = points.size_bytes * (counted.moved * self.move_us_per_byte + counted.added * self.add_us_per_byte)
        return latency_us, wire_us, work_us

    def busy_us(self, points: Points, counted: Counts | None = None) -> Floats:
        """Time for which the busiest core is used in each all-reduce, us, [points]; 0: it was not measured."""
        uses = core_uses(self.counted(points) if counted is None else counted, points)
        total_us: Floats = uses @ np.array([self.call_busy_us, self.message_busy_us, self.byte_busy_us])
        return total_us

    def predict(self, points: Points, counted: Counts | None = None) -> Floats:
        """Duration of each all-reduce in us, [points]; `counted` as in `parts_us`."""
        counted = self.counted(points) if counted is None else counted
        latency_us, wire_us, work_us = self.parts_us(points, counted)
        saved_us = counted.messages * self.burst_bytes / points.link_bytes_per_us
        lost_us = np.maximum(latency_us - saved_us, 0.0)
        if self.algorithm is Algorithm.PARAMETER_SERVER:
            # Pushes and pulls go opposite ways: one direction rests while the other is used.
            wire_us = np.maximum(wire_us - saved_us, wire_us / 2)
        else:
            rested_us = np.minimum(self.rested * latency_us, self.burst_bytes / points.link_bytes_per_us)
            wire_us = np.maximum(wire_us - rested_us, 0.0)
        total_us: Floats = np.maximum(wire_us + lost_us, latency_us + work_us) + self.exposed * np.minimum(wire_us, work_us)
        return np.maximum(total_us, self.busy_us(points, counted))


def core_uses(counted: Counts, points: Points) -> Floats:
    """Count what uses the busiest core in each all-reduce: its ranks' calls, their messages, bytes moved, [points, 3]."""
    sharing = np.where(points.ranks > 1, 1 + counted.turns, 0.0)
    return np.stack([sharing, sharing * counted.messages, points.size_bytes * counted.moved], axis=1)


def queued_us(alone_us: Floats, used_us: Floats, sharing: Floats) -> Floats:
    """Duration of what takes a rank `alone_us` by itself, where several ranks share the core that it needs for a part of it.

    Mean values of a closed queue of ranks that request the core at random (Reiser & Lavenberg, "Mean-value analysis of closed
    multichain queueing networks", 1980): hardly more than alone while ranks wait for other things most of the time, and what they
    use the core for in all where that is longer.

    Parameters
    ----------
    alone_us, used_us, sharing
        Time alone, part of it on the core, and ranks on the core, at least 1, [points] each.
    """
    away_us = np.maximum(alone_us - used_us, 0.0)
    total_us, ahead = alone_us, np.zeros_like(alone_us)  # ahead: ranks that another one meets at the core
    for ranks in range(1, int(sharing.max(initial=1)) + 1):
        at_core_us = used_us * (1 + ahead)
        cycle_us = np.maximum(away_us + at_core_us, LEAST_US)
        ahead = ranks * at_core_us / cycle_us
        total_us = np.where(ranks <= sharing, cycle_us, total_us)
    return total_us


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
    share: Floats = over / np.maximum(total, 1.0)
    return share


def fit_all_reduce(
    algorithms: Sequence[Algorithm],
    points: Points,
    duration_us: Floats,
    busy_us: Floats | None = None,
    *,
    meets: bool = False,
    ranks_per_host: int = 1,
) -> AllReduceCost:
    """Fit the constants of an algorithm to measured points: robust least squares of the relative error.

    A byte added up costs a fixed part of a byte moved where the counts of both go together in all points (ring); the prediction
    does not depend on how the sum is divided.

    Parameters
    ----------
    algorithms
        The best fit of them is returned: for a library that does not report which one it uses.
    busy_us
        Time for which the busiest core was used in each, [points]; NaN where that was not measured.
    meets
        Whether ranks met before each call, so that their links had rested.
    ranks_per_host
        Ranks on each host, in all points.

    Raises
    ------
    InputError
        There are too few points, or a duration that is no positive number.
    """
    if len(np.unique(points.ranks)) == 1:  # all formulas are alike: the constants take up what differs
        algorithms = algorithms[:1]
    fits = (_fit_algorithm(algorithm, points, duration_us, busy_us, meets, ranks_per_host) for algorithm in algorithms)
    return min(fits, key=lambda fit: fit[1])[0]


def _fit_algorithm(
    algorithm: Algorithm, points: Points, duration_us: Floats, busy_us: Floats | None, meets: bool, ranks_per_host: int
) -> tuple[AllReduceCost, float]:
    """Fit the constants of one algorithm; the second value is the loss that is left."""
    duration = np.asarray(duration_us, dtype=np.float64)
    busy = np.broadcast_to(np.nan if busy_us is None else busy_us, duration.shape)
    several = points.ranks > 1
    points, duration, busy = points.select(several), duration[several], busy[several]
    if len(duration) < FEWEST_POINTS:
        raise InputError(
            f"{algorithm}: {len(duration)} points of at least two ranks; at least {FEWEST_POINTS} are needed to fit an all-reduce"
        )
    if not (np.isfinite(duration) & (duration > 0)).all():
        raise InputError(f"{algorithm}: a measured duration is not a positive number")
    counted = counts(algorithm, points.ranks, points.servers, points.cores, ranks_per_host)
    limited = bool(np.isfinite(points.link_bytes_per_us).any())
    crowded, sometimes = bool(counted.turns.any()), len(np.unique(counted.turns > 0)) > 1
    shared = (counted.turns > 0) & (busy > 0)
    if shared.sum() >= FEWEST_POINTS:  # a rank that has a core for itself uses it more: it wakes up for each message
        busy = np.where(shared, busy, np.nan)
    call_busy_us, message_busy_us, byte_busy_us = fit_core_use(core_uses(counted, points), busy, duration).tolist()

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
            ranks_per_host=ranks_per_host,
        )

    log_duration = np.log(duration)

    def errors(constants: Floats) -> Floats:
        log_ratio: Floats = np.log(np.maximum(cost(constants).predict(points, counted), LEAST_US)) - log_duration
        return log_ratio

    quickest = duration.min()
    per_byte = float(np.median(duration / np.maximum(counted.moved * points.size_bytes, 1.0)))
    best = None
    # Starts of the search, because the sum is not convex: messages take from hardly anything to all of the shortest call, and links
    # have bursts or none.
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
        fit = least_squares(errors, start, loss="soft_l1", f_scale=_LOSS_SCALE, bounds=_BOUNDS, max_nfev=_MOST_TRIES)
        if best is None or fit.cost < best.cost:
            best = fit
    assert best is not None  # all starts end somewhere
    return cost(best.x), float(best.cost)


def fit_core_use(uses: Floats, busy_us: Floats, duration_us: Floats) -> Floats:
    """Fit how long each use of a core takes, us, [uses], by robust least squares of the relative error; all 0 for too few points.

    Points count by how much of the time the core was used: an idle one spends time on waking up, a busy one does not.

    Parameters
    ----------
    uses
        How often the busiest core was used for each, [points, uses].
    busy_us, duration_us
        Time for which it was used, and duration of the whole, [points] each; NaN where that was not measured.
    """
    known = busy_us > 0
    if known.sum() < FEWEST_POINTS:
        return np.zeros(uses.shape[1])
    uses, log_busy, weight = uses[known], np.log(busy_us[known]), np.minimum(busy_us[known] / duration_us[known], 1.0)
    start = np.log((busy_us[known, None] / uses).min(axis=0) / uses.shape[1])  # together they explain no point wholly

    def errors(constants: Floats) -> Floats:
        weighted: Floats = (np.log(uses @ np.exp(constants)) - log_busy) * weight
        return weighted

    fit = least_squares(errors, np.clip(start, *_BOUNDS), loss="soft_l1", f_scale=_LOSS_SCALE, bounds=_BOUNDS)
    return np.asarray(np.exp(fit.x), dtype=np.float64)
