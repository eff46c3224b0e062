"""Logs of NCCL's inspector: one JSON object a line for each collective of a process, with times where it was told to be verbose.

Format: NCCL, ext-profiler/inspector/README.md, versions 4.0 to 6.0; from 6.0 on a line of ``dump_stats`` has the header of those
behind it. Lines need ``event_trace_ts`` (NCCL_INSPECTOR_DUMP_VERBOSE=1): when the host enqueued a collective, when its first kernel
started and its last one stopped, in us on the host's clock. Messages (``p2p_perf``) are left out.

A log has no steps. A job repeats the same collectives in each step, so that the shortest period in which operations and sizes
repeat is taken for a step, which ends with its last collective. A rank is taken to wait from the start of a collective's first
kernel to the end of its last one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dpro_search.collect.readers._bytes import read_whole
from dpro_search.collect.readers.stamps.records import FIRST_COLLECTIVE, RECORD, STEP, RankStamps, StampedGroup
from dpro_search.errors import TraceFormatError

_SIGNS = (b'"coll_perf"', b'"inspector_output_format_version"')
_HEAD_BYTES = 4096
_MARKS = ("none", "step", "forward", "update")
_LEAST_STEPS = 8  # that a period must repeat


class _Header(msgspec.Struct):
    id: str
    rank: int
    n_ranks: int


class _Metadata(msgspec.Struct):
    hostname: str
    pid: int


class _KernelTimes(msgspec.Struct):
    kernel_start_ts: int
    kernel_stop_ts: int


class _Times(msgspec.Struct):
    coll_start_ts: int
    kernel_events: list[_KernelTimes] = []


class _InspectorCall(msgspec.Struct):
    coll: str
    coll_sn: int
    coll_msg_size_bytes: int
    event_trace_ts: _Times | None = None


class _InspectorLine(msgspec.Struct):
    header: _Header | None = None
    metadata: _Metadata | None = None
    coll_perf: _InspectorCall | None = None


_Call = tuple[_Header, _InspectorCall]


def recognise(folder: Path) -> list[Path]:
    """The inspector's logs in a folder."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file()] if folder.is_dir() else []
    return [path for path in files if _is_log(path)]


