"""Reads the execution trace that PyTorch's ExecutionTraceObserver wrote of one step (Chakra's schema of a host, JSON).

It knows what a profile does not: which tensors each operator reads and writes, where they lie in which storage, and which forward
operator a backward function belongs to. From these follow the true data dependencies between operators, the bytes of every
collective, and the gradients of every bucket.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dpro_search.collect._files import DAMAGED
from dpro_search.collect.assemble.torch.host_spans import HostSpans
from dpro_search.collect.readers._bytes import read_whole
from dpro_search.collect.recorded_names import AUTOGRAD_FUNCTION, ENQUEUE
from dpro_search.collect.trace import NodeGraph
from dpro_search.errors import InputError, TraceFormatError

_PARTED = re.compile("_(allgather|reduce_scatter)_base_")  # of two tensors, the whole and this rank's part of it
_WRITTEN = re.compile(r"\(\w+!")  # a schema marks the arguments that it writes: "Tensor(a!) self"
_DTYPE = re.compile(r"Tensor\(([^()]*)\)")
_BACKWARD_SCOPE = 1  # of RecordFunction: a function of the autograd engine
_LARGEST = 2**48  # numbers and bytes; larger ones are damaged


@dataclass(frozen=True, kw_only=True)
class TensorUse:
    """A tensor as an operator got or gave it; `begin` and `end` are the bytes of its storage that it may touch."""

    storage: int
    begin: int
    end: int
    size_bytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ExecutionNode:
    """An operator or an annotation."""

    name: str
    function: int  # Rises in the order in which nodes began; the profile has it as well.
    sequence: int  # Joins a backward function with the forward operator that it belongs to; -1: none.
    is_backward: bool  # Whether `sequence` names the forward operator, not this one.
    # inputs, outputs, writes: Tensors; `writes` are those that the operator made or changed.
    inputs: tuple[TensorUse, ...]
    outputs: tuple[TensorUse, ...]
    writes: tuple[TensorUse, ...]


@dataclass(frozen=True, kw_only=True)
class EnqueuedCollective:
    """A collective as its rank enqueued it; `op` is its operator's place in `ExecutionTrace.operators`."""

    name: str
    size_bytes: int
    dtype: str
    op: int


@dataclass(frozen=True, kw_only=True)
class ExecutionTrace:
    """One rank's step."""

    nodes: tuple[ExecutionNode, ...]  # In the order in which they began.
    # The function of the outermost operator around each operator, by its function: what lies in what follows from the profile, for
    # the observer loses count of what is open where a collective ends on another thread.
    outermost: Mapping[int, int]
    dropped: dict[str, int]  # Records that were left out, by reason.

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Row of the outermost operator of each node; -1 for a node that the profile does not have, [nodes]."""
        row_of = {node.function: row for row, node in enumerate(self.nodes)}
        return tuple(row_of.get(self.outermost.get(node.function, -1), -1) for node in self.nodes)

    @cached_property
    def operators(self) -> tuple[int, ...]:
        """Rows of the outermost operators, in the order in which they began."""
        return tuple(row for row, owner in enumerate(self.owners) if owner == row)

    @cached_property
    def graph(self) -> NodeGraph:
        """The outermost operators and their true dependencies: tensors that others wrote, and each backward function's forward."""
        place = {row: i for i, row in enumerate(self.operators)}
        needs: list[set[int]] = [set() for _ in place]
        storages = _Storages()
        forward: dict[int, int] = {}
        for node, owner in zip(self.nodes, self.owners, strict=True):
            if owner < 0:
                continue
            number = place[owner]
            needs[number].update(writer for use in node.inputs for writer in storages.writers(use))
            if node.is_backward:
                needs[number].update({forward[node.sequence]} if node.sequence in forward else ())
            elif node.sequence >= 0:
                forward[node.sequence] = number
            read = {use.storage for use in node.inputs}
            for use in node.writes:
                storages.write(use, number, fresh=use.storage not in read)
            for use in node.outputs:
                storages.give(use)
        rows = [sorted(need - {number}) for number, need in enumerate(needs)]
        names = [self.nodes[row].name.removeprefix(AUTOGRAD_FUNCTION) for row in self.operators]
        return NodeGraph(
            name=tuple(f"{name}#{count}" for name, count in _counted(names)),
            op=tuple(names),
            input_ptr=np.cumsum([0, *map(len, rows)]).astype(np.int64),
            input_idx=np.array([need for row in rows for need in row], dtype=np.int64),
        )

    @cached_property
    def collectives(self) -> tuple[EnqueuedCollective, ...]:
        """Collectives in enqueue order."""
        place = {row: i for i, row in enumerate(self.operators)}
        return tuple(
            EnqueuedCollective(
                name=node.name.removeprefix(ENQUEUE).rstrip("_"),
                size_bytes=_moved_bytes(node),
                dtype=node.inputs[0].dtype if node.inputs else "",
                op=place[owner],
            )
            for node, owner in zip(self.nodes, self.owners, strict=True)
            if node.name.startswith(ENQUEUE) and owner >= 0
        )


