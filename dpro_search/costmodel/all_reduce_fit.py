"""Fits the constants of all-reduce algorithms to measured points."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from scipy.optimize import least_squares
from scipy.special import expit, logit

from dpro_search.collect.trace import Floats
from dpro_search.costmodel.all_reduce_cost import AllReduceCost, core_uses
from dpro_search.costmodel.collectives import Algorithm, Points, counts
from dpro_search.costmodel.shared_cores import BOUNDS, FEWEST, LEAST_US, LOSS_SCALE, fit_uses
from dpro_search.errors import InputError

_BURST_BYTES = 100e3  # where the search for a burst begins
_MOST_TRIES = 100


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

    Of several algorithms it is the one that fits best: for a library that does not report which one it uses.

    A byte added up costs a fixed part of a byte moved where the counts of both go together in all points (ring); the prediction
    does not depend on how the sum is divided.

    Parameters
    ----------
    algorithms
        The best fit of them is returned: for a library that does not report which one it uses.
    busy_us
        How long the busiest core was used in each, [points]; NaN where that was not measured.
    meets
        Whether ranks met before each call, so that their links had rested.
    ranks_per_host
        Of all points.

    Raises
    ------
    InputError
        There are too few points, or a duration that is no positive number.
    """
    if len(np.unique(points.ranks)) == 1:  # all formulas are alike: the constants take up what differs
        algorithms = algorithms[:1]
    fits = (_fitted(algorithm, points, duration_us, busy_us, meets, ranks_per_host) for algorithm in algorithms)
    return min(fits, key=lambda found: found[1])[0]


def _fitted(
    algorithm: Algorithm, points: Points, duration_us: Floats, busy_us: Floats | None, meets: bool, ranks_per_host: int
) -> tuple[AllReduceCost, float]:
    """The constants, and the loss that is left."""
    duration = np.asarray(duration_us, dtype=np.float64)
    busy = np.broadcast_to(np.nan if busy_us is None else busy_us, duration.shape)
    taken = points.ranks > 1
    points, duration, busy = points.select(taken), duration[taken], busy[taken]
    if len(duration) < FEWEST:
        raise InputError(
            f"{algorithm}: {len(duration)} points of at least two ranks; at least {FEWEST} are needed to fit an all-reduce"
        )
    if not (np.isfinite(duration) & (duration > 0)).all():
        raise InputError(f"{algorithm}: a measured duration is not a positive number")
    counted = counts(algorithm, points.ranks, points.servers, points.cores, ranks_per_host)
    limited = bool(np.isfinite(points.link_bytes_per_us).any())
    crowded, sometimes = bool(counted.turns.any()), len(np.unique(counted.turns > 0)) > 1
    shared = (counted.turns > 0) & (busy > 0)
    if shared.sum() >= FEWEST:  # a rank that has a core for itself uses it more: it wakes up for each message
        busy = np.where(shared, busy, np.nan)
    call_busy_us, message_busy_us, byte_busy_us = fit_uses(core_uses(counted, points), busy, duration).tolist()

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

    logarithm = np.log(duration)

    def residuals(constants: Floats) -> Floats:
        found: Floats = np.log(np.maximum(cost(constants).predict(points), LEAST_US)) - logarithm
        return found

    quickest = duration.min()
    per_byte = float(np.median(duration / np.maximum(counted.moved * points.size_bytes, 1.0)))
    best = None
    # What messages take, hardly anything to all of the shortest call, and the bursts of links: the sum is not convex.
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
        found = least_squares(residuals, start, loss="soft_l1", f_scale=LOSS_SCALE, bounds=BOUNDS, max_nfev=_MOST_TRIES)
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None  # all starts end somewhere
    return cost(best.x), float(best.cost)
