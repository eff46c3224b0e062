"""Raw files of an MXNet job with parameter servers -> its `Trace`: `assemble_kvstore`.

A raw folder holds ``job.json``, ``rank{r}/{hook,worker,symbol}.json`` of every worker, ``server{s}/{cpu,rank{k}_server}.json`` of
every server, and the log of each process.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect.assemble.common import (
    RankFile,
    RawJobFile,
    completed,
    job_facts,
    joined,
    no_profiled_step,
    read_job,
    read_json,
    steps_of,
)
from dpro_search.collect.assemble.kvstore_slices import Slicing
from dpro_search.collect.clock import ONE_MACHINE, align_clocks, one_clock
from dpro_search.collect.readers.mxnet.files import COMM, Profile, Span, Symbol, read_profile, read_symbol
from dpro_search.collect.readers.mxnet.importer import ProfileWriter
from dpro_search.collect.trace import ClockReport, Steps, TensorInfo, Trace
from dpro_search.errors import InputError, TraceFormatError

FORMAT = "mxnet-kvstore"

_LONGEST_NS = 2**62

# Operators that the engine runs as soon as they are called for, early or late of their step.
_BESIDE = re.compile(r"SetValueOp|_zeros.*|CopyCPU2CPU|_backward_.*|.*_update")


class StoreParameter(msgspec.Struct, kw_only=True):
    """A parameter of the Trainer; its position is its key."""

    key: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    trained: bool


class StoreFacts(msgspec.Struct, kw_only=True):
    """Facts of a worker about its store. `compression`: how BytePS compresses gradients ("": not at all, or another store)."""

    type: str
    update_on_kvstore: bool
    parameters: list[StoreParameter]
    compression: str = ""


class MxnetHookFile(RankFile, kw_only=True):
    """``hook.json`` of one worker; `kvstore` is None if no step was profiled."""

    kvstore: StoreFacts | None = None


class ServerJobFile(RawJobFile, kw_only=True):
    """``job.json`` of a job with servers beside its ranks."""

    servers: int
    server_hosts: tuple[str, ...]
    server_cores: tuple[int, ...]
    boot: str = ""  # of the servers' machine, as `RankFile.machine`


def read_server_job(raw: Path, format_name: str) -> ServerJobFile:
    """The file that the launcher of a job with servers wrote; raises the errors of `read_job`."""
    job = read_job(raw, ServerJobFile, format_name)
    if not job.servers == len(job.server_hosts) == len(job.server_cores) >= 1:
        raise TraceFormatError(
            f"{raw}/job.json: {job.ranks} ranks, {job.servers} servers, not a host for each; record the job again"
        )
    return job


def read_mxnet_hook(path: Path) -> MxnetHookFile:
    """Read what the hook of one worker wrote; raises `InputError` or `TraceFormatError` that name the file."""
    return read_json(
        path, MxnetHookFile, "no step of a gluon.Trainer was seen in autograd.record, or the worker's process was killed"
    )


def assemble_kvstore(raw: Path) -> Trace:
    """Build the trace of one job from its raw folder; servers are the last ranks: see `Launcher.assemble`."""
    job = read_server_job(raw, FORMAT)
    hooks = [_checked_hook(raw / f"rank{rank}") for rank in range(job.ranks)]
    dropped: Counter[str] = Counter()
    workers = [_in_steps(read_profile(raw / f"rank{r}" / "worker.json", dropped), hook) for r, hook in enumerate(hooks)]
    servers = _servers(raw, job, dropped)
    symbol_path = raw / "rank0" / "symbol.json"
    symbol = read_symbol(symbol_path) if symbol_path.is_file() else None
    read = _JobWriter(job, hooks, workers, servers, symbol, dropped).trace()
    base_us = min(profile.ops[0].start_us for profile in (*workers, *(server.profile for server in servers)))  # the reader's zero
    used = {server.process for server in servers}
    idle = [f"server{s} has no key" for s in range(job.servers) if s not in used]
    trace = replace(
        read,
        steps=with_servers(
            on_clock(steps_of(hooks, 0), base_us, read.meta.clock.offset_us), raw, [server.process for server in servers], base_us
        ),
        tensors=_with_shapes(read.tensors, hooks[0]),
        meta=msgspec.structs.replace(
            read.meta,
            comm="kvstore",
            format=FORMAT,
            **job_facts(job, hooks, *places(job, [server.process for server in servers])),
            knobs={name: value for name, value in job.knobs.items() if value},
            warnings=(*read.meta.warnings, *idle),
        ),
    )
    return completed(trace)


@dataclass(frozen=True, kw_only=True)
class _Server:
    """A server that has keys: its number among the processes, and the store's number for it, by which keys are given out."""

    process: int
    number: int
    profile: Profile


