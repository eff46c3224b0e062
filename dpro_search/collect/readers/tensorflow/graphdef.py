"""The executed graph of a rank, from a serialized TensorFlow `RunMetadata`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpro_search.collect.readers._bytes import read_whole
from dpro_search.collect.readers.protos import parse, text
from dpro_search.collect.recorded_names import made_for_backward
from dpro_search.collect.trace import GraphTensors, NodeGraph
from dpro_search.errors import TraceFormatError

ALLREDUCE_OPS = ("HorovodAllreduce", "HorovodGroupedAllreduce")

DTYPES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 9: "int64", 10: "bool",
    14: "bfloat16", 17: "uint16", 19: "float16", 22: "uint32", 23: "uint64",
}  # fmt: skip  # tensorflow/core/framework/types.proto


@dataclass(frozen=True, kw_only=True)
class CommNode:
    """A graph node that all-reduces."""

    name: str
    op: str
    # The communication library's names, as in its timeline: one, or one per tensor of a group, in the order of `inputs`.
    tensor_names: tuple[str, ...]
    dtype: str
    inputs: tuple[str, ...]  # Nodes that produce the tensors (data inputs only).


def read_partition_graph(path: Path) -> tuple[NodeGraph, tuple[CommNode, ...]]:
    """Read the graph that was executed and all-reduces, with its all-reduce nodes.

    Of the tensors, only their places among the outputs of their nodes are known.

    A `RunMetadata` holds, per function that ran, one partition graph per device. The partitions of the function that
    all-reduces are merged; of several such functions (retraces of one step) the last is taken, for that one still runs.

    Raises
    ------
    InputError
        The file cannot be read.
    TraceFormatError
        Not a `RunMetadata`, no graph with an all-reduce in it, or an input that names no node.
    """
    metadata = parse("RunMetadata", read_whole(path), path)
    functions = [function.partition_graphs for function in metadata.function_graphs] or [metadata.partition_graphs]
    training = [graphs for graphs in functions if any(node.op in ALLREDUCE_OPS for graph in graphs for node in graph.node)]
    if not training:
        raise TraceFormatError(
            f"{path}: no partition graph with a {' or '.join(ALLREDUCE_OPS)} node ({len(functions)} functions); "
            "record a step that all-reduces gradients, with run metadata enabled before the step's first call"
        )
    nodes = [node for graph in training[-1] for node in graph.node]
    return _node_graph(nodes, path), tuple(_comm_node(node) for node in nodes if node.op in ALLREDUCE_OPS)


def _node_graph(nodes: list[Any], path: Path) -> NodeGraph:
    index: dict[str, int] = {}
    for i, node in enumerate(nodes):
        if index.setdefault(text(node.name), i) != i:
            raise TraceFormatError(f"{path}: two nodes are named '{text(node.name)}'")
    ptr, idx, ports = [0], [], []
    for node in nodes:
        for entry in map(text, node.input):
            source = index.get(producer(entry))
            if source is None:
                raise TraceFormatError(
                    f"{path}: node '{text(node.name)}' has the input '{entry}', which names no node of the graph"
                )
            idx.append(source)
            ports.append(_port(entry))
        ptr.append(len(idx))
    return NodeGraph(
        name=tuple(text(node.name) for node in nodes),
        op=tuple(text(node.op) for node in nodes),
        input_ptr=np.array(ptr, dtype=np.int64),
        input_idx=np.array(idx, dtype=np.int64),
        backward=np.array([made_for_backward(text(node.name), text(node.op)) for node in nodes], dtype=np.bool_),
        tensors=GraphTensors(
            types=(),
            input_port=np.array(ports, dtype=np.int64),
            input_type=np.full(len(ports), -1, dtype=np.int64),
            workspace_bytes=np.zeros(len(nodes), dtype=np.int64),
        ),
    )


def producer(entry: str) -> str:
    """Node of an input: "^node" (control), "node" (its output 0) or "node:port"."""
    return entry[1:] if entry.startswith("^") else entry.partition(":")[0]


def _port(entry: str) -> int:
    """Which output of its node an input is; -1: a control input, or none that could be."""
    if entry.startswith("^"):
        return -1
    port = entry.partition(":")[2]
    return (int(port) if port.isdecimal() and len(port) < 10 else -1) if port else 0


def _comm_node(node: Any) -> CommNode:
    attributes = {entry.key: entry.value for entry in node.attr}
    # The kernel names the tensors after its node, and a group's tensors by a suffix (horovod/tensorflow/mpi_ops.cc).
    base = text(node.name)
    if "ignore_name_scope" in attributes and attributes["ignore_name_scope"].b:
        base = base.rpartition("/")[2]
    names: tuple[str, ...] = (base,)
    if node.op == "HorovodGroupedAllreduce":
        count = attributes["num_tensors"].i
        names = tuple(f"{base}_{i + 1}of{count}" for i in range(count))
    number = attributes["T"].type if "T" in attributes else 0
    return CommNode(
        name=text(node.name),
        op=text(node.op),
        tensor_names=names,
        dtype=DTYPES.get(number, f"type {number}"),
        inputs=tuple(producer(entry) for entry in map(text, node.input) if not entry.startswith("^")),
    )