def _moved_bytes(collective: ExecutionNode) -> int:
    """Tensors of the whole of a gathering or scattering collective, of which each rank has a part; otherwise all tensors."""
    sizes = [use.size_bytes for use in collective.inputs]
    return max(sizes, default=0) if _PARTED.search(collective.name) else sum(sizes)


def read_execution_trace(path: Path, spans: HostSpans) -> ExecutionTrace:
    """Read one rank's execution trace, gzipped or not; what lies in what is taken from the spans of the same rank's profile.

    Raises
    ------
    InputError
        The file is missing.
    TraceFormatError
        It is cut off, damaged, or no file of PyTorch's.
    """
    content = _decoded(path)
    dropped: defaultdict[str, int] = defaultdict(int)
    nodes: dict[int, ExecutionNode] = {}  # by function
    for record in content.nodes:
        attributes = {attribute.name: attribute.value for attribute in record.attrs}
        function = attributes.get("rf_id")
        if not isinstance(function, int) or not 0 <= function < _LARGEST:
            dropped["execution nodes without a function id"] += 1
        elif function == 0:
            dropped["execution nodes of processes and threads"] += 1
        elif function in nodes:
            dropped["execution nodes of one function id"] += 1
        else:
            nodes[function] = _node(record, attributes, function)
    return ExecutionTrace(
        nodes=tuple(nodes[function] for function in sorted(nodes)), outermost=_outermost(spans), dropped=dict(dropped)
    )


def _outermost(spans: HostSpans) -> dict[int, int]:
    """The function of the outermost operator around each operator that the profile shares with an execution trace."""
    rows = np.flatnonzero(spans.is_op & (spans.function > 0))
    order = rows[np.lexsort((-spans.end_us[rows], spans.start_us[rows], spans.thread[rows]))]
    columns = (spans.thread[order], spans.start_us[order], spans.end_us[order], spans.function[order])
    outermost: dict[int, int] = {}
    inside, until_us, outer = -1, -np.inf, 0
    for thread, start_us, end_us, function in zip(*(column.tolist() for column in columns), strict=True):
        # Only an outermost operator's end counts: what lies in it may end a rounding later than itself.
        if thread != inside or start_us >= until_us:
            inside, until_us, outer = thread, end_us, function
        outermost[function] = outer
    return outermost


def _decoded(path: Path) -> _File:
    if not path.is_file():
        raise InputError(f"{path}: missing: the job ended before the last of its profiled steps")
    raw = read_whole(path)
    try:
        return msgspec.json.decode(raw, type=_File)
    except DAMAGED as error:
        raise TraceFormatError(f"{path}: not a whole execution trace of PyTorch ({error}); record the job again") from error


class _Attribute(msgspec.Struct, gc=False):
    name: str
    value: Any = None


class _Values(msgspec.Struct):
    values: list[Any] = []
    shapes: list[Any] = []
    types: list[str] = []
    strides: list[Any] = []


class _Record(msgspec.Struct):
    name: str
    inputs: _Values = msgspec.field(default_factory=_Values)
    outputs: _Values = msgspec.field(default_factory=_Values)
    attrs: list[_Attribute] = []


class _File(msgspec.Struct):
    nodes: list[_Record]


def _node(record: _Record, attributes: dict[str, Any], function: int) -> ExecutionNode:
    sequence, schema = attributes.get("seq_id"), attributes.get("op_schema")
    inputs = [tuple(_uses(*argument)) for argument in _arguments(record.inputs)]
    outputs = tuple(use for argument in _arguments(record.outputs) for use in _uses(*argument))
    changed = _changed(schema if isinstance(schema, str) else "", record.name, inputs)
    read = {use.storage for uses in inputs for use in uses}
    # A view is of the storage of an input: it makes nothing.
    made = tuple(use for use in outputs if use.storage not in read)
    return ExecutionNode(
        name=record.name,
        function=function,
        sequence=sequence if isinstance(sequence, int) else -1,
        is_backward=attributes.get("scope") == _BACKWARD_SCOPE,
        inputs=tuple(use for uses in inputs for use in uses),
        outputs=outputs,
        writes=made + changed,
    )


