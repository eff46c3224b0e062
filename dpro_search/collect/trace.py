"""The `Trace`: everything recorded of one job, in columns, as one folder on disk (``trace.npz`` and ``meta.json``).

What it consists of is defined in `trace_columns`, `trace_meta` and `trace_values`, whose names can be imported from here.

Versions of the format: 2 has the kind of each collective, its process group, element types, shapes of ops, and what an op does in
the step. A trace of version 1 has some of that in names; they are read once, when it is loaded (`trace_upgrade`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import msgspec
import numpy as np
import numpy.typing as npt

from dpro_search._regular_files import read_regular
from dpro_search._text import holds_secrets
from dpro_search.collect._files import DAMAGED, what_is, write_file, written_folder
from dpro_search.collect.modules import ModuleCalls, ModuleInfo
from dpro_search.collect.trace_check import check, narrowed, packed, read_columns, widened
from dpro_search.collect.trace_columns import (
    DESCRIPTIONS,
    Codes,
    CollectiveKind,
    Dependencies,
    DependencyKind,
    EventKind,
    Events,
    Floats,
    GraphTensors,
    Ints,
    MemorySamples,
    NodeGraph,
    ProcessGroup,
    Role,
    Shapes,
    Steps,
    TensorInfo,
    TensorType,
)
from dpro_search.collect.trace_meta import TRACE_VERSION, AllocatorReport, ClockReport, CommSettings, TraceMeta
from dpro_search.collect.trace_upgrade import upgraded
from dpro_search.collect.trace_values import SETTLING_STEPS, TraceValues
from dpro_search.errors import InputError, TraceFormatError, TraceVersionError

__all__ = [
    "DESCRIPTIONS",
    "SETTLING_STEPS",
    "TRACE_VERSION",
    "AllocatorReport",
    "ClockReport",
    "Codes",
    "CollectiveKind",
    "CommSettings",
    "Dependencies",
    "DependencyKind",
    "EventKind",
    "Events",
    "Floats",
    "GraphTensors",
    "Ints",
    "MemorySamples",
    "NodeGraph",
    "ProcessGroup",
    "Role",
    "Shapes",
    "Steps",
    "TensorInfo",
    "TensorType",
    "Trace",
    "TraceMeta",
]

_OLDEST_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Trace(TraceValues):
    """One recorded job, which can be written to a folder and read from one."""

    def __repr__(self) -> str:
        steps = len(set(self.steps.index.tolist()))
        return f"Trace(format={self.meta.format!r}, ranks={self.meta.ranks}, steps={steps}, events={len(self.events)})"

    def save(self, folder: Path) -> None:
        """Write the folder under a temporary name, then rename it; raises `InputError` if it exists already."""
        with written_folder(folder) as tmp:
            columns = _event_columns(self.events)
            columns |= {f"steps.{f.name}": getattr(self.steps, f.name) for f in fields(Steps)}
            columns |= {f"dependencies.{f.name}": getattr(self.dependencies, f.name) for f in fields(Dependencies)}
            if self.modules:
                columns |= {f"modules.{f.name}": getattr(self.module_calls, f.name) for f in fields(ModuleCalls)}
            if len(self.memory):
                columns |= {f"memory.{f.name}": getattr(self.memory, f.name) for f in fields(MemorySamples)}
            for i, graph in enumerate(self.graphs):
                columns[f"graph{i}.input_ptr"] = graph.input_ptr
                columns[f"graph{i}.input_idx"] = graph.input_idx
                if graph.backward is not None:
                    columns[f"graph{i}.backward"] = graph.backward
                for column in _TENSOR_COLUMNS if graph.tensors else ():
                    columns[f"graph{i}.{column}"] = getattr(graph.tensors, column)
            strings = _Strings(
                names=self.names,
                tensors=self.tensors,
                graph_of_rank=self.graph_of_rank,
                modules=self.modules,
                groups=self.groups,
                dtypes=self.dtypes,
                shapes=self.shapes,
                graphs=tuple(
                    _GraphStrings(name=g.name, op=g.op, types=g.tensors.types if g.tensors else None) for g in self.graphs
                ),
            )
            columns["strings"] = np.frombuffer(msgspec.json.encode(strings), dtype=np.uint8)
            _write_columns(tmp / "trace.npz", columns)
            data = msgspec.json.format(msgspec.json.encode(self.meta), indent=1) + b"\n"
            write_file(tmp / "meta.json", data, private=holds_secrets(self.meta.command))  # needed to run the job again

    @staticmethod
    def load(folder: Path) -> Trace:
        """Read a folder written by `save`.

        Raises
        ------
        InputError
            The folder or one of its files is missing.
        TraceVersionError
            Written by another version.
        TraceFormatError
            A file is damaged.
        """
        for name in ("meta.json", "trace.npz"):
            if not (folder / name).is_file():
                what = what_is(folder)
                missing = f"{name} is missing" if what in ("a trace", "another folder") else f"but {what}"
                raise InputError(f"{folder}: not a trace folder, {missing}; make one with 'dpro-search collect' or 'import'")
        raw = read_regular(folder / "meta.json")
        try:
            version = msgspec.json.decode(raw, type=_TraceVersion).version
            if not _OLDEST_VERSION <= version <= TRACE_VERSION:
                raise TraceVersionError(
                    f"{folder}/meta.json: trace version {version}, this program reads {_OLDEST_VERSION} to {TRACE_VERSION}; "
                    "install a later dpro-search, or record the job again"
                )
            meta = msgspec.json.decode(raw, type=TraceMeta)
        except DAMAGED as error:
            raise TraceFormatError(f"{folder}/meta.json: {error}") from error
        try:
            columns = read_columns(folder / "trace.npz", _COLUMNS)
            strings = msgspec.json.decode(columns["strings"].tobytes(), type=_Strings)
            events = _events(columns)
            steps = Steps(**{f.name: widened(columns[f"steps.{f.name}"]) for f in fields(Steps)})
            none = np.zeros(0, np.int32)  # of traces written before there were dependencies
            dependencies = Dependencies(
                **{f.name: widened(columns.get(f"dependencies.{f.name}", none)) for f in fields(Dependencies)}
            )
            calls = ModuleCalls.none()
            if strings.modules:
                # Of traces from before ends were kept, whose modules have no bfloat16 columns.
                columns.setdefault("modules.end_us", columns["modules.again_us"])
                columns.setdefault("modules.backward_end_us", columns["modules.backward_us"])
                calls = ModuleCalls(**{f.name: widened(columns[f"modules.{f.name}"]) for f in fields(ModuleCalls)})
            memory = MemorySamples.none()
            if "memory.rank" in columns:
                memory = MemorySamples(**{f.name: widened(columns[f"memory.{f.name}"]) for f in fields(MemorySamples)})
            graphs = tuple(
                NodeGraph(
                    name=g.name,
                    op=g.op,
                    input_ptr=widened(columns[f"graph{i}.input_ptr"]),
                    input_idx=widened(columns[f"graph{i}.input_idx"]),
                    tensors=_tensors(g, columns, f"graph{i}"),
                    backward=columns.get(f"graph{i}.backward"),
                )
                for i, g in enumerate(strings.graphs)
            )
        except (KeyError, ValueError, TypeError, OverflowError, OSError, *DAMAGED) as error:
            raise TraceFormatError(f"{folder}/trace.npz: damaged or cut off ({error}); record it again") from error
        trace = Trace(
            meta=meta,
            names=strings.names,
            events=events,
            steps=steps,
            tensors=strings.tensors,
            graphs=graphs,
            graph_of_rank=strings.graph_of_rank,
            dependencies=dependencies,
            modules=strings.modules,
            module_calls=calls,
            groups=strings.groups,
            dtypes=strings.dtypes,
            shapes=strings.shapes,
            memory=memory,
        )
        try:
            check(trace)
        except ValueError as error:
            raise TraceFormatError(f"{folder}/trace.npz: does not fit together ({error}); record it again") from error
        return upgraded(trace) if version < TRACE_VERSION else trace


def _event_columns(events: Events) -> dict[str, npt.NDArray[Any]]:
    """Columns on disk; those that are empty are left out."""
    columns = {f"events.{f.name}": getattr(events, f.name) for f in fields(Events)}
    return {name: column for name, column in columns.items() if name not in _NARROW or (column >= 0).any()}


def _write_columns(path: Path, columns: Mapping[str, npt.NDArray[Any]]) -> None:
    """As `numpy.savez_compressed`, but columns are packed one after the other, so that only one takes memory twice."""
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        for name, column in columns.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, narrowed(column) if name in _NARROW else packed(column), allow_pickle=False)


def _events(columns: dict[str, npt.NDArray[Any]]) -> Events:
    required = {f.name: widened(columns[f"events.{f.name}"]) for f in fields(Events) if f.name not in DESCRIPTIONS}
    described = {name: columns[f"events.{name}"] for name in DESCRIPTIONS if f"events.{name}" in columns}
    return Events(**required, **described)


class _TraceVersion(msgspec.Struct):
    version: int


class _GraphStrings(msgspec.Struct, frozen=True):
    name: tuple[str, ...]
    op: tuple[str, ...]
    types: tuple[TensorType, ...] | None = None


class _Strings(msgspec.Struct, frozen=True):
    names: tuple[str, ...]
    tensors: tuple[TensorInfo, ...]
    graph_of_rank: tuple[int, ...]
    graphs: tuple[_GraphStrings, ...]
    modules: tuple[ModuleInfo, ...] = ()
    groups: tuple[ProcessGroup, ...] = ()
    dtypes: tuple[str, ...] = ()
    shapes: tuple[Shapes, ...] = ()


_COLUMNS = re.compile(
    "strings|"
    + "|".join(
        rf"{table}\.(?:{'|'.join(f.name for f in fields(columns))})"
        for table, columns in (
            ("events", Events),
            ("steps", Steps),
            ("dependencies", Dependencies),
            ("modules", ModuleCalls),
            ("memory", MemorySamples),
        )
    )
    + r"|graph\d+\.(?:input_ptr|input_idx|backward|input_port|input_type|workspace_bytes)"
)
_TENSOR_COLUMNS = ("input_port", "input_type", "workspace_bytes")
_NARROW = frozenset(f"events.{name}" for name in DESCRIPTIONS)


def _tensors(graph: _GraphStrings, columns: dict[str, npt.NDArray[Any]], prefix: str) -> GraphTensors | None:
    if graph.types is None:
        return None
    tensors = GraphTensors(types=graph.types, **{name: widened(columns[f"{prefix}.{name}"]) for name in _TENSOR_COLUMNS})
    edges = len(columns[f"{prefix}.input_idx"])
    lengths = [len(tensors.input_port), len(tensors.input_type), len(tensors.workspace_bytes)]
    if lengths != [edges, edges, len(graph.name)] or tensors.input_type.max(initial=-1) >= len(graph.types):
        raise ValueError("the tensors do not fit their graph")
    return tensors
