"""BytePS's own trace (``comm.json`` of every worker), with or without logs of messages and servers.

A worker's file holds, per tensor and step, the whole push-pull (thread "total") and the stages of each partition: REDUCE, COPYD2H,
PUSH, PULL, COPYH2D, BROADCAST (thread: the partition's key, declared key * 65536 + number of the part). All times are epoch
microseconds. What the files do not have is left unknown: sizes and, without logs, what servers and wire did within PUSH and PULL.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect.assemble.described import described
from dpro_search.collect.clock import CommSpans
from dpro_search.collect.readers._bytes import read_available
from dpro_search.collect.readers._chrome import chrome_events
from dpro_search.collect.readers._salvage import shown
from dpro_search.collect.readers.byteps.events import FORMAT, STAGES, JobEvents, Push, Server, WorkerEvents, inside
from dpro_search.collect.readers.byteps.logs import (
    MessageLog,
    ServerOp,
    is_message_log,
    is_server_log,
    read_message_log,
    read_server_log,
    wire_times,
)
from dpro_search.collect.readers.event_table import clocks_checked, steps_by_repetition
from dpro_search.collect.readers.importers import Importer, read_head
from dpro_search.collect.readers.mxnet import importer as mxnet_profiler
from dpro_search.collect.readers.mxnet.files import COMM, read_profile
from dpro_search.collect.trace import ClockReport, Trace
from dpro_search.errors import InputError, TraceFormatError

_EVENT = re.compile(rb'"(?:cat"\s*:\s*"Comm|name"\s*:\s*"Comm\.)')
_NAMES = re.compile(rb"(?:[\w./:-]+\s*\n?)+")
_LONGEST_US = 1e18


class _BytepsEvent(msgspec.Struct, gc=False):
    ph: str
    name: str
    ts: float
    pid: str | int
    tid: str | int = ""
    dur: float = 0.0


def recognise(head: bytes, path: Path) -> bool:
    """Whether a file that begins with `head` is a trace that BytePS wrote."""
    return b'"Comm.' in head and _EVENT.search(head) is not None and b"traceEvents" in head


def companion(head: bytes, path: Path) -> bool:
    """Whether a file is a log of messages or of a server, a list of the gradients' names, or MXNet's profile of a worker."""
    return is_message_log(head) or is_server_log(head) or _is_name_list(head) or mxnet_profiler.recognise(head, path)


def read(paths: Sequence[Path]) -> Trace:
    """Read the traces of all workers of one job, and what logs and profiles there are.

    Ranks are the workers in the order of their paths, then the servers. COMM events of one tensor and step share a collective
    number. A PUSH or PULL has one only where both ends of its message were logged; the time of that message on the wire is then an
    event of the server's rank. QUEUE events are waiting: of a partition for its push (credit and priority), of an arrived part for
    the server's thread.

    Raises
    ------
    InputError
        A file cannot be read, or the workers' clocks contradict each other.
    TraceFormatError
        No file has a push-pull of BytePS.
    """
    dropped: Counter[str] = Counter()
    heads = {path: read_head(path) for path in paths}
    workers = [read_worker(path, dropped) for path in paths if not companion(heads[path], path)]
    for worker in workers:
        dropped[f"ranks without a push-pull: {shown(worker.path)}"] += not worker.totals
    workers = [worker for worker in workers if worker.totals]
    if not workers:
        raise TraceFormatError(f"{paths[0]}: no push-pull of BytePS in it; record with BYTEPS_TRACE_ON=1")
    base_us = min(start for worker in workers for start, *_ in worker.totals)
    logs = [read_message_log(path, dropped) for path in paths if is_message_log(heads[path])]
    servers = servers_of_logs([read_server_log(path, dropped) for path in paths if is_server_log(heads[path])], logs)
    match_workers(workers, logs)
    _match_profiles(workers, [path for path in paths if mxnet_profiler.recognise(heads[path], path)], dropped)
    try:
        clock = _clock(workers, servers, base_us)
    except InputError as error:
        raise InputError(f"{paths[0]}: {error}") from error
    names = _tensor_names(workers, [path for path in paths if _is_name_list(heads[path])], dropped)
    return described(JobEvents(workers, servers, names, clock, base_us, dropped).trace())


def _is_name_list(head: bytes) -> bool:
    lines = head.split(b"\n")
    return (
        len(lines) > 1
        and not is_server_log(head)
        and all(b" " not in line and _NAMES.fullmatch(line + b"\n") for line in lines if line)
    )


def read_worker(path: Path, dropped: Counter[str]) -> WorkerEvents:
    """One worker's push-pulls and their stages; raises as `chrome_events` does."""
    events, left_out = chrome_events(path, _BytepsEvent)
    dropped.update(left_out)
    worker = WorkerEvents(path=path)
    parts: list[tuple[float, float, str, str, int]] = []
    for event in events:
        tensor, end = str(event.pid), event.ts + event.dur
        stage = event.name.removeprefix(f"{tensor}.")
        key = str(event.tid)
        if event.ph != "X":
            dropped[f"'{event.ph[:1]}' events"] += 1
        elif not 0 <= event.ts <= end < _LONGEST_US:
            dropped["ends before it starts"] += 1
        elif key == "total":
            worker.totals.append((event.ts, end, tensor, -1))
        elif key.isdecimal() and len(key) < 18 and stage in STAGES:
            parts.append((event.ts, end, tensor, stage, int(key)))
        else:
            dropped["unknown stage"] += 1
    worker.totals.sort()
    steps = steps_by_repetition([tensor for _, _, tensor, _ in worker.totals])
    worker.totals = [(start, end, tensor, step) for (start, end, tensor, _), step in zip(worker.totals, steps, strict=True)]
    since: dict[str, tuple[list[float], list[int]]] = defaultdict(lambda: ([], []))
    for start, _, tensor, step in worker.totals:
        since[tensor][0].append(start)
        since[tensor][1].append(step)
    for start, end, tensor, stage, key_number in sorted(parts):
        position = bisect_right(since[tensor][0], start) - 1
        if position < 0:
            dropped["stage outside any push-pull"] += 1
            continue
        step = since[tensor][1][position]
        part = worker.parts.setdefault((key_number, step), Push(tensor=tensor, key=key_number, step=step))
        dropped["stage twice"] += stage in part.span_us
        part.span_us.setdefault(stage, (start, end))
    return worker