def _changed(schema: str, name: str, inputs: Sequence[tuple[TensorUse, ...]]) -> tuple[TensorUse, ...]:
    """The arguments that an operator writes to: by its schema, and a collective its tensors."""
    if name.startswith(ENQUEUE):
        return inputs[0] if inputs else ()
    arguments = schema.partition("(")[2].rpartition(" -> ")[0].replace(" *, ", " ").split(", ")
    marked = [bool(_WRITTEN.search(argument)) for argument in arguments]
    return tuple(use for uses, written in zip(inputs, marked, strict=False) if written for use in uses)


def _arguments(values: _Values) -> Iterator[tuple[Any, Any, Any, str]]:
    """(value, shape, strides, type) of each argument, as far as all four are there."""
    count = len(values.values)
    columns = [[*column[:count], *[None] * (count - len(column))] for column in (values.shapes, values.strides)]
    types = [*values.types[:count], *[""] * (count - len(values.types))]
    return zip(values.values, *columns, types, strict=True)


def _uses(value: Any, shape: Any, strides: Any, kind: str) -> Iterator[TensorUse]:
    """The tensors of an argument: itself, or those of a list."""
    tensors = list(_tensors(value, shape, strides))
    dtypes = _DTYPE.findall(kind)
    if len(dtypes) != len(tensors):
        dtypes = [""] * len(tensors)
    for (tensor, sides, steps), dtype in zip(tensors, dtypes, strict=True):
        _, storage, offset, elements, width, _ = tensor
        extent = 1 + sum((side - 1) * step for side, step in zip(sides, steps, strict=True)) if steps and elements else elements
        yield TensorUse(
            storage=storage,
            begin=offset * width,
            end=(offset + extent) * width,
            size_bytes=elements * width,
            dtype=dtype.removeprefix("c10::").lower(),
            shape=tuple(sides),
        )


def _tensors(value: Any, shape: Any, strides: Any) -> Iterator[tuple[list[Any], list[int], list[int]]]:
    """Lists of [tensor, storage, offset, elements, bytes of an element, device], with shape and strides where they fit."""
    if not isinstance(value, list):
        return
    if len(value) == 6 and isinstance(value[5], str) and all(map(_is_count, value[:5])) and max(value[2:4]) * value[4] < _LARGEST:
        sides = shape if _are_counts(shape) else []
        fits = _are_counts(strides) and len(strides) == len(sides) > 0
        yield value, sides, strides if fits else []
        return
    for i, inner in enumerate(value):
        yield from _tensors(
            inner, *(column[i] if isinstance(column, list) and i < len(column) else None for column in (shape, strides))
        )


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < _LARGEST


def _are_counts(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(_is_count(number) for number in numbers)


def _counted(names: Sequence[str]) -> Iterator[tuple[str, int]]:
    seen: defaultdict[str, int] = defaultdict(int)
    for name in names:
        yield name, seen[name]
        seen[name] += 1


class _Storages:
    """Who wrote which bytes of which storage last.

    Numbers of storages are used again, also for tensors that no operator made: those of another type of element, and scalars that
    no operator gave, are such.
    """

    def __init__(self) -> None:
        self._written: defaultdict[int, list[tuple[TensorUse, int]]] = defaultdict(list)
        self._scalars: defaultdict[int, set[int]] = defaultdict(set)  # where in each storage

    def writers(self, use: TensorUse) -> set[int]:
        """Those whose bytes a use of a storage may read."""
        if not use.shape and use.begin not in self._scalars[use.storage]:
            return set()
        return {
            who
            for made, who in self._written[use.storage]
            if made.begin < use.end and use.begin < made.end and made.dtype == use.dtype
        }

    def write(self, use: TensorUse, who: int, *, fresh: bool) -> None:
        """Note a write; a fresh storage holds nothing older."""
        if fresh:
            self._scalars[use.storage].clear()
        written = [] if fresh else [row for row in self._written[use.storage] if not _covers(use, row[0])]
        self._written[use.storage] = [*written, (use, who)]

    def give(self, use: TensorUse) -> None:
        """Note what an operator returned."""
        if not use.shape:
            self._scalars[use.storage].add(use.begin)


def _covers(use: TensorUse, other: TensorUse) -> bool:
    return use.begin <= other.begin and other.end <= use.end
