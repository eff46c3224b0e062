"""Spans of threads that lie in each other, as those of a call and of what it calls."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Codes, Floats, Ints


def is_outermost(start_us: Floats, end_us: Floats) -> npt.NDArray[np.bool_]:
    """Whether each span of a thread lies in none before it, [n]; the spans are in the order of their starts, the longest first."""
    before_us = np.concatenate(([-np.inf], np.maximum.accumulate(end_us)[:-1]))
    outermost: npt.NDArray[np.bool_] = start_us >= before_us[: len(start_us)]
    return outermost


def parents_of(thread: Codes, start_us: Floats, end_us: Floats) -> Ints:
    """The innermost other span of its thread that is open when each span begins, -1: none, [n].

    Spans of a thread must be nested.
    """
    order = np.lexsort((-end_us, start_us, thread))
    parent = np.full(len(order), -1, np.int64)
    open_spans: list[tuple[int, float]] = []
    current = -1
    columns = (order, thread[order], start_us[order], end_us[order])
    for span, on, begins, ends in zip(*(column.tolist() for column in columns), strict=True):
        if on != current:
            open_spans.clear()
            current = on
        while open_spans and open_spans[-1][1] <= begins:
            open_spans.pop()
        if open_spans:
            parent[span] = open_spans[-1][0]
        open_spans.append((span, ends))
    return parent


def innermost(thread: Codes, start_us: Floats, end_us: Floats, at_thread: Codes, at_us: Floats, parent: Ints | None = None) -> Ints:
    """The innermost span that is open at each instant on a thread, -1: none, [instants]."""
    if not len(thread) or not len(at_us):
        return np.full(len(at_us), -1, np.int64)
    parent = parents_of(thread, start_us, end_us) if parent is None else parent
    order = np.lexsort((-end_us, start_us, thread))
    both = np.lexsort(
        (np.repeat((False, True), (len(order), len(at_us))), np.concatenate((start_us[order], at_us)),
         np.concatenate((thread[order], at_thread)))
    )  # fmt: skip
    before = np.empty(len(both), np.int64)
    before[both] = np.cumsum(both < len(order)) - 1
    last = before[len(order) :]
    span = np.where(last >= 0, order[np.maximum(last, 0)], -1)
    span[(span >= 0) & (thread[span] != at_thread)] = -1
    while (over := (span >= 0) & (end_us[span] < at_us)).any():
        span[over] = parent[span[over]]
    return span
