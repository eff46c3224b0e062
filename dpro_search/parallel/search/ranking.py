"""`ranked`: strategies that fit in memory in the order of bounds on their steps, most of them without a look at their details.

The tree of `Candidates` is opened where its bound is least: a shape becomes its cuts, a cut its splits, each with the bound of all
its costs. A split whose turn comes must fit in memory; one that does not comes back with as little recomputation as makes it fit.
Splits of one cut that `family` calls alike have the same passes: only the one with the least bound is given.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from enum import IntEnum

from dpro_search.errors import InputError
from dpro_search.parallel.search.bounds import PassBounds, least_us
from dpro_search.parallel.search.candidates import Candidates, recomputing
from dpro_search.parallel.steps.step_prices import StepPrices
from dpro_search.parallel.strategy import DETAILS, Strategy, key_without

RELAXED = 0.005
"""Share of a step: if less communication than this is exposed, strategies that can only hide communication are skipped."""


class _Level(IntEnum):
    SHAPE = 0
    CUT = 1
    SPLIT = 2
    FITS = 3


def family(strategy: Strategy) -> Hashable:
    """A value that is equal for strategies of which a list of different plans has only one, with these details at their best."""
    return key_without(strategy, DETAILS)


def ranked(
    candidates: Candidates,
    steps: StepPrices,
    limit_bytes: float = math.inf,
    settled: Callable[[Hashable, float], bool] = lambda family, bound_us: False,
) -> Iterator[tuple[Strategy, float]]:
    """Strategies, with a time that their step cannot be below, the least first; those that do not fit are left out.

    `settled` tells of a family and a bound that no such strategy is worth a look.
    """
    return iter(_Ranking(candidates, steps, limit_bytes, settled))


class _Ranking:
    def __init__(
        self, candidates: Candidates, steps: StepPrices, limit_bytes: float, settled: Callable[[Hashable, float], bool]
    ) -> None:
        self._candidates, self._steps, self._limit_bytes, self._settled = candidates, steps, limit_bytes, settled
        self._bounds = PassBounds(steps)
        self._waiting: list[tuple[float, int, _Level, int, Strategy]] = []
        self._numbers = itertools.count()
        self._done: set[tuple[int, Hashable]] = set()  # cuts and families of which a split was given

    def __iter__(self) -> Iterator[tuple[Strategy, float]]:
        for shape in self._candidates.shapes():
            self._add(_Level.SHAPE, shape, 0.0)
        while self._waiting:
            bound_us, number, level, cut, strategy = heapq.heappop(self._waiting)
            if level >= _Level.SPLIT and (cut, family(strategy)) in self._done:
                continue
            if level is _Level.FITS:
                self._done.add((cut, family(strategy)))
                yield strategy, bound_us
            elif level is _Level.SHAPE:
                self._cut(strategy, bound_us)
            elif level is _Level.CUT:
                self._split(strategy, bound_us, number)
            else:
                self._fitting(strategy, bound_us, number, cut)

    def _cut(self, shape: Strategy, bound_us: float) -> None:
        leanest = self._candidates.leanest(shape)
        if leanest is None or self._steps.least_memory_bytes(leanest) > self._limit_bytes:
            return
        for cut in self._candidates.cuts(shape):
            self._add(_Level.CUT, cut, bound_us)

    def _split(self, cut: Strategy, passes_us: float, number: int) -> None:
        if not self._can_fit(cut):
            return
        for split in self._candidates.splits(cut):
            plain_us = self._add(_Level.SPLIT, split, passes_us, number)
            if plain_us > passes_us * (1 + RELAXED):
                for other in self._candidates.relaxed(split):
                    self._add(_Level.SPLIT, other, passes_us, number)

    def _fitting(self, split: Strategy, bound_us: float, number: int, cut: int) -> None:
        """A split as it is, or with as little recomputation as makes it fit, unless neither is worth a look."""
        again = [replace(split, recompute=kind) for kind in self._candidates.choices.recompute]
        recomputed = all(self._settled(family(strategy), bound_us) for strategy in again)
        if recomputed and self._settled(family(split), bound_us):
            return
        if self._fits(split):
            heapq.heappush(self._waiting, (bound_us, number, _Level.FITS, cut, split))
        elif not recomputed and not self._recomputed(split, bound_us, cut):
            lean = next((each for each in self._candidates.offloaded(split)[1:] if self._fits(each)), None)
            if lean is not None:
                self._add(_Level.FITS, lean, bound_us, cut)

    def _recomputed(self, split: Strategy, bound_us: float, cut: int) -> bool:
        """Whether recomputation makes a split fit; memory falls with each of `recomputations`."""
        options = self._candidates.recomputations(split)
        if not options or not self._fits(recomputing(split, options[-1])):
            return False
        place = bisect_left(options, True, hi=len(options) - 1, key=lambda again: self._fits(recomputing(split, again)))
        self._add(_Level.FITS, recomputing(split, options[place]), bound_us, cut)
        return True

    def _can_fit(self, cut: Strategy) -> bool:
        """Whether the split of a cut that needs least memory fits, with all that can be computed again."""
        leanest = self._candidates.leanest(cut)
        if leanest is None:
            return False
        options = self._candidates.recomputations(leanest)
        return self._fits(recomputing(leanest, options[-1]) if options else leanest)

    def _fits(self, strategy: Strategy) -> bool:
        return self._steps.fits(strategy, self._limit_bytes)

    def _add(self, level: _Level, strategy: Strategy, least: float, cut: int = -1) -> float:
        """Put a strategy among those that wait, with its bound, which is at least that of where it comes from."""
        try:
            bound_us = max(self._bound_us(level, strategy), least)
        except InputError:  # a group does not fit on the cluster
            return math.inf
        heapq.heappush(self._waiting, (bound_us, next(self._numbers), level, cut, strategy))
        return bound_us

    def _bound_us(self, level: _Level, strategy: Strategy) -> float:
        if level is _Level.SHAPE:
            ring = [replace(strategy, cp_ring=True)] if strategy.cp > 1 and self._candidates.choices.rings else []
            return min(self._bounds.shape_us(each) for each in (strategy, *ring))
        if level is _Level.CUT:
            return self._bounds.cut_us(strategy)
        return least_us(self._steps.costs(strategy), strategy)
