"""The ranks' clocks, aligned by the ends of collectives; a clock that jumps is noticed and named."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpro_search.analysis.ranks.matching import Ints, matched
from dpro_search.collect.readers.stamps import RankStamps

_ALIGNING_STEPS = 32
_JUMP_STEPS = 3  # a clock has jumped when so many steps in a row agree
_LEAST_JUMP_NS = 1_000_000


class Clocks:
    """Offsets of the ranks' clocks.

    Ranks with one clock need none. The others are aligned by the median difference of the ends of all-rank collectives in the first
    steps: a collective ends on all ranks at almost the same moment. A difference that changes by more than twice the time that a
    collective takes, in three steps in a row, is a jump of that clock: it becomes a note, and the offset changes with it. A link
    that was slow from the first step on cannot be told from an offset.
    """

    def __init__(self, stamps: Sequence[RankStamps]) -> None:
        self._one = len({each.clock for each in stamps}) == 1
        self._ranks = [each.rank for each in stamps]
        self._current_ns: Ints | None = None
        self.notes: list[str] = []

    def offsets_ns(self, stamps: Sequence[RankStamps], steps: Ints) -> Ints:
        """Time by which each rank's clock is ahead of the first rank's, in ns, [n, R], in these n steps."""
        offsets = np.zeros((len(steps), len(stamps)), np.int64)
        if self._one:
            return offsets
        differences, blur_ns = _end_differences_ns(stamps, steps)
        if np.isnan(differences).all():
            self._note("clocks of several machines are not aligned: no collective joins all ranks")
            return offsets
        if self._current_ns is None:
            self._current_ns = np.nan_to_num(np.nanmedian(differences[:_ALIGNING_STEPS], axis=0)).astype(np.int64)
        for row in range(len(steps)):
            ahead = differences[row : row + _JUMP_STEPS] - self._current_ns
            agrees = len(ahead) == _JUMP_STEPS and not np.isnan(ahead).any()
            for place in np.flatnonzero(np.abs(ahead).min(axis=0) > blur_ns) if agrees else ():
                jump_ns = int(np.median(ahead[:, place]))
                self._note(f"the clock of rank {self._ranks[place]} jumped by {jump_ns / 1e6:.3g} ms at step {steps[row]}")
                self._current_ns[place] += jump_ns
            offsets[row] = self._current_ns
        return offsets

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _end_differences_ns(stamps: Sequence[RankStamps], steps: Ints) -> tuple[np.ndarray, float]:
    """Median difference of the ends on each rank to those on the first, [n, R], and how far ends may lie apart."""
    differences, durations_ns = np.full((len(steps), len(stamps)), np.nan), [float(_LEAST_JUMP_NS)]
    for _, places, rows in matched(stamps):
        if len(places) < len(stamps):
            continue
        at = np.argsort(places)
        ends = np.stack([rows[column]["enqueue_ns"] + rows[column]["ended_us"].astype(np.float64) * 1e3 for column in at], axis=1)
        durations_ns.append(2e3 * float(np.nanmedian(np.stack([part["ended_us"] for part in rows]).min(axis=0))))
        step = rows[0]["step"]
        for row, number in enumerate(steps.tolist()):
            part = ends[step == number]
            if len(part):
                differences[row] = np.median(part - part[:, :1], axis=0)
    return differences, max(durations_ns)
