"""Run an MXNet job with parameter servers (KVStore) under the recorder: `record_kvstore_job`, `time_kvstore_job`.

Each server has a host of its own where hosts are shaped, after those of the workers; the scheduler is on the first server's host.
A raw folder holds ``job.json``, ``rank{r}/{hook,worker,symbol}.json`` of every worker, ``server{s}/{cpu,rank{k}_server}.json`` of
every server, and the log of each process.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect._files import write_file
from dpro_search.collect.assembly import RankFile, overhead_pct, read_json, steps_of
from dpro_search.collect.job import Schedule, StepTimes, machine, shaped_hosts
from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.ranks import JobSpec, require_framework, run_ranks
from dpro_search.collect.readers._mxnet_files import COMM, Profile, Span, read_profile, read_symbol
from dpro_search.collect.readers.mxnet_profiler import ProfileWriter
from dpro_search.collect.trace import ClockReport, Steps, TensorInfo, Trace
from dpro_search.errors import InputError, JobError, TraceFormatError

FORMAT = "mxnet-kvstore"
BIGARRAY_BOUND = "MXNET_KVSTORE_BIGARRAY_BOUND"

_PORT = 9091
_KNOBS = {BIGARRAY_BOUND: "1000000", "DMLC_PS_VAN_TYPE": "", "MXNET_KVSTORE_SLICE_THRESHOLD": "40000"}
_END_S = 10.0  # servers end by themselves once all workers have, unless none of them used the store
_TAIL = 400


class Parameter(msgspec.Struct, kw_only=True):
    """A parameter of the Trainer; its position is its key."""

    key: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    trained: bool


class StoreFacts(msgspec.Struct, kw_only=True):
    """What a worker knows of its store."""

    type: str
    update_on_kvstore: bool
    parameters: list[Parameter]


class MxnetHookFile(RankFile, kw_only=True):
    """``hook.json`` of one worker; `kvstore` is None if no step was profiled."""

    kvstore: StoreFacts | None = None


class MxnetJobFile(msgspec.Struct, kw_only=True):
    """``job.json``: what only the launcher knows."""

    format: str
    ranks: int
    servers: int
    server_hosts: tuple[str, ...]
    server_cores: tuple[int, ...]
    command: tuple[str, ...]
    machine: str
    recorded_at: str
    rate_bps: float | None = None
    knobs: dict[str, str] = {}


def servers_of(env: Mapping[str, str], ranks: int) -> int:
    """Number of servers under an environment: DMLC_NUM_SERVER, or as many as workers."""
    text = env.get("DMLC_NUM_SERVER", str(ranks))
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"DMLC_NUM_SERVER={text}: must be a number >= 1")
    return int(text)


def record_kvstore_job(
    spec: JobSpec,
    out: Path,
    *,
    rate_bps: float | None = None,
    shaped: bool = False,
    schedule: Schedule | None = None,
    keep_raw: Path | None = None,
    timeout_s: float = 3600,
) -> Trace:
    """Run a job with the hook on and write its trace to the new folder `out`.

    The number of servers is DMLC_NUM_SERVER's, else that of the workers. Other parameters and errors are those of
    `collect.job.record_job`; a job that takes longer than `timeout_s` is ended.
    """
    if out.exists():
        raise InputError(f"{out}: exists already; remove it or choose another --out")
    schedule = schedule or Schedule()
    require_framework(spec.interpreter, ("mxnet",), "mxnet")
    env = {**os.environ, **spec.env}
    servers = servers_of(env, spec.ranks)
    raw = keep_raw or Path(tempfile.mkdtemp(prefix="dpro-search-raw-"))
    raw.mkdir(parents=True, exist_ok=True)
    try:
        job = MxnetJobFile(
            format=FORMAT,
            ranks=spec.ranks,
            servers=servers,
            server_hosts=tuple(f"h{spec.ranks + s}" if shaped else socket.gethostname() for s in range(servers)),
            server_cores=tuple(_server_core(spec, s) for s in range(servers)),
            command=spec.command,
            machine=machine(),
            recorded_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            rate_bps=rate_bps,
            knobs={name: env.get(name, value) for name, value in _KNOBS.items()},
        )
        write_file(raw / "job.json", msgspec.json.encode(job))
        _run(spec, raw, schedule.hook("record"), servers, rate_bps, shaped, timeout_s)
        trace = assemble_kvstore(raw)
        trace.save(out)
        return trace
    finally:
        if keep_raw is None:
            shutil.rmtree(raw, ignore_errors=True)


def time_kvstore_job(
    spec: JobSpec, *, rate_bps: float | None = None, shaped: bool = False, warmup: int = 5, timeout_s: float = 3600
) -> StepTimes:
    """Run a job and measure its steps; the recorder only reads the clock.

    Raises
    ------
    JobError
        The job failed, or ran too few steps.
    """
    servers = servers_of({**os.environ, **spec.env}, spec.ranks)
    folder = Path(tempfile.mkdtemp(prefix="dpro-search-time-"))
    try:
        _run(spec, folder, Schedule(warmup=max(warmup, 2)).hook("time"), servers, rate_bps, shaped, timeout_s)
        hooks = [read_mxnet_hook(folder / f"rank{rank}" / "hook.json") for rank in range(spec.ranks)]
        rows = [np.array(hook.steps, dtype=np.float64) for hook in hooks]
        if min(len(row) for row in rows) < warmup + 3:
            raise JobError(f"the job ran {min(len(row) for row in rows)} steps; at least {warmup + 3} are needed to measure it")
        distances = [np.diff(row, axis=0)[warmup:] / 1e3 for row in rows]
        return StepTimes(
            iteration_us=distances[0][:, 0],
            compute_cpu_us=np.mean([row[:, 2] for row in distances], axis=0),
            comm_cpu_us=np.mean([row[:, 3] for row in distances], axis=0),
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# Processes


def _run(
    spec: JobSpec, out: Path, hook: dict[str, str], servers: int, rate_bps: float | None, shaped: bool, timeout_s: float
) -> None:
    with shaped_hosts(spec.ranks + servers, rate_bps, shaped) as hosts:
        scheduler_host = spec.ranks
        root = {
            "DMLC_PS_ROOT_URI": hosts.address(scheduler_host) if hosts else "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(_PORT if hosts else _free_port()),
            "DMLC_NUM_SERVER": str(servers),
            "DMLC_NUM_WORKER": str(spec.ranks),
        }
        if spec.cores and "OMP_NUM_THREADS" not in spec.env:
            root["OMP_NUM_THREADS"] = "1"
        parts = [("scheduler", scheduler_host, -1)]
        parts += [(f"server{s}", spec.ranks + s, _server_core(spec, s)) for s in range(servers)]
        workers = [{**root, **_place("worker", rank, hosts), "DPRO_SEARCH_HOOK_RANK": str(rank)} for rank in range(spec.ranks)]
        with _beside(spec, out, parts, root, hosts) as alive:
            run_ranks(spec, out, workers, hosts=hosts, hook={**hook, "FRAMEWORK": "mxnet"}, timeout_s=timeout_s, on_poll=alive)


def _server_core(spec: JobSpec, server: int) -> int:
    return spec.cores[server % len(spec.cores)] if spec.cores else -1


def _place(role: str, host: int, hosts: ShapedHosts | None) -> dict[str, str]:
    address, interface = (hosts.address(host), "eth0") if hosts else ("127.0.0.1", "lo")
    return {"DMLC_ROLE": role, "DMLC_NODE_HOST": address, "DMLC_INTERFACE": interface}


@contextlib.contextmanager
def _beside(
    spec: JobSpec, out: Path, parts: Sequence[tuple[str, int, int]], root: dict[str, str], hosts: ShapedHosts | None
) -> Iterator[Callable[[], None]]:
    """Scheduler and servers (name, host, core), for as long as the block; gives a check that raises `JobError` if one failed.

    Each check also notes how much CPU time the servers have used; ``cpu.json`` has [epoch ns, CPU ns] of all checks.
    """
    processes: dict[str, subprocess.Popen[bytes]] = {}
    used: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def check() -> None:
        for name, process in processes.items():
            if process.poll() not in (None, 0):
                raise JobError(f"{name} ended with code {process.returncode}: {_tail(out / name / 'log')}")
            used[name].append((time.time_ns(), _cpu_ns(process.pid)))

    try:
        for name, host, core in parts:
            folder = out / name
            folder.mkdir(parents=True, exist_ok=True)
            command = [spec.interpreter, "-c", "import mxnet"]  # serves until the job ends
            command = ["taskset", "-c", str(core), *command] if core >= 0 else command
            command = hosts.command(host, command) if hosts else command
            env = {**os.environ, **spec.env, **root, **_place(name.rstrip("0123456789"), host, hosts)}
            with (folder / "log").open("wb") as log:
                processes[name] = subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *command],
                    env=env,
                    cwd=folder,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        yield check
        for name, samples in used.items():
            write_file(out / name / "cpu.json", msgspec.json.encode(samples))
        deadline = time.monotonic() + _END_S
        for process in processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
    finally:
        for process in processes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _cpu_ns(pid: int) -> int:
    """CPU time that the threads of a process have used; those that ended do not count."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(path.read_text().split()[0])
    return total


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{' | '.join(lines[-3:])[-_TAIL:] or 'no output'}; see {log}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# Assembly


