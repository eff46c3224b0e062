"""One rank of a Kineto profile: what its records are, which call launched what, and which step each belongs to.

Names tell which calls of a device's runtime wait, order streams or ask for events. CUDA's names are the pattern for HIP, MUSA
(Moore Threads) and most others. CNRT (Cambricon) calls a stream a queue and an event a notifier; ACL (Ascend) puts the verb first;
Unified Runtime, Level Zero and OpenCL have queues, command lists, fences and `Finish`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.collect.readers.kineto.columns import Category, KinetoFile
from dpro_search.collect.readers.kineto.notes import NotedCollective, collective_of
from dpro_search.collect.recorded_names import (
    communicates,
    computes_too,
    is_communication_op,
    is_library_span,
    is_named_after_collective,
    may_communicate,
)
from dpro_search.collect.trace import EventKind, Floats, Ints, Role, Shapes

# Vendors add these to the name of a call: `cudaStreamSynchronize_ptsz`, `aclrtSynchronizeStreamWithTimeout`.
_ENDING = r"(?:WithTimeout|WithFlags|WithBarrier|Ext)*(?:_\w+)?$"

# Calls in which the host waits for all streams of a device, for one stream, and for an event.
DEVICE_WAITS = re.compile(rf"(?:(?:Device|Ctx|Context)Sync(?:hronize)?|Sync(?:hronize)?(?:Device|Ctx|Context)){_ENDING}")
STREAM_WAITS = re.compile(
    rf"(?:(?:Stream|Queue|CommandList)(?:Host)?Sync(?:hronize)?|Sync(?:hronize)?(?:Stream|Queue)|QueueFinish|clFinish){_ENDING}"
)
EVENT_WAITS = re.compile(
    r"(?:(?:Event|Fence|Notifier)(?:Host)?Sync(?:hronize)?|Sync(?:hronize)?(?:Event|Notifier)"
    rf"|(?<!Queue)WaitNotifier|WaitForEvents|(?<!Enqueue)Events?Wait){_ENDING}"
)
# Calls that wait for the device before they copy or free memory.
MEMORY_WAITS = re.compile(r"^(?:cuda|hip|musa|aclrt|cnrt|mc)(?:Memcpy|Free)$")

# Calls that make a stream wait for an event, and that record one on a stream.
STREAM_ORDERS = re.compile(
    rf"(?:(?:Stream|Queue)Wait(?:Event|Notifier)|EnqueueEventsWait|AppendWaitOnEvents|AppendBarrier){_ENDING}"
)
EVENT_RECORDS = re.compile(rf"(?:EventRecord|RecordEvent|PlaceNotifier|AppendSignalEvent){_ENDING}")

# Calls that only ask whether something has ended: a host that polls makes many of them.
QUERIES = re.compile(
    rf"(?:(?:Event|Stream|Queue|Notifier|Fence)Query(?:Status)?|Query(?:Event|Stream|Notifier)(?:Status)?|EventGetInfo){_ENDING}"
)
Bools = npt.NDArray[np.bool_]
CLOCK_SLACK_US = 5.0  # by which device and host clocks of one profile may disagree
STREAMS_OF_DEVICE = 100_000  # stream s of the rank's d-th device is numbered d * STREAMS_OF_DEVICE + s
_STEP = re.compile(r"^ProfilerStep#?\s*(\d+)")
_OTHER_MARKS = ("Optimizer.step#", "Optimizer.zero_grad#", "enumerate(DataLoader)")  # where steps are not marked, first found
# Calls that launch kernels, of CUDA, HIP, SYCL and Level Zero, Ascend's CANN, and their drivers.
_KERNEL_LAUNCH = re.compile(r"LaunchKernel|LaunchCooperativeKernel|GraphLaunch|KernelLaunch|AppendLaunch")
_LOST_SHARE = 0.01  # of the launches in the recorded steps, of which the device may lack records without a warning
_OPTIMIZER = ("Optimizer.step", "optimizer.step")
_LOADING = ("enumerate(DataLoader)", "enumerate(DataPipe)")  # spans of torch.utils.data
# Columns of `RankRecords` that have a row for each event.
EVENT_COLUMNS = (
    *("name", "kind", "stream", "start_us", "end_us", "size_bytes", "correlation", "annotation", "launch", "shapes", "dtype"),
    *("role", "op", "module", "source", "step"),
)


def host_waits(name: str) -> bool:
    """Whether the host waits for the device in a call with this name."""
    return any(pattern.search(name) for pattern in (DEVICE_WAITS, STREAM_WAITS, EVENT_WAITS, MEMORY_WAITS))


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
        What launched each device op, in which module and at which line (`origins`); they index `names`, [n].
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
    main_stream: int
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


def rank_records(file: KinetoFile, rows: Ints, *, rank: int | None) -> tuple[RankRecords, Ints]:
    """The records of one rank: all, or those of its processes in a merged file; and the row of the file that each event is."""
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
    stream, main_stream = _streams(file, rows, on_device, steps.thread)
    start_us = file.start_us[rows]
    kind, collectives_named = _kinds(file, rows, category)
    header = file.header.get("distributedInfo")
    info = header if isinstance(header, dict) else {}
    result = RankRecords(
        rank=rank if rank is not None else _whole(info.get("rank")),
        world_size=_whole(info.get("world_size")),
        device=_device_name(file.header.get("deviceProperties")),
        host=str(file.header.get("host_name", "")),
        origin_ns=file.origin_ns,
        names=file.names,
        name=file.name[rows].astype(np.int64),
        kind=kind,
        stream=stream,
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
        role=_roles(file, rows, kind),
        op=np.full(len(rows), -1, np.int32),
        module=np.full(len(rows), -1, np.int32),
        source=np.full(len(rows), -1, np.int32),
        step=np.full(len(rows), -1, np.int64),
        step_number=steps.number,
        step_start_us=steps.start_us,
        step_end_us=steps.end_us,
        main_stream=main_stream,
        collectives={},
        syncs=sync_records,
        **_memory(file, rows, bool(on_device.any())),
        job=info,
        dropped=dropped,
    )
    launches = np.array([bool(_KERNEL_LAUNCH.search(name)) for name in file.names] or [False])[result.name]
    launches &= kind == EventKind.RUNTIME
    if not on_device.any():
        result.unrecorded_launches = int(launches.sum())
    _find_launches(result)
    _assign_steps(result)
    if on_device.any():
        _warn_of_lost_kernels(result, np.flatnonzero(launches & (result.step >= 0)))
    _describe_collectives(result, file, rows, collectives_named)
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


def _streams(file: KinetoFile, rows: Ints, on_device: Bools, main_thread: int) -> tuple[Ints, int]:
    """Device streams from 0 on; host threads -1, -2, ... with the main thread first."""
    device_rows, host_rows = rows[on_device], rows[~on_device]
    stream = np.empty(len(rows), np.int64)
    number = np.where(file.stream[device_rows] >= 0, file.stream[device_rows], _stream_of_thread(file)[file.thread[device_rows]])
    place = np.where(file.device[device_rows] >= 0, file.device[device_rows], -2 - file.process[device_rows].astype(np.int64))
    _, device = np.unique(place, return_inverse=True)
    stream[on_device] = device * STREAMS_OF_DEVICE + number % STREAMS_OF_DEVICE
    threads, counts = np.unique(file.thread[host_rows], return_counts=True)
    order = sorted(threads.tolist(), key=lambda t: (t != main_thread, -counts[np.searchsorted(threads, t)]))
    table = np.zeros(max(len(file.threads), 1), np.int64)
    table[order] = -1 - np.arange(len(order))
    stream[~on_device] = table[file.thread[host_rows]]
    return stream, -1


def _stream_of_thread(file: KinetoFile) -> Ints:
    """Stream numbers of the threads of a device, for records that lack one: the first number in "stream 7"."""
    numbers = [re.search(r"\d+", str(thread)) for thread in file.threads]
    return np.array([int(match[0][:9]) if match else 0 for match in numbers] or [0], np.int64)


def _kinds(file: KinetoFile, rows: Ints, category: npt.NDArray[np.int8]) -> tuple[Ints, Bools]:
    names = file.names
    of_name = np.zeros((3, max(len(names), 1)), np.bool_)
    of_name[0, : len(names)] = [communicates(name) or is_library_span(name) for name in names]
    of_name[1, : len(names)] = [host_waits(name) for name in names]
    of_name[2, : len(names)] = [computes_too(name) for name in names]
    collective, waits, mixed = of_name[:, file.name[rows]]
    kind = np.full(len(rows), int(EventKind.OP), np.int64)
    kind[category == Category.RUNTIME] = EventKind.RUNTIME
    kind[(category == Category.RUNTIME) & waits] = EventKind.SYNC
    kind[category == Category.KERNEL] = EventKind.KERNEL
    kind[category == Category.COPY] = EventKind.COPY
    noted = (
        np.isin(rows, [row for row, note in file.notes.items() if note.collective]) if file.notes else np.zeros(len(rows), np.bool_)
    )
    kind[(category == Category.KERNEL) & mixed] = EventKind.UNKNOWN
    moves = np.isin(category, (Category.KERNEL, Category.COPY)) & (collective | noted)
    kind[moves] = EventKind.COLLECTIVE
    return kind, moves


def _roles(file: KinetoFile, rows: Ints, kind: Ints) -> npt.NDArray[np.int8]:
    """Spans of the optimizer and of PyTorch's data loader, which the script's thread marks."""
    of_name = np.array([_role(name) for name in file.names] or [Role.UNKNOWN], np.int8)
    return np.where(kind == EventKind.OP, of_name[file.name[rows]], Role.UNKNOWN).astype(np.int8)


def _role(name: str) -> Role:
    if name.startswith(_OPTIMIZER):
        return Role.UPDATE
    return Role.LOADING if name.startswith(_LOADING) else Role.UNKNOWN


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
    launches = np.array([name.endswith(("GraphLaunch", "LaunchKernel", "LaunchKernelExC")) for name in r.names] or [False])
    graphs = np.array([name.endswith("GraphLaunch") for name in r.names] or [False])
    free = np.flatnonzero((r.kind == EventKind.RUNTIME) & launches[r.name])
    free = free[~np.isin(free, r.launch)]
    single = free[~graphs[r.name[free]]]
    if len(single) == len(alone) and (r.start_us[single] <= r.start_us[alone] + CLOCK_SLACK_US).all():
        r.launch[alone] = single
        return
    of_graphs = free[graphs[r.name[free]]]
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


def _describe_collectives(r: RankRecords, file: KinetoFile, rows: Ints, moves: Bools) -> None:
    """Kind, group and size: from the op's own record, else from the host span around its launch."""
    noted = np.array(sorted(row for row in file.notes), np.int64)
    noted = noted[np.isin(noted, rows)]
    noted_start, noted_thread = file.start_us[noted], file.thread[noted]
    noted_end = noted_start + file.duration_us[noted]
    for event in np.flatnonzero(moves).tolist():
        notes = [file.notes[int(rows[event])]] if int(rows[event]) in file.notes else []
        launch = int(r.launch[event])
        if launch >= 0:
            time_us = r.start_us[launch]
            around = (noted_start <= time_us) & (noted_end >= time_us) & (noted_thread == file.thread[rows[launch]])
            notes += [file.notes[int(row)] for row in noted[around]]
        r.collectives[event] = collective_of(r.names[r.name[event]], notes)
        r.size_bytes[event] = r.collectives[event].size_bytes


def find_unknown_communication(r: RankRecords) -> None:
    """Kernels of no known library that ops of communication launched: with the name of a collective they communicate, else it is
    unknown what they do. What such an op computes or copies beside it stays what it is."""
    for op in np.unique(r.op[(r.kind == EventKind.KERNEL) & (r.op >= 0)]).tolist():
        if not is_communication_op(r.names[op]):
            continue
        for event in np.flatnonzero((r.kind == EventKind.KERNEL) & (r.op == op)).tolist():
            kernel = r.names[r.name[event]]
            if not may_communicate(kernel):
                continue
            r.kind[event] = EventKind.UNKNOWN
            if is_named_after_collective(kernel):
                r.kind[event] = EventKind.COLLECTIVE
                r.collectives[event] = collective_of(kernel, [])
