"""`CollectivePrices`: what a collective of a type and a size would take on the recorded cluster, from the job's own collectives.

Latency plus bytes over a rate, fitted by type to the medians of each size (least squares of the relative error, neither negative).
Where one size was recorded only its rate is known; the latency is taken as 0, and the error as large as if all of it were latency
for half the size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import CollectiveKind
from dpro_search.errors import InputError

_LEAST_ERROR = 0.1  # relative; of a price between recorded sizes (empirical: buckets of one job differ by that)
_ERROR_OF_ONE_SIZE = 0.5


@dataclass(frozen=True)
class _LinearTime:
    latency_us: float
    us_per_byte: float
    error: float
    sizes: int


class CollectivePrices:
    """Durations by type; `recorded` holds (bytes of the whole tensor, us without waiting for others) by type."""

    def __init__(self, recorded: Mapping[CollectiveKind, Sequence[tuple[int, float]]]) -> None:
        self._lines = {kind: line for kind, points in recorded.items() if (line := _fitted(points)) is not None}

    def price_us(self, kind: CollectiveKind, size_bytes: float) -> float:
        """Duration once all ranks take part; raises `InputError` for a type that the job does not have with a known size."""
        line = self._line(kind)
        return line.latency_us + line.us_per_byte * size_bytes

    def error(self, kind: CollectiveKind) -> float:
        """Relative standard error of a price."""
        return self._line(kind).error

    def knows(self, kind: CollectiveKind) -> bool:
        """Whether the job has collectives of a type with known sizes."""
        return kind in self._lines

    @property
    def doubts(self) -> tuple[str, ...]:
        """Assumptions of predictions, a sentence for each type of which only one size was recorded."""
        return tuple(
            f"{kind.name.lower().replace('_', '-')}s of one size were recorded: others are priced without latency, an error of "
            f"{_ERROR_OF_ONE_SIZE:.0%}"
            for kind, line in self._lines.items()
            if line.sizes == 1
        )

    def _line(self, kind: CollectiveKind) -> _LinearTime:
        if kind not in self._lines:
            name = kind.name.lower().replace("_", "-")
            raise InputError(f"the trace has no {name} with a known size: what one takes cannot be told")
        return self._lines[kind]


def _fitted(points: Sequence[tuple[int, float]]) -> _LinearTime | None:
    usable = [(size, us) for size, us in points if size > 0 and us > 0]
    if not usable:
        return None
    by_size: dict[int, list[float]] = {}
    for size, us in usable:
        by_size.setdefault(size, []).append(us)
    sizes = np.array(sorted(by_size), np.float64)
    median_us = np.array([np.median(by_size[int(size)]) for size in sizes])
    if len(sizes) == 1:
        return _LinearTime(0.0, float(median_us[0] / sizes[0]), _ERROR_OF_ONE_SIZE, 1)
    columns = np.stack((1 / median_us, sizes / median_us), axis=1)  # of the relative error
    latency_us, us_per_byte = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)[0].tolist()
    if us_per_byte < 0:
        latency_us, us_per_byte = float(np.median(median_us)), 0.0
    elif latency_us < 0:
        latency_us, us_per_byte = 0.0, float(1 / np.mean(sizes / median_us))
    residual = (latency_us + us_per_byte * sizes) / median_us - 1
    return _LinearTime(latency_us, us_per_byte, max(float(np.sqrt(np.mean(residual**2))), _LEAST_ERROR), len(sizes))
