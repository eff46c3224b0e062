"""Results of replays of several iterations, and their settled part."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpro_search.collect.trace import Floats, Ints
from dpro_search.replay.steady import halves_agree

WARMUP = 2  # iterations before those that count
DRAWS = 4096  # random numbers that a replay uses in turn
_Z_90 = 1.64  # standard deviations within which nine in ten values of a normal distribution lie
_MEDIAN_OVER_MEAN = 1.2533  # standard error of the median of normally distributed values over that of their mean
_BREAKDOWN = ("compute", "contention", "exposed_communication")  # rows of a breakdown


@dataclass(frozen=True, kw_only=True)
class IterationTimes:
    """Result of a replay; times in microseconds."""

    iteration_us: float  # Settled iteration time: median distance between the ends of iterations (the latest rank counts).
    # False: the two halves of the run disagree by more than 1 % beyond their noise, so `iteration_us` is not a steady state.
    settled: bool
    iterations_us: Floats = field(default_factory=lambda: np.zeros(0))  # Each distance after the warm-up, [iterations].
    # Per iteration on the rank that computes most: compute, contention (computing slower than alone), exposed communication.
    breakdown_us: dict[str, float] = field(default_factory=dict)
    rank_breakdown_us: tuple[dict[str, float], ...] = ()  # The same on every rank.
    # Half the interval that holds the median iteration in nine of ten cases: it varies with the steps of a run, and with durations
    # that are drawn anew; 0: not known.
    spread_us: float = 0.0
    # The interval that follows from what is replayed (the spread of recorded steps, say); None: `spread_us` in both directions.
    interval_us: tuple[float, float] | None = None
    floor_us: float = 0.0  # The least that an iteration can take; 0: not known.
    mean_us: float | None = None  # Mean of the recorded steps, which steps that stall make longer than the median; None: not known.


def sample_order(rng: np.random.Generator, samples: int, iterations: int) -> Ints:
    """Recorded step of each iteration, the warm-up's first: all of them equally often, in random order, [WARMUP + iterations]."""
    total = iterations + WARMUP
    return np.concatenate([rng.permutation(samples) for _ in range(-(-total // samples))])[:total].astype(np.int64)


def iteration_times(end_us: Floats, breakdown_us: Floats, class_of_rank: Ints | None = None) -> dict[str, Any]:
    """The fields of `IterationTimes`.

    Parameters
    ----------
    end_us
        End of each iteration on each class of ranks, [WARMUP + iterations, classes].
    breakdown_us
        Compute, contention, exposed communication of the whole run, [3, classes].
    class_of_rank
        Ranks that behave alike are of one class, [ranks]; None: each is its own.
    """
    distances = np.diff(end_us.max(axis=1)[WARMUP - 1 :])
    per_class = [dict(zip(_BREAKDOWN, row, strict=True)) for row in (breakdown_us.T / len(end_us)).tolist()]
    ranks = range(len(per_class)) if class_of_rank is None else class_of_rank.tolist()
    return {
        "iteration_us": float(np.median(distances)),
        "iterations_us": distances,
        "breakdown_us": per_class[int(breakdown_us[0].argmax())],
        "rank_breakdown_us": tuple(per_class[number] for number in ranks),
        "settled": halves_agree(distances),
        "spread_us": _Z_90 * _MEDIAN_OVER_MEAN * float(np.std(distances)) / math.sqrt(len(distances)),
    }