def read_mxnet_hook(path: Path) -> MxnetHookFile:
    """Read what the hook of one worker wrote; raises `InputError` or `TraceFormatError` that name the file."""
    return read_json(
        path, MxnetHookFile, "no step of a gluon.Trainer was seen in autograd.record, or the worker's process was killed"
    )


def assemble_kvstore(raw: Path) -> Trace:
    """Build the trace of one job from its raw folder; servers are the last ranks.

    Raises
    ------
    InputError
        A worker is missing, or nothing was profiled.
    TraceFormatError
        A file is damaged, or contradicts another.
    """
    job = read_json(raw / "job.json", MxnetJobFile, "make a raw folder with 'dpro-search collect --keep-raw'")
    if job.format != FORMAT:
        raise InputError(f"{raw}/job.json: the raw files are of '{job.format}', not of {FORMAT}")
    if job.ranks < 1:
        raise TraceFormatError(f"{raw}/job.json: {job.ranks} ranks; record the job again")
    hooks = [_checked_hook(raw / f"rank{rank}") for rank in range(job.ranks)]
    dropped: Counter[str] = Counter()
    workers = [_in_steps(read_profile(raw / f"rank{r}" / "worker.json", dropped), hook) for r, hook in enumerate(hooks)]
    files = {s: found[0] for s in range(job.servers) if (found := sorted((raw / f"server{s}").glob("rank*_server.json")))}
    # A server without a key leaves a profile without an operator, and is no rank.
    servers = {s: profile for s, path in files.items() if (profile := read_profile(path, dropped)).ops}
    symbol_path = raw / "rank0" / "symbol.json"
    symbol = read_symbol(symbol_path) if symbol_path.is_file() else None
    read = _OneMachine(workers, list(servers.values()), symbol, dropped).trace()
    base_us = min(profile.ops[0].start_us for profile in (*workers, *servers.values()))  # the reader's zero
    idle = [f"server{s} has no key" for s in range(job.servers) if s not in servers]
    trace = replace(
        read,
        steps=_with_servers(_on_clock(steps_of(hooks, 0), base_us, read.meta.clock.offset_us), raw, list(servers), base_us),
        tensors=_with_shapes(read.tensors, hooks[0]),
        meta=msgspec.structs.replace(
            read.meta,
            comm="kvstore",
            format=FORMAT,
            hosts=(*(hook.host for hook in hooks), *(job.server_hosts[s] for s in servers)),
            cores=(*(hook.core for hook in hooks), *(job.server_cores[s] for s in servers)),
            rate_bps=job.rate_bps,
            versions=hooks[0].versions,
            knobs={name: value for name, value in job.knobs.items() if value},
            peak_rss_bytes=max(hook.peak_rss_bytes for hook in hooks),
            warnings=(*read.meta.warnings, *idle),
            command=job.command,
            machine=job.machine,
            recorded_at=job.recorded_at,
        ),
    )
    return replace(trace, meta=msgspec.structs.replace(trace.meta, overhead_pct=overhead_pct(trace)))


