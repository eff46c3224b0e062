"""MXNet's files: a profile with the operators and API calls of one process, and the symbol graph of a model.

The profiler writes an operator as B and E on its device's process (and again as b and e on a process "operator"), named by its
type; API calls as b and e of category MXNET_C_API; tasks that the script made (iteration marks) as b and e of other categories.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from dpro_search.collect._files import DAMAGED
from dpro_search.collect.readers._bytes import read_available
from dpro_search.collect.readers._chrome import chrome_events
from dpro_search.collect.trace import NodeGraph

COMM = re.compile(r"KVStore|P3Store|BytePS|[Hh]orovod")  # operators that communicate

_HOUSEKEEPING = ("DeleteVariable", "WaitForVar")
_CALLS = ("Invoke", "Backward", "PushPull", "KVStore", "Wait", "SyncCopy", "EnginePush", "push_pull")  # start or await work
_AUXILIARY_FROM = {"BatchNorm": 3, "SyncBatchNorm": 3}  # inputs from this position on are running statistics
_LONGEST_US = 1e18


class Span(NamedTuple):
    """An operator, an API call or a task; epoch microseconds."""

    start_us: float
    end_us: float
    name: str
    thread: int


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One process's profile; every list is sorted by start."""

    path: Path
    ops: list[Span]
    calls: list[Span]
    tasks: list[Span]  # spans of the script's own

    @property
    def trains(self) -> bool:
        """Whether the process computed gradients."""
        return any(op.name.startswith("_backward_") for op in self.ops)


class _ChromeEvent(msgspec.Struct, gc=False):
    ph: str
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    pid: int = 0
    tid: int = 0
    id: int | str = 0


def read_profile(path: Path, dropped: Counter[str]) -> Profile:
    """Read one process's profile; raises as `chrome_events` does."""
    events, left_out = chrome_events(path, _ChromeEvent)
    dropped.update(left_out)
    threads: dict[int, int] = {}
    spans: dict[str, list[Span]] = {"operator": [], "MXNET_C_API": [], "": []}
    since: dict[tuple[str, int, int, int | str], list[float]] = defaultdict(list)
    for event in events:
        if event.ph == "M":
            continue
        if event.ph == "C":
            dropped["counters"] += 1
            continue
        is_op = event.ph in "BE"
        if not event.ph or event.ph not in "BEbe" or not 0 <= event.ts < _LONGEST_US:
            dropped["unknown events"] += 1
            continue
        if event.cat == "operator" and not is_op:
            dropped["operators written twice"] += event.ph == "e"
            continue
        # Operators of one thread may overlap (asynchronous ones): a B and its E follow each other in the file.
        key = event.name, event.pid, event.tid, "" if is_op else event.id
        if event.ph in "Bb":
            since[key].append(event.ts)
        elif not since[key] or event.ts < since[key][-1]:
            dropped["end without start"] += 1
        else:
            start_us = since[key].pop()
            name, kept = event.name, event.cat if event.cat in spans else ""
            if is_op and name in _HOUSEKEEPING:
                dropped["engine housekeeping"] += 1
            elif kept == "MXNET_C_API" and not any(part in name for part in _CALLS):
                dropped["API calls that start or await nothing"] += 1
            else:
                thread = threads.setdefault(event.tid, len(threads))
                spans["operator" if is_op else kept].append(Span(start_us, event.ts, name, thread))
    dropped["start without end"] += sum(map(len, since.values()))
    return Profile(
        path=path,
        ops=sorted(spans["operator"]),
        calls=sorted(spans["MXNET_C_API"]),
        tasks=sorted(spans[""]),
    )


@dataclass(frozen=True, kw_only=True)
class Symbol:
    """A model's graph: the nodes in the order of the file, which is topological."""

    names: tuple[str, ...]
    ops: tuple[str, ...]
    inputs: tuple[tuple[int, ...], ...]  # Nodes that each node reads, [nodes].
    parameters: tuple[tuple[int, ...], ...]  # Inputs of each node that are trained, [nodes].
    size: tuple[int, ...]  # Elements of each node where its shape is known, else 0.
    least_size: tuple[int, ...]  # The same, with 1 for every extent that was not known when the file was written.

    def graph(self) -> NodeGraph:
        """The graph in the form of a `Trace`."""
        ptr = np.cumsum([0, *map(len, self.inputs)])
        read = np.array([source for row in self.inputs for source in row], np.int64)
        return NodeGraph(name=self.names, op=self.ops, input_ptr=ptr.astype(np.int64), input_idx=read)


class _SymbolNode(msgspec.Struct):
    op: str
    name: str
    inputs: list[list[int]] = []
    attrs: dict[str, str] = {}


class _SymbolFile(msgspec.Struct):
    nodes: list[_SymbolNode]


def is_symbol(head: bytes) -> bool:
    """Whether a file that begins with `head` is a symbol graph."""
    text = head.lstrip()
    return text.startswith(b"{") and b'"nodes"' in text[:100] and b'"op"' in text[:400]


def read_symbol(path: Path) -> Symbol | None:
    """The graph, or None if the file is damaged."""
    try:
        nodes = msgspec.json.decode(read_available(path)[0], type=_SymbolFile).nodes
    except DAMAGED:
        return None
    if any(len(entry) < 1 or not 0 <= entry[0] < i for i, node in enumerate(nodes) for entry in node.inputs):
        return None
    inputs = tuple(tuple(entry[0] for entry in node.inputs) for node in nodes)
    return Symbol(
        names=tuple(node.name for node in nodes),
        ops=tuple(node.op for node in nodes),
        inputs=inputs,
        parameters=tuple(_parameters(nodes, i) for i in range(len(nodes))),
        size=tuple(_elements(node.attrs.get("__shape__", ""), unknown=0) for node in nodes),
        least_size=tuple(_elements(node.attrs.get("__shape__", ""), unknown=1) for node in nodes),
    )


def _parameters(nodes: Sequence[_SymbolNode], i: int) -> tuple[int, ...]:
    node = nodes[i]
    parameters = []
    for position, (number, *_) in enumerate(node.inputs):
        is_variable = nodes[number].op == "null" and "__shape__" in nodes[number].attrs
        fixed = node.attrs.get("fix_gamma") == "True" and position == 1
        if is_variable and not fixed and position < _AUXILIARY_FROM.get(node.op, len(node.inputs)):
            parameters.append(number)
    return tuple(parameters)


def _elements(text: str, *, unknown: int) -> int:
    """Elements of a shape such as "(16, 0, 3, 3)", in which 0 is an extent that was not known."""
    try:
        shape = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return 0
    if not (
        isinstance(shape, tuple) and len(shape) <= 8 and all(isinstance(extent, int) and 0 <= extent < 2**31 for extent in shape)
    ):
        return 0
    return min(math.prod(extent or unknown for extent in shape), 2**60)
