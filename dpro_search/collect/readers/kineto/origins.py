"""Origins of a rank's events in the user's program: the op, the module and the source line (``find_origins(records, file, rows)``).

A device op is launched by a call within an op of the framework, by time on the thread, else by the external id that the profiler
gives both. Ops of the backward pass have the sequence number of the op of the forward pass that they differentiate: module and
source line are that op's. A module is named by the path of calls to it, like ``Net_0.Block_1.Conv2d_3``.
"""

from __future__ import annotations

import numpy as np

from dpro_search.collect.readers.kineto.columns import MODULE, Category, KinetoFile, PythonCalls
from dpro_search.collect.readers.kineto.rank import RankRecords
from dpro_search.collect.trace import Codes, EventKind, Floats, Ints

_DEEPEST = 64  # calls of modules within each other: those further in have the path of the last


def find_origins(r: RankRecords, file: KinetoFile, rows: Ints) -> None:
    """Set `op`, `module` and `source` of a rank's device ops, or of its ops where it used no device; `rows`: of the file.

    Kernels get the shapes and the element type of the inputs of the op that launched them.
    """
    ops = np.flatnonzero((r.kind == EventKind.OP) & (file.category[rows] == Category.HOST_OP))
    parent = parents_of(file.thread[rows[ops]], r.start_us[ops], r.end_us[ops])
    on_device = np.flatnonzero(r.on_device)
    if len(on_device):
        targets, causes = on_device, _causes(r, file, rows, ops, parent, on_device)
        known = causes >= 0
        r.op[targets[known]] = r.name[ops[causes[known]]]
        kernels = known & (r.kind[targets] == EventKind.KERNEL)
        r.shapes[targets[kernels]] = r.shapes[ops[causes[kernels]]]
        r.dtype[targets[kernels]] = r.dtype[ops[causes[kernels]]]
    else:
        targets, causes = ops, np.arange(len(ops))
    frames = file.frames
    of_rank = np.isin(frames.thread, np.unique(file.thread[rows[~r.on_device]]))
    if not of_rank.any() or not len(targets):
        return
    thread, at_us = _places(r, file, rows, ops, parent, targets, causes)
    is_module = np.array([name.startswith(MODULE) for name in file.names] or [False])[frames.name]
    names = list(r.names)
    for column, which in ((r.module, is_module), (r.source, ~is_module)):
        spans = _of(frames, of_rank & which)
        up = parents_of(spans.thread, spans.start_us, spans.end_us)
        frame = innermost(spans.thread, spans.start_us, spans.end_us, thread, at_us, up)
        name = _paths(names, spans, up) if column is r.module else spans.name.astype(np.int64)
        column[targets[frame >= 0]] = name[frame[frame >= 0]]
    r.names = tuple(names)


def _causes(r: RankRecords, file: KinetoFile, rows: Ints, ops: Ints, parent: Ints, on_device: Ints) -> Ints:
    """The innermost op of the framework (its place in `ops`) that launched each device op, -1: not known."""
    call = r.launch[on_device]
    launched = np.flatnonzero(call >= 0)
    causes = np.full(len(on_device), -1, np.int64)
    calls = call[launched]
    causes[launched] = innermost(
        file.thread[rows[ops]], r.start_us[ops], r.end_us[ops], file.thread[rows[calls]], r.start_us[calls], parent
    )
    ids, first = np.unique(file.external[rows[ops]], return_index=True)
    external_ids = file.external[rows[on_device]]
    at = np.minimum(np.searchsorted(ids, external_ids), max(len(ids) - 1, 0))
    if len(ids):
        unlaunched = (causes < 0) & (external_ids > 0) & (ids[at] == external_ids)
        causes[unlaunched] = first[at[unlaunched]]
    return causes


def _places(
    r: RankRecords, file: KinetoFile, rows: Ints, ops: Ints, parent: Ints, targets: Ints, causes: Ints
) -> tuple[Ints, Floats]:
    """Thread and time at which the program asked for each event: of the backward pass, when the forward pass ran the op."""
    row = rows[ops]
    sequence, backward = file.autograd[row], (file.forward_thread[row] > 0) & (file.autograd[row] >= 0)
    forward = np.flatnonzero((sequence >= 0) & ~backward)
    by_number = forward[np.lexsort((r.start_us[ops[forward]], sequence[forward]))]
    twin = np.full(len(ops), -1, np.int64)
    numbers = sequence[by_number]
    for op in np.flatnonzero(backward).tolist():
        last = int(np.searchsorted(numbers, sequence[op], side="right")) - 1
        while last >= 0 and numbers[last] == sequence[op] and r.start_us[ops[by_number[last]]] > r.start_us[ops[op]]:
            last -= 1
        if last >= 0 and numbers[last] == sequence[op]:
            twin[op] = by_number[last]
    for op in np.argsort(r.start_us[ops], kind="stable").tolist():  # what a backward op calls is of its module
        if twin[op] < 0 and parent[op] >= 0:
            twin[op] = twin[parent[op]]
    call = np.where(r.launch[targets] >= 0, r.launch[targets], targets)
    source = np.where(causes >= 0, ops[np.maximum(causes, 0)] if len(ops) else call, call)
    if len(ops):
        of = np.where(causes >= 0, twin[np.maximum(causes, 0)], -1)
        source = np.where(of >= 0, ops[np.maximum(of, 0)], source)
    return file.thread[rows[source]].astype(np.int64), r.start_us[source]


def _of(frames: PythonCalls, chosen: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> PythonCalls:
    return PythonCalls(
        name=frames.name[chosen],
        thread=frames.thread[chosen],
        start_us=frames.start_us[chosen],
        end_us=frames.end_us[chosen],
    )


def _paths(names: list[str], spans: PythonCalls, up: Ints) -> Ints:
    """The number of the path of each call of a module in `names`, which gets the paths that it lacks."""
    numbers: dict[str, int] = {}
    path, depth = [""] * len(spans), [0] * len(spans)
    for span in np.lexsort((-spans.end_us, spans.start_us)).tolist():
        name = names[spans.name[span]].removeprefix(MODULE)
        outer = int(up[span])
        depth[span] = depth[outer] + 1 if outer >= 0 else 0
        path[span] = name if outer < 0 else path[outer] if depth[span] > _DEEPEST else f"{path[outer]}.{name}"
    path_numbers = []
    for text in path:
        number = numbers.get(text)
        if number is None:
            number = numbers[text] = len(names)
            names.append(text)
        path_numbers.append(number)
    return np.array(path_numbers, np.int64)


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