def servers_of_logs(ops: Sequence[list[ServerOp]], logs: Sequence[MessageLog | None]) -> list[Server]:
    """Servers that left a log of any kind; the logs of one server are those with the same keys."""
    servers = [Server(log=log) for log in logs if log is not None and log.role == "server"]
    servers.sort(key=lambda server: server.log.node if server.log else 0)
    for server_ops in ops:
        keys = {op.key for op in server_ops}
        known = [server for server in servers if server.log and not server.ops]
        best = max(
            known, key=lambda server: len(keys & {lane.key for lane in server.log.received} if server.log else ()), default=None
        )
        if best is None:
            servers.append(Server(ops=server_ops))
        else:
            best.ops = server_ops
    return servers


def match_workers(workers: Sequence[WorkerEvents], logs: Sequence[MessageLog | None]) -> None:
    """A worker's message log is the one that sent a push within most of the worker's pushes."""
    left = [log for log in logs if log is not None and log.role == "worker"]
    scores = []
    for w, worker in enumerate(workers):
        pushes = [(part.key, part.span_us["PUSH"]) for part in worker.parts.values() if "PUSH" in part.span_us]
        for number, log in enumerate(left):
            sent: dict[int, list[int]] = {lane.key: times for lane, times in log.sent.items() if lane.is_push and lane.is_request}
            hits = sum(inside(sent.get(key, []), span) is not None for key, span in pushes)
            scores.append((-hits, w, number))
    taken: set[int] = set()
    for hits, w, number in sorted(scores):
        if hits and workers[w].log is None and number not in taken:
            workers[w].log = left[number]
            taken.add(number)


