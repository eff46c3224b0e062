"""Predicted durations with their intervals, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats, Ints


class PredictionOrigin(IntEnum):
    """PredictionOrigin of a predicted number."""

    INTERPOLATED = 0
    EXTRAPOLATED = 1  # outside what was measured: the interval is wider
    REFUSED = 2  # so far outside that nothing is predicted: the values are NaN


@dataclass(frozen=True, kw_only=True)
class Durations:
    """n predicted durations, us, with their intervals and origins."""

    us: Floats
    low_us: Floats
    high_us: Floats
    origin: Ints  # `PredictionOrigin`

    @staticmethod
    def of(us: Floats, half: Floats, *, outside: npt.NDArray[np.bool_], refused: npt.NDArray[np.bool_]) -> Durations:
        """Durations whose logarithms have intervals of these half widths, where they are not refused, [n] each."""
        answered = np.where(outside, PredictionOrigin.EXTRAPOLATED, PredictionOrigin.INTERPOLATED)
        origin = np.where(refused, PredictionOrigin.REFUSED, answered)
        us, low_us, high_us = (np.where(refused, np.nan, column) for column in (us, us * np.exp(-half), us * np.exp(half)))
        return Durations(us=us, low_us=low_us, high_us=high_us, origin=origin.astype(np.int64))


def conformal_quantile(scores: Floats, coverage: float) -> float:
    """The least width that holds for `coverage` of the sorted scores, with the correction for their number."""
    rank = int(np.ceil((len(scores) + 1) * coverage)) - 1
    return float(scores[min(rank, len(scores) - 1)])
