"""The order in which a search compiles the points of a program: meshes and values of choices, the most promising first.

A compilation takes minutes, and an estimate microseconds. So every point has an estimate, which follows from the points that were
compiled, and `CompileOrder` gives the point that is worth the next compilation until no estimate promises a faster step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dpro_search.kinds.xla.plans import Choices, Mesh, Point, combinations, meshes

MOST_COMPILED = 10
"""Programs that a search compiles unless it is told another number of trials, the captured one among them."""
_SETTLED = 1.3
"""A mesh that was not compiled yet is not worth it if its estimate is that many times the best step: estimates are off by less
(assumed)."""
_FASTER = 0.995
"""A point whose mesh was compiled is worth it if its estimate is at most that share of the best step: real runs differ by more
(assumed)."""
_MOST_REFUSED = 2
"""A value of a choice that never ran, and was refused so often, is left alone: the compiler may not know it at all (assumed)."""


class StepParts(NamedTuple):
    """Parts of a replayed step.

    Attributes
    ----------
    alone_us
        The step without the collectives that nothing hides.
    axes_us
        These collectives, for each axis of the mesh.
    memory_bytes
        The most memory that a device needs; None: not known.
    """

    alone_us: float
    axes_us: Mapping[str, float]
    memory_bytes: float | None = None

    @property
    def total_us(self) -> float:
        """The step."""
        return self.alone_us + sum(self.axes_us.values())


def estimated_us(mesh: Mesh, known: Sequence[tuple[Mesh, StepParts]]) -> float:
    """The step under a mesh, from those under other meshes; 0 without any.

    Computation is that of the nearest mesh. What the devices of an axis exchange is what the other axes have not split: its bytes
    grow as these shrink (parameters that tensor parallel ranks share, activations that replicas do not have). A ring of n moves
    (n - 1) / n of them. Each known mesh gives an estimate for an axis that it splits, and the least counts, because more of the
    same exchange may be hidden elsewhere; an axis that no known mesh splits counts nothing. So a mesh that may be fast is tried
    early.
    """
    if not known:
        return 0.0
    total_us = min(known, key=lambda each: _doublings(mesh, each[0]))[1].alone_us
    for axis, size in mesh.items():
        estimates_us = [
            parts.axes_us.get(axis, 0.0)
            * math.prod(base[other] / mesh[other] for other in mesh if other != axis)
            * ((1 - 1 / size) / (1 - 1 / base[axis]))
            for base, parts in known
            if base[axis] > 1
        ]
        total_us += min(estimates_us, default=0.0)
    return total_us


class CompileOrder:
    """Points of one script in the order in which they are worth a compilation.

    `tell` it the captured point, then compile what `ask` gives, and `tell` the result, until it gives None. Meshes and values of
    choices that no compiled point has take turns: a mesh with the least estimate, with values that ran; then one other value at
    the fastest point. As soon as each value was tried, the least estimate counts alone. Nothing is random.

    Parameters
    ----------
    captured
        The point to begin with.
    choices
        The texts of the values of each choice.

    Attributes
    ----------
    known
        Parts of the steps that were told; None: the point does not run.
    points
        All points.
    asked
        The point that `ask` gave last; None: none yet.
    """

    def __init__(self, captured: Point, choices: Choices) -> None:
        self._captured, self._choices = captured, choices
        shapes = [tuple(mesh.items()) for mesh in meshes(dict(captured.mesh))]
        self.points = [Point(mesh, chosen) for chosen in combinations(choices) for mesh in shapes]
        self.known: dict[Point, StepParts | None] = {}
        self.asked: Point | None = None
        self._running: dict[Point, StepParts] = {}
        self._ratios_of: dict[tuple[str, str, str], StepParts | None] = {}  # until something else is told

    def tell(self, point: Point, parts: StepParts | None) -> None:
        """Take the parts of a point's step; None: it does not run."""
        self.known[point] = parts
        if parts is not None:
            self._running[point] = parts
            self._ratios_of.clear()

    def ask(self) -> Point | None:
        """The point that is worth the next compilation; None: no other is."""
        changed, estimated = self._changed_value(), self._least_estimate()
        if changed is None or estimated is None:
            self.asked = changed or estimated
        else:  # they take turns, the mesh first
            self.asked = changed if len(self.known) % 2 == 0 else estimated
        return self.asked

    @property
    def best(self) -> tuple[Point, float] | None:
        """The fastest point, and its step in us; None: none runs."""
        steps_us = {point: parts.total_us for point, parts in self._running.items()}
        return min(steps_us.items(), key=lambda item: item[1], default=None)

    def estimate_us(self, point: Point) -> float:
        """The step of a point, from those that were told; 0: nothing is known.

        Compiled points count as what they would be with this point's values of choices: each part is multiplied by the ratio
        that the value brought where nothing else was changed. Of points with the same mesh only the one with the fewest changes
        counts; for another mesh all do.
        """
        return estimated_us(dict(point.mesh), self._with_values_of(point))

    def _left(self) -> Iterator[Point]:
        """Points that were not compiled, without those that need as much memory as one of the same mesh that did not run."""
        refused = [point for point, parts in self.known.items() if parts is None]
        for point in self.points:
            if point not in self.known and not any(self._needs_as_much(point, other) for other in refused):
                yield point

    def _changed_value(self) -> Point | None:
        """The fastest point with one value that no running point has; None: there is no such value, or it was refused."""
        if self.best is None:
            return None
        ran = {pair for point in self._running for pair in point.chosen}
        best, left = self.best[0], set(self._left())
        for name, texts in self._choices.items():
            for text in texts:
                point = Point(best.mesh, tuple((dict(best.chosen) | {name: text}).items()))
                refusals = sum((name, text) in refused.chosen for refused in self.known if self.known[refused] is None)
                if (name, text) not in ran and point in left and refusals < _MOST_REFUSED:
                    return point
        return None

    def _least_estimate(self) -> Point | None:
        """The point with the least estimate among those whose values ran, if that is below what is worth a compilation."""
        ran = {pair for point in self._running for pair in point.chosen}
        best, best_us = self.best or (self._captured, math.inf)
        meshes_run = {point.mesh for point in self._running}
        refusals = [point.mesh for point, parts in self.known.items() if parts is None]
        ranked = []
        for point in self._left():
            if ran and not ran.issuperset(point.chosen):
                continue
            new_mesh = point.mesh not in meshes_run
            step_us = self.estimate_us(point)
            if step_us <= (_SETTLED if new_mesh else _FASTER) * best_us:
                # A mesh on which other points do not run comes later, but is not given up: other values may need less memory.
                later = _SETTLED ** refusals.count(point.mesh) if new_mesh else 1.0
                near = _changes(best, point) + _doublings(dict(point.mesh), dict(self._captured.mesh))
                ranked.append((step_us * later, near, point))
        return min(ranked, default=(0.0, 0.0, None), key=lambda each: each[:2])[2]

    def _with_values_of(self, point: Point) -> list[tuple[Mesh, StepParts]]:
        """The compiled points' meshes and parts as they would be with a point's values, those with the fewest changes first."""
        unknown = {base: sum(self._ratios(*change) is None for change in _differences(base, point)) for base in self._running}
        bases = sorted(unknown, key=lambda base: (unknown[base], _changes(base, point)))
        if same_mesh := [base for base in bases if base.mesh == point.mesh]:
            bases = same_mesh[:1]
        elif bases:
            bases = [base for base in bases if unknown[base] == unknown[bases[0]]]
        return [(dict(base.mesh), self._moved(self._running[base], base, point)) for base in bases]

    def _moved(self, parts: StepParts, base: Point, point: Point) -> StepParts:
        for change in _differences(base, point):
            ratios = self._ratios(*change)
            if ratios is not None:
                axes_us = {axis: us * ratios.axes_us.get(axis, 1.0) for axis, us in parts.axes_us.items()}
                parts = StepParts(parts.alone_us * ratios.alone_us, axes_us)
        return parts

    def _ratios(self, name: str, before: str, after: str) -> StepParts | None:
        """Ratios of the parts of a step that another value of one choice brings; None: no two points show it."""
        change = name, before, after
        if change not in self._ratios_of:
            self._ratios_of[change] = self._compared(*change)
        return self._ratios_of[change]

    def _compared(self, name: str, before: str, after: str) -> StepParts | None:
        """The ratios, from all pairs of points that differ in this value alone: a part's sum with it over that without it.

        Sums are compared, not ratios averaged, so that a part that is small counts little.
        """
        pairs = [
            (parts, self._running[other])
            for point, parts in self._running.items()
            if (name, before) in point.chosen
            and (other := Point(point.mesh, tuple((dict(point.chosen) | {name: after}).items()))) in self._running
        ]
        if not pairs:
            return None
        memory = [(one.memory_bytes or 0.0, other.memory_bytes or 0.0) for one, other in pairs]
        return StepParts(
            _ratio([(one.alone_us, other.alone_us) for one, other in pairs]),
            {
                axis: _ratio([(one.axes_us.get(axis, 0.0), other.axes_us.get(axis, 0.0)) for one, other in pairs])
                for axis, _ in self._captured.mesh
            },
            _ratio(memory) if all(all(each) for each in memory) else None,
        )

    def _needs_as_much(self, point: Point, refused: Point) -> bool:
        """Whether a point is known to need no less memory than one with the same mesh that does not run."""
        if point.mesh != refused.mesh:
            return False
        ratio = 1.0
        for change in _differences(refused, point):
            ratios = self._ratios(*change)
            if ratios is None or ratios.memory_bytes is None:
                return False
            ratio *= ratios.memory_bytes
        return ratio >= 1


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """The sum of the second numbers over that of the first; 1 where that is nothing."""
    before, after = (sum(each) for each in zip(*pairs, strict=True))
    return after / before if before else 1.0


def _differences(base: Point, point: Point) -> list[tuple[str, str, str]]:
    """The choices in which a point differs from another: name, the other's value, and its own."""
    return [(name, before, after) for (name, before), (_, after) in zip(base.chosen, point.chosen, strict=True) if before != after]


def _changes(base: Point, point: Point) -> int:
    return len(_differences(base, point))


def _doublings(mesh: Mesh, other: Mesh) -> float:
    """Doublings and halvings between two meshes."""
    return sum(abs(math.log2(mesh[axis] / other[axis])) for axis in mesh)