def _match_profiles(workers: Sequence[WorkerEvents], paths: Sequence[Path], dropped: Counter[str]) -> None:
    """A worker's profile is the one whose push-pulls begin when the worker's do."""
    profiles = [read_profile(path, dropped) for path in paths]
    pushed = [np.array([op.start_us for op in profile.ops if COMM.search(op.name)]) for profile in profiles]
    apart = [
        (float(np.median([np.abs(times - start).min() for start, *_ in worker.totals])), w, number)
        for w, worker in enumerate(workers)
        for number, times in enumerate(pushed)
        if len(times)
    ]
    taken: set[int] = set()
    for _, w, number in sorted(apart):
        if workers[w].profile is None and number not in taken:
            workers[w].profile = profiles[number]
            taken.add(number)
    dropped["profiles of no worker"] += len(profiles) - len(taken)


def _clock(workers: Sequence[WorkerEvents], servers: Sequence[Server], base_us: float) -> ClockReport:
    """Workers from push-pulls that all of them made; servers from the messages between them and the workers."""
    common = sorted(set.intersection(*(set(worker.parts) for worker in workers)))
    common = [key for key in common if all({"PUSH", "PULL"} <= set(worker.parts[key].span_us) for worker in workers)]
    spans_us = [[worker.parts[key].span_us for worker in workers] for key in common]
    rows = [[(span_us["PUSH"][0], span_us["PULL"][1]) for span_us in of_workers] for of_workers in spans_us]
    report = clocks_checked(CommSpans.of(rows, (key for key, _ in common), len(workers), base_us), "pull")
    offset, residual, unknown = list(report.offset_us), list(report.residual_us), 0
    for server in servers:
        ahead, behind = [], []
        for worker, theta in zip(workers, report.offset_us, strict=True):
            if server.log and worker.log:
                for lane in set(worker.log.sent) | set(server.log.sent):
                    if lane.sender == worker.log.node and lane.receiver == server.log.node:
                        ahead += [received - (sent - theta) for sent, received in wire_times(lane, worker.log, server.log)]
                    elif lane.sender == server.log.node and lane.receiver == worker.log.node:
                        behind += [(received - theta) - sent for sent, received in wire_times(lane, server.log, worker.log)]
        if not (ahead and behind):
            unknown += 1
            offset.append(0.0)
            residual.append(0.0)
            continue
        high, low = min(ahead), -min(behind)
        offset.append(0.0 if low <= 0 <= high else (low + high) / 2)
        residual.append(abs(high - low) / 2)
    method = report.method + ("; servers from their messages" if servers else "")
    method += f"; {unknown} servers unknown, taken to share the first worker's clock" if unknown else ""
    return ClockReport(offset_us=tuple(offset), residual_us=tuple(residual), method=method)


def _tensor_names(workers: Sequence[WorkerEvents], lists: Sequence[Path], dropped: Counter[str]) -> dict[str, str]:
    """Name of each tensor: its parameter's where a list has it, else BytePS's."""
    tensors = sorted({tensor for worker in workers for _, _, tensor, _ in worker.totals})
    names = {tensor: tensor.removeprefix("Comm.") for tensor in tensors}
    numbers = {tensor: int(match[1]) for tensor in tensors if (match := re.search(r"gradient_(\d{1,9})$", tensor))}
    for path in lists:
        lines = read_available(path)[0].decode("utf-8", "replace").split()
        if not numbers or max(numbers.values()) >= len(lines):
            dropped["lists of names that do not fit"] += 1
        else:
            names |= {tensor: lines[number] for tensor, number in numbers.items()}
    return names


IMPORTER = Importer(
    name=FORMAT,
    description="traces of BytePS (comm.json with events of category Comm)",
    recognise=recognise,
    read=read,
    companion=companion,
)