class _OneMachine(ProfileWriter):
    """The events of processes that were all started here."""

    def _clock(self) -> ClockReport:
        zero = (0.0,) * (len(self._workers) + len(self._servers))
        return ClockReport(offset_us=zero, residual_us=zero, method="all processes ran on one machine and share its clock")


def _checked_hook(folder: Path) -> MxnetHookFile:
    hook = read_mxnet_hook(folder / "hook.json")
    if not any(step[4] for step in hook.steps):
        raise InputError(f"{folder}/hook.json: only {len(hook.steps)} steps ran, none was profiled; run more or lower --warmup")
    if hook.kvstore is None or "dist" not in hook.kvstore.type:
        said = "none" if hook.kvstore is None or not hook.kvstore.type else hook.kvstore.type
        raise InputError(f"{folder}/hook.json: the Trainer's KVStore is '{said}'; use kvstore='dist_sync'")
    return hook


def _on_clock(steps: Steps, base_us: float, offset_us: Sequence[float]) -> Steps:
    shift = base_us + np.array(offset_us)[steps.rank]
    return replace(steps, start_us=steps.start_us - shift, end_us=steps.end_us - shift)


def _with_servers(steps: Steps, raw: Path, servers: Sequence[int], base_us: float) -> Steps:
    """The steps, and after them those of the servers: the first worker's, with the CPU time that the server used meanwhile."""
    parts = [steps]
    first = steps.select(steps.rank == 0)
    for position, server in enumerate(servers):
        samples = read_json(raw / f"server{server}" / "cpu.json", list[tuple[int, int]], "the launcher was killed; record again")
        if not samples:
            continue
        at_ns, cpu_ns = np.array(samples, dtype=np.float64).T
        upto_us = np.interp([*first.start_us, first.end_us[-1]], at_ns / 1e3 - base_us, cpu_ns / 1e3)
        rank = np.full(len(first), int(steps.rank.max()) + 1 + position)
        parts.append(replace(first, rank=rank, compute_cpu_us=np.diff(upto_us), comm_cpu_us=np.zeros(len(first))))
    return Steps(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in Steps.__dataclass_fields__})


def _in_steps(profile: Profile, hook: MxnetHookFile) -> Profile:
    """The profile with a mark at the beginning of each step, numbered as the hook did.

    The engine runs late and in its own order, so times of the script do not divide its operators. But a step's gradients are all
    sent before the first operator of the next one, for it needs a weight of theirs.
    """
    steps = [index for index, step in enumerate(hook.steps) if step[4]]
    comm = [op for op in profile.ops if COMM.search(op.name)]
    forward = [op for op in profile.ops if not COMM.search(op.name)]
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
        TensorInfo(name=tensor.name, node=f"key{own.key}", dtype=own.dtype, shape=own.shape, size_bytes=own.size_bytes)
        if (own := known.get(tensor.name)) is not None
        else tensor
        for tensor in tensors
    )
