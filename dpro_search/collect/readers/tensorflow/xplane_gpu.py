"""XPlane profiles with GPU planes (JAX, TensorFlow): every GPU is a rank, every stream a device of its own.

One process may drive several GPUs: each has a plane with a line per stream, whose events are kernels and copies; the calls that
launched them are on the threads of the host's plane, with the same correlation id. XLA notes which operation of which module a
kernel is of; a step is one execution of the module that keeps the GPU busiest, with what runs beside it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from dpro_search.collect.assemble.described import described
from dpro_search.collect.readers._bytes import read_whole
from dpro_search.collect.readers.event_table import EventTable, clocks_as_recorded
from dpro_search.collect.readers.importers import Importer
from dpro_search.collect.readers.protos import parse, text
from dpro_search.collect.recorded_names import collective_kind_of, communicates, kernel_communication
from dpro_search.collect.trace import CollectiveKind, DependencyKind, EventKind, Trace
from dpro_search.errors import TraceFormatError

FORMAT = "xplane-gpu"

_GPU = re.compile(r"/device:GPU:(\d{1,6})$")
_KNOWN_PLANE = re.compile(r"/host:|/device:CUSTOM:|#|Task Environment$")  # that may have events of no GPU
_PLANE = re.compile(rb"/(host|device):|Task Environment")
_DERIVED = re.compile(r"XLA|Steps|TensorFlow|Framework|Source|Launch Stats|Scope", re.IGNORECASE)  # lines made from others
_COMM = re.compile(r"nccl|rccl|all-?reduce|all-?gather|reduce-?scatter|all-?to-?all|collective-?permute", re.IGNORECASE)
_COPY = re.compile(r"copyBuffer|fillBuffer|mem(cpy|set)", re.IGNORECASE)
_AWAIT = re.compile(r"Synchronize|EventQuery")
_SIZE = re.compile(r"size:(\d{1,15})")
_HOST_STREAM = 1 << 20  # host threads come after the streams
_LONGEST_US = 1e15


@dataclass(kw_only=True)
class _Item:
    """A kernel, a copy or a call; microseconds on the profile's clock."""

    name: str
    start_us: float
    end_us: float
    stats: dict[str, Any]
    thread: int = 0
    event: int = -1
    step: int = -1

    @property
    def kind(self) -> EventKind:
        operation = str(self.stats.get("hlo_op", ""))
        if communicates(self.name) or _COMM.search(self.name) or (_COMM.match(operation) and not _COPY.search(self.name)):
            return EventKind.COLLECTIVE
        return EventKind.COPY if _COPY.search(self.name) or "memcpy_details" in self.stats else EventKind.KERNEL

    @property
    def collective_kind(self) -> CollectiveKind:
        """The kind that XLA's operation, which the kernel carries out, names; else the one that the kernel's name tells."""
        if self.kind is not EventKind.COLLECTIVE:
            return CollectiveKind.UNKNOWN
        kinds = (collective_kind_of(str(self.stats.get("hlo_op", ""))), kernel_communication(self.name))
        return next((kind for kind in kinds if kind is not CollectiveKind.UNKNOWN), CollectiveKind.UNKNOWN)

    @property
    def size_bytes(self) -> int:
        size = _SIZE.search(str(self.stats.get("memcpy_details", "")))
        return int(size[1]) if size else 0


@dataclass(kw_only=True)
class _GpuItems:
    """The items that ran on one GPU, by start."""

    file: int
    ordinal: int
    items: list[_Item] = field(default_factory=list)


def recognise(head: bytes, path: Path) -> bool:
    """Whether a file that begins with `head` is an XSpace: a first field with a plane, which begins with its number or name."""
    if head[:1] != b"\x0a":
        return False
    place = 1
    while place < min(len(head), 6) and head[place] >= 0x80:
        place += 1
    plane = head[place + 1 : place + 64]
    return plane[:1] in (b"\x08", b"\x12") and _PLANE.search(plane[:48]) is not None


