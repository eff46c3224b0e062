"""Operations of a parameter server's profile, matched to keys: the operations carry none.

A server copies the first worker's part of a key, adds the others', and updates the parameter. An operation can only have been on a
key between the workers' sending it and their having it back; of the assignments that this leaves, the one with the least total
deviation is taken (Kuhn, The Hungarian method, 1955).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.collect.readers.event_table import EventTable
from dpro_search.collect.readers.mxnet.files import Profile, Span
from dpro_search.collect.recorded_names import role_in_server
from dpro_search.collect.trace import ClockReport, CollectiveKind, EventKind, Floats, Ints

Key = tuple[int, int]  # step and parameter
Round = tuple[int, ...]  # events of a part of a key: the first worker's copy (or -1), sums, and the update or the copy of the sum
Served = dict[Key, list[Round]]

_COPY, _UPDATE = "CopyCPU2CPU", "_update"
_WIRE_STREAM = 200
_IMPOSSIBLE = 1e30
_GRAIN_US = 10.0  # lengths are distinguished above this
_SCALE_US = 1_000.0  # waiting of this length weighs as much as being e times as long as expected


@dataclass(kw_only=True)
class Comm:
    """A gradient on its way in one step, on one worker; epoch microseconds of its clock."""

    event: int
    parameter: int
    node: int  # whose backward made it; -1: not known
    producer: int  # event of that backward, -1: not known
    consumer: int = -1  # the first event that uses what came back
    step: int
    start_us: float
    end_us: float


class ServerWork:
    """Adds the events of servers, and of the ways between them and the workers.

    Parameters
    ----------
    table
        Events so far, at epoch times less `base_us`.
    common
        Of each key that all workers sent, its communication on every worker.
    tensors
        Tensor of each parameter.
    unmatched
        Counts what belongs to no key.
    least_size, name
        Of a parameter: elements that it has at least, and what it is called.
    first_collective
        The first free number of a collective.
    """

    def __init__(
        self,
        table: EventTable,
        *,
        base_us: float,
        clock: ClockReport,
        common: Mapping[Key, Sequence[Comm]],
        workers: int,
        tensors: Mapping[int, int],
        unmatched: Counter[str],
        least_size: Callable[[int], int],
        name: Callable[[int], str],
        first_collective: int,
    ) -> None:
        self._table, self._base_us, self._clock, self._common, self._workers = table, base_us, clock, common, workers
        self._tensors, self._unmatched, self._least_size, self._parameter_name = tensors, unmatched, least_size, name
        self._collectives = first_collective

    def add_server(self, rank: int, profile: Profile, parts: Mapping[int, Sequence[int]] | None = None) -> Served:
        """Work of a server.

        Parameters
        ----------
        parts
            Elements of each part of each parameter that the server has; None: it may have one of each.
        """
        events = [
            self._table.add(op.name, EventKind.SERVER, rank=rank, stream=op.thread, role=role_in_server(op.name), **self._span(op))
            for op in profile.ops
        ]
        starts = np.array([op.start_us for op in profile.ops])
        rounds = self._rounds(profile)
        after = {i for members in rounds for i in members}
        copies = np.array([i for i, op in enumerate(profile.ops) if op.name == _COPY and i not in after], np.int64)
        first = np.array([members[0] for members in rounds], np.int64)
        served_by_key: Served = {}
        in_steps = np.zeros(len(events), np.bool_)
        for keys, pushed, returned in self._windows(self._clock.offset_us[rank]):
            inside = (pushed.min() <= starts) & (starts <= returned.max())
            in_steps |= inside
            window = [rounds[i] for i in np.flatnonzero(inside[first])]
            # One column for each part that can be here.
            of = {i: [self._least_size(keys[i][1])] if parts is None else parts.get(keys[i][1], ()) for i in range(len(keys))}
            column = np.array([i for i, sizes in of.items() for _ in sizes], np.int64)
            size = np.array([size for sizes in of.values() for size in sizes], np.float64)
            part_keys = [keys[i] for i in column]
            of_step = self._match_rounds(
                profile, events, window, part_keys, size, pushed.max(axis=1)[column], returned.min(axis=1)[column]
            )
            self._match_copies(profile, events, copies[inside[copies]].tolist(), of_step, keys, pushed.min(axis=1))
            served_by_key |= of_step
        for key, served in served_by_key.items():
            for event in (event for members in served for event in members if event >= 0):
                self._table.step[event], self._table.tensor[event] = key[0], self._tensors[key[1]]
        matched = {event for served in served_by_key.values() for members in served for event in members}
        without_key = [event not in matched for event in events]
        self._unmatched["operations of a server in profiled steps matched to no key"] += int(np.sum(without_key & in_steps))
        return served_by_key

    def _rounds(self, profile: Profile) -> list[list[int]]:
        """Operations on one part: the sums, up to its update.

        Where workers update: the sums of all but the first worker's part, and the copy of the result, which is the thread's next
        operation.
        """
        updates = any(_UPDATE in op.name for op in profile.ops)
        copies = sum(op.name == _COPY for op in profile.ops)
        copied_back = not updates and copies * (self._workers - 1) > 1.5 * (len(profile.ops) - copies)
        rounds: list[list[int]] = [[]]
        for i, op in enumerate(profile.ops):
            if op.name == _COPY:
                if copied_back and len(rounds) > 1 and not rounds[-1] and rounds[-2][-1] == i - 1:
                    rounds[-2].append(i)
                continue
            rounds[-1].append(i)
            if _UPDATE in op.name if updates else len(rounds[-1]) == self._workers - 1:
                rounds.append([])
        return rounds[:-1]

    def _windows(self, offset_us: float) -> list[tuple[list[Key], Floats, Floats]]:
        """Keys of each step and when each worker sent and had them, [keys, workers], on the clock of a rank of that offset."""
        by_step: dict[int, list[Key]] = defaultdict(list)
        for key in self._common:
            by_step[key[0]].append(key)
        windows = []
        for keys in by_step.values():
            moved = np.array(self._clock.offset_us[: self._workers]) - offset_us
            pushed = np.array([[comm.start_us for comm in self._common[key]] for key in keys]) - moved
            returned = np.array([[comm.end_us for comm in self._common[key]] for key in keys]) - moved
            windows.append((keys, pushed, returned))
        return windows

    def _match_rounds(
        self,
        profile: Profile,
        events: Sequence[int],
        rounds: Sequence[Sequence[int]],
        keys: Sequence[Key],
        size: Floats,
        after_us: Floats,
        before_us: Floats,
    ) -> Served:
        """The sum and update of a part lie between the last worker's push and the first worker's return, and near to both."""
        begin = np.array([profile.ops[members[0]].start_us for members in rounds])
        done = np.array([profile.ops[members[-1]].end_us for members in rounds])
        after, before = begin[:, None] - after_us, before_us - done[:, None]
        # The larger of parts that may have come in any order took longer.
        longer = np.log(done - begin + _GRAIN_US)[:, None] * np.log(1 + size)
        rounds_of_key: Served = {}
        for members, part in zip(
            rounds, _assigned((after**2 + before**2) / _SCALE_US**2 - longer, (after >= 0) & (before >= 0)), strict=True
        ):
            if part >= 0:
                rounds_of_key.setdefault(keys[part], []).append((-1, *(events[i] for i in members)))
                for earlier, later in pairwise(members):
                    self._table.need(events[earlier], events[later])
        return rounds_of_key

    def _match_copies(
        self,
        profile: Profile,
        events: Sequence[int],
        copies: Sequence[int],
        served: Served,
        keys: Sequence[Key],
        pushed_us: Floats,
    ) -> None:
        """The copy of a part's first worker lies between its push and its sum, and moves as many bytes as the sum."""
        known = [(key, i, pushed) for key, pushed in zip(keys, pushed_us, strict=True) for i in range(len(served.get(key, ())))]
        pushed = np.array([pushed for *_, pushed in known])
        sums = [served[key][i][1] for key, i, _ in known]
        summed = np.array([self._table.start_us[event] + self._base_us for event in sums])
        sum_us = np.array([self._table.end_us[event] - self._table.start_us[event] for event in sums])
        begin = np.array([profile.ops[i].start_us for i in copies])
        done = np.array([profile.ops[i].end_us for i in copies])
        longer = np.log((done - begin + _GRAIN_US)[:, None] / (sum_us + _GRAIN_US))
        possible = (begin[:, None] >= pushed) & (done[:, None] <= summed)
        waited = (begin[:, None] - pushed) / _SCALE_US / 10
        for copy, place in zip(copies, _assigned(longer**2 + waited**2, possible), strict=True):
            if place >= 0:
                key, i, _ = known[place]
                served[key][i] = (events[copy], *served[key][i][1:])
                self._table.need(events[copy], served[key][i][1])

    def add_wire(self, served: Sequence[Served]) -> None:
        """The way of each gradient to the server's first or later work on it, and of the new value back."""
        last_names = {number for name, number in self._table.names.items() if name == _COPY or _UPDATE in name}
        for key, comms in self._common.items():
            rounds = [members for of_server in served for members in of_server.get(key, ())]
            if not rounds:
                continue
            for copy, *work in rounds:  # several where the gradient is sliced over servers
                takes = work[:-1] if self._table.name[work[-1]] in last_names else work
                taken_by = [event for event in (copy, *takes) if event >= 0]
                by_start = sorted(range(len(comms)), key=lambda r: comms[r].start_us - self._clock.offset_us[r])
                for order, rank in enumerate(by_start):
                    comm = comms[rank]
                    name = self._parameter_name(comm.parameter)
                    about: dict[str, Any] = {"rank": rank, "step": comm.step, "tensor": self._tensors[comm.parameter]}
                    if order < len(taken_by):
                        taken_us = self._at_worker(taken_by[order], rank)
                        if taken_us >= comm.start_us - self._base_us:
                            push = self._wire(CollectiveKind.PUSH, name, comm.start_us - self._base_us, taken_us, about)
                            self._table.need(push, taken_by[order])
                            if comm.producer >= 0:
                                self._table.need(comm.producer, push)
                    back_us = self._at_worker(work[-1], rank, end=True)
                    if back_us <= comm.end_us - self._base_us:
                        pull = self._wire(CollectiveKind.PULL, name, back_us, comm.end_us - self._base_us, about)
                        self._table.need(work[-1], pull)
                        if comm.consumer >= 0:
                            self._table.need(pull, comm.consumer)

    def _at_worker(self, event: int, rank: int, *, end: bool = False) -> float:
        """Start or end of a server's event on a worker's clock."""
        time_us = self._table.end_us[event] if end else self._table.start_us[event]
        return time_us - self._clock.offset_us[self._table.rank[event]] + self._clock.offset_us[rank]

    def _wire(self, kind: CollectiveKind, name: str, start_us: float, end_us: float, about: dict[str, Any]) -> int:
        self._collectives += 1
        return self._table.add(
            f"{name} {kind.label}",
            EventKind.COLLECTIVE,
            collective_kind=kind,
            start_us=start_us,
            end_us=end_us,
            stream=_WIRE_STREAM + about["tensor"],
            collective=self._collectives - 1,
            **about,
        )

    def _span(self, span: Span) -> dict[str, Any]:
        return {"start_us": span.start_us - self._base_us, "end_us": span.end_us - self._base_us}


def _assigned(cost: Floats, possible: npt.NDArray[np.bool_]) -> Ints:
    """Column of each row, -1 for none: each column at most once, the total cost least."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(np.where(possible, cost, _IMPOSSIBLE))
    column_of_row = np.full(len(cost), -1, np.int64)
    column_of_row[rows] = np.where(possible[rows, columns], columns, -1)
    return column_of_row