def _servers(raw: Path, job: ServerJobFile, dropped: Counter[str]) -> list[_Server]:
    """The servers with a profile, in the order of the store's numbers. One without a key leaves a profile without an operator."""
    servers = []
    for process in range(job.servers):
        for path in sorted((raw / f"server{process}").glob("rank*_server.json"))[:1]:
            number = re.fullmatch(r"rank(\d{1,6})_server.json", path.name)
            profile = read_profile(path, dropped)
            if number is not None and profile.ops:
                servers.append(_Server(process=process, number=int(number[1]), profile=profile))
    return sorted(servers, key=lambda server: server.number)


class _JobWriter(ProfileWriter):
    """The events of a job of which it is known what runs where and how its gradients are cut."""

    def __init__(
        self,
        job: ServerJobFile,
        hooks: Sequence[MxnetHookFile],
        workers: Sequence[Profile],
        servers: Sequence[_Server],
        symbol: Symbol | None,
        dropped: Counter[str],
    ) -> None:
        super().__init__(workers, [server.profile for server in servers], symbol, dropped)
        self._machines = tuple(hook.machine for hook in hooks)
        self._boot = job.boot or hooks[0].machine
        self._numbers = [server.number for server in servers]
        self._parts = _parts(job, hooks[0])

    def _parts_on_server(self, server: int) -> dict[int, list[int]] | None:
        if self._symbol is None:
            return None
        number = self._numbers[server]
        return {
            parameter: [elements for owner, elements in self._parts.get(self._symbol.names[parameter], ()) if owner == number]
            for parameter in self._tensors
            if parameter >= 0
        }

    def _clock(self) -> ClockReport:
        if {*self._machines, self._boot} == {self._boot}:
            return one_clock(len(self._workers) + len(self._servers), ONE_MACHINE)
        report = align_clocks(self._common_spans(), self._machines)
        beside = self._machines.index(self._boot) if self._boot in self._machines else 0
        note = "" if self._boot in self._machines else "; servers taken to share the first worker's clock"
        count = len(self._servers)
        return ClockReport(
            offset_us=(*report.offset_us, *[report.offset_us[beside]] * count),
            residual_us=(*report.residual_us, *[report.residual_us[beside]] * count),
            method=report.method + note,
        )


def _parts(job: ServerJobFile, hook: MxnetHookFile) -> dict[str, list[tuple[int, int]]]:
    """(server, elements) of the parts of each gradient, by name."""
    assert hook.kvstore is not None  # it was checked
    trained = [parameter for parameter in hook.kvstore.parameters if parameter.trained]
    parts = Slicing.of_knobs(job.knobs, job.servers).parts(
        [parameter.key for parameter in trained], [math.prod(parameter.shape) for parameter in trained]
    )
    return {parameter.name: parameter_parts for parameter, parameter_parts in zip(trained, parts, strict=True)}