def read(paths: Sequence[Path]) -> Trace:
    """Read the profiles of the processes of one job, one file a process.

    Ranks are the GPUs, in the order of the paths and of their numbers. Kernels, copies and collectives are on streams; calls that
    launched or awaited work of a GPU are on the same rank, each thread a stream of its own. A LAUNCH dependency joins them. What a
    stream waited for on another is not in the files. The k-th collective kernels of one name share a number if all ranks have one.

    Raises
    ------
    InputError
        A file cannot be read.
    TraceFormatError
        A file is no XSpace, or has no GPU plane with events.
    """
    dropped: Counter[str] = Counter()
    gpus: list[_GpuItems] = []
    calls: list[list[_Item]] = []
    for number, path in enumerate(paths):
        space = parse("XSpace", read_whole(path), path, dropped)
        origin_us = _origin_us(space)
        gpus_of_file = _gpus(space, number, origin_us, dropped)
        if not gpus_of_file:
            if any("/device:TPU" in text(plane.name) for plane in space.planes):
                raise TraceFormatError(f"{path}: a profile of a TPU; only those of GPUs can be imported")
            planes = ", ".join(f"'{text(plane.name)!s:.40}'" for plane in space.planes[:20]) or "none"
            raise TraceFormatError(
                f"{path}: no GPU plane with events (planes: {planes}); a profile of a CPU job is read with its raw folder"
            )
        gpus += gpus_of_file
        calls.append(_calls(space, origin_us, dropped))
    base_us = min(item.start_us for gpu in gpus for item in gpu.items)
    base_us = min([base_us, *(call.start_us for of_file in calls for call in of_file)])
    steps = [_mark_steps(gpu) for gpu in gpus]
    table = EventTable()
    numbers = _collectives(gpus)
    clock = "GPUs of one process share a clock" + ("" if len(paths) == 1 else ", processes their epoch")
    for rank, gpu in enumerate(gpus):
        _add_gpu(table, rank, gpu, base_us, numbers)
    for number, of_file in enumerate(calls):
        _add_calls(table, [(rank, gpu) for rank, gpu in enumerate(gpus) if gpu.file == number], of_file, base_us, dropped)
    return described(
        table.trace(
            format=FORMAT,
            framework="xla",
            comm="nccl" if numbers else "unknown",
            clock=clocks_as_recorded(len(gpus), clock),
            steps=(
                (rank, index, start - base_us, end - base_us)
                for rank, of_rank in enumerate(steps)
                for index, (start, end) in enumerate(of_rank)
            ),
            dropped=dropped,
            warnings=(
                f"rank {rank}: no kernel names its XLA module, so all is one step"
                for rank, gpu in enumerate(gpus)
                if not any("hlo_module" in item.stats for item in gpu.items)
            ),
            hosts=[f"process {gpu.file}" for gpu in gpus],
        )
    )


def _origin_us(space: Any) -> float:
    """Epoch time of the profile's start, or 0 where it is not there."""
    for plane in space.planes:
        names = {entry.key: text(entry.value.name) for entry in plane.stat_metadata}
        for stat in plane.stats:
            if names.get(stat.metadata_id) == "profile_start_time":
                return float(stat.uint64_value or stat.int64_value) / 1e3
    return 0.0


