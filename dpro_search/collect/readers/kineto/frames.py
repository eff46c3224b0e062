"""Python frames of a Kineto profile (``with_stack``): calls of modules, and of functions in the user's own files."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Codes, Floats, Ints

MODULE = "nn.Module: "  # before the class of a module and its number among those of the class
_LINE = re.compile(r"(?P<file>[^<(][^(]*\.py)\(\d+\): ")
_LIBRARY = re.compile(r"(?:^|/)(?:site-packages|dist-packages|lib/python[\d.]+)/")
_NOT_THE_USERS = sys.stdlib_module_names | {"torch"}


@dataclass(frozen=True, kw_only=True)
class Frames:
    """n calls, [n] each; `name` and `thread` index the tables of the file."""

    name: npt.NDArray[np.int32]
    thread: npt.NDArray[np.int32]
    start_us: Floats
    end_us: Floats

    def __len__(self) -> int:
        return len(self.name)


def tells_where(name: str) -> bool:
    """Whether a frame is a module's call, or a function in a file that is neither Python's own nor PyTorch's nor installed."""
    if name.startswith(MODULE):
        return True
    line = _LINE.match(name)
    if line is None or _LIBRARY.search(line["file"]):
        return False
    return line["file"].partition("/")[0].removesuffix(".py") not in _NOT_THE_USERS


def parents_of(thread: Codes, start_us: Floats, end_us: Floats) -> Ints:
    """Of each span, the innermost other span of its thread that is open when it begins, -1: none, [n].

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
    """Of each instant on a thread, the innermost span that is open then, -1: none, [instants]."""
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
    found = np.where(last >= 0, order[np.maximum(last, 0)], -1)
    found[(found >= 0) & (thread[found] != at_thread)] = -1
    while (over := (found >= 0) & (end_us[found] < at_us)).any():
        found[over] = parent[found[over]]
    return found
