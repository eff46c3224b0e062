"""`IncrementalReplay`: the times of a graph, kept right while durations change; what cannot differ is not looked at."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats
from dpro_search.errors import InputError
from dpro_search.replay.engine import Engine, Run
from dpro_search.replay.kernels.repair import BLOCK, GAVE_UP, collective_state, latest_end, repair
from dpro_search.replay.layout import Layout
from dpro_search.replay.times import OpTimes, device_order
from dpro_search.space.replay_graph import Int32s, OrderPolicy

_IMPATIENCE = 12  # once one op in so many was mended by itself, a full replay is quicker


class IncrementalReplay:
    """Changes durations of an engine's graph and mends its times; equal to a full replay, to the last bit.

    Where the order within an instant matters (devices that serve by priority, ops without work on a device) and in graphs with
    flows or slow-downs, every change is a full replay.

    Attributes
    ----------
    mended
        Ops that the last change looked at; the number of all ops if it was a full replay.
    """

    def __init__(self, engine: Engine, *, sweep_after: int | None = None) -> None:
        """Begin with the engine's own replay.

        Parameters
        ----------
        sweep_after
            Ops that are mended one by one before sweeping over all later ones is considered, where most of them change; None: a
            share of all that has proved good.
        """
        self._sweep_after = max(512, len(engine.graph) // 32) if sweep_after is None else sweep_after
        self._engine = engine
        self._layout: Layout = engine.layout
        self._label = self._layout.label_of()
        self._duration_us = self._layout.duration_us.copy()
        count, layout = len(self._duration_us), self._layout
        blocks = -(-count // BLOCK)
        self._dirty, self._blocks = np.zeros(blocks * BLOCK, np.uint8), np.zeros(blocks, np.uint8)
        on_unbounded = layout.policy[layout.device] == OrderPolicy.UNBOUNDED
        sinks = np.diff(layout.succ_ptr)[:-1] == 0
        self._unbounded_sinks = np.flatnonzero(on_unbounded & sinks)
        self._can_mend = not engine.graph.is_fluid and not (layout.policy == OrderPolicy.PRIORITY).any()
        self.mended = 0
        self._adopt(engine.first)

    @property
    def makespan_us(self) -> float:
        """The latest end."""
        return float(latest_end(self._end_us, self._last, self._unbounded_sinks))

    def change(self, ops: npt.ArrayLike, duration_us: npt.ArrayLike) -> float:
        """Give ops new durations; returns the new makespan in us.

        Parameters
        ----------
        ops
            Op numbers, [any].
        duration_us
            Their new durations, [any].

        Raises
        ------
        InputError
            A duration is negative or not a number; nothing has changed then.
        GraphError
            The changed graph is a deadlock; nothing has changed then.
        """
        labels = self._label[np.atleast_1d(np.asarray(ops, np.int64))]
        values = np.atleast_1d(np.asarray(duration_us, np.float64))
        if len(labels) != len(values):
            raise InputError(f"{len(labels)} ops and {len(values)} durations")
        if not ((values >= 0) & np.isfinite(values)).all():
            raise InputError(f"a duration must be a number >= 0, not {values[~((values >= 0) & np.isfinite(values))][0]}")
        old = self._duration_us[labels]
        self._duration_us[labels] = values
        layout, count = self._layout, len(self._duration_us)
        self.mended = GAVE_UP
        if self._mendable:
            self.mended = repair(
                labels,
                self._duration_us,
                layout.device,
                layout.key,
                layout.pred_ptr,
                layout.pred_idx,
                layout.succ_ptr,
                layout.succ_idx,
                layout.policy,
                layout.collective,
                layout.part_ptr,
                layout.part,
                self._ready_us,
                self._start_us,
                self._end_us,
                self._moved_us,
                self._work_us,
                self._latest,
                self._before,
                self._behind,
                self._last,
                self._dirty,
                self._blocks,
                self._sweep_after,
                max(count // _IMPATIENCE, 64),
            )
        if self.mended == GAVE_UP:
            self.mended = count
            self._replay_all(labels, old)
        return self.makespan_us

    def times(self) -> OpTimes:
        """Times of every op, by op number."""
        run = Run(
            layout=self._layout,
            ready_us=self._ready_us,
            start_us=self._start_us,
            end_us=self._end_us,
            moved_us=self._moved_us,
            order=self._order(),
        )
        return run.times()

    def _order(self) -> Int32s:
        """Labels in the order of their starts: where mending was possible, ops without work are on unbounded devices, and labels
        order those."""
        return np.argsort(self._start_us, kind="stable").astype(np.int32) if self._mendable else self._full_order

    def _replay_all(self, labels: Int32s, old: Floats) -> None:
        try:
            self._adopt(self._engine.simulate(self._duration_us))
        except Exception:
            self._duration_us[labels] = old
            self._adopt(self._engine.simulate(self._duration_us))
            raise

    def _adopt(self, run: Run) -> None:
        """Go on from a full replay."""
        layout = self._layout
        self._full_order = run.order
        self._ready_us, self._start_us, self._end_us, self._moved_us = (
            column.copy() for column in (run.ready_us, run.start_us, run.end_us, run.moved_us)
        )
        unbounded = layout.policy == OrderPolicy.UNBOUNDED
        self._work_us, self._latest = np.empty(layout.collectives), np.empty(layout.collectives, np.int32)
        collective_state(self._duration_us, layout.part_ptr, layout.part, self._start_us, self._work_us, self._latest)
        self._before, self._last = device_order(layout.device, run.order, unbounded)
        self._behind = np.full(len(self._before), -1, np.int32)
        has = np.flatnonzero(self._before >= 0).astype(np.int32)
        self._behind[self._before[has]] = has
        takes_time = (self._end_us > self._start_us) | unbounded[layout.device]
        self._mendable = self._can_mend and bool(takes_time.all())
