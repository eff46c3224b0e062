"""One rank of a Kineto profile: what its records are, which call launched what, in which step, and from where in the program.

A device op is launched by a call within an op of the framework, by time on the thread, else by the external id that the profiler
gives both. Ops of the backward pass have the sequence number of the op of the forward pass that they differentiate: module and
source line are that op's. A module is named by the path of calls to it, like ``Net_0.Block_1.Conv2d_3``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.collect.readers._nesting import innermost, parents_of
from dpro_search.collect.readers.kineto.columns import MODULE, Bools, Category, KinetoFile, PythonCalls, rows_named
from dpro_search.collect.readers.kineto.records import NotedCollective
from dpro_search.collect.recorded_names import communicates, computes_too, host_waits, is_library_span
from dpro_search.collect.trace import EventKind, Floats, Ints, Role, Shapes

CLOCK_SLACK_US = 5.0  # by which device and host clocks of one profile may disagree
MAIN_THREAD = -1  # stream of the thread that runs the script
STREAMS_OF_DEVICE = 100_000  # stream s of the rank's d-th device is numbered d * STREAMS_OF_DEVICE + s
_STEP = re.compile(r"^ProfilerStep#?\s*(\d+)")
_OTHER_MARKS = ("Optimizer.step#", "Optimizer.zero_grad#", "enumerate(DataLoader)")  # where steps are not marked, first found
# Calls that launch kernels, of CUDA, HIP, SYCL and Level Zero, Ascend's CANN, and their drivers.
_KERNEL_LAUNCH = re.compile(r"LaunchKernel|LaunchCooperativeKernel|GraphLaunch|KernelLaunch|AppendLaunch")
_LOST_SHARE = 0.01  # of the launches in the recorded steps, of which the device may lack records without a warning
_OPTIMIZER = ("Optimizer.step", "optimizer.step")
_LOADING = ("enumerate(DataLoader)", "enumerate(DataPipe)")  # spans of torch.utils.data
_KINDS = {Category.RUNTIME: EventKind.RUNTIME, Category.KERNEL: EventKind.KERNEL, Category.COPY: EventKind.COPY}
# Columns of `RankRecords` that have a row for each event.
EVENT_COLUMNS = (
    *("name", "kind", "stream", "start_us", "end_us", "size_bytes", "correlation", "annotation", "launch", "shapes", "dtype"),
    *("role", "op", "module", "source", "step"),
)
_DEEPEST = 64  # calls of modules within each other: those further in have the path of the last


@dataclass(kw_only=True)
class RankRecords:
    """Records of a rank: n events in order of their starts, before inferred polls are added; the columns are those of `Events`.

    Attributes
    ----------
    rank, world_size
        From the profile; None where it does not have it.
    device
        Name of the GPUs of its host, as their driver has it; empty where the profile does not have it, or they differ.
    launch
        Event of the host call that launched each device op, [n]; -1 for other events and where it is unknown.
    correlation, wait_stream, wait_record
        As recorded, [n].
    shapes, dtype
        What `shape_table` and `dtypes` index, [n].
    role
        `Role`, [n].
    op, module, source
        What launched each device op, in which module and at which line; they index `names`, [n].
    collectives
        By event.
    syncs
        CUPTI's records of synchronisations: (kind, stream, correlation, stream waited for, correlation of the event's record).
    memory_us, memory_bytes
        When the device's allocator (without a device, the host's) was called, and what it had handed out then.
    host_waits
        Collectives of a rank without a device, and the events in which its thread waited for each.
    job
        The profile's distributedInfo.
    process
        Number of the process, which is unique on its host; None: unknown.
    step_number, step_start_us
        Steps that the script marked, in order.
    """

    rank: int | None
    world_size: int | None
    device: str
    host: str
    origin_ns: int
    names: tuple[str, ...]
    name: Ints
    kind: Ints
    stream: Ints
    start_us: Floats
    end_us: Floats
    size_bytes: Ints
    correlation: Ints
    annotation: Bools
    launch: Ints
    shapes: npt.NDArray[np.int32]
    dtype: npt.NDArray[np.int32]
    shape_table: tuple[Shapes, ...]
    dtypes: tuple[str, ...]
    role: npt.NDArray[np.int8]
    op: npt.NDArray[np.int32]
    module: npt.NDArray[np.int32]
    source: npt.NDArray[np.int32]
    step: Ints
    step_number: Ints
    step_start_us: Floats
    step_end_us: Floats
    collectives: dict[int, NotedCollective]
    syncs: tuple[tuple[str, int, int, int, int], ...]
    memory_us: Floats
    memory_bytes: Ints
    job: dict[str, Any]
    process: int | str | None = None
    host_waits: tuple[tuple[int, int], ...] = ()
    unrecorded_launches: int = 0  # Calls that launched kernels, of a profile without a record of its device.
    dropped: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.name)

    def reduce(self) -> None:
        """Give up what only `find_dependencies` needs, and bits that nothing needs: a job may have a thousand ranks."""
        self.correlation = self.launch = np.zeros(0, np.int64)
        self.annotation = np.zeros(0, np.bool_)
        self.syncs = ()
        for column, kind in (("name", np.int32), ("kind", np.int8), ("stream", np.int32), ("step", np.int32)):
            values = getattr(self, column)
            if not len(values) or max(-int(values.min()), int(values.max())) <= np.iinfo(kind).max:
                setattr(self, column, values.astype(kind))

    @property
    def on_device(self) -> Bools:
        """Events that ran on a device's stream, [n]."""
        return self.stream >= 0

    def with_events(self, **values: Any) -> RankRecords:
        """The records with more events at their end; a column that is not given is unknown there (-1)."""
        count = len(values["start_us"])
        columns: dict[str, Any] = {name: getattr(self, name) for name in EVENT_COLUMNS}
        for name, column in columns.items():
            added = np.broadcast_to(np.array(values.get(name, -1)).astype(column.dtype), count)
            columns[name] = np.append(column, added)
        return replace(self, **columns)

    def named(self, accepts: Callable[[str], object]) -> Bools:
        """Events whose name is accepted, [n]."""
        return rows_named(self.names, self.name, accepts)


