"""`OpPattern`: ops that a graph repeats for many things, with other devices, durations and sizes for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats, Ints
from dpro_search.graph.dataflow import OpKind
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.replay_graph import Int32s

Each = float | Ints | Int32s | Floats  # one value for all things, or one for each, [things]
Mask = npt.NDArray[np.bool_]


class _Op(NamedTuple):
    device: Each
    duration_us: Each
    name: str
    kind: OpKind
    priority: Each
    flow_bytes: Each
    links: Sequence[Each]
    after: Sequence[int | Ints]
    since: Ints | Int32s | None
    where: Mask | None


class OpPattern:
    """Collects the ops of one thing; `into` adds them for all things, one thing after the other.

    The graph is the one that `GraphBuilder.add_op` makes of the same ops in the same order, in a fraction of the time.

    >>> builder, pattern = GraphBuilder(), OpPattern(["a", "b"])
    >>> sent = pattern.add(builder.add_device(), np.array([3.0, 4.0]), "send")
    >>> taken = pattern.add(builder.add_device(), 1.0, "take", after=[sent])
    >>> pattern.into(builder)[:, taken].tolist()
    [1, 3]
    >>> list(builder.build().names)
    ['a.send', 'a.take', 'b.send', 'b.take']
    """

    def __init__(self, things: Sequence[str]) -> None:
        """Names of the things."""
        self._things = things
        self._ops: list[_Op] = []

    def add(
        self,
        device: Each,
        duration_us: Each,
        name: str,
        *,
        kind: OpKind = OpKind.COMM,
        priority: Each = 0,
        flow_bytes: Each = 0.0,
        links: Sequence[Each] = (),
        after: Sequence[int | Ints] = (),
        since: Ints | Int32s | None = None,
        where: Mask | None = None,
    ) -> int:
        """One op of every thing; returns its place in the pattern.

        Parameters
        ----------
        after
            Places of the ops that it needs, the same for all things or one for each, [things].
        since
            An op of the graph that each thing's needs as well, [things].
        where
            Things that have this op; None: all.
        """
        self._ops.append(_Op(device, duration_us, name, kind, priority, flow_bytes, links, after, since, where))
        return len(self._ops) - 1

    def into(self, builder: GraphBuilder) -> Int32s:
        """Add the ops of all things; returns their numbers, [things, places], -1 where a thing has no such op."""
        shape = len(self._things), len(self._ops)
        exists = np.ones(shape, np.bool_)
        for place, op in enumerate(self._ops):
            if op.where is not None:
                exists[:, place] = op.where
        numbers = np.full(shape, -1, np.int32)
        most = max(len(op.links) for op in self._ops)
        numbers[exists] = builder.add_ops(
            self._column([op.device for op in self._ops], np.int32)[exists],
            self._column([op.duration_us for op in self._ops], np.float64)[exists],
            kind=self._column([int(op.kind) for op in self._ops], np.int8)[exists],
            priority=self._column([op.priority for op in self._ops], np.int32)[exists],
            flow_bytes=self._column([op.flow_bytes for op in self._ops], np.float64)[exists],
            links=np.stack(
                [
                    self._column([op.links[k] if k < len(op.links) else -1 for op in self._ops], np.int32)[exists]
                    for k in range(most)
                ],
                axis=-1,
            )
            if most
            else None,
            name="{0}",
            axes=(_Names(self._things, [op.name for op in self._ops], np.flatnonzero(exists)),),
        )
        self._add_edges(builder, numbers)
        return numbers

    def _column(self, values: Sequence[Each], dtype: type[np.generic]) -> npt.NDArray[np.generic]:
        """Values by place, as rows of things."""
        column = np.empty((len(values), len(self._things)), dtype)
        for row, value in zip(column, values, strict=True):
            row[:] = value
        return column.T

    def _add_edges(self, builder: GraphBuilder, numbers: Int32s) -> None:
        things = np.arange(len(numbers))
        source: list[Ints | Int32s] = []
        place: list[int] = []
        for number, op in enumerate(self._ops):
            source += [numbers[:, before] if isinstance(before, int) else numbers[things, before] for before in op.after]
            source += [] if op.since is None else [op.since]
            place += [number] * (len(source) - len(place))
        if source:
            needs = numbers[:, place]
            builder.add_edges(np.stack(source, axis=1)[needs >= 0], needs[needs >= 0])


class _Names:
    """Names of ops, spelled when they are needed: an axis of names."""

    def __init__(self, things: Sequence[str], ops: Sequence[str], at: Ints) -> None:
        self._things, self._ops, self._at = things, ops, at

    def __len__(self) -> int:
        return len(self._at)

    def __getitem__(self, index: int, /) -> str:
        thing, place = divmod(int(self._at[index]), len(self._ops))
        return f"{self._things[thing]}.{self._ops[place]}"