def _checked_hook(folder: Path) -> MxnetHookFile:
    hook = read_mxnet_hook(folder / "hook.json")
    if any(not 0 <= value < _LONGEST_NS for step in hook.steps for value in step[:4]):
        raise TraceFormatError(f"{folder}/hook.json: a time is out of range; record the job again")
    if not hook.traced_steps:
        raise no_profiled_step(folder, hook)
    if hook.kvstore is None or "dist" not in hook.kvstore.type:
        kvstore_type = "none" if hook.kvstore is None or not hook.kvstore.type else hook.kvstore.type
        raise InputError(f"{folder}/hook.json: the Trainer's KVStore is '{kvstore_type}'; use kvstore='dist_sync'")
    return hook


def places(job: ServerJobFile, servers: Sequence[int]) -> tuple[list[str], list[int]]:
    """Hosts and cores of some of the servers, in an order."""
    return [job.server_hosts[server] for server in servers], [job.server_cores[server] for server in servers]


def on_clock(steps: Steps, base_us: float, offset_us: Sequence[float]) -> Steps:
    shift = base_us + np.array(offset_us)[steps.rank]
    return replace(steps, start_us=steps.start_us - shift, end_us=steps.end_us - shift)


def with_servers(steps: Steps, raw: Path, servers: Sequence[int], base_us: float) -> Steps:
    """The steps, and after them those of the servers: the first worker's, with the CPU time that the server used meanwhile.

    Steps that ended after the last look at a server are not known of it.
    """
    parts = [steps]
    first = steps.select(steps.rank == 0)
    for position, server in enumerate(servers):
        samples = read_json(raw / f"server{server}" / "cpu.json", list[tuple[int, int]], "the launcher was killed; record again")
        if not samples:
            continue
        at_ns, cpu_ns = np.array(samples, dtype=np.float64).T
        at_us = at_ns / 1e3 - base_us
        upto_us = np.interp([*first.start_us, first.end_us[-1]], at_us, cpu_ns / 1e3)
        rank = np.full(len(first), int(steps.rank.max()) + 1 + position)
        server_steps = replace(first, rank=rank, compute_cpu_us=np.diff(upto_us), comm_cpu_us=np.zeros(len(first)))
        parts.append(server_steps.select(np.array([*first.start_us[1:], first.end_us[-1]]) <= at_us[-1]))
    return joined(parts)


def _in_steps(profile: Profile, hook: MxnetHookFile) -> Profile:
    """The profile with a mark at the beginning of each step, numbered as the hook did.

    The engine runs late and in its own order, so times of the script do not divide its operators. But a step's gradients are all
    sent before the first operator of the next one, for it needs a weight of theirs.
    """
    steps = hook.traced_steps
    comm = [op for op in profile.ops if COMM.search(op.name)]
    forward = [op for op in profile.ops if not COMM.search(op.name) and not _BESIDE.fullmatch(op.name)]
    if not comm or len(comm) % len(steps):
        raise InputError(
            f"{profile.path}: {len(comm)} gradients were sent in {len(steps)} steps; "
            "a step must send each gradient once, with one call of the Trainer's step"
        )
    starts = [profile.ops[0].start_us]
    for last in comm[len(comm) // len(steps) - 1 : -1 : len(comm) // len(steps)]:
        next_step = (op.start_us for op in forward if op.start_us > last.start_us and op.name == forward[0].name)
        starts.append(next(next_step, last.start_us))
    ends = [*starts[1:], max(op.end_us for op in profile.ops)]
    return replace(profile, tasks=[Span(a, b, f"step{i}", 0) for i, a, b in zip(steps, starts, ends, strict=True)])


def _with_shapes(tensors: Sequence[TensorInfo], hook: MxnetHookFile) -> tuple[TensorInfo, ...]:
    """The gradients with what the Trainer knows of them; their node is their key."""
    assert hook.kvstore is not None  # it was checked
    known = {parameter.name: parameter for parameter in hook.kvstore.parameters}
    return tuple(
        TensorInfo(name=tensor.name, node=f"key{shape.key}", dtype=shape.dtype, shape=shape.shape, size_bytes=shape.size_bytes)
        if (shape := known.get(tensor.name)) is not None
        else tensor
        for tensor in tensors
    )