def _items(plane: Any, origin_us: float, stats_to_keep: frozenset[str], dropped: Counter[str]) -> dict[int, list[_Item]]:
    """Events of a plane with the requested statistics, by line."""
    stat_names = {entry.key: text(entry.value.name) for entry in plane.stat_metadata}
    names = {entry.key: text(entry.value.name) for entry in plane.event_metadata}
    items_of_line: dict[int, list[_Item]] = {}
    for number, line in enumerate(plane.lines):
        if _GPU.match(text(plane.name)) and _DERIVED.search(text(line.name)):
            dropped["events of derived lines"] += len(line.events)
            continue
        line_us = line.timestamp_ns / 1e3
        start_of_line_us = line_us if line_us >= origin_us else origin_us + line_us
        items = items_of_line.setdefault(number, [])
        for event in line.events:
            start_us = start_of_line_us + event.offset_ps / 1e6
            end_us = start_us + event.duration_ps / 1e6
            if not (0 <= start_us <= end_us and end_us - origin_us < _LONGEST_US):
                dropped["out of range"] += 1
                continue
            stats: dict[str, Any] = {}
            for stat in event.stats:
                name = stat_names.get(stat.metadata_id, "")
                if name in stats_to_keep:
                    referred = stat_names.get(stat.ref_value, "") if stat.ref_value else ""
                    stats[name] = referred or text(stat.str_value) or stat.int64_value or stat.uint64_value
            items.append(_Item(name=names.get(event.metadata_id, ""), start_us=start_us, end_us=end_us, stats=stats, thread=number))
    return items_of_line


def _gpus(space: Any, file: int, origin_us: float, dropped: Counter[str]) -> list[_GpuItems]:
    stats_to_keep = frozenset({"correlation_id", "hlo_op", "hlo_module", "memcpy_details"})
    gpus = []
    for plane in space.planes:
        number = _GPU.match(text(plane.name))
        if number is None:
            if any(len(line.events) for line in plane.lines) and not _KNOWN_PLANE.match(text(plane.name)):
                dropped[f"ranks without a number: events of plane '{text(plane.name):.40}'"] += 1
            continue
        items = [item for of_line in _items(plane, origin_us, stats_to_keep, dropped).values() for item in of_line]
        if items:
            gpus.append(
                _GpuItems(file=file, ordinal=int(number[1]), items=sorted(items, key=lambda item: (item.start_us, item.end_us)))
            )
    return sorted(gpus, key=lambda gpu: gpu.ordinal)


def _calls(space: Any, origin_us: float, dropped: Counter[str]) -> list[_Item]:
    """Calls of the host that launched or awaited work of a device."""
    calls = []
    for plane in space.planes:
        if not text(plane.name).startswith("/host:") or not plane.lines:
            continue
        for items in _items(plane, origin_us, frozenset({"correlation_id", "device_id", "memcpy_details"}), dropped).values():
            for item in items:
                if "correlation_id" in item.stats:
                    calls.append(item)
                else:
                    dropped["host events that launch nothing"] += 1
    return calls


def _mark_steps(gpu: _GpuItems) -> list[tuple[float, float]]:
    """First start and last end of each step: an execution of the busiest module, with what runs beside it.

    What runs between two executions brings in the input of the next or takes away the output of the last: it belongs to that on its
    side of the longest idle time. Without notes of XLA, all is one step.
    """
    busy_us: dict[Any, float] = defaultdict(float)
    for item in gpu.items:
        if "hlo_module" in item.stats:
            busy_us[item.stats["hlo_module"]] += item.end_us - item.start_us
    if not busy_us:
        for item in gpu.items:
            item.step = 0
        return [(gpu.items[0].start_us, max(item.end_us for item in gpu.items))]
    module = max(busy_us, key=lambda name: busy_us[name])
    of_module = [item for item in gpu.items if item.stats.get("hlo_module") == module]
    # Most kernels run once in an execution; a few run several times, or lack the note of their operation.
    counts = Counter((item.stats.get("hlo_op"), item.name) for item in of_module)
    executions = Counter(counts.values()).most_common(1)[0][0]
    anchor = next(key for key in ((item.stats.get("hlo_op"), item.name) for item in of_module) if counts[key] == executions)
    execution, run, before = -1, list[_Item](), of_module[0]
    outputs: list[int] = []  # of each execution, how many items followed it
    for item in gpu.items:
        if item.stats.get("hlo_module") != module:
            run.append(item)
            continue
        begins = (item.stats.get("hlo_op"), item.name) == anchor
        if execution >= 0:
            split = _longest_idle([before, *run, item]) if begins else len(run)
            outputs += [split] if begins else []
            for i, other in enumerate(run):
                other.step = execution + (i >= split)
        run = []
        execution += begins
        item.step = execution
        before = item
    for other in run[: int(median(outputs)) if outputs else len(run)]:  # nothing follows that they might belong to
        other.step = execution
    steps = [[item for item in gpu.items if item.step == number] for number in range(execution + 1)]
    return [(min(item.start_us for item in step), max(item.end_us for item in step)) for step in steps]


