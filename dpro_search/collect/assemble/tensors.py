"""Facts that a rank's profile adds to its graph: types of tensors, workspace of ops, and the allocator's own count."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dpro_search.collect.readers.tensorflow.xplane import MemoryEvents, XPlaneRank, tensor_types
from dpro_search.collect.trace import AllocatorReport, Floats, GraphTensors, Ints, NodeGraph, TensorType


def with_tensors(graph: NodeGraph, profile: XPlaneRank) -> tuple[NodeGraph, int]:
    """The graph with the types of its tensors as the profiled ops saw them, and how many ops saw others than the graph has."""
    assert graph.tensors is not None
    shapes_of = dict(zip(profile.nodes, profile.input_shapes, strict=True))
    workspaces = _workspaces(profile)
    types: dict[TensorType, int] = {}
    ports, misfits = graph.tensors.input_port, 0
    input_type = np.full(len(ports), -1, dtype=np.int64)
    for node, name in enumerate(graph.name):
        found = tensor_types(shapes_of.get(name, ""))
        first, end = graph.input_ptr[node : node + 2]
        edges = first + np.flatnonzero(ports[first:end] >= 0)
        if len(found) != len(edges):
            misfits += bool(found)
            continue
        for edge, kind in zip(edges.tolist(), found, strict=True):
            if kind is not None:
                input_type[edge] = types.setdefault(kind, len(types))
    tensors = GraphTensors(
        types=tuple(types),
        input_port=ports,
        input_type=input_type,
        workspace_bytes=np.array([workspaces.get(name, 0) for name in graph.name], dtype=np.int64),
    )
    return replace(graph, tensors=tensors), misfits


def allocator_report(memories: Sequence[MemoryEvents]) -> AllocatorReport | None:
    """The count of the allocator of that rank whose peak is the highest; None if there are no events."""
    reports = [_report(memory) for memory in memories if len(memory.time_us)]
    return max(reports, key=lambda report: report.peak_bytes, default=None)


def _report(memory: MemoryEvents) -> AllocatorReport:
    spare = np.where(memory.is_allocation, memory.taken_bytes - memory.requested_bytes, 0)
    releases = memory.releases()
    given_back = np.flatnonzero(releases >= 0)
    change = spare.copy()
    np.subtract.at(change, releases[given_back], spare[given_back])
    return AllocatorReport(
        name=memory.allocator,
        peak_bytes=int(memory.in_use_bytes.max()),
        requested_peak_bytes=int((memory.in_use_bytes - np.cumsum(change)).max()),
        least_bytes=int(memory.in_use_bytes.min()),
    )


def _workspaces(profile: XPlaneRank) -> dict[str, int]:
    """Largest memory that each op allocated and freed while it ran, over all steps."""
    memory, releases = profile.memory, profile.memory.releases()
    number = {name: i for i, name in enumerate(profile.nodes)}
    runs = _runs(profile)
    held: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    for i in np.flatnonzero(releases >= 0).tolist():
        name = memory.ops[memory.op[i]]
        if name not in number:
            continue
        starts, ends = runs[number[name]]
        from_us, to_us = memory.time_us[i], memory.time_us[releases[i]]
        run = int(np.searchsorted(starts, from_us, side="right")) - 1
        if run >= 0 and to_us <= ends[run]:
            size = int(memory.requested_bytes[i])
            held[name, run] += [(from_us, size), (to_us, -size)]
    most: dict[str, int] = {}
    for (name, _), changes in held.items():
        most[name] = max(most.get(name, 0), int(np.cumsum([size for _, size in sorted(changes)]).max()))
    return most


def _runs(profile: XPlaneRank) -> list[tuple[Floats, Floats]]:
    """Starts and ends of every node's executions, by its number."""
    ops = profile.ops
    order: Ints = np.argsort(ops.node, kind="stable")
    limits = np.searchsorted(ops.node[order], np.arange(len(profile.nodes) + 1))
    rows = [order[low:high] for low, high in itertools.pairwise(limits)]
    return [(ops.start_us[row], ops.end_us[row]) for row in rows]
