"""Raw files of an MXNet job with BytePS -> its `Trace`: `assemble_byteps`.

A raw folder holds ``job.json``, ``rank{r}/{hook,worker,symbol}.json`` and BytePS's own ``rank{r}/0/comm.json`` of every worker,
``server{s}/cpu.json`` of every server, and the log of each process. Where BytePS logged messages and servers' work
(``messages.log`` in the folder of a process, ``work.log`` in that of a server), these are read as well.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dpro_search.collect.assemble.common import completed, job_facts, joined, no_profiled_step, read_json, steps_of
from dpro_search.collect.assemble.kvstore import MxnetHookFile, ServerJobFile, on_clock, places, read_server_job, with_servers
from dpro_search.collect.clock import ONE_MACHINE, one_clock
from dpro_search.collect.readers.byteps.events import JobEvents
from dpro_search.collect.readers.byteps.importer import match_workers, read_worker, servers_of_logs
from dpro_search.collect.readers.byteps.logs import read_message_log, read_server_log
from dpro_search.collect.readers.mxnet.files import COMM, Profile, Span, read_profile, read_symbol
from dpro_search.collect.readers.mxnet.importer import ProfileWriter
from dpro_search.collect.trace import ClockReport, Dependencies, Steps, TensorInfo, Trace
from dpro_search.errors import InputError, TraceFormatError

FORMAT = "mxnet-byteps"
_NODE = re.compile(r"\bS\[(\d{1,9})\]")
_IDLE_NS = 1e9
KNOBS = {
    "BYTEPS_PARTITION_BYTES": "4096000",
    "BYTEPS_SCHEDULING_CREDIT": "0",
    "BYTEPS_SERVER_ENGINE_THREAD": "4",
    "BYTEPS_SERVER_ENABLE_SCHEDULE": "0",
    "BYTEPS_KEY_HASH_FN": "djb2",
    "BYTEPS_NCCL_GROUP_SIZE": "4",
    "MXNET_OPTIMIZER_AGGREGATION_SIZE": "4",
}


def read_byteps_hook(path: Path) -> MxnetHookFile:
    """Read what the hook of one worker wrote; raises `InputError` or `TraceFormatError` that name the file."""
    return read_json(
        path, MxnetHookFile, "no step of a DistributedTrainer was seen in autograd.record, or the worker's process was killed"
    )


def assemble_byteps(raw: Path) -> Trace:
    """Build the trace of one job from its raw folder; servers are the last ranks: see `Launcher.assemble`."""
    job = read_server_job(raw, FORMAT)
    hooks = [_checked_hook(raw / f"rank{rank}") for rank in range(job.ranks)]
    dropped: Counter[str] = Counter()
    profiles = [
        _without_comm(read_profile(_packed_or_not(raw / f"rank{rank}" / "worker.json"), dropped)) for rank in range(job.ranks)
    ]
    symbol_path = _packed_or_not(raw / "rank0" / "symbol.json")
    symbol = read_symbol(symbol_path) if symbol_path.is_file() else None
    base_us = min(profile.ops[0].start_us for profile in profiles)
    ranks, order = job.ranks + job.servers, _server_order(raw, job.servers)
    computed = _Computed(profiles, symbol, dropped, [hook.traced_steps for hook in hooks]).trace()
    sent = _sent(raw, job, hooks, base_us, dropped)
    events, dependencies, names = _together(computed, sent)
    assert hooks[0].kvstore is not None  # it was checked
    compression = hooks[0].kvstore.compression
    knobs = {**job.knobs, "compression": compression}
    unknown = compression not in ("", "fp16")
    warned = (f"the gradients were compressed ({compression}): replays take them to be sent whole",) if unknown else ()
    trace = replace(
        sent,
        names=names,
        events=events,
        dependencies=dependencies,
        steps=_with_polling(with_servers(on_clock(steps_of(hooks, 0), base_us, (0.0,) * ranks), raw, order, base_us), raw, order),
        graphs=computed.graphs,
        graph_of_rank=(0,) * ranks if computed.graphs else (),
        meta=msgspec.structs.replace(
            sent.meta,
            framework="mxnet",
            format=FORMAT,
            **job_facts(job, hooks, *places(job, order)),
            knobs={name: value for name, value in knobs.items() if value},
            dropped={reason: dropped[reason] for reason in sorted(dropped) if dropped[reason]},
            warnings=(*computed.meta.warnings, *warned),
        ),
    )
    return completed(trace)


class _Computed(ProfileWriter):
    """The operators of workers that were all started here.

    The engine runs late: at a step's end it updates weights whose gradients are back, while operators of the next step run. A step
    has each operator equally often, so the operators of one name are divided by their number.
    """

    def __init__(self, workers: Sequence[Profile], symbol: Any, dropped: Counter[str], steps: Sequence[Sequence[int]]) -> None:
        super().__init__(workers, (), symbol, dropped)
        self._step_numbers = steps

    def _clock(self) -> ClockReport:
        return one_clock(len(self._workers), ONE_MACHINE)

    def _add_worker(self, rank: int, profile: Profile, steps: Sequence[tuple[int, float, float]]) -> None:
        numbers = self._step_numbers[rank]
        self._comm.append([])
        by_step: dict[int, list[Span]] = defaultdict(list)
        count, seen = Counter(op.name for op in profile.ops), Counter[str]()
        for op in profile.ops:
            share, rest = divmod(count[op.name], len(numbers))
            if rest:
                self._dropped["operators not alike in all steps"] += 1
                continue
            by_step[numbers[seen[op.name] // share]].append(op)
            seen[op.name] += 1
        for step, ops in sorted(by_step.items()):
            self._add_step(rank, step, ops, [])
        self._dropped["API calls"] += len(profile.calls)


def _sent(raw: Path, job: ServerJobFile, hooks: Sequence[MxnetHookFile], base_us: float, dropped: Counter[str]) -> Trace:
    """Events that BytePS traced and logged, with the steps and tensors of the hooks."""
    workers = []
    for rank in range(job.ranks):
        path = _packed_or_not(raw / f"rank{rank}" / "0" / "comm.json")
        if not path.is_file():
            raise InputError(f"{path}: missing: the job must run at least two steps after the traced ones")
        workers.append(read_worker(path, dropped))
        if not workers[-1].totals:
            raise TraceFormatError(f"{path}: no push-pull of BytePS in it; record the job again")
    folders = [raw / f"{name}{number}" for name, count in (("rank", job.ranks), ("server", job.servers)) for number in range(count)]
    logs = [read_message_log(path, dropped) for folder in folders if (path := _packed_or_not(folder / "messages.log")).is_file()]
    works = [_packed_or_not(raw / f"server{server}" / "work.log") for server in range(job.servers)]
    work = [read_server_log(path, dropped) for path in works if path.is_file()]
    servers = servers_of_logs(work, logs)
    match_workers(workers, logs)
    assert hooks[0].kvstore is not None  # it was checked
    parameters = hooks[0].kvstore.parameters
    tensors = sorted({tensor for worker in workers for _, _, tensor, _ in worker.totals}, key=_number)
    if any(not 0 <= _number(tensor) < len(parameters) for tensor in tensors):
        raise TraceFormatError(f"{raw}/rank0/0/comm.json: it has gradients that the Trainer has not; record the job again")
    names = {tensor: parameters[_number(tensor)].name for tensor in tensors}
    clock = one_clock(job.ranks + job.servers, ONE_MACHINE)
    trace = JobEvents(workers, servers, names, clock, base_us, dropped).trace()
    key = {part.tensor: number >> 16 for worker in workers for (number, _), part in worker.parts.items()}
    infos = []
    for tensor in tensors:
        parameter = parameters[_number(tensor)]
        infos.append(
            TensorInfo(
                name=parameter.name,
                node=f"key{key.get(tensor, -1)}",
                dtype=parameter.dtype,
                shape=parameter.shape,
                size_bytes=parameter.size_bytes,
            )
        )
    first = hooks[0].traced_steps[0]
    moved = replace(trace.events, step=np.where(trace.events.step >= 0, trace.events.step + first, -1))
    return replace(trace, events=moved, tensors=tuple(infos))


def _together(computed: Trace, sent: Trace) -> tuple[Any, Dependencies, tuple[str, ...]]:
    """Events, dependencies and names of two traces of one job."""
    names = {name: number for number, name in enumerate(dict.fromkeys((*computed.names, *sent.names)))}
    parts = [
        replace(trace.events, name=np.array([names[name] for name in trace.names], np.int64)[trace.events.name])
        for trace in (computed, sent)
    ]
    shift = len(computed.events)
    dependencies = Dependencies(
        source=np.concatenate((computed.dependencies.source, sent.dependencies.source + shift)),
        target=np.concatenate((computed.dependencies.target, sent.dependencies.target + shift)),
        kind=np.concatenate((computed.dependencies.kind, sent.dependencies.kind)),
    )
    return joined(parts), dependencies, tuple(names)


def _checked_hook(folder: Path) -> MxnetHookFile:
    hook = read_byteps_hook(folder / "hook.json")
    if not hook.traced_steps:
        raise no_profiled_step(folder, hook)
    if hook.kvstore is None:
        raise InputError(f"{folder}/hook.json: no Trainer was seen; use byteps.mxnet.DistributedTrainer")
    return hook


def _without_comm(profile: Profile) -> Profile:
    """The profile without push-pulls, which BytePS's own trace has in detail."""
    ops = [op for op in profile.ops if not COMM.search(op.name)]
    if not ops:
        raise TraceFormatError(f"{profile.path}: no operator of MXNet in it; record the job again")
    return replace(profile, ops=ops)


