"""Start the scheduler and the servers of a job with parameter servers (ps-lite) beside its workers: `run_with_servers`.

For every system on ps-lite: MXNet's KVStore and BytePS (`byteps_servers`) differ in what a server runs only. Where hosts are
shaped, each server has a host of its own, after those of the workers, or is on a worker's (DPRO_SEARCH_SERVER_HOSTS); the scheduler
is on the first server's host. Without hosts, all are on this machine.

A folder of the job holds one folder for each process (``rank{r}``, ``server{s}``, ``scheduler``), in which scheduler and servers
run: files that these write under plain names are found there. Each has a ``log``, and servers have ``cpu.json``: [epoch ns, CPU ns
so far] several times a second. A server that has ended leaves no more of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from dpro_search.collect._files import write_file
from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.ranks import JobSpec, end_process, free_port, log_tail, run_ranks, start_process
from dpro_search.errors import InputError, JobError, MissingCapabilityError

SERVER_HOSTS = "DPRO_SEARCH_SERVER_HOSTS"
_ON_WORKERS = {"own": False, "workers": True}
_PORT = 9091
_END_S = 10.0  # servers end by themselves once all workers have, unless none of them used the store
_MOUNT = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
_CODE = f"import os, sys; os.execvp('unshare', ['unshare', '--mount', 'sh', '-c', {_MOUNT!r}, 'sh', *sys.argv[1:]])"


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """The servers of a job."""

    count: int  # How many.
    on_workers: bool = False  # Whether they run on the workers' hosts, round-robin, instead of on hosts of their own.
    code: str = "import mxnet"  # Python that a server and the scheduler run; it must serve until the job ends.
    env: tuple[tuple[str, str], ...] = ()  # Variables of scheduler and servers only, on top of the job's.
    own_shm: bool = False  # Whether every worker needs a /dev/shm of its own.
    # Variables of one worker, given its rank, on top of those that ps-lite needs (DMLC_*).
    worker_env: Callable[[int], Mapping[str, str]] = lambda rank: {}

    def hosts(self, workers: int) -> tuple[int, ...]:
        """Number of each server's host; workers have the first ones."""
        return tuple(server % workers if self.on_workers else workers + server for server in range(self.count))


def servers_of(env: Mapping[str, str], workers: int) -> int:
    """Number of servers under an environment: DMLC_NUM_SERVER, or as many as workers. Raises `InputError` if it is not a number."""
    text = env.get("DMLC_NUM_SERVER", str(workers))
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise InputError(f"DMLC_NUM_SERVER={text}: must be a number >= 1")
    return int(text)


def on_workers_of(env: Mapping[str, str]) -> bool:
    """Whether DPRO_SEARCH_SERVER_HOSTS puts servers on the workers' hosts; raises `InputError` for an unknown place."""
    text = env.get(SERVER_HOSTS, "own")
    if text not in _ON_WORKERS:
        raise InputError(f"{SERVER_HOSTS}={text}: known are {', '.join(_ON_WORKERS)}")
    return _ON_WORKERS[text]


def server_hosts(spec: JobSpec, servers: ServerSpec, shaped: bool) -> tuple[str, ...]:
    """Name of each server's host."""
    return tuple(f"h{host}" if shaped else socket.gethostname() for host in servers.hosts(spec.ranks))


def hosts_needed(spec: JobSpec, servers: ServerSpec) -> int:
    """How many hosts workers and servers have together."""
    return max(spec.ranks, *(host + 1 for host in servers.hosts(spec.ranks)))


def server_cores(spec: JobSpec, servers: int) -> tuple[int, ...]:
    """Core of each server, -1 where nothing is pinned: those of the workers, round-robin."""
    return tuple(spec.cores[server % len(spec.cores)] if spec.cores else -1 for server in range(servers))


