"""Raw files of a recorded TensorFlow + Horovod job -> `Trace`.

A raw folder holds ``job.json`` (how the job was started), ``rank{r}/{hook.json,run_metadata.pb,xplane.pb}`` of every rank, and
``horovod_timeline.json`` of rank 0.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect.assemble.common import (
    aligned,
    completed,
    event_columns,
    joined,
    no_profiled_step,
    read_job,
    read_json,
    shifted,
    step_of,
    steps_of,
)
from dpro_search.collect.assemble.horovod_phases import (
    HorovodJobFile,
    HorovodRankFile,
    horovod_facts,
    phase_events,
    settings_with_groups,
    timeline_dropped,
    timeline_warnings,
    with_collectives,
)
from dpro_search.collect.readers.horovod.timeline import HorovodTimeline, read_horovod_timeline
from dpro_search.collect.readers.tensorflow.graphdef import CommNode, read_partition_graph
from dpro_search.collect.readers.tensorflow.xplane import MemoryEvents, XPlaneRank, epoch_origin, read_xplane, tensor_types
from dpro_search.collect.trace import (
    AllocatorReport,
    CollectiveKind,
    EventKind,
    Events,
    Floats,
    GraphTensors,
    Ints,
    NodeGraph,
    Steps,
    TensorInfo,
    TensorType,
    Trace,
    TraceMeta,
)
from dpro_search.errors import InputError

FORMAT = "tensorflow-horovod"
_CUT_OFF = 0.01  # Of a rank's all-reduces: so many may reach over an end of the profile.


class GradientRecord(msgspec.Struct):
    """A gradient as the hook noted it while the step was traced."""

    name: str
    op: str
    horovod: str


class HookFile(HorovodRankFile, kw_only=True):
    """``hook.json`` of one rank."""

    gradients: list[GradientRecord]


def read_hook(path: Path) -> HookFile:
    """Read what the hook of one rank wrote; raises `InputError` or `TraceFormatError` that name the file."""
    return read_json(path, HookFile, "this rank never started Horovod, or its process was killed")


@dataclass(frozen=True)
class _TensorFlowRank:
    hook: HookFile
    profile: XPlaneRank
    graph: NodeGraph
    comm_nodes: tuple[CommNode, ...]
    origin_residual_us: float
    misfits: int  # ops whose inputs are others in the profile than in the graph


def assemble(raw: Path) -> Trace:
    """Build the trace of one job from its raw folder: see `Launcher.assemble`."""
    job = read_job(raw, HorovodJobFile, FORMAT)
    raw_ranks = [_read_rank(raw / f"rank{r}") for r in range(job.ranks)]
    timeline = read_horovod_timeline(raw / "horovod_timeline.json")
    base_ns = raw_ranks[0].hook.steps[0][0]
    tensors, tensor_of_horovod = _tensors(raw_ranks[0], timeline)
    steps = steps_of([rank.hook for rank in raw_ranks], base_ns)
    names: dict[str, int] = {}
    per_rank = [_rank_events(rank, r, base_ns, steps, tensors, names) for r, rank in enumerate(raw_ranks)]
    phases = phase_events(timeline, base_ns, steps, tensor_of_horovod, names)
    events = joined([*per_rank, phases])
    events = with_collectives(events)
    clock = aligned(events, tuple(rank.hook.machine for rank in raw_ranks), [rank.origin_residual_us for rank in raw_ranks])
    events, steps = shifted(events, steps, clock)
    graphs, graph_of_rank = _shared_graphs([rank.graph for rank in raw_ranks])
    trace = Trace(
        meta=TraceMeta(
            framework="tensorflow",
            format=FORMAT,
            **horovod_facts(job, [rank.hook for rank in raw_ranks], timeline),
            settings=settings_with_groups(job, tensors),
            clock=clock,
            allocator=allocator_report([rank.profile.memory for rank in raw_ranks]),
            dropped=_dropped(raw_ranks, timeline),
            warnings=_warnings(raw_ranks, timeline, events),
        ),
        names=tuple(names),
        events=events,
        steps=steps,
        tensors=tensors,
        graphs=graphs,
        graph_of_rank=graph_of_rank,
    )
    return completed(trace)


def _read_rank(folder: Path) -> _TensorFlowRank:
    hook = read_hook(folder / "hook.json")
    if not hook.steps:
        raise InputError(
            f"{folder}/hook.json: no training step was seen; a step is a call of a tf.function that all-reduces with Horovod"
        )
    traced = np.array([step[:2] for step in hook.steps if step[4]], dtype=np.int64).reshape(-1, 2)
    if not len(traced):
        raise no_profiled_step(folder, hook)
    graph, comm_nodes = read_partition_graph(folder / "run_metadata.pb")
    profile, residual_us = epoch_origin(read_xplane(folder / "xplane.pb"), traced)
    graph, misfits = with_tensors(graph, profile)
    return _TensorFlowRank(hook, profile, graph, comm_nodes, residual_us, misfits)


def _tensors(rank: _TensorFlowRank, timeline: HorovodTimeline) -> tuple[tuple[TensorInfo, ...], dict[str, int]]:
    """The gradients, and their indices by Horovod's name. Those that the hook could not name keep Horovod's name."""
    sizes = {tensor.name: tensor for tensor in timeline.tensors}
    names = {_tail(record.horovod): record.name for record in rank.hook.gradients}
    tensors: list[TensorInfo] = []
    index: dict[str, int] = {}
    for node in rank.comm_nodes:
        for horovod in node.tensor_names:
            seen = sizes.get(horovod.replace("/", "_")) or sizes.get(horovod)
            if seen is None or seen.size_bytes < 0:
                raise InputError(
                    f"horovod_timeline.json: no all-reduce of '{horovod}', which the graph has; was the job ended early?"
                )
            index[seen.name] = len(tensors)
            tensors.append(
                TensorInfo(
                    name=names.get(_tail(horovod), horovod),
                    node=node.name,
                    dtype=seen.dtype,
                    shape=seen.shape,
                    size_bytes=seen.size_bytes,
                )
            )
    return tuple(tensors), index


def _tail(name: str) -> str:
    return name.rpartition("/")[2]


def _rank_events(
    rank: _TensorFlowRank, number: int, base_ns: int, steps: Steps, tensors: Sequence[TensorInfo], names: dict[str, int]
) -> Events:
    """Ops and communication spans of one rank; a node that carries a group has one span for each of its tensors."""
    assert rank.profile.origin_ns is not None
    shift_us = (rank.profile.origin_ns - base_ns) / 1e3
    ops, comm, nodes = rank.profile.ops, rank.profile.comm, rank.profile.nodes
    name_of = np.array([names.setdefault(node, len(names)) for node in nodes], dtype=np.int64)
    lines = {int(line): i for i, line in enumerate(np.unique(ops.line))}
    start = ops.start_us + shift_us
    op_events = event_columns(
        name=name_of[ops.node],
        kind=EventKind.OP,
        rank=number,
        stream=np.array([lines[int(line)] for line in ops.line], dtype=np.int64),
        start_us=start,
        end_us=ops.end_us + shift_us,
        step=step_of(steps, number, start),
    )
    carried: dict[str, list[int]] = {}
    for i, tensor in enumerate(tensors):
        carried.setdefault(tensor.node, []).append(i)
    pairs = [(i, tensor) for i, node in enumerate(comm.node) for tensor in carried.get(nodes[node], ())]
    which = np.array([i for i, _ in pairs], dtype=np.int64)
    which_tensor = np.array([t for _, t in pairs], dtype=np.int64)
    start = comm.start_us[which] + shift_us
    comm_events = event_columns(
        name=name_of[comm.node[which]],
        kind=EventKind.COMM,
        rank=number,
        start_us=start,
        end_us=comm.end_us[which] + shift_us,
        step=step_of(steps, number, start),
        tensor=which_tensor,
        size_bytes=np.array([tensors[t].size_bytes for t in which_tensor], dtype=np.int64),
        collective_kind=CollectiveKind.ALL_REDUCE,
    )
    return joined([op_events, comm_events])


def _shared_graphs(graphs: Sequence[NodeGraph]) -> tuple[tuple[NodeGraph, ...], tuple[int, ...]]:
    kept: list[NodeGraph] = []
    of_rank = []
    for graph in graphs:
        same = next((i for i, other in enumerate(kept) if _equal(graph, other)), len(kept))
        if same == len(kept):
            kept.append(graph)
        of_rank.append(same)
    return tuple(kept), tuple(of_rank)


def _equal(a: NodeGraph, b: NodeGraph) -> bool:
    assert a.tensors is not None
    assert b.tensors is not None
    columns = ((a.input_idx, b.input_idx), (a.input_ptr, b.input_ptr), (a.tensors.input_type, b.tensors.input_type))
    strings = (a.name, a.op, a.tensors.types) == (b.name, b.op, b.tensors.types)
    return strings and all(np.array_equal(column, other) for column, other in columns)


def _dropped(ranks: Sequence[_TensorFlowRank], timeline: HorovodTimeline) -> dict[str, int]:
    """Counts of events that the readers left out, by reason: events of the profiles, and of the timeline."""
    dropped: dict[str, int] = {}
    for rank in ranks:
        for reason, count in rank.profile.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    misfits = sum(rank.misfits for rank in ranks)
    dropped |= {"shapes of ops with other inputs in the graph": misfits} if misfits else {}
    return dropped | timeline_dropped(timeline)


def _warnings(ranks: Sequence[_TensorFlowRank], timeline: HorovodTimeline, events: Events) -> tuple[str, ...]:
    warnings = timeline_warnings(timeline, events)
    for number, rank in enumerate(ranks):
        unpaired = rank.profile.dropped.get("unpaired", 0)
        whole = int(((events.kind == EventKind.COMM) & (events.rank == number)).sum())
        if unpaired > _CUT_OFF * whole:
            warnings.append(
                f"rank {number}: {unpaired} of {unpaired + whole} all-reduces of the profile lack their start or end and were left "
                "out: record the job again"
            )
    return tuple(warnings)


def with_tensors(graph: NodeGraph, profile: XPlaneRank) -> tuple[NodeGraph, int]:
    """The graph with the types of its tensors as the profiled ops saw them, and how many ops saw others than the graph has."""
    assert graph.tensors is not None
    shapes_of = dict(zip(profile.nodes, profile.input_shapes, strict=True))
    workspaces = _workspaces(profile)
    types: dict[TensorType, int] = {}
    ports, misfits = graph.tensors.input_port, 0
    input_type = np.full(len(ports), -1, dtype=np.int64)
    for node, name in enumerate(graph.name):
        known_types = tensor_types(shapes_of.get(name, ""))
        first, end = graph.input_ptr[node : node + 2]
        edges = first + np.flatnonzero(ports[first:end] >= 0)
        if len(known_types) != len(edges):
            misfits += bool(known_types)
            continue
        for edge, kind in zip(edges.tolist(), known_types, strict=True):
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