def rank_records(file: KinetoFile, rows: Ints) -> tuple[RankRecords, Ints]:
    """The records of one rank: all, or those of its processes in a merged file; and the row of the file that each event is.

    Collectives are not yet described (`collectives.find_collectives`).
    """
    rows = rows[np.argsort(file.start_us[rows], kind="stable")]
    category = file.category[rows]
    syncs = category == Category.DEVICE_SYNC
    sync_records = tuple(_sync_record(file, int(row)) for row in rows[syncs])
    rows, category = rows[~syncs], category[~syncs]
    steps = _marked_steps(file, rows, category)
    is_mark = np.isin(rows, steps.rows)
    rows, category = rows[~is_mark], category[~is_mark]
    dropped = Counter(file.dropped)
    on_device = (category == Category.KERNEL) | (category == Category.COPY)
    start_us = file.start_us[rows]
    header = file.header.get("distributedInfo")
    info = header if isinstance(header, dict) else {}
    result = RankRecords(
        rank=_whole(info.get("rank")),
        world_size=_whole(info.get("world_size")),
        device=_device_name(file.header.get("deviceProperties")),
        host=str(file.header.get("host_name", "")),
        origin_ns=file.origin_ns,
        names=file.names,
        name=file.name[rows].astype(np.int64),
        kind=_kinds(file, rows, category),
        stream=_streams(file, rows, on_device, steps.thread),
        start_us=start_us,
        end_us=start_us + file.duration_us[rows],
        size_bytes=np.maximum(file.size_bytes[rows], -1),
        correlation=file.correlation[rows],
        annotation=category == Category.ANNOTATION,
        launch=np.full(len(rows), -1, np.int64),
        shapes=file.shapes[rows],
        dtype=file.dtype[rows],
        shape_table=file.shape_table,
        dtypes=file.dtypes,
        role=np.full(len(rows), Role.UNKNOWN, np.int8),
        op=np.full(len(rows), -1, np.int32),
        module=np.full(len(rows), -1, np.int32),
        source=np.full(len(rows), -1, np.int32),
        step=np.full(len(rows), -1, np.int64),
        step_number=steps.number,
        step_start_us=steps.start_us,
        step_end_us=steps.end_us,
        collectives={},
        syncs=sync_records,
        **_memory(file, rows, bool(on_device.any())),
        job=info,
        dropped=dropped,
    )
    # Spans of the optimizer and of PyTorch's data loader, which the script's thread marks.
    result.role[result.named(lambda name: name.startswith(_OPTIMIZER)) & (result.kind == EventKind.OP)] = Role.UPDATE
    result.role[result.named(lambda name: name.startswith(_LOADING)) & (result.kind == EventKind.OP)] = Role.LOADING
    launches = result.named(_KERNEL_LAUNCH.search) & (result.kind == EventKind.RUNTIME)
    _find_launches(result)
    _assign_steps(result)
    if on_device.any():
        _warn_of_lost_kernels(result, np.flatnonzero(launches & (result.step >= 0)))
    else:
        result.unrecorded_launches = int(launches.sum())
    _find_origins(result, file, rows)
    return result, rows


