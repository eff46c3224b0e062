"""`GroupingReplay`: the iteration times of one data-parallel job under groupings of its tensors, as often as a search asks.

A search changes little from one plan to the next, and asks for one number. So the job is laid out once; a grouping is an array of
numbers; and no more is replayed than differs from a grouping that was replayed before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpro_search.collect.trace import Floats, Ints
from dpro_search.errors import InputError
from dpro_search.replay.kernels.group_packing import packed
from dpro_search.replay.kernels.group_state import Grouping, Snapshots, State, fill_slots, state_sizes
from dpro_search.replay.kernels.groups import find, run
from dpro_search.replay.replayer import replay
from dpro_search.replay.steady import settled_distance
from dpro_search.space.coarse import coarsened
from dpro_search.space.data_parallel import DataParallelJob
from dpro_search.space.folding import classes
from dpro_search.space.group_work import group_work, why_not
from dpro_search.space.job_graph import build_rows
from dpro_search.space.replay_graph import Int32s

_FIRST_TRY, _LAST_TRY = 8, 64  # iterations, as in `replay`
_BASES = 8  # groupings whose snapshots are kept: of several chains' states, and of some plans that they tried
_SNAPSHOTS = 4  # of each
_OPS_A_TENSOR = 10  # from so many compute ops on, snapshots cost less than they save


@dataclass(frozen=True, kw_only=True)
class Shortcuts:
    """What a replay may leave out. The times are the same with and without each."""

    coarsen: bool = True  # Ops that nothing can come between are one op (`space/coarse.py`).
    symmetry: bool = True  # Ranks that provably behave alike are one (`space/folding.py`).
    # A replay goes on from a snapshot of another grouping's, taken before the two begin to differ. None: where that pays, with many
    # ops of compute for each tensor.
    partial: bool | None = None


class GroupingReplay:
    """Replays of a job under groupings.

    Attributes
    ----------
    job
        What is replayed, but for its groups.
    why_not
        Why each grouping's graph is built and replayed after all, with neither coarse ops nor snapshots; None: it is not.
    """

    def __init__(self, job: DataParallelJob, shortcuts: Shortcuts | None = None) -> None:
        shortcuts = shortcuts or Shortcuts()
        self.why_not = why_not(job)
        if shortcuts.coarsen and self.why_not is None:
            job = replace(job, steps=tuple(coarsened(step) for step in job.steps))
        self.job = job
        self._row_of_rank = classes(job) if shortcuts.symmetry else np.arange(job.ranks)
        self._rank = np.unique(self._row_of_rank, return_index=True)[1]
        self._carries = any(len(step.carry_src) for step in job.steps)
        self._partial = shortcuts.partial
        self._runs: dict[int, _Runs] = {}

    @property
    def resumed(self) -> int:
        """Replays so far that went on from a snapshot of another one, or found the whole of it."""
        return sum(runs.resumed for runs in self._runs.values())

    @property
    def rows(self) -> int:
        """Ranks that are replayed."""
        return len(self._rank)

    def iteration_us(self, group_of: Ints) -> float:
        """The settled iteration time.

        Parameters
        ----------
        group_of
            Group of each tensor, any numbers from 0 to tensors - 1, [tensors]. A group is posted when its last tensor is made;
            of groups that are posted together the one that ends with the lower tensor goes first.

        Raises
        ------
        InputError
            That is no grouping of the job's tensors.
        GraphError
            The job cannot be replayed.
        """
        tensors = len(self.job.tensor_bytes)
        if len(group_of) != tensors or group_of.min() < 0 or group_of.max() >= tensors:
            raise InputError(f"a grouping has a number from 0 to {tensors - 1} for each of {tensors} tensors")
        if self.why_not is not None:
            return self._replayed(group_of)
        found = self._of(1).makespan(group_of)
        if found is None:
            return self._replayed(group_of)  # which says what is wrong
        makespan_us, afresh = found
        if afresh or not self._carries:
            return makespan_us
        iterations = _FIRST_TRY
        while True:
            iteration_us, settled = settled_distance(self._of(iterations).ends_us(group_of))
            if settled or iterations >= _LAST_TRY:
                return iteration_us
            iterations *= 2

    def times_us(self, group_of: Ints) -> tuple[Ints, Floats, Floats] | None:
        """The last tensor of each tensor's group, when each tensor is made, and when its group is back, on the rank that is last.

        Of the first iteration, [tensors] each; None where graphs are built.
        """
        return None if self.why_not is not None else self._of(1).times_us(group_of)

    def _of(self, iterations: int) -> _Runs:
        if iterations not in self._runs:
            self._runs[iterations] = _Runs(self.job, self._rank, self._row_of_rank, iterations, self._partial)
        return self._runs[iterations]

    def _replayed(self, group_of: Ints) -> float:
        members: dict[int, list[int]] = {}
        for tensor, group in enumerate(group_of.tolist()):
            members.setdefault(group, []).append(tensor)
        groups = tuple(sorted((tuple(group) for group in members.values()), key=lambda group: group[-1]))
        return replay(build_rows(replace(self.job, groups=groups), self._rank, self._row_of_rank)).iteration_us


class _Runs:
    """Replays of some iterations, with the snapshots of the last ones; snapshots are only of use where there is one iteration."""

    def __init__(self, job: DataParallelJob, rank: Ints, row_of_rank: Ints, iterations: int, partial: bool | None) -> None:
        work = group_work(job, rank, row_of_rank, iterations)
        tensors, cells, ops, devices = len(work.tensor_bytes), len(work.makers), len(work.duration_us), len(work.in_program)
        self._work, self._iterations = packed(work), iterations
        self._tensor_bytes = work.tensor_bytes[: tensors // iterations].astype(np.float64)
        numbers = [np.empty(tensors, np.int32) for _ in range(3)]
        self._grouping = Grouping(numbers[0], numbers[1], numbers[2], np.empty(tensors))
        ints, floats, flags, line = state_sizes(work)
        self._state = State(
            np.empty(ints, np.int32), np.empty(floats), np.empty(flags, np.uint8), np.empty(line, np.int32), np.empty(line)
        )
        first_end = 1 + devices + 2 * tensors
        self._ends_us = self._state.floats[first_end : first_end + iterations]
        self._tensor_us = np.empty(cells)
        self._scratch = (
            np.empty(ops + 3 * cells, np.int32), np.empty(cells, np.int32), np.empty(devices, np.int32),
            np.zeros(devices, np.bool_), np.empty(cells),
        )  # fmt: skip
        if partial is None:
            partial = ops >= _OPS_A_TENSOR * cells
        bases = _BASES if partial and iterations == 1 and not work.meets else 0
        room = bases * _SNAPSHOTS
        self._snapshots = Snapshots(
            np.empty((room, ints), np.int32), np.empty((room, floats)), np.empty((room, flags), np.uint8),
            np.empty((room, line), np.int32), np.empty((room, line)),
        )  # fmt: skip
        self._taken_us = np.empty(_SNAPSHOTS)
        self._every_us = np.inf
        self._base_slots = np.full((bases, tensors), -1, np.int32)
        self._base_tensor_us = np.empty((bases, cells))
        self._snapshot_us = np.full((bases, _SNAPSHOTS), np.inf)
        self._snapshot_rows = [list[int]() for _ in range(bases)]
        self._known = [(0.0, False)] * bases
        self._used = [0] * bases  # when each base was last of use
        self._clock = 0
        self._shares = [0] * room  # bases that have each row of the snapshots
        self._free = list(range(room))
        self.resumed = 0

    def makespan(self, group_of: Ints) -> tuple[float, bool] | None:
        """When the last op ends, and whether the next iteration starts afresh then; None: the job cannot go on."""
        base, snapshot = self._find(group_of)
        kept: list[int] = []
        if base >= 0:
            self._clock += 1
            self._used[base] = self._clock
            self.resumed += 1
            if snapshot < 0:
                return self._known[base]
            kept = self._snapshot_rows[base][: snapshot + 1]
            kept_us = self._snapshot_us[base, : snapshot + 1].copy()
            self._tensor_us[:] = self._base_tensor_us[base]
        if not self._used:
            taken, makespan_us, afresh = self._run(-1, np.zeros(0, np.int32))
            return None if taken < 0 else (makespan_us, afresh)
        oldest = min(range(len(self._used)), key=self._used.__getitem__)
        for row in kept:
            self._shares[row] += 1
        self._forget(oldest)
        rows = self._free[: _SNAPSHOTS - len(kept)]
        taken, makespan_us, afresh = self._run(kept[-1] if kept else -1, np.array(rows, np.int32))
        new = rows[: max(taken, 0)]
        del self._free[: len(new)]
        for row in new:
            self._shares[row] = 1
        self._snapshot_rows[oldest] = kept + new
        if taken < 0:
            self._forget(oldest)
            return None
        if kept:
            self._snapshot_us[oldest, : len(kept)] = kept_us
        self._snapshot_us[oldest, len(kept) : len(kept) + taken] = self._taken_us[:taken]
        self._base_slots[oldest] = self._grouping.slot_of
        self._base_tensor_us[oldest] = self._tensor_us
        self._known[oldest] = makespan_us, afresh
        self._clock += 1
        self._used[oldest] = self._clock
        self._every_us = makespan_us / (_SNAPSHOTS + 1)
        return makespan_us, afresh

    def times_us(self, group_of: Ints) -> tuple[Ints, Floats, Floats]:
        """See `GroupingReplay.times_us`."""
        self._find(group_of)
        self._run(-1, np.zeros(0, np.int32))
        rows = (-1, len(group_of))
        slot_of = self._grouping.slot_of
        group_us = self._scratch[-1].reshape(rows)[:, slot_of].max(axis=0)
        return slot_of.astype(np.int64), self._tensor_us.reshape(rows).max(axis=0), group_us

    def ends_us(self, group_of: Ints) -> Floats:
        """When each iteration ends, [iterations]."""
        self._find(group_of)
        self._run(-1, np.zeros(0, np.int32))
        return self._ends_us.copy()

    def _find(self, group_of: Ints) -> tuple[int, int]:
        """Fill in the grouping; base and snapshot from which it can go on, see `nearest`."""
        if not self._used:  # `find` takes seconds to compile
            fill_slots(group_of, self._tensor_bytes, self._iterations, self._grouping)
            return -1, -1
        bases = self._base_slots, self._base_tensor_us, self._snapshot_us
        arguments: tuple[Any, ...] = (*self._work, group_of, *self._grouping, *bases)
        found: tuple[int, int] = find(*arguments)
        return found

    def _run(self, from_row: int, rows: Int32s) -> tuple[int, float, bool]:
        last = self._tensor_us, from_row, rows, self._taken_us, self._every_us
        arguments: tuple[Any, ...] = (*self._work, *self._grouping, *self._state, *self._snapshots, *self._scratch, *last)
        found: tuple[int, float, bool] = run(*arguments)
        return found

    def _forget(self, base: int) -> None:
        """Give up a base, and the snapshots that no other has."""
        for row in self._snapshot_rows[base]:
            self._shares[row] -= 1
            if self._shares[row] == 0:
                self._free.append(row)
        self._snapshot_rows[base] = []
        self._snapshot_us[base] = np.inf
        self._base_slots[base, 0] = -1
