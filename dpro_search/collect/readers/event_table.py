"""`EventTable`: the table that readers of recorded jobs fill with events, and from which a trace is made; steps and clocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from dpro_search.collect.assemble.common import shifted
from dpro_search.collect.clock import CommSpans, align_clocks, one_clock
from dpro_search.collect.trace import (
    DESCRIPTIONS,
    ClockReport,
    Dependencies,
    DependencyKind,
    EventKind,
    Events,
    NodeGraph,
    ProcessGroup,
    Steps,
    TensorInfo,
    Trace,
    TraceMeta,
)

_COLUMNS = ("name", "kind", "rank", "stream", "start_us", "end_us", "step", "tensor", "collective", "size_bytes")


class EventTable:
    """Events and their dependencies while files are read. Times are on the clocks of the ranks.

    Attributes
    ----------
    names
        Number of each name of an event, in the order of the numbers.
    name, kind, rank, stream, start_us, end_us, step, tensor, collective, size_bytes
        The columns of `Events`: lists with an entry for each event, which a reader may change until it makes the trace.
    """

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.name: list[int] = []
        self.kind: list[int] = []
        self.rank: list[int] = []
        self.stream: list[int] = []
        self.start_us: list[float] = []
        self.end_us: list[float] = []
        self.step: list[int] = []
        self.tensor: list[int] = []
        self.collective: list[int] = []
        self.size_bytes: list[int] = []
        self._descriptions: dict[str, dict[int, int]] = {column: {} for column in DESCRIPTIONS}
        self._dependencies: list[tuple[int, int, int]] = []

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
        """Add an event and return its number. `described` are entries of the columns of `DESCRIPTIONS`, where they are known."""
        event = len(self.name)
        self.name.append(self.names.setdefault(name, len(self.names)))
        self.kind.append(int(kind))
        self.rank.append(rank)
        self.stream.append(stream)
        self.start_us.append(start_us)
        self.end_us.append(end_us)
        self.step.append(step)
        self.tensor.append(tensor)
        self.collective.append(collective)
        self.size_bytes.append(size_bytes)
        for column, code in described.items():
            self._descriptions[column][event] = code
        return event

    def need(self, source: int, target: int, kind: DependencyKind = DependencyKind.DATA) -> None:
        """Add a dependency: the event `target` needed `source`."""
        self._dependencies.append((source, target, int(kind)))

    def trace(
        self,
        *,
        format: str,
        framework: str,
        comm: str,
        clock: ClockReport,
        steps: Iterable[tuple[int, int, float, float]],
        dropped: Counter[str],
        warnings: Iterable[str] = (),
        hosts: Sequence[str] = (),
        tensors: Iterable[TensorInfo] = (),
        graphs: Iterable[NodeGraph] = (),
        graph_of_rank: Iterable[int] = (),
        groups: Iterable[ProcessGroup] = (),
        is_aligned: bool = False,
    ) -> Trace:
        """The trace of the events, in the order in which they were added, on the aligned clock.

        Parameters
        ----------
        clock
            Has the offset of each rank, and so the number of ranks.
        steps
            Rank, index, start and end in us of each step, in any order.
        dropped
            What was left out, by reason; reasons without a count are not kept.
        hosts
            Name of each rank's host; empty: not known.
        is_aligned
            Whether times are on the aligned clock already.
        """
        events, aligned_steps = self._events(), steps_of(steps)
        if not is_aligned:
            events, aligned_steps = shifted(events, aligned_steps, clock)
        ranks = len(clock.offset_us)
        needs = np.array(self._dependencies, np.int64).reshape(-1, 3)
        return Trace(
            meta=TraceMeta(
                framework=framework,
                comm=comm,
                ranks=ranks,
                hosts=tuple(hosts) or ("",) * ranks,
                cores=(-1,) * ranks,
                format=format,
                clock=clock,
                dropped={reason: number for reason, number in sorted(dropped.items()) if number},
                warnings=tuple(warnings),
            ),
            names=tuple(self.names),
            events=events,
            steps=aligned_steps,
            tensors=tuple(tensors),
            graphs=tuple(graphs),
            graph_of_rank=tuple(graph_of_rank),
            dependencies=Dependencies(source=needs[:, 0], target=needs[:, 1], kind=needs[:, 2]),
            groups=tuple(groups),
        )

    def _events(self) -> Events:
        columns: dict[str, Any] = {
            name: np.array(getattr(self, name), np.float64 if name.endswith("_us") else np.int64) for name in _COLUMNS
        }
        for name, codes in self._descriptions.items():
            if codes:
                columns[name] = np.full(len(self.name), -1, DESCRIPTIONS[name])
                columns[name][list(codes)] = list(codes.values())
        return Events(**columns)


def steps_of(rows: Iterable[tuple[int, int, float, float]]) -> Steps:
    """Steps from (rank, index, start_us, end_us), sorted by rank and start; all were recorded, and CPU times are not known: 0."""
    ordered = sorted(rows, key=lambda row: (row[0], row[2]))
    columns = list(zip(*ordered, strict=True)) or [()] * 4
    return Steps(
        rank=np.array(columns[0], np.int64),
        index=np.array(columns[1], np.int64),
        start_us=np.array(columns[2], np.float64),
        end_us=np.array(columns[3], np.float64),
        traced=np.ones(len(ordered), np.bool_),
        compute_cpu_us=np.zeros(len(ordered)),
        comm_cpu_us=np.zeros(len(ordered)),
    )


def clocks_as_recorded(ranks: int, why: str) -> ClockReport:
    """The report of a recording whose clocks were not changed; `why` says what is known about them."""
    return one_clock(ranks, f"as recorded: {why}")


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


def clocks_checked(spans: CommSpans, what: str) -> ClockReport:
    """Clocks of recordings whose hosts are not known: kept where they agree, else aligned.

    They agree as long as no collective ends on a rank before another rank enqueued it.

    Parameters
    ----------
    spans
        Collectives on all ranks.
    what
        What the collectives are, for the report.

    Raises
    ------
    InputError
        Clocks differ, and no offset explains how.
    """
    enqueue_us, end_us = spans.enqueue_us, spans.end_us
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
    return align_clocks(spans, tuple(f"rank {rank}" for rank in range(ranks)))