@dataclass(frozen=True)
class _Marks:
    rows: Ints
    number: Ints
    start_us: Floats
    end_us: Floats
    thread: int


def _device_name(properties: object) -> str:
    """The name that all GPUs of a host have; empty where they differ or are not listed."""
    listed = properties if isinstance(properties, list) else []
    names = {one.get("name") for one in listed if isinstance(one, dict)}
    name = names.pop() if len(names) == 1 else None
    return name if isinstance(name, str) else ""


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 2**31 else None


def _sync_record(file: KinetoFile, row: int) -> tuple[str, int, int, int, int]:
    kind = file.names[file.name[row]]
    return kind, int(file.stream[row]), int(file.correlation[row]), int(file.wait_stream[row]), int(file.wait_record[row])


def _marked_steps(file: KinetoFile, rows: Ints, category: npt.NDArray[np.int8]) -> _Marks:
    """Spans ProfilerStep#N of the host; without any, from one optimizer step (or loading of a batch) to the next."""
    host = rows[np.isin(category, (Category.HOST_OP, Category.ANNOTATION))]
    names = file.names
    numbered = {i: int(match[1]) for i, name in enumerate(names) if (match := _STEP.match(name)) and len(match[1]) < 10}
    if numbered:
        marks = host[np.isin(file.name[host], list(numbered))]
        if len(marks):
            number = np.array([numbered[int(n)] for n in file.name[marks]], np.int64)
            _, first = np.unique(number, return_index=True)
            first = first[np.argsort(file.start_us[marks[first]], kind="stable")]
            at = marks[first]
            start_us = file.start_us[at]
            end_us = np.minimum(start_us + file.duration_us[at], np.append(start_us[1:], np.inf))
            return _Marks(marks, number[first], start_us, end_us, int(file.thread[at[0]]))
    none = np.zeros(0, np.int64)
    for mark in _OTHER_MARKS:
        which = [i for i, name in enumerate(names) if name.startswith(mark)]
        marks = host[np.isin(file.name[host], which[:1])]
        if len(marks) >= 2:
            bounds = file.start_us[marks] + (file.duration_us[marks] if mark.startswith("Optimizer.step") else 0.0)
            first_us = file.start_us[host[0]]
            before = np.append(first_us, bounds) if bounds[0] > first_us else bounds
            return _Marks(none, np.arange(len(before) - 1), before[:-1], before[1:], int(file.thread[marks[0]]))
    if not len(rows):
        return _Marks(none, none, np.zeros(0), np.zeros(0), -1)
    begin_us, end_us = float(file.start_us[rows].min()), float((file.start_us[rows] + file.duration_us[rows]).max())
    thread = int(file.thread[host[0]]) if len(host) else -1
    return _Marks(none, np.zeros(1, np.int64), np.array([begin_us]), np.array([np.nextafter(end_us, np.inf)]), thread)


def _memory(file: KinetoFile, rows: Ints, has_device: bool) -> dict[str, Any]:
    counts = file.memory
    of_rank = (counts.on_device == has_device) & np.isin(counts.thread, np.unique(file.thread[rows]))
    return {"memory_us": counts.time_us[of_rank], "memory_bytes": counts.allocated_bytes[of_rank]}