def _longest_idle(items: Sequence[_Item]) -> int:
    """After how many of the items between the first and the last the longest time passes in which none runs."""
    reach_us = accumulate((item.end_us for item in items), max)
    gaps_us = [after.start_us - until_us for after, until_us in zip(items[1:], reach_us, strict=False)]
    return gaps_us.index(max(gaps_us))


def _collectives(gpus: Sequence[_GpuItems]) -> dict[int, int]:
    """Number of the collective of each item (by identity) whose peers were found on all GPUs."""
    parts: dict[tuple[str, int], list[_Item]] = defaultdict(list)
    for gpu in gpus:
        seen: Counter[str] = Counter()
        for item in gpu.items:
            if item.kind is EventKind.COLLECTIVE:
                parts[item.name, seen[item.name]].append(item)
                seen[item.name] += 1
    whole = [items for items in parts.values() if len(items) == len(gpus) > 1]
    return {id(item): number for number, items in enumerate(whole) for item in items}


def _add_gpu(table: EventTable, rank: int, gpu: _GpuItems, base_us: float, numbers: dict[int, int]) -> None:
    streams = {line: number for number, line in enumerate(sorted({item.thread for item in gpu.items}))}
    for item in gpu.items:
        item.event = table.add(
            item.name,
            item.kind,
            rank=rank,
            stream=streams[item.thread],
            start_us=item.start_us - base_us,
            end_us=item.end_us - base_us,
            step=item.step,
            collective=numbers.get(id(item), -1),
            size_bytes=item.size_bytes,
            collective_kind=item.collective_kind,
        )


def _add_calls(
    table: EventTable, gpus: Sequence[tuple[int, _GpuItems]], calls: Sequence[_Item], base_us: float, dropped: Counter[str]
) -> None:
    """The calls of one process, on the rank of the GPU that they are about."""
    launched: dict[Any, list[tuple[int, _Item]]] = defaultdict(list)
    for rank, gpu in gpus:
        for item in gpu.items:
            if "correlation_id" in item.stats:
                launched[item.stats["correlation_id"]].append((rank, item))
    votes: dict[Any, Counter[int]] = defaultdict(Counter)
    for call in calls:
        for rank, _ in launched.get(call.stats["correlation_id"], ()):
            votes[call.stats.get("device_id")][rank] += 1
    rank_of_device = {device: counts.most_common(1)[0][0] for device, counts in votes.items()}
    launch_ids: set[int] = set()
    for call in calls:
        targets = launched.get(call.stats["correlation_id"], [])
        rank = targets[0][0] if targets else rank_of_device.get(call.stats.get("device_id"), -1)
        if rank < 0:
            dropped["calls for no known GPU"] += 1
            continue
        event = table.add(
            call.name,
            EventKind.SYNC if _AWAIT.search(call.name) else EventKind.RUNTIME,
            rank=rank,
            stream=_HOST_STREAM + call.thread,
            start_us=call.start_us - base_us,
            end_us=call.end_us - base_us,
            step=min((item.step for _, item in targets), default=-1),
        )
        for _, item in targets:
            if call.start_us <= item.start_us:
                table.need(event, item.event, DependencyKind.LAUNCH)
                launch_ids.add(item.event)
            else:
                dropped["launches after their kernel"] += 1
    unlaunched = sum(item.event not in launch_ids for _, gpu in gpus for item in gpu.items)
    dropped["kernels without a recorded launch (kept)"] += unlaunched


IMPORTER = Importer(
    name=FORMAT,
    description="XPlane profiles with GPU planes (an XSpace protobuf)",
    recognise=recognise,
    read=read,
)
