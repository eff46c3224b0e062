"""Which ops to fuse, by what a cost model says of each cluster: ``fused(step, slacks_us) -> clusters``.

What a step takes is the sum of its parts, each a cluster or an op by itself, so that a change costs what its parts cost and no
replay. Neighbours are fused first, best first, and where that is not sure to pay: a pair of ops may gain nothing, and the larger
cluster that it leads to much. Then ops change places as long as that pays, which takes back what did not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dpro_search.collect.trace import Ints
from dpro_search.space.transformations.compute import ComputeGraph

Part = tuple[str, ...]  # ops in the order of the graph

_ROUNDS = 40  # at most, of moves that do not touch each other
_LEAST_US = 1e-3  # that a move must gain, so that moves come to an end


class Step(NamedTuple):
    """The ops that may be fused."""

    compute: ComputeGraph
    beside: Mapping[str, Sequence[str]]  # Of each op that may be in a cluster, those that use its result or make what it uses.
    costs_us: Callable[[Sequence[Part]], Sequence[float]]  # What parts take, each on its own; not finite: it cannot be.
    place: Mapping[str, int]  # Place of each op in the graph.


class _Move(NamedTuple):
    """Parts of the same ops before and after."""

    old: tuple[Part, ...]
    new: tuple[Part, ...]


def fused(step: Step, slacks_us: Sequence[float]) -> list[Part]:
    """Clusters that make the step as short as moves of single ops can, and can all run at one time each.

    Parameters
    ----------
    slacks_us
        What fusing two parts may cost at first; the best of what these lead to counts.
    """
    best = min((_fused(step, slack_us) for slack_us in slacks_us), key=_StepParts.us)  # the first of equals
    return [part for part in best.parts() if len(part) > 1]


def _fused(step: Step, slack_us: float) -> _StepParts:
    parts = _StepParts(step)
    contraction = step.compute.contraction()
    parts.improve(parts.fusions, lambda move: contraction.fuse(parts.ops(move.new[0])), least_us=_LEAST_US - slack_us)
    parts.improve(parts.changes, parts.keep_order, least_us=_LEAST_US)
    return parts


class _StepParts:
    """A step's ops as parts: at first, each by itself."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self.home: dict[str, Part] = {name: (name,) for name in step.beside}
        self._cost_us: dict[Part, float] = {}
        self._clusters = 0  # that were labelled

    def parts(self) -> list[Part]:
        """All parts."""
        return list(dict.fromkeys(self.home.values()))

    def us(self) -> float:
        """Duration of the step."""
        return sum(self._cost_us[part] for part in self.parts())

    def improve(self, moves_of: Callable[[Part], Iterable[_Move]], may: Callable[[_Move], bool], *, least_us: float) -> None:
        """Make moves that gain at least so much, best first, until none is left.

        Parameters
        ----------
        moves_of
            Moves that change a part.
        may
            Whether a move is possible; it is made then.
        """
        gains: dict[_Move, float] = {}
        of_part: dict[Part, list[_Move]] = {}
        touched = self.parts()
        self._price(touched)
        for _ in range(_ROUNDS):
            moves = dict.fromkeys(move for part in touched for move in moves_of(part))
            self._price([part for move in moves for part in (*move.old, *move.new)])
            for move in moves:
                gain_us = sum(self._cost_us[part] for part in move.old) - sum(self._cost_us[part] for part in move.new)
                if gain_us >= least_us:
                    gains[move] = gain_us
                    for part in move.old:
                        of_part.setdefault(part, []).append(move)
            made: list[_Move] = []
            gone: set[Part] = set()
            for move in sorted(gains, key=lambda move: (-gains[move], move)):
                if gone.isdisjoint(move.old):
                    if may(move):
                        made.append(move)
                        gone.update(move.old)
                    else:
                        del gains[move]  # what is in the way stays there as long as its parts do
            for part in gone:
                for move in of_part.pop(part, ()):
                    gains.pop(move, None)
            touched = [part for move in made for part in move.new]
            self.home.update((name, part) for part in touched for name in part)
            if not made:
                return

    def fusions(self, part: Part) -> Iterator[_Move]:
        """A part with each of those beside it."""
        for other in dict.fromkeys(self.home[name] for op in part for name in self._step.beside[op]):
            if other != part:
                yield _Move(tuple(sorted((part, other))), (self._ordered(part + other),))

    def changes(self, part: Part) -> Iterator[_Move]:
        """An op that goes to the next part, or out, and a cluster that is cut, or dissolved."""
        for op in part:
            for name in self._step.beside[op]:
                other = self.home[name]
                if other != part:
                    if len(part) > 1:
                        yield self._moved(op, part, other)
                    if len(other) > 1:
                        yield self._moved(name, other, part)
        if len(part) > 1:
            yield _Move((part,), tuple((op,) for op in part))
            for out, op in enumerate(part):
                yield _Move((part,), tuple(sorted(((op,), part[:out] + part[out + 1 :]))))
            for cut in range(2, len(part) - 1):
                yield _Move((part,), (part[:cut], part[cut:]))

    def keep_order(self, move: _Move) -> bool:
        """Make a move if there is an order that runs each cluster at one time."""
        ops = np.concatenate([self.ops(part) for part in move.old], axis=1)
        before = self._labels[ops]
        for part in move.new:
            self._label(part)
        if self._step.compute.is_acyclic_with(self._labels):
            return True
        self._labels[ops] = before
        return False

    @cached_property
    def _labels(self) -> Ints:
        """Number of the cluster of each op on its rank, -1: none, [ops]."""
        self._labels = np.full(len(self._step.compute.graph), -1, dtype=np.int64)
        for part in self.parts():
            self._label(part)
        return self._labels

    def _label(self, part: Part) -> None:
        """Tell the ops of a part that they are one."""
        ops = self.ops(part)
        self._labels[ops] = -1
        if len(part) > 1:
            self._labels[ops] = self._clusters * len(ops) + np.arange(len(ops))[:, None]
            self._clusters += 1

    def ops(self, part: Part) -> Ints:
        """Numbers of a part's ops, [ranks, ops]."""
        return np.array([self._step.compute.ops[name] for name in part], dtype=np.int64).T

    def _moved(self, op: str, source: Part, target: Part) -> _Move:
        left = tuple(name for name in source if name != op)
        return _Move(tuple(sorted((source, target))), tuple(sorted((left, self._ordered((*target, op))))))

    def _ordered(self, names: Iterable[str]) -> Part:
        return tuple(sorted(names, key=self._step.place.__getitem__))

    def _price(self, parts: Iterable[Part]) -> None:
        new = [part for part in dict.fromkeys(parts) if part not in self._cost_us]
        for part, us in zip(new, self._step.costs_us(new), strict=True):
            self._cost_us[part] = us if math.isfinite(us) else math.inf