def _streams(file: KinetoFile, rows: Ints, on_device: Bools, main_thread: int) -> Ints:
    """Device streams from 0 on; host threads -1, -2, ... with the main thread first (`MAIN_THREAD`)."""
    device_rows, host_rows = rows[on_device], rows[~on_device]
    stream = np.empty(len(rows), np.int64)
    number = np.where(file.stream[device_rows] >= 0, file.stream[device_rows], _stream_of_thread(file)[file.thread[device_rows]])
    place = np.where(file.device[device_rows] >= 0, file.device[device_rows], -2 - file.process[device_rows].astype(np.int64))
    _, device = np.unique(place, return_inverse=True)
    stream[on_device] = device * STREAMS_OF_DEVICE + number % STREAMS_OF_DEVICE
    threads, counts = np.unique(file.thread[host_rows], return_counts=True)
    order = sorted(threads.tolist(), key=lambda t: (t != main_thread, -counts[np.searchsorted(threads, t)]))
    table = np.zeros(max(len(file.threads), 1), np.int64)
    table[order] = MAIN_THREAD - np.arange(len(order))
    stream[~on_device] = table[file.thread[host_rows]]
    return stream


def _stream_of_thread(file: KinetoFile) -> Ints:
    """Stream numbers of the threads of a device, for records that lack one: the first number in "stream 7"."""
    numbers = [re.search(r"\d+", str(thread)) for thread in file.threads]
    return np.array([int(match[0][:9]) if match else 0 for match in numbers] or [0], np.int64)


def _kinds(file: KinetoFile, rows: Ints, category: npt.NDArray[np.int8]) -> Ints:
    """`EventKind` of each record: by its category, and by its name or note where it waits or communicates, [rows]."""
    kind = np.full(len(rows), int(EventKind.OP), np.int64)
    for of_category, kind_of_category in _KINDS.items():
        kind[category == of_category] = kind_of_category
    name = file.name[rows]
    kind[(category == Category.RUNTIME) & rows_named(file.names, name, host_waits)] = EventKind.SYNC
    kind[(category == Category.KERNEL) & rows_named(file.names, name, computes_too)] = EventKind.UNKNOWN
    moves = rows_named(file.names, name, lambda text: communicates(text) or is_library_span(text))
    moves |= np.isin(rows, [row for row, note in file.notes.items() if note.collective])
    kind[np.isin(category, (Category.KERNEL, Category.COPY)) & moves] = EventKind.COLLECTIVE
    return kind


def _find_launches(r: RankRecords) -> None:
    """Match device ops to calls by correlation id; of calls with one id (merged files), to the last that began before the op."""
    calls = np.flatnonzero(np.isin(r.kind, (EventKind.RUNTIME, EventKind.SYNC)) & (r.correlation > 0))
    ops = np.flatnonzero(r.on_device & (r.correlation > 0))
    if len(calls) and len(ops):
        calls = calls[np.lexsort((r.start_us[calls], r.correlation[calls]))]
        ids = r.correlation[calls]
        first = np.searchsorted(ids, r.correlation[ops], side="left")
        after = np.searchsorted(ids, r.correlation[ops], side="right")
        at = _last_before(ids, r.start_us[calls], r.correlation[ops], r.start_us[ops] + CLOCK_SLACK_US)
        has_call = at >= first
        r.launch[ops[has_call]] = calls[at[has_call]]
        wrong = int((~has_call & (after > first)).sum())
        if wrong:
            r.warnings.append(f"{wrong} device ops begin before the call of their correlation id: their launches are unknown")
    _launches_without_ids(r)


def _warn_of_lost_kernels(r: RankRecords, launches: Ints) -> None:
    """Warn if more than a few of the launches in the recorded steps have no kernel: the profiler lost records of the device."""
    lost = int((~np.isin(launches, r.launch)).sum())
    if lost > _LOST_SHARE * len(launches):
        r.warnings.append(
            f"{lost} of {len(launches)} launches of kernels have no record of the device: the time of the lost kernels looks idle; "
            "profile fewer steps at a time"
        )


