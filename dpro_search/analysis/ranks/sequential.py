"""A sequential test: which columns of a series exceed a threshold far more often than those that are alike would by chance.

In each step a column (a rank's own time beyond its peers', as a share of the step) hits if it exceeds ``max(least, 1.5 noise)``. A
column is named when its hits among the last n steps have a probability below `_FALSE_ALARM` under the rate at which unnamed columns
hit. The binomial bound needs no shape of the noise. It does need independent steps: therefore n steps last `_LEAST_S` at least, so
that a pause of a moment is no slow rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

_FALSE_ALARM = 5e-6  # of a column in one window
_LEAST_STEPS, _MOST_STEPS = 12, 200
_LEAST_S = 0.8
_NOISES, _NOISES_OF_LARGEST = 1.5, 1.0  # a hit exceeds so many standard deviations of the noise
_NOISE_STEPS = 64  # over which the noise is taken
_RATE_STEPS = 256  # over which the rate of hits is taken
_LEAST_RATE, _LEAST_RATE_LARGE = 0.07, 0.005
_UNSEEN_HITS = 2  # hits that are added to those seen, so that few steps do not make a rate look small
_LEAST_SHARE, _LEAST_LARGE_HITS = 0.7, 4  # of the hits and the large hits of a window, below which no column is named
_LARGE = 2.5  # a large hit exceeds so many thresholds, and `_LEAST_LARGE` of a step
_LEAST_LARGE = 0.08
_LEAST_JITTER_US = 3000.0
"""A delay that counts as jitter lasts so long at least: a time slice of Linux's scheduler (`base_slice_ns`, 2.8 to 3 ms with few
cores). A healthy rank loses one now and then to other programs."""
_QUIET_STEADY, _QUIET_JITTER = 10, 14  # steps without lateness after which it is over
_NEAR = 0.4  # of the mean lateness
_STEADY = 0.6  # coefficient of variation below which a lateness is steady


@dataclass(frozen=True, kw_only=True)
class Excess:
    """One named column: since which step (counted back from the last), its values and the steps' lengths since then."""

    column: int
    steps_ago: int
    values: Floats
    lengths_us: Floats
    steady: bool
    false_alarm: float


