"""Checks of the columns of a trace on disk: a damaged file, or one of another program, may hold anything."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search._regular_files import open_regular
from dpro_search.collect._memory import available_bytes
from dpro_search.collect.trace_columns import Codes, CollectiveKind, DependencyKind, EventKind, NodeGraph, ProcessGroup, Role
from dpro_search.collect.trace_values import TraceValues
from dpro_search.quantities import size_text

MOST_BYTES = 16 * 2**30  # of a trace's columns, unpacked; a thousand times the bundled sample
_MEMORY_SHARE = 1 / 3  # of the available memory: columns are widened and used in copies
_MOST_RANKS = 1 << 20
_MOST_US = 1e17  # of a time: 3,000 years since 1970 or the start of a machine


def read_columns(path: Path, pattern: re.Pattern[str]) -> dict[str, npt.NDArray[Any]]:
    """The arrays in a file of `numpy.savez` whose names fit, without running anything in it or unpacking others.

    Raises `ValueError` if it is damaged, or would unpack to more than `MOST_BYTES` or than the memory allows; `OSError` if it
    cannot be read.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            sizes = {entry.filename.removesuffix(".npy"): entry.file_size for entry in archive.infolist()}
        names = [name for name in sizes if pattern.fullmatch(name)]
        total, allowed = sum(sizes[name] for name in names), min(MOST_BYTES, int(available_bytes() * _MEMORY_SHARE))
        if total > allowed:
            raise ValueError(f"{size_text(total)} when unpacked, more than the {size_text(allowed)} that can be read here")
        with open_regular(path) as file, np.load(file, allow_pickle=False) as data:
            return {name: data[name] for name in names}
    except OSError:
        raise
    except Exception as error:  # numpy lets through what its parsers raise: of zip, deflate, Python literals, tokens, types
        raise ValueError(str(error) or type(error).__name__) from error


