"""Small executed graphs with the types of their tensors, for tests of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dpro_search.collect.trace import GraphTensors, NodeGraph, TensorType
from dpro_search.graph.buffers import step_memory
from dpro_search.graph.dataflow import OpKind, StepMemory


def node_graph(nodes: Sequence[tuple[str, str, str]], types: Mapping[str, TensorType], workspace: Mapping[str, int]) -> NodeGraph:
    """Nodes as (name, op, inputs "a b:1 ^c"); types by tensor, "a" or "b:1"."""
    index = {name: i for i, (name, _, _) in enumerate(nodes)}
    distinct = list(dict.fromkeys(types.values()))
    ptr, idx, ports, kinds = [0], [], [], []
    for _, _, inputs in nodes:
        for entry in inputs.split():
            name, _, port = entry.removeprefix("^").partition(":")
            idx.append(index[name])
            ports.append(-1 if entry.startswith("^") else int(port or 0))
            kinds.append(distinct.index(types[entry]) if entry in types else -1)
        ptr.append(len(idx))
    tensors = GraphTensors(
        types=tuple(distinct),
        input_port=np.array(ports, np.int64),
        input_type=np.array(kinds, np.int64),
        workspace_bytes=np.array([workspace.get(name, 0) for name, _, _ in nodes], np.int64),
    )
    return NodeGraph(
        name=tuple(name for name, _, _ in nodes),
        op=tuple(op for _, op, _ in nodes),
        input_ptr=np.array(ptr, np.int64),
        input_idx=np.array(idx, np.int64),
        tensors=tensors,
    )


def step(
    nodes: Sequence[tuple[str, str, str]],
    types: Mapping[str, TensorType],
    *,
    backward: Sequence[str] = (),
    workspace: Mapping[str, int] | None = None,
    gradients: Sequence[int] = (),
) -> StepMemory:
    """The buffers of nodes that ran one after the other as listed; those without a kernel did not run."""
    graph = node_graph(nodes, types, workspace or {})
    start = np.array([np.nan if op in ("_Arg", "Const") else 10.0 * i for i, (_, op, _) in enumerate(nodes)])
    kinds = [
        OpKind.COMM if op == "HorovodAllreduce" else OpKind.BACKWARD if name in backward else OpKind.FORWARD
        for name, op, _ in nodes
    ]
    memory_use = step_memory(graph, np.array(kinds, np.int64), [(start, start + 9)], gradients)
    assert memory_use is not None
    return memory_use


def floats(*shape: int) -> TensorType:
    return TensorType("float32", shape)