def _packed_or_not(path: Path) -> Path:
    """The file, or the one that gzip made of it."""
    packed = path.with_name(f"{path.name}.gz")
    return packed if packed.is_file() and not path.is_file() else path


def _number(tensor: str) -> int:
    """Index of the parameter whose gradient a tensor is; -1 for none."""
    digits = tensor.rpartition("_")[2]
    return int(digits) if "gradient_" in tensor and digits.isdecimal() and len(digits) < 9 else -1


def _server_order(raw: Path, servers: int) -> list[int]:
    """Folders of the servers in BytePS's order, by which it spreads keys; in start order where the logs do not have it."""
    numbers = []
    for server in range(servers):
        log = raw / f"server{server}" / "log"
        node = _NODE.search(log.read_text(errors="replace")) if log.is_file() else None
        numbers.append(int(node[1]) if node else -1)
    known = len(set(numbers)) == servers and min(numbers) >= 0
    return sorted(range(servers), key=lambda server: numbers[server] if known else server)


def _with_polling(steps: Steps, raw: Path, order: Sequence[int]) -> Steps:
    """The steps with the CPU time that polling for work takes, which the threads of ps-lite do all the time, as communication's.

    A server's is what it uses before the workers send anything; the scheduler's is divided among all ranks.
    """
    comm_us, compute_us = steps.comm_cpu_us.copy(), steps.compute_cpu_us.copy()
    ranks = len(np.unique(steps.rank))
    scheduler = _idle_share(raw / "scheduler" / "cpu.json") / ranks
    for rank in range(ranks):
        of_server = np.flatnonzero(steps.rank == rank)
        duration_us = np.diff(np.append(steps.start_us[of_server], steps.end_us[of_server[-1:]]))
        if rank >= ranks - len(order):
            folder = raw / f"server{order[rank - ranks + len(order)]}"
            looking_us = np.minimum(_idle_share(folder / "cpu.json") * duration_us, compute_us[of_server])
            comm_us[of_server] = looking_us
            compute_us[of_server] -= looking_us
        comm_us[of_server] += scheduler * duration_us
    return replace(steps, comm_cpu_us=comm_us, compute_cpu_us=compute_us)


def _idle_share(path: Path) -> float:
    """The least share of a core that a process used over a second, of its samples [n, 2] of (clock ns, CPU ns)."""
    samples = np.array(read_json(path, list[tuple[int, int]], "the launcher was killed; record again"), dtype=np.float64)
    ends = np.searchsorted(samples[:, 0], samples[:, 0] + _IDLE_NS) if len(samples) else np.zeros(0, np.int64)
    begins = np.flatnonzero(ends < len(samples))
    if not len(begins):
        return 0.0
    used = samples[ends[begins]] - samples[begins]
    rising = used[:, 1] > 0  # a process that has ended is read as 0
    return float((used[rising, 1] / used[rising, 0]).min()) if rising.any() else 0.0