def packed(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Columns on disk: integers in 32 bits where they fit, times rounded to 0.01 us, below the clocks' resolution."""
    if column.dtype.kind == "i" and column.min(initial=0) > -(2**31) and column.max(initial=0) < 2**31:
        return column.astype(np.int32, copy=False)
    return np.round(column, 2) if column.dtype.kind == "f" else column


def widened(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Columns as they were before `packed`."""
    return column.astype(np.int64) if column.dtype.kind == "i" else column


def narrowed(column: Codes) -> Codes:
    """Codes in as few bits as hold them all."""
    least, most = int(column.min(initial=0)), int(column.max(initial=0))
    kind = next(
        kind for kind in (np.int8, np.int16, np.int32, np.int64) if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max
    )
    return column.astype(kind)


def check(trace: TraceValues) -> None:
    """Raise `ValueError` that names what does not fit, if anything does not."""
    for wrong, what in _problems(trace):
        if wrong:
            raise ValueError(what)


def _problems(trace: TraceValues) -> Iterator[tuple[bool, str]]:
    meta, events, steps, needs = trace.meta, trace.events, trace.steps, trace.dependencies
    yield not 1 <= meta.ranks <= _MOST_RANKS, f"{meta.ranks} ranks"
    per_rank = (meta.hosts, meta.cores, meta.clock.offset_us, meta.clock.residual_us)
    yield any(len(column) != meta.ranks for column in per_rank), "hosts, cores and clocks are not one a rank"
    numbers = meta.rank_numbers
    yield bool(numbers) and (len(set(numbers)) != meta.ranks or min(numbers) < 0), "the ranks' numbers are not one a rank"
    yield bool(trace.graphs) and len(trace.graph_of_rank) != meta.ranks, "graphs are not one a rank"
    calls, memory = trace.module_calls, trace.memory
    for title, columns in (("events", events), ("steps", steps), ("dependencies", needs), ("modules", calls), ("memory", memory)):
        yield from _columns(title, columns)
    yield _outside(events.name, 0, len(trace.names)), "events: a name that is not there"
    yield _outside(events.kind, 0, len(EventKind)), "events: an unknown kind"
    yield _outside(events.rank, 0, _MOST_RANKS), "events: an impossible rank"
    yield _outside(events.tensor, -1, len(trace.tensors)), "events: a tensor that is not there"
    yield _outside(events.step, -1), "events: a step below -1"
    yield _outside(events.collective, -1), "events: a collective below -1"
    yield _outside(events.collective_kind, -1, max(CollectiveKind) + 1), "events: an unknown kind of collective"
    yield _outside(events.role, -1, max(Role) + 1), "events: an unknown role"
    yield _outside(events.group, -1, len(trace.groups)), "events: a process group that is not there"
    for origin in (events.op, events.module, events.source):
        yield _outside(origin, -1, len(trace.names)), "events: an origin that is not there"
    yield _outside(events.dtype, -1, len(trace.dtypes)), "events: an element type that is not there"
    yield _outside(events.shapes, -1, len(trace.shapes)), "events: shapes that are not there"
    yield any(side < 0 for shapes in trace.shapes for shape in shapes for side in shape), "shapes: a negative side"
    yield any(_impossible(group) for group in trace.groups), "groups: impossible ranks, or another number of them than their size"
    yield _outside(steps.rank, 0, meta.ranks), "steps: a rank that is not there"
    yield _outside(memory.rank, 0, meta.ranks), "memory: a rank that is not there"
    yield _outside(memory.allocated_bytes, 0), "memory: a negative size"
    yield _outside(steps.index, 0), "steps: an index below 0"
    for title, spans in (("events", events), ("steps", steps)):
        yield bool((spans.end_us < spans.start_us).any()), f"{title}: an end before its start"
    for end in (needs.source, needs.target):
        yield _outside(end, 0, len(events)), "dependencies: an event that is not there"
    yield _outside(needs.kind, 0, len(DependencyKind)), "dependencies: an unknown kind"
    yield _outside(calls.module, 0, len(trace.modules)), "modules: a module that is not there"
    yield _outside(calls.rank, 0, meta.ranks), "modules: a rank that is not there"
    lowered = [module.lowered for module in trace.modules if module.lowered is not None]
    yield any(min(ops.forward_us, ops.backward_us, ops.casts, ops.cast_elements) < 0 for ops in lowered), "modules: a negative time"
    yield any(op.us < 0 or op.calls < 1 for ops in lowered for op in ops.ops), "modules: ops of a negative time, or none"
    yield any(tensor.size_bytes < -1 for tensor in trace.tensors), "tensors: a negative size"  # -1: not known
    if trace.graphs:  # without any, the graph that a rank names is not looked at
        yield any(not 0 <= number < len(trace.graphs) for number in trace.graph_of_rank), "a graph that is not there"
    for graph in trace.graphs:
        yield from _graph(graph)


def _columns(title: str, columns: Any) -> Iterator[tuple[bool, str]]:
    """All columns are flat, of one length, and numbers of their kind; start and end are finite."""
    column_of = {field.name: getattr(columns, field.name) for field in fields(columns)}
    shapes = {column.shape for column in column_of.values()}
    yield len(shapes) > 1 or any(len(shape) != 1 for shape in shapes), f"{title}: columns of different lengths"
    for name, column in column_of.items():
        expected = "f" if name.endswith("_us") else "b" if name == "traced" else "i"
        yield column.dtype.kind != expected, f"{title}: column '{name}' has elements of type {column.dtype}"
        if expected == "f" and column.dtype.kind == "f":
            yield bool((np.abs(column) > _MOST_US).any()), f"{title}: column '{name}' has times of more than {_MOST_US:g} us"
        if name in ("start_us", "end_us", "again_us", "backward_us", "backward_end_us", "time_us"):  # others may be unknown
            yield not np.isfinite(column).all(), f"{title}: column '{name}' has numbers that are not finite"


def _impossible(group: ProcessGroup) -> bool:
    ranks = group.ranks
    listed = all(0 <= rank < _MOST_RANKS for rank in ranks) and len(set(ranks)) == len(ranks) and group.size in (len(ranks), -1)
    return not listed if ranks else group.size < -1


def _graph(graph: NodeGraph) -> Iterator[tuple[bool, str]]:
    nodes, pointers = len(graph.name), graph.input_ptr
    shapes_fit = len(graph.op) == nodes and pointers.shape == (nodes + 1,) and graph.input_idx.ndim == 1
    yield not shapes_fit, "graph: columns of different lengths"
    yield pointers.dtype.kind != "i" or graph.input_idx.dtype.kind != "i", "graph: indices that are no integers"
    yield bool(pointers[0] != 0 or pointers[-1] != len(graph.input_idx) or (np.diff(pointers) < 0).any()), "graph: broken pointers"
    if graph.backward is not None:
        yield (
            graph.backward.shape != (nodes,) or graph.backward.dtype.kind != "b",
            "graph: marks of the backward pass that do not fit",
        )
    yield _outside(graph.input_idx, 0, nodes), "graph: an input that is not there"


def _outside(column: npt.NDArray[Any], low: int, high: int | None = None) -> bool:
    """Whether any number is below `low`, or not below `high`."""
    return bool(len(column)) and (int(column.min()) < low or (high is not None and int(column.max()) >= high))
