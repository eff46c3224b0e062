"""`Engine`: replays one graph again and again, with its own or with other durations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.errors import InputError
from dpro_search.replay.kernels.compiled import kernel_of, simulated
from dpro_search.replay.kernels.layout import Layout, lay_out
from dpro_search.replay.kernels.retime import retime
from dpro_search.replay.kernels.times import Filled, OpTimes, device_order
from dpro_search.replay.steady import unrolled
from dpro_search.space.replay_graph import Int32s, OrderPolicy, ReplayGraph, csr


@dataclass(frozen=True, kw_only=True)
class LabelTimes:
    """Times by label of a layout: ready, start and end of each op, [n]; when each collective began to move data, [collectives].

    `order` holds the labels in the order in which they started, [n]. A re-timed order has the ready times of the replay that it
    comes from.
    """

    layout: Layout
    ready_us: Floats
    start_us: Floats
    end_us: Floats
    moved_us: Floats
    order: Int32s

    @property
    def makespan_us(self) -> float:
        """The latest end."""
        return float(self.end_us.max())

    def times(self) -> OpTimes:
        """Times by op number."""
        columns = [np.empty(len(self.start_us)) for _ in range(3)]
        for column, values in zip(columns, (self.ready_us, self.start_us, self.end_us), strict=True):
            column[self.layout.op_of] = values
        moved = columns[1]
        if self.layout.collectives:
            moved = moved.copy()
            parts = self.layout.part
            moved[self.layout.op_of[parts]] = self.moved_us[self.layout.collective[parts]]
        return OpTimes(
            ready_us=columns[0], start_us=columns[1], moved_us=moved, end_us=columns[2], order=self.layout.op_of[self.order]
        )


class Engine:
    """Replays of one graph. The first one finds the order in which ops run; ops are then laid out in that order.

    Attributes
    ----------
    graph
        What is replayed; of all iterations.
    layout
        Its arrays in order of execution.
    first
        The graph's own replay.
    """

    def __init__(self, graph: ReplayGraph, iterations: int = 1) -> None:
        """Validate, replay once and lay out.

        Raises
        ------
        GraphError
            For what cannot be replayed, a deadlock included.
        """
        graph.validate()
        self.graph = unrolled(graph, iterations)
        self.iterations = iterations
        self._lay_out(None)
        self.first = self._find_order()

    def simulate(self, duration_us: Floats | None = None) -> LabelTimes:
        """Replay, event by event.

        Parameters
        ----------
        duration_us
            Of each op by label (see `in_layout`), [n]; those of the graph if None.
        """
        return self._simulate(self.layout.duration_us if duration_us is None else duration_us)

    def retime(self, duration_us: Floats) -> LabelTimes:
        """The times under other durations, by label, [n], if every device keeps the order of the graph's own replay: one linear
        pass.

        Raises
        ------
        InputError
            The graph has flows or slow-downs: its times do not follow from an order.
        """
        if self.graph.is_fluid:
            raise InputError("a graph with flows or slow-downs cannot be re-timed: replay it")
        first, layout = self.first, self.layout
        start, end, moved = np.empty(len(duration_us)), np.empty(len(duration_us)), np.empty(layout.collectives)
        filled = Filled(first.ready_us, start, end, moved, first.order)
        retime(duration_us, layout, *self._executed, filled)
        return LabelTimes(layout=layout, **filled._asdict())

    def in_layout(self, duration_us: Floats) -> Floats:
        """Durations by op number, [n], as durations by label."""
        return duration_us[self.layout.op_of]

    @property
    def nbytes(self) -> int:
        """Bytes of the layout, and of a replay's times."""
        run = self.first
        return self.layout.nbytes + sum(a.nbytes for a in (run.ready_us, run.start_us, run.end_us, run.moved_us, run.order))

    @cached_property
    def _executed(self) -> tuple[Int32s, Int32s]:
        """Dependencies and, after them, the op that the same device served before: predecessors by label, CSR."""
        layout = self.layout
        count = len(layout.op_of)
        before, _ = device_order(layout.device, self.first.order, layout.policy == OrderPolicy.UNBOUNDED)
        follows = np.flatnonzero(before >= 0)
        needs = np.repeat(np.arange(count, dtype=np.int32), np.diff(layout.pred_ptr))
        return csr(np.concatenate((needs, follows)), np.concatenate((layout.pred_idx, before[follows])), count)

    def _lay_out(self, op_of: Int32s | None) -> None:
        self.layout = lay_out(self.graph, op_of)
        self._kernel = kernel_of(self.graph, self.layout)

    def _find_order(self) -> LabelTimes:
        """Replay once in the graph's own numbering, then lay out in the order of the starts."""
        run = self._simulate(self.layout.duration_us)
        self._lay_out(run.order)
        return LabelTimes(
            layout=self.layout,
            ready_us=run.ready_us[run.order],
            start_us=run.start_us[run.order],
            end_us=run.end_us[run.order],
            moved_us=run.moved_us,
            order=np.arange(len(run.order), dtype=np.int32),
        )

    def _simulate(self, duration_us: Floats) -> LabelTimes:
        return LabelTimes(layout=self.layout, **simulated(self.graph, self.layout, self._kernel, duration_us)._asdict())


class Retimed:
    """A valid graph that is replayed once with one set of durations after the other, of which only the end is needed."""

    def __init__(self, graph: ReplayGraph) -> None:
        self._graph, self._layout = graph, lay_out(graph)
        self._kernel = kernel_of(graph, self._layout)

    def end_us(self, duration_us: Floats) -> float:
        """The latest end under these durations, [ops]. Raises `GraphError` for a deadlock."""
        return float(simulated(self._graph, self._layout, self._kernel, duration_us[self._layout.op_of]).end_us.max())


def ends_us(graph: ReplayGraph, iterations: int, longer: Floats | None = None) -> Floats:
    """When each of some iterations of a valid graph ends, [iterations]: all that a prediction needs of a replay.

    What `Engine` prepares for further replays takes longer than this one. Raises `GraphError` for a deadlock.

    Parameters
    ----------
    longer
        How many times its duration each op takes in each iteration, [iterations, ops]; None: once.
    """
    whole = unrolled(graph, iterations)
    layout = lay_out(whole)
    duration_us = layout.duration_us if longer is None else layout.duration_us * longer.ravel()[layout.op_of]
    ends: Floats = simulated(whole, layout, kernel_of(whole, layout), duration_us).end_us.reshape(iterations, -1).max(axis=1)
    return ends
