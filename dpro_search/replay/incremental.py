"""`IncrementalReplay`: the times of a graph, kept right while the graph changes; what cannot differ is not looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Ints
from dpro_search.errors import DproSearchError, InputError
from dpro_search.replay.engine import Engine, Run
from dpro_search.replay.kernels.repair import BLOCK, GAVE_UP, collective_state, latest_end, repair
from dpro_search.replay.rows import Rows
from dpro_search.replay.times import OpTimes, device_order
from dpro_search.space.replay_graph import Int32s, OrderPolicy, ReplayGraph, csr

_NEVER = 2**62
_IMPATIENCE = 12  # once one op in so many was mended by itself, a full replay is quicker


class IncrementalReplay:
    """Changes durations and dependencies of an engine's graph and mends its times; equal to a full replay, to the last bit.

    Two tensors are fused, say, by giving one all-reduce the fused duration and the producers of both, and the other no work
    and no op that needs it.

    Where the order within an instant matters (devices that serve by priority; ops on a device that take no time and that others
    need) and in graphs with flows or slow-downs, every change is a full replay.

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
        count = len(engine.graph)
        blocks = -(-count // BLOCK)
        self._dirty, self._blocks = np.zeros(blocks * BLOCK, np.uint8), np.zeros(blocks, np.uint8)
        self._sweep_after_asked = max(512, count // 32) if sweep_after is None else sweep_after
        self.mended = 0
        self._unbounded_sinks: Ints = np.zeros(0, np.int64)
        self._begin(engine)

    @property
    def makespan_us(self) -> float:
        """The latest end."""
        return float(latest_end(self._end_us, self._last, self._unbounded_sinks))

    def change(
        self,
        ops: npt.ArrayLike = (),
        duration_us: npt.ArrayLike = (),
        *,
        needs: Mapping[int, Sequence[int]] | None = None,
    ) -> float:
        """Give ops new durations, or new predecessors; returns the new makespan in us.

        Parameters
        ----------
        ops, duration_us
            Op numbers and their new durations, [any].
        needs
            Op number -> the ops that it needs from now on.

        Raises
        ------
        InputError
            A duration is negative or not a number, or an op does not exist; nothing has changed then.
        GraphError
            The changed graph is a deadlock; nothing has changed then.
        """
        labels = self._labels(np.atleast_1d(np.asarray(ops, np.int64)))
        values = np.atleast_1d(np.asarray(duration_us, np.float64))
        if len(labels) != len(values):
            raise InputError(f"{len(labels)} ops and {len(values)} durations")
        if len(values) and not (values.min() >= 0 and values.max() < np.inf):
            raise InputError(f"a duration must be a number >= 0, not {values[~((values >= 0) & np.isfinite(values))][0]}")
        wanted = {}
        for op, sources in (needs or {}).items():
            wanted[int(self._labels(np.array([op]))[0])] = self._labels(np.array(sources, np.int64))
        old_values = self._duration_us[labels]
        old_needs = {label: self._pred.row(label).copy() for label in wanted}
        self._duration_us[labels] = values
        rewired = np.array(self._rewire(wanted), np.int32)
        self.mended = self._mend(labels, rewired) if self._mendable else GAVE_UP
        if self.mended == GAVE_UP:
            self.mended = len(self._duration_us)
            try:
                self._replay_all()
            except DproSearchError:
                self._duration_us[labels] = old_values
                self._rewire(old_needs)
                self._replay_all()
                raise
        return self.makespan_us

    def times(self) -> OpTimes:
        """Times of every op, by op number."""
        run = Run(
            layout=self._engine.layout,
            ready_us=self._ready_us,
            start_us=self._start_us,
            end_us=self._end_us,
            moved_us=self._moved_us,
            order=self._order(),
        )
        return run.times()

    def graph(self) -> ReplayGraph:
        """The graph as changed."""
        op_of, count = self._engine.layout.op_of, len(self._duration_us)
        duration = np.empty(count)
        duration[op_of] = self._duration_us
        ptr, idx = self._pred.compact()
        needs = np.repeat(op_of, np.diff(ptr))
        pred_ptr, pred_idx = csr(needs, op_of[idx], count)
        return replace(self._engine.graph, duration_us=duration, pred_ptr=pred_ptr, pred_idx=pred_idx)

    def _labels(self, ops: Ints) -> Int32s:
        if len(ops) and (ops.min() < 0 or ops.max() >= len(self._label)):
            raise InputError(f"there is no op {int(ops[(ops < 0) | (ops >= len(self._label))][0])} among {len(self._label)}")
        return self._label[ops]

    def _rewire(self, wanted: Mapping[int, Int32s]) -> list[int]:
        """Give labels other predecessors; returns the labels of all ops of which a row changed."""
        touched = list(wanted)
        for label, sources in wanted.items():
            for source in self._pred.row(label).tolist():
                self._succ.remove(source, label)
                touched.append(source)
            for source in sources.tolist():
                self._succ.add(source, label)
                touched.append(source)
            self._pred.replace(label, sources)
        if wanted:
            self._rewired = True
            self._sweep_after = _NEVER  # labels no longer follow the dependencies, which a sweep relies on
            sinks = [op for op in touched if self._on_unbounded[op] and self._succ.begin[op] == self._succ.end[op]]
            self._unbounded_sinks = np.append(self._unbounded_sinks, np.array(sinks, np.int64))
        return touched

    def _mend(self, changed: Int32s, rewired: Int32s) -> int:
        layout = self._engine.layout
        mended: int = repair(
            changed,
            rewired,
            self._duration_us,
            layout.device,
            layout.key,
            self._pred.begin,
            self._pred.end,
            self._pred.idx,
            self._succ.begin,
            self._succ.end,
            self._succ.idx,
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
            max(len(self._duration_us) // _IMPATIENCE, 64),
        )
        return mended

    def _order(self) -> Int32s:
        """Labels in the order of their starts.

        Where mending was possible, ops that take no time and that others need are on unbounded devices: labels order those.
        """
        if not self._mendable:
            return self._full_order
        if self._rewired:
            return self._label[Engine(self.graph()).first.times().order]
        return np.lexsort((self._end_us, self._start_us)).astype(np.int32)

    def _replay_all(self) -> None:
        if self._rewired:
            self._begin(Engine(self.graph()))
        else:
            self._adopt(self._engine.simulate(self._duration_us))

    def _begin(self, engine: Engine) -> None:
        """Begin with an engine's own replay."""
        layout, count = engine.layout, len(engine.graph)
        self._engine = engine
        self._label = layout.label_of()
        self._duration_us = layout.duration_us.copy()
        self._pred = Rows(layout.pred_ptr, layout.pred_idx)
        self._succ = Rows(layout.succ_ptr[: count + 1], layout.succ_idx[: layout.succ_ptr[count]])
        self._rewired, self._sweep_after = False, self._sweep_after_asked
        self._on_unbounded = layout.policy[layout.device] == OrderPolicy.UNBOUNDED
        self._unbounded_sinks = np.flatnonzero(self._on_unbounded & (self._succ.begin == self._succ.end))
        self._can_mend = not engine.graph.is_fluid and not (layout.policy == OrderPolicy.PRIORITY).any()
        self._adopt(engine.first)

    def _adopt(self, run: Run) -> None:
        """Go on from a full replay."""
        layout = self._engine.layout
        self._full_order = run.order
        self._ready_us, self._start_us, self._end_us, self._moved_us = (
            column.copy() for column in (run.ready_us, run.start_us, run.end_us, run.moved_us)
        )
        self._work_us, self._latest = np.empty(layout.collectives), np.empty(layout.collectives, np.int32)
        collective_state(self._duration_us, layout.part_ptr, layout.part, self._start_us, self._work_us, self._latest)
        self._before, self._last = device_order(layout.device, run.order, layout.policy == OrderPolicy.UNBOUNDED)
        self._behind = np.full(len(self._before), -1, np.int32)
        has = np.flatnonzero(self._before >= 0).astype(np.int32)
        self._behind[self._before[has]] = has
        orderly = (self._end_us > self._start_us) | self._on_unbounded | (self._succ.begin == self._succ.end)
        self._mendable = self._can_mend and bool(orderly.all())