def _last_before(ids: Ints, start_us: Floats, queried_ids: Ints, until_us: Floats) -> Ints:
    """The last call of each queried id that began by an instant, else the last of a lower id, or -1.

    The calls are sorted by id and start.
    """
    is_query = np.repeat((False, True), (len(ids), len(queried_ids)))
    order = np.lexsort((is_query, np.concatenate((start_us, until_us)), np.concatenate((ids, queried_ids))))
    last = np.cumsum(~is_query[order]) - 1
    last_of_entry = np.empty(len(order), np.int64)
    last_of_entry[order] = last
    return last_of_entry[len(ids) :]


def _launches_without_ids(r: RankRecords) -> None:
    """Ops of a CUDA or HIP graph that lack correlation ids belong to the last launch of a graph before them; where as many single
    launches as ops have no partner (ROCm), they are paired in order."""
    alone = np.flatnonzero(r.on_device & (r.launch < 0))
    if not len(alone):
        return
    launches = r.named(lambda name: name.endswith(("GraphLaunch", "LaunchKernel", "LaunchKernelExC")))
    graphs = r.named(lambda name: name.endswith("GraphLaunch"))
    free = np.flatnonzero((r.kind == EventKind.RUNTIME) & launches)
    free = free[~np.isin(free, r.launch)]
    single = free[~graphs[free]]
    if len(single) == len(alone) and (r.start_us[single] <= r.start_us[alone] + CLOCK_SLACK_US).all():
        r.launch[alone] = single
        return
    of_graphs = free[graphs[free]]
    if len(of_graphs):
        at = np.searchsorted(r.start_us[of_graphs], r.start_us[alone] + CLOCK_SLACK_US, side="right") - 1
        r.launch[alone[at >= 0]] = of_graphs[at[at >= 0]]


def _assign_steps(r: RankRecords) -> None:
    """Host events by time, device ops by their launch, else by the neighbours on their stream."""
    if not len(r.step_number):
        return
    at = np.searchsorted(r.step_start_us, r.start_us, side="right") - 1
    inside = at >= 0
    inside[inside] = r.start_us[inside] < r.step_end_us[at[inside]]
    by_time = np.where(inside, r.step_number[np.maximum(at, 0)], -1)
    host = ~r.on_device
    r.step[host] = by_time[host]
    launched = np.flatnonzero(r.launch >= 0)
    r.step[launched] = r.step[r.launch[launched]]
    alone = np.flatnonzero(r.on_device & (r.launch < 0))
    if not len(alone):
        return
    if not len(launched):
        r.step[alone] = by_time[alone]
        return
    early = 0
    for stream in np.unique(r.stream[alone]).tolist():
        unlaunched = alone[r.stream[alone] == stream]
        known = launched[r.stream[launched] == stream]
        known = known if len(known) else launched
        before = np.searchsorted(known, unlaunched) - 1
        r.step[unlaunched] = np.where(before >= 0, r.step[known[np.maximum(before, 0)]], -1)
        early += int((before < 0).sum())
    if early:
        r.warnings.append(f"{early} device ops were launched before the profiler's window: they belong to no step")
    if len(alone) > early:
        r.warnings.append(f"{len(alone) - early} device ops have no launch in the profile: they start after their stream's last op")


def _find_origins(r: RankRecords, file: KinetoFile, rows: Ints) -> None:
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
    is_module = rows_named(file.names, frames.name, lambda name: name.startswith(MODULE))
    names = list(r.names)
    for column, which in ((r.module, is_module), (r.source, ~is_module)):
        spans = frames.select(of_rank & which)
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


def _paths(names: list[str], spans: PythonCalls, up: Ints) -> Ints:
    """The number of the path of each call of a module in `names`, which gets the paths that it lacks."""
    path, depth = [""] * len(spans), [0] * len(spans)
    for span in np.lexsort((-spans.end_us, spans.start_us)).tolist():
        name = names[spans.name[span]].removeprefix(MODULE)
        outer = int(up[span])
        depth[span] = depth[outer] + 1 if outer >= 0 else 0
        path[span] = name if outer < 0 else path[outer] if depth[span] > _DEEPEST else f"{path[outer]}.{name}"
    numbers = {text: len(names) + place for place, text in enumerate(dict.fromkeys(path))}
    names += numbers
    return np.array([numbers[text] for text in path], np.int64)