class Exceedance:
    """The test on C columns, fed step by step.

    Parameters
    ----------
    columns
        Number C of columns.
    least
        Least size worth naming, as a share of a step.
    one_of_all
        Only the largest column of a step may hit: columns that share a cause, like the links of neighbours.
    """

    def __init__(self, columns: int, least: float, *, one_of_all: bool = False) -> None:
        self._least, self._one_of_all = least, one_of_all
        self._room = np.zeros((4 * _RATE_STEPS, columns))
        self._hit_room, self._large_room, self._clean_room = (np.zeros(self._room.shape, bool) for _ in range(3))
        self._count = 0
        self._values, self._hits, self._large = self._room[:0], self._hit_room[:0], self._large_room[:0]
        self._clean = self._clean_room[:0]  # neither named, nor in the steps before it was named
        self._noise_now = 0.0
        self._lengths_us: list[float] = []
        self.active = np.zeros(columns, bool)
        self._false_alarm = np.ones(columns)
        self._since = np.zeros(columns, np.int64)  # steps ago

    def push(self, values: Floats, length_us: float) -> None:
        """Take the next step: each column's excess as a share of the step, [C], and the length of the step."""
        threshold = max(self._least, (_NOISES_OF_LARGEST if self._one_of_all else _NOISES) * self._noise())
        hits = values > threshold
        large = values > max(_LARGE * threshold, _LEAST_LARGE, _LEAST_JITTER_US / max(length_us, 1.0))
        if self._one_of_all:
            largest = np.arange(len(values)) == values.argmax()
            hits, large = hits & largest, large & largest
        self._keep(values, hits, large, length_us)
        self._since += 1
        self._decide()

    def _keep(self, values: Floats, hits: Flags, large: Flags, length_us: float) -> None:
        """Append a row to the tables, whose room is used again when it is full."""
        if self._count == len(self._room):
            for table in (self._room, self._hit_room, self._large_room, self._clean_room):
                table[:_RATE_STEPS] = table[-_RATE_STEPS:]
            self._count = _RATE_STEPS
        row, self._count = self._count, self._count + 1
        self._room[row], self._hit_room[row], self._large_room[row], self._clean_room[row] = values, hits, large, ~self.active
        rows = slice(max(self._count - _RATE_STEPS, 0), self._count)
        self._values, self._hits, self._large, self._clean = (
            table[rows] for table in (self._room, self._hit_room, self._large_room, self._clean_room)
        )
        self._lengths_us = [*self._lengths_us[1 - _RATE_STEPS :], length_us]

    @property
    def clean(self) -> Flags:
        """Steps of each column that show how it is when it is not slow, the last `_NOISE_STEPS` of them, [n, C]."""
        return self._clean[-_NOISE_STEPS:]

    def named(self) -> list[Excess]:
        """The columns that are slow now."""
        named = []
        for column in np.flatnonzero(self.active).tolist():
            values, _ = self._span(column)
            steady = self._is_steady(column)
            if not steady and not self._is_jitter(column, values):
                continue  # neither steady nor large: noise with a mean
            named.append(
                Excess(
                    column=column,
                    steps_ago=int(self._since[column]),
                    values=values,
                    lengths_us=np.array(self._lengths_us[-len(values) :]),
                    steady=steady,
                    false_alarm=float(self._false_alarm[column]),
                )
            )
        return named

    def _window(self) -> int:
        typical_us = float(np.median(self._lengths_us[-_NOISE_STEPS:]))
        return int(np.clip(math.ceil(_LEAST_S * 1e6 / max(typical_us, 1.0)), _LEAST_STEPS, _MOST_STEPS))

    def _noise(self) -> float:
        """Standard deviation of clean values, by their median deviation; taken anew every eighth step."""
        if self._count % 8 == 1 or len(self._values) < _LEAST_STEPS:
            self._noise_now = self._noise_of_now()
        return self._noise_now

    def _noise_of_now(self) -> float:
        recent = np.where(self._clean, self._values, np.nan)[-_NOISE_STEPS:]
        recent = recent[:, (~np.isnan(recent)).sum(axis=0) >= 4]
        if not recent.size:
            return 0.0
        return 1.4826 * float(np.nanmedian(np.abs(recent - np.nanmedian(recent, axis=0))))

    def _decide(self) -> None:
        window = self._window()
        if len(self._values) < _LEAST_STEPS or len(self._values) < window:
            return
        spread_window = max(window, 20)
        hits, large = self._hits[-window:], self._large[-spread_window:]
        many, some = hits.sum(axis=0) >= _LEAST_SHARE * window, large.sum(axis=0) >= _LEAST_LARGE_HITS
        if not self.active.any() and not many.any() and not some.any():
            return  # the usual case: the probabilities below need not be computed
        rate, large_rate = self._rate(self._hits, _LEAST_RATE), self._rate(self._large, _LEAST_RATE_LARGE)
        steady = binom.sf(hits.sum(axis=0) - 1, window, rate)
        seldom = np.where(_scattered(large), binom.sf(large.sum(axis=0) - 1, len(large), large_rate), 1.0)
        enough_jitter = some & (self._values[-spread_window:].mean(axis=0) >= max(2 * self._noise(), 2 * self._least))
        enough = many & (np.median(self._values[-window:], axis=0) >= self._least)
        by_jitter = (seldom < _FALSE_ALARM) & enough_jitter
        begins = ~self.active & (((steady < _FALSE_ALARM) & enough) | by_jitter)
        for column in np.flatnonzero(begins).tolist():
            self._since[column] = self._began(column, spread_window)
            if not enough_jitter[column] and not self._is_steady(column):
                continue  # neither steady nor large: noise with a mean
            self.active[column] = True
            self._clean[-self._since[column] :, column] = False
        self._false_alarm[begins] = np.minimum(steady, seldom)[begins]
        for column in np.flatnonzero(self.active & ~begins).tolist():
            if self._is_over(column):
                self.active[column] = False

    def _is_jitter(self, column: int, values: Floats) -> bool:
        """Whether a lateness that is not steady is large: in its mean, and in several steps by what no healthy rank loses."""
        large = self._large[-len(values) :, column]
        return bool(values.mean() >= max(2 * self._noise_now, 2 * self._least) and large.sum() >= _LEAST_LARGE_HITS)

    def _is_over(self, column: int) -> bool:
        """Whether the lateness ended: at most one of the last steps comes near to its mean."""
        values, hits = self._span(column)
        level = float(values[hits].mean()) if hits.any() else 0.0
        quiet = _QUIET_STEADY if self._is_steady(column) else _QUIET_JITTER
        last, last_hits = self._values[-quiet:, column], self._hits[-quiet:, column]
        return int((last_hits & (last > _NEAR * level)).sum()) <= 1

    def _span(self, column: int) -> tuple[Floats, Flags]:
        """Values and hits since the lateness began."""
        ago = int(min(self._since[column], len(self._values)))
        return self._values[-ago:, column], self._hits[-ago:, column]

    def _is_steady(self, column: int) -> bool:
        """Whether the lateness, in us, is about equal in all steps from its begin to its last hit, of which the last 24 count."""
        values, hits = self._span(column)
        us = values * np.array(self._lengths_us[-len(values) :])
        if not hits.any():
            return True
        near = hits & (us > _NEAR * us[hits].mean())
        until = len(hits) - int(near[::-1].argmax())
        recent = us[max(until - 24, 0) : until]
        return bool(recent.std() < _STEADY * abs(recent.mean()))

    def _rate(self, hits: Flags, least: float) -> float:
        """Rate at which unnamed columns hit, the last steps left out: there may be what is to be named."""
        clean = self._clean[:-_LEAST_STEPS]
        return max((int((hits[:-_LEAST_STEPS] & clean).sum()) + _UNSEEN_HITS) / max(int(clean.sum()), 1), least)

    def _began(self, column: int, window: int) -> int:
        """Steps since the change: the most likely one for a shift of the mean (CUSUM)."""
        values = self._values[-window - 8 :, column]
        middle = float(np.mean(values[-_LEAST_STEPS:])) / 2
        gain = np.cumsum((values - middle)[::-1])
        return int(gain.argmax()) + 1


def _scattered(hits: Flags) -> Flags:
    """Columns whose hits lie between steps without a hit: at most four fifths of a span of ten steps and more."""
    first, last = hits.argmax(axis=0), len(hits) - 1 - hits[::-1].argmax(axis=0)
    span = last - first + 1
    scattered: Flags = (span >= 10) & (hits.sum(axis=0) <= 0.8 * span)
    return scattered
