"""TensorFlow's `RunMetadata` with a full trace: one step of one rank, every node with its times, and the executed graph if kept.

What `Session.run` fills in with ``RunOptions(trace_level=FULL_TRACE, output_partition_graphs=True)``. An asynchronous node, such as
an all-reduce, spans from its start to its completion. On a GPU the kernels appear again on devices named after streams.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpro_search.collect.assemble.described import described
from dpro_search.collect.clock import CommSpans
from dpro_search.collect.readers._bytes import read_whole
from dpro_search.collect.readers.event_table import EventTable, clocks_checked
from dpro_search.collect.readers.importers import Importer
from dpro_search.collect.readers.protos import parse, text
from dpro_search.collect.readers.tensorflow.graphdef import DTYPES, producer
from dpro_search.collect.recorded_names import collective_kind_of, made_for_backward
from dpro_search.collect.trace import CollectiveKind, EventKind, NodeGraph, TensorInfo, Trace
from dpro_search.errors import InputError, TraceFormatError

FORMAT = "tensorflow-runmetadata"

_COMM = re.compile(r"Horovod.*(Allreduce|Allgather|Broadcast|Reducescatter|Alltoall)|Collective|Nccl")
_LABEL = re.compile(r" = (\w+)\(")
_ALL_STREAMS = "stream:all"
_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int8": 1, "uint8": 1, "bool": 1, "int32": 4, "int64": 8}
_LONGEST_US = 1e18
_LARGEST_BYTES = 2**50


@dataclass(frozen=True, kw_only=True)
class _ExecutedNode:
    """One executed node; epoch microseconds."""

    name: str
    op: str
    device: str
    thread: int
    start_us: float
    end_us: float
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_comm(self) -> bool:
        return _COMM.search(self.op) is not None

    @property
    def size_bytes(self) -> int:
        size = math.prod(self.shape) * _ITEM_BYTES.get(self.dtype, 0) if self.dtype else 0
        return size if 0 <= size < _LARGEST_BYTES else 0


def recognise(head: bytes, path: Path) -> bool:
    """Whether a file that begins with `head` is a `RunMetadata` that begins with step statistics of a device."""
    place = 0
    for _ in range(3):  # step_stats, dev_stats, device: the first field of each
        if head[place : place + 1] != b"\x0a":
            return False
        place += 1
        while place < len(head) and head[place] >= 0x80:
            place += 1
        place += 1
    return head[place : place + 1] == b"/" and re.match(rb"/(job:|device:|host:|gpu:|cpu:)", head[place : place + 10]) is not None


def read(paths: Sequence[Path]) -> Trace:
    """Read the traced step of every rank: one file a rank, in the order of the paths.

    Nodes are OP events, named as in the graph; those that communicate are COMM events, of which the ones of one name share a
    collective number if every rank has one. DATA dependencies are the graph's edges between executed nodes.

    Raises
    ------
    InputError
        A file cannot be read, or the ranks' clocks contradict each other.
    TraceFormatError
        A file is no `RunMetadata`, or holds no executed node.
    """
    dropped: Counter[str] = Counter()
    metadata = [parse("RunMetadata", read_whole(path), path, dropped) for path in paths]
    ranks = [_nodes(of_rank, dropped) for of_rank in metadata]
    for path, nodes in zip(paths, ranks, strict=True):
        if not nodes:
            raise TraceFormatError(f"{path}: no executed node in the step statistics; run the step with trace_level=FULL_TRACE")
    base_us = min(node.start_us for nodes in ranks for node in nodes)
    common = _common(ranks)
    rows = [[(node.start_us, node.end_us) for node in nodes] for nodes in common.values()]
    sizes = (math.floor(math.log2(max(nodes[0].size_bytes, 1))) for nodes in common.values())
    try:
        clock = clocks_checked(CommSpans.of(rows, sizes, len(ranks), base_us), "collective")
    except InputError as error:
        raise InputError(f"{paths[0]}: {error}") from error
    tensor = {name: number for number, name in enumerate(common)}
    infos = tuple(
        TensorInfo(name=name, node=name, dtype=nodes[0].dtype, shape=nodes[0].shape, size_bytes=nodes[0].size_bytes)
        for name, nodes in common.items()
    )
    table = EventTable()
    graphs = []
    for rank, (nodes, metadata_of_rank) in enumerate(zip(ranks, metadata, strict=True)):
        graph = _graph(metadata_of_rank, dropped)
        graphs.append(graph)
        events = _add_rank(table, rank, nodes, base_us, tensor)
        for target, name in enumerate(graph.name):
            for source in graph.input_idx[graph.input_ptr[target] : graph.input_ptr[target + 1]].tolist():
                before, after = events.get(graph.name[source]), events.get(name)
                if before is None or after is None:
                    continue
                if table.end_us[before] <= table.start_us[after]:
                    table.need(before, after)
                else:  # a loop's back edge, or the times of a device's queue
                    dropped["edges that the times contradict"] += 1
    kept: list[NodeGraph] = []
    of_rank = [_kept_at(kept, graph) for graph in graphs]
    steps = [
        (r, 0, min(n.start_us for n in nodes) - base_us, max(n.end_us for n in nodes) - base_us) for r, nodes in enumerate(ranks)
    ]
    has_graph = any(len(graph.name) for graph in kept)
    return described(
        table.trace(
            format=FORMAT,
            framework="tensorflow",
            comm="horovod" if any("Horovod" in node.op for nodes in ranks for node in nodes) else "unknown",
            clock=clock,
            steps=steps,
            dropped=dropped,
            warnings=() if has_graph else ("no executed graph in the files: dependencies are not known",),
            tensors=infos,
            graphs=kept,
            graph_of_rank=of_rank,
        )
    )


def _nodes(metadata: Any, dropped: Counter[str]) -> list[_ExecutedNode]:
    ops = {text(node.name): text(node.op) for graph in metadata.partition_graphs for node in graph.node}
    devices = [text(stats.device) for stats in metadata.step_stats.dev_stats]
    by_stream = any("stream:" in device and _ALL_STREAMS not in device for device in devices)
    nodes = []
    for device, stats in zip(devices, metadata.step_stats.dev_stats, strict=True):
        if _ALL_STREAMS in device and by_stream:
            dropped["kernels written twice"] += len(stats.node_stats)
            continue
        for node in stats.node_stats:
            start_us = node.all_start_nanos / 1e3 if node.all_start_nanos else float(node.all_start_micros)
            length_us = node.all_end_rel_nanos / 1e3 if node.all_end_rel_nanos else float(node.all_end_rel_micros)
            if not (0 < start_us < _LONGEST_US and 0 <= length_us < _LONGEST_US):
                dropped["without times"] += 1
                continue
            label = _LABEL.search(text(node.timeline_label))
            output = node.output[0].tensor_description if node.output else None
            nodes.append(
                _ExecutedNode(
                    name=text(node.node_name),
                    op=ops.get(text(node.node_name)) or (label[1] if label else ""),
                    device=device,
                    thread=node.thread_id,
                    start_us=start_us,
                    end_us=start_us + length_us,
                    dtype=DTYPES.get(output.dtype, "") if output else "",
                    shape=tuple(dimension.size for dimension in output.shape.dim) if output else (),
                )
            )
    return sorted(nodes, key=lambda node: (node.start_us, node.end_us))


def _common(ranks: Sequence[Sequence[_ExecutedNode]]) -> dict[str, list[_ExecutedNode]]:
    """Communication nodes that every rank executed once, by name."""
    names = [Counter(node.name for node in nodes if node.is_comm) for nodes in ranks]
    shared = [name for name in names[0] if all(counts[name] == 1 for counts in names)]
    by_name = [{node.name: node for node in nodes if node.is_comm} for nodes in ranks]
    return {name: [nodes[name] for nodes in by_name] for name in shared}


def _add_rank(
    table: EventTable, rank: int, nodes: Sequence[_ExecutedNode], base_us: float, tensor: dict[str, int]
) -> dict[str, int]:
    """The events of one rank; returns those of the nodes that were executed once, by name."""
    streams: dict[tuple[str, int], int] = {}
    events: dict[str, list[int]] = defaultdict(list)
    for node in nodes:
        kind = EventKind.COMM if node.is_comm else EventKind.OP
        if "stream:" in node.device or "memcpy" in node.device:
            kind = EventKind.COPY if "memcpy" in node.device.lower() + node.name.lower() else EventKind.KERNEL
        number = tensor.get(node.name, -1) if kind is EventKind.COMM else -1
        event = table.add(
            node.name,
            kind,
            rank=rank,
            stream=streams.setdefault((node.device, node.thread), len(streams)),
            start_us=node.start_us - base_us,
            end_us=node.end_us - base_us,
            step=0,
            tensor=number,
            collective=number,
            size_bytes=node.size_bytes if kind is EventKind.COMM else 0,
            collective_kind=collective_kind_of(node.op) if kind is EventKind.COMM else CollectiveKind.UNKNOWN,
        )
        if kind in (EventKind.OP, EventKind.COMM):
            events[node.name].append(event)
    return {name: of_name[0] for name, of_name in events.items() if len(of_name) == 1}


def _graph(metadata: Any, dropped: Counter[str]) -> NodeGraph:
    nodes: dict[str, Any] = {}
    for node in (node for graph in metadata.partition_graphs for node in graph.node):
        dropped["graph nodes of one name"] += text(node.name) in nodes
        nodes.setdefault(text(node.name), node)
    index = {name: i for i, name in enumerate(nodes)}
    ptr, idx = [0], []
    for node in nodes.values():
        sources = [index.get(producer(text(entry)), -1) for entry in node.input]
        dropped["inputs that name no node"] += sources.count(-1)
        idx += [source for source in sources if source >= 0]
        ptr.append(len(idx))
    return NodeGraph(
        name=tuple(nodes),
        op=tuple(text(node.op) for node in nodes.values()),
        input_ptr=np.array(ptr, np.int64),
        input_idx=np.array(idx, np.int64),
        backward=np.array([made_for_backward(name, text(node.op)) for name, node in nodes.items()], np.bool_),
    )


def _kept_at(kept: list[NodeGraph], graph: NodeGraph) -> int:
    """The place of a graph among those that are kept; ranks that run equal graphs share one."""
    for i, other in enumerate(kept):
        if other.name == graph.name and other.op == graph.op and np.array_equal(other.input_idx, graph.input_idx):
            return i
    kept.append(graph)
    return len(kept) - 1


IMPORTER = Importer(
    name=FORMAT,
    description="step statistics of TensorFlow (a RunMetadata protobuf with a full trace)",
    recognise=recognise,
    read=read,
)
