"""What readers of recorded jobs share: events collected row by row, steps, and clocks that were left as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from dpro_search.collect.clock import CommSpans, align_clocks
from dpro_search.collect.trace import (
    DESCRIPTIONS,
    ClockReport,
    Dependencies,
    DependencyKind,
    EventKind,
    Events,
    Floats,
    Ints,
    Steps,
)


class EventRows:
    """Events and dependencies while a file is read; `events` and `dependencies` make the columns."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int, float, float, int, int, int, int]] = []
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._needs: list[tuple[int, int, int]] = []
        self._described: dict[str, dict[int, int]] = {name: {} for name in DESCRIPTIONS}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the events, by their numbers."""
        return tuple(self._names)

    def add(
        self,
        name: str,
        kind: EventKind,
        *,
        rank: int,
        start_us: float,
        end_us: float,
        stream: int = 0,
        step: int = -1,
        tensor: int = -1,
        collective: int = -1,
        size_bytes: int = 0,
        **described: int,
    ) -> int:
        """One event; returns its number. `described` are entries of the columns of `DESCRIPTIONS`, where they are known."""
        number = self._numbers.setdefault(name, len(self._names))
        if number == len(self._names):
            self._names.append(name)
        self._rows.append((number, int(kind), rank, stream, start_us, end_us, step, tensor, collective, size_bytes))
        for column, code in described.items():
            self._described[column][len(self._rows) - 1] = code
        return len(self._rows) - 1

    def step(self, event: int) -> int:
        """Step of an event that was added."""
        return self._rows[event][6]

    def join(self, event: int, collective: int) -> None:
        """Make an event that was added a part of a collective."""
        row = self._rows[event]
        self._rows[event] = (*row[:8], collective, row[9])

    def name(self, event: int) -> str:
        """Name of an event that was added."""
        return self._names[self._rows[event][0]]

    def rank(self, event: int) -> int:
        """Rank of an event that was added."""
        return self._rows[event][2]

    def assign(self, event: int, *, step: int, tensor: int) -> None:
        """Give an event that was added its step and tensor, once they are known."""
        row = self._rows[event]
        self._rows[event] = (*row[:6], step, tensor, *row[8:])

    def start_us(self, event: int) -> float:
        """Start of an event that was added."""
        return self._rows[event][4]

    def end_us(self, event: int) -> float:
        """End of an event that was added."""
        return self._rows[event][5]

    def need(self, source: int, target: int, kind: DependencyKind = DependencyKind.DATA) -> None:
        """The event `target` needed `source`."""
        self._needs.append((source, target, int(kind)))

    def events(self) -> Events:
        """The columns, in the order of the rows."""
        columns = list(zip(*self._rows, strict=True)) or [()] * 10
        names = ("name", "kind", "rank", "stream", "start_us", "end_us", "step", "tensor", "collective", "size_bytes")
        arrays: dict[str, Any] = {
            name: np.array(column, np.float64 if name.endswith("_us") else np.int64)
            for name, column in zip(names, columns, strict=True)
        }
        for column, codes in self._described.items():
            if codes:
                arrays[column] = np.full(len(self._rows), -1, DESCRIPTIONS[column])
                arrays[column][list(codes)] = list(codes.values())
        return Events(**arrays)

    def dependencies(self) -> Dependencies:
        """The dependencies, in the order in which they were added."""
        rows = np.array(self._needs, np.int64).reshape(-1, 3)
        return Dependencies(source=rows[:, 0], target=rows[:, 1], kind=rows[:, 2])


def steps_of(rows: Iterable[tuple[int, int, float, float]]) -> Steps:
    """Steps from (rank, index, start_us, end_us), sorted by rank and start; all were recorded, and CPU times are not known: 0."""
    found = sorted(rows, key=lambda row: (row[0], row[2]))
    columns = list(zip(*found, strict=True)) or [()] * 4
    return Steps(
        rank=np.array(columns[0], np.int64),
        index=np.array(columns[1], np.int64),
        start_us=np.array(columns[2], np.float64),
        end_us=np.array(columns[3], np.float64),
        traced=np.ones(len(found), np.bool_),
        compute_cpu_us=np.zeros(len(found)),
        comm_cpu_us=np.zeros(len(found)),
    )


def clocks_as_recorded(ranks: int, why: str) -> ClockReport:
    """Of a recording whose clocks were not changed: what is known about them is `why`."""
    return ClockReport(offset_us=(0.0,) * ranks, residual_us=(0.0,) * ranks, method=f"as recorded: {why}")


def counted(dropped: Counter[str]) -> dict[str, int]:
    """Reasons with a count above 0, in alphabetical order."""
    return {reason: dropped[reason] for reason in sorted(dropped) if dropped[reason]}


def steps_by_repetition(keys: Sequence[Hashable]) -> list[int]:
    """Step of each item of a sequence in time order in which every step holds each key at most once."""
    steps: list[int] = []
    seen: set[Hashable] = set()
    step = 0
    for key in keys:
        if key in seen:
            step += 1
            seen = set()
        seen.add(key)
        steps.append(step)
    return steps


def clocks_checked(enqueue_us: Floats, end_us: Floats, family: Ints, what: str) -> ClockReport:
    """Clocks of recordings whose hosts are not known: kept where they agree, else aligned.

    They agree as long as no collective ends on a rank before another rank enqueued it.

    Parameters
    ----------
    post_us, end_us
        Of each collective on each rank, [m, R].
    family
        Size class of each collective, [m].
    what
        What the collectives are, for the report.

    Raises
    ------
    InputError
        Clocks differ, and no offset explains how.
    """
    ranks = enqueue_us.shape[1]
    if not len(enqueue_us):
        return clocks_as_recorded(ranks, f"no {what} seen on all ranks")
    ahead, behind = (end_us - enqueue_us[:, :1]).min(axis=0), (end_us[:, :1] - enqueue_us).min(axis=0)
    if min(ahead.min(), behind.min()) >= 0:
        residual = tuple(((ahead + behind) / 2 * (np.arange(ranks) > 0)).tolist())
        return ClockReport(
            offset_us=(0.0,) * ranks,
            residual_us=residual,
            method=f"as recorded: no {what} contradicts; the residual is what it allows",
        )
    return align_clocks(
        CommSpans(enqueue_us=enqueue_us, end_us=end_us, family=family), tuple(f"rank {rank}" for rank in range(ranks))
    )