def _is_log(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return head.lstrip()[:1] == b"{" and any(sign in head for sign in _SIGNS)


def read(paths: Sequence[Path]) -> list[RankStamps]:
    """Stamps of all ranks, sorted by rank; a line that was not finished at the end of a log is left out.

    Raises
    ------
    TraceFormatError
        A line is none of the inspector's, collectives have no times, or do not repeat.
    """
    calls: dict[tuple[str, int], list[_Call]] = defaultdict(list)
    for path in paths:
        for process, call in _calls(path):
            calls[process].append(call)
    if not calls:
        raise TraceFormatError(f"{paths[0]}: no collective is in it")
    rank_of = _ranks(calls)
    members: dict[str, dict[int, int]] = defaultdict(dict)  # global rank of each rank of a communicator
    for process, process_calls in calls.items():
        for header, _ in process_calls:
            members[header.id][header.rank] = rank_of[process]
    names = sorted({call.coll for process_calls in calls.values() for _, call in process_calls})
    operations = (*_MARKS, *names)
    numbers = {name: number for number, name in enumerate(members)}
    groups = {
        numbers[name]: StampedGroup(name=name, ranks=tuple(ranks[place] for place in sorted(ranks)), backend="nccl")
        for name, ranks in members.items()
    }
    stamps = []
    for process, process_calls in calls.items():
        rows = [_row(header, call, numbers[header.id], operations.index(call.coll)) for header, call in process_calls]
        records = np.array(rows, RECORD)
        records = records[np.argsort(records["enqueue_ns"], kind="stable")]
        stamps.append(
            RankStamps(
                rank=rank_of[process],
                world=len(calls),
                host=process[0],
                clock=process[0],
                wall_less_clock_ns=0,
                operations=operations,
                groups=groups,
                records=_with_steps(records, f"{process[0]}, process {process[1]}"),
            )
        )
    return sorted(stamps, key=lambda each: each.rank)


def _calls(path: Path) -> list[tuple[tuple[str, int], _Call]]:
    """Process, communicator and collective of each line."""
    lines = read_whole(path).splitlines()
    header, metadata, calls = None, None, []
    for number, text in enumerate(lines, 1):
        try:
            line = msgspec.json.decode(text, type=_InspectorLine)
        except msgspec.MsgspecError as error:
            if number == len(lines):
                break  # it was being written
            raise TraceFormatError(f"{path}, line {number}: not of NCCL's inspector ({error})") from error
        header, metadata = line.header or header, line.metadata or metadata
        if line.coll_perf is None:
            continue
        if header is None or metadata is None:
            raise TraceFormatError(f"{path}, line {number}: no line before it says which communicator it is of")
        if line.coll_perf.event_trace_ts is None:
            raise TraceFormatError(
                f"{path}, line {number}: no times of single collectives; set NCCL_INSPECTOR_DUMP_VERBOSE=1 in the job"
            )
        calls.append(((metadata.hostname, metadata.pid), (header, line.coll_perf)))
    return calls


def _ranks(calls: dict[tuple[str, int], list[_Call]]) -> dict[tuple[str, int], int]:
    """Rank of each process: that in a communicator of all of them, else their order by host and process."""
    for process_calls in calls.values():
        for header, _ in process_calls:
            if header.n_ranks == len(calls):
                ranks = {
                    process: next((each.rank for each, _ in others if each.id == header.id), -1)
                    for process, others in calls.items()
                }
                if sorted(ranks.values()) == list(range(len(calls))):
                    return ranks
    return {process: rank for rank, process in enumerate(sorted(calls))}


def _row(header: _Header, call: _InspectorCall, group: int, operation: int) -> tuple[Any, ...]:
    times = call.event_trace_ts
    assert times is not None, "lines without times were refused"
    started = [each.kernel_start_ts for each in times.kernel_events if each.kernel_start_ts > 0]
    stopped = [each.kernel_stop_ts for each in times.kernel_events if each.kernel_stop_ts > 0]
    arrived_us = float(min(started) - times.coll_start_ts) if started else np.nan
    ended_us = float(max(stopped) - times.coll_start_ts) if stopped else np.nan
    size_bytes = call.coll_msg_size_bytes
    waits = arrived_us, ended_us, arrived_us, ended_us  # it waits while kernels run
    return (
        times.coll_start_ts * 1000,
        *waits,
        call.coll_sn,
        0,
        size_bytes,
        group,
        FIRST_COLLECTIVE + operation - len(_MARKS),
        0,
        -1,
        0,
    )


def _with_steps(records: np.ndarray, where: str) -> np.ndarray:
    """The records from the first period on, each with its step, and a mark at the end of each whole step."""
    kinds = np.unique(records[["group", "operation", "size_bytes"]], return_inverse=True)[1]
    period = _period(kinds)
    if period is None:
        raise TraceFormatError(f"{where}: its collectives do not repeat {_LEAST_STEPS} times, so that no steps are known")
    differing = np.flatnonzero(kinds[period:] != kinds[:-period])
    first = int(differing[-1]) + 1 if len(differing) else 0
    records = records[first:].copy()
    records["step"] = np.arange(len(records)) // period
    ends_us = np.fmax(records["ended_us"], 0.0).astype(np.float64)
    ends_ns = records["enqueue_ns"] + (ends_us * 1e3).astype(np.int64)
    whole = len(records) // period
    marks = np.zeros(whole, RECORD)
    marks["enqueue_ns"] = ends_ns[: whole * period].reshape(whole, period).max(axis=1) + 1
    for name in ("arrived_us", "ended_us", "waiting_us", "resumed_us"):
        marks[name] = np.nan
    marks["step"], marks["operation"], marks["peer"] = np.arange(whole), STEP, -1
    return np.sort(np.concatenate([records, marks]), order=("step", "enqueue_ns"), kind="stable")


def _period(kinds: np.ndarray) -> int | None:
    """The shortest period of the last half of a sequence; None: it does not repeat often enough."""
    tail = kinds[len(kinds) // 2 :]
    for period in range(1, len(tail) // _LEAST_STEPS + 1):
        if (tail[period:] == tail[:-period]).all():
            return period
    return None
