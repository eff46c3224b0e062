"""Programs of a kernel that are worth measuring on a new device."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
from sklearn.cluster import KMeans
from sklearn.preprocessing import StandardScaler

from dpro_search.costmodel.programs.latency import logs
from dpro_search.errors import InputError

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
Choice = Literal["kmeans", "determinantal", "expected-error", "random"]
CHOICES: tuple[Choice, ...] = ("kmeans", "determinantal", "expected-error", "random")
_TIMES_COUNT = 2.0  # Times on other devices tell more of what a program does than its columns.
_POOL = 1500  # programs among which the last two ways choose, drawn at random


def chosen(columns: Floats, others_us: Floats, count: int, *, seed: int = 0, way: Choice = "kmeans") -> Places:
    """Places of `count` programs to measure, [count].

    "kmeans" takes the program nearest to each centre of clusters (CDMPP), "determinantal" those that are least alike (greedy
    maximum of the determinant of their covariance: Chen et al. 2018), "expected-error" those after which the errors of all
    programs are expected to be least (greedy, by the same covariance).

    Parameters
    ----------
    columns, others_us
        As of `ProgramLatency.fit`.

    Raises
    ------
    InputError
        There are fewer programs than are asked for.
    """
    if not 0 < count <= len(columns):
        raise InputError(f"{count} programs were asked for, of {len(columns)} that there are")
    points = space(columns, others_us)
    random = np.random.default_rng(seed)
    if way == "random":
        return np.sort(random.choice(len(points), count, replace=False))
    if way == "kmeans":
        return _nearest_to_centres(points, count, seed)
    pool = np.sort(random.choice(len(points), max(min(_POOL, len(points)), count), replace=False))
    return pool[_greedy(points[pool], count, expected_error=way == "expected-error")]


def space(columns: Floats, others_us: Floats) -> Floats:
    """Points whose distances say how unlike programs are, [n, columns + devices]."""
    parts = [(columns, 1.0), (logs(others_us), _TIMES_COUNT)]
    return np.column_stack(
        [weight * StandardScaler().fit_transform(part) / np.sqrt(part.shape[1]) for part, weight in parts if part.shape[1]]
    )


def _nearest_to_centres(points: Floats, count: int, seed: int) -> Places:
    distance = KMeans(n_clusters=count, n_init=1, random_state=seed).fit(points).transform(points)
    taken: list[int] = []
    for cluster in range(count):
        taken.append(next(int(place) for place in np.argsort(distance[:, cluster]) if int(place) not in taken))
    return np.array(taken)


def _greedy(points: Floats, count: int, *, expected_error: bool) -> Places:
    """Greedy choice by a Gaussian covariance that is as wide as points are apart in the median."""
    squared = _squared(points)
    left = np.exp(-squared / np.median(squared))
    noise = 1e-2
    taken: list[int] = []
    for _ in range(count):
        variance = np.maximum(np.diagonal(left), 0.0)
        gain = (left**2).sum(axis=0) / (variance + noise) if expected_error else variance.copy()
        gain[taken] = -np.inf
        place = int(np.argmax(gain))
        taken.append(place)
        left = left - np.outer(left[:, place], left[place]) / (variance[place] + noise)
    return np.array(taken)


def _squared(points: Floats) -> Floats:
    size = (points**2).sum(axis=1)
    return np.asarray(np.maximum(size[:, None] + size[None, :] - 2 * points @ points.T, 0.0))
