"""`MarkedSpans`: what PyTorch's profiler marks on host threads, by name, with the device ops that were launched in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import DependencyKind, EventKind, Ints, Trace


@dataclass(frozen=True)
class ThreadSpan:
    """A stretch of a host thread, and the device ops that were launched in it."""

    thread: int
    start_us: float
    end_us: float
    events: tuple[int, ...] = ()


class MarkedSpans:
    """Operators and annotations of a trace's host threads.

    Attributes
    ----------
    call_of
        The call that launched each device op, by event.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        events, needs = trace.events, trace.dependencies
        launches = needs.kind == DependencyKind.LAUNCH
        launched, calls = needs.target[launches], needs.source[launches]
        order = np.argsort(events.start_us[calls], kind="stable")
        self._launched, self._calls = launched[order], calls[order]
        self._call_us = events.start_us[self._calls]
        self.call_of = dict(zip(self._launched.tolist(), self._calls.tolist(), strict=True))
        self.number = {name: number for number, name in enumerate(trace.names)}

    def steps_of(self, rank: int) -> list[int]:
        """The steps of a rank."""
        steps = self.trace.steps
        return [int(step) for step in steps.index[steps.rank == rank].tolist()]

    def rows(self, names: Sequence[str], rank: int, step: int | None = None) -> Ints:
        """Host events of some names by start, of all steps or of one."""
        events = self.trace.events
        numbers = [self.number[name] for name in names if name in self.number]
        chosen = np.isin(events.name, numbers) & (events.rank == rank) & np.isin(events.kind, (EventKind.OP, EventKind.RUNTIME))
        rows = np.flatnonzero(chosen if step is None else chosen & (events.step == step))
        return rows[np.argsort(events.start_us[rows], kind="stable")]

    def named(self, names: Sequence[str], rank: int, step: int) -> list[ThreadSpan]:
        """Spans of some names in a rank's step, by start."""
        return [self.span(row) for row in self.rows(names, rank, step).tolist()]

    def span(self, row: int) -> ThreadSpan:
        """A host event as a span."""
        events = self.trace.events
        thread = int(events.stream[row])
        return self.between(int(events.rank[row]), thread, float(events.start_us[row]), float(events.end_us[row]))

    def between(self, rank: int, thread: int, start_us: float, end_us: float) -> ThreadSpan:
        """A stretch of a rank's thread between two instants."""
        events = self.trace.events
        first, last = np.searchsorted(self._call_us, (start_us, end_us)).tolist()
        launched = tuple(
            int(self._launched[i])
            for i in range(first, last)
            if events.rank[self._calls[i]] == rank and events.stream[self._calls[i]] == thread
        )
        return ThreadSpan(thread, start_us, end_us, launched)