def run_with_servers(
    spec: JobSpec,
    out: Path,
    servers: ServerSpec,
    *,
    hosts: ShapedHosts | None = None,
    hook: Mapping[str, str] | None = None,
) -> None:
    """Run workers, scheduler and servers to their end.

    Parameters
    ----------
    spec
        The workers.
    hosts
        As many as `hosts_needed` returns; None: all run on this machine as it is.
    hook
        Settings of the recorder in the workers; None: they run without it.

    Raises
    ------
    JobError
        A process failed (where a server did, it is named, not the workers that miss it), or the job took longer than its spec
        allows.
    MissingCapabilityError
        Workers cannot have a /dev/shm of their own here, and need it.
    """
    if servers.own_shm:
        spec = with_own_shm(spec)
    server_host = servers.hosts(spec.ranks)
    scheduler_host = server_host[0]
    root = {
        "DMLC_PS_ROOT_URI": hosts.address(scheduler_host) if hosts else "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(_PORT if hosts else free_port()),
        "DMLC_NUM_SERVER": str(servers.count),
        "DMLC_NUM_WORKER": str(spec.ranks),
        **spec.thread_env,
    }
    cores = server_cores(spec, servers.count)
    parts = [("scheduler", scheduler_host, -1)]
    parts += [(f"server{server}", server_host[server], cores[server]) for server in range(servers.count)]
    workers = [{**root, **_place("worker", rank, hosts), **servers.worker_env(rank)} for rank in range(spec.ranks)]
    with _beside(spec, servers, out, parts, root, hosts) as check:
        try:
            run_ranks(spec, out, workers, hosts=hosts, hook=hook, on_poll=check)
        except JobError:
            check()
            raise


def _place(role: str, host: int, hosts: ShapedHosts | None) -> dict[str, str]:
    address, interface = (hosts.address(host), "eth0") if hosts else ("127.0.0.1", "lo")
    return {"DMLC_ROLE": role, "DMLC_NODE_HOST": address, "DMLC_INTERFACE": interface}


@contextlib.contextmanager
def _beside(
    spec: JobSpec,
    servers: ServerSpec,
    out: Path,
    parts: Sequence[tuple[str, int, int]],
    root: Mapping[str, str],
    hosts: ShapedHosts | None,
) -> Iterator[Callable[[], None]]:
    """Scheduler and servers (name, host, core), for as long as the block; gives a check that raises `JobError` if one failed."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    used: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def check() -> None:
        for name, process in processes.items():
            if process.poll() not in (None, 0):
                log = out / name / "log"
                raise JobError(f"{name} ended with code {process.returncode}: {log_tail(log)}; see {log}")
            used_ns = _cpu_ns(process.pid)
            if not used[name] or used_ns >= used[name][-1][1]:  # less: it is ending, and threads are gone
                used[name].append((time.time_ns(), used_ns))

    try:
        for name, host, core in parts:
            env = {**os.environ, **spec.env, **dict(servers.env), **root, **_place(name.rstrip("0123456789"), host, hosts)}
            command, on = (spec.interpreter, "-c", servers.code), (hosts, host) if hosts else None
            processes[name] = start_process(command, out / name, env, core=core, on=on, cwd=out / name)
        yield check
        for name, samples in used.items():
            write_file(out / name / "cpu.json", msgspec.json.encode(samples))
        deadline = time.monotonic() + _END_S
        for process in processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
    finally:
        for process in processes.values():
            end_process(process)


def _cpu_ns(pid: int) -> int:
    """CPU time that the threads of a process have used; those that ended do not count."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(path.read_text().split()[0])
    return total


def with_own_shm(spec: JobSpec) -> JobSpec:
    """The job whose ranks have a /dev/shm of their own each; raises what `require_own_shm` does."""
    require_own_shm()
    return replace(spec, command=(spec.interpreter, "-c", _CODE, *spec.command))


def require_own_shm() -> None:
    """Raise `MissingCapabilityError` unless a rank can have a /dev/shm of its own."""
    if shutil.which("unshare") is None:
        raise MissingCapabilityError("a worker's own /dev/shm needs unshare: install util-linux")
    if os.geteuid() != 0:
        raise MissingCapabilityError("a worker's own /dev/shm needs root: run as root")


def byteps_servers(
    count: int,
    on_workers: bool = False,
    env: tuple[tuple[str, str], ...] = (),
    worker_env: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> ServerSpec:
    """Servers of BytePS; parameters are attributes of `ServerSpec`.

    BytePS names its shared memory by tensor only: workers on one machine would share their gradients, so that each gets a /dev/shm
    of its own, which needs root.
    """
    return ServerSpec(
        count=count,
        on_workers=on_workers,
        code="import byteps.server",
        env=env,
        own_shm=True,
        worker_env=lambda rank: {**_one_device(rank), **worker_env(rank)},
    )


def _one_device(rank: int) -> dict[str, str]:
    """Variables that BytePS requires of a worker with one device. Its sockets are in its own /dev/shm."""
    return {
        "DMLC_WORKER_ID": str(rank),
        "BYTEPS_LOCAL_RANK": "0",
        "BYTEPS_LOCAL_SIZE": "1",
        "BYTEPS_SOCKET_PATH": "/dev/shm",
    }
