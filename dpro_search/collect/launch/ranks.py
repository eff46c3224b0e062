"""Start a job's ranks, without ssh, horovodrun or torchrun, on this machine or on shaped hosts; wait; leave nothing behind.

`run_ranks` is for jobs of any framework. What a framework's ranks need beside it is in ``horovod_gloo.py``, ``torch_ranks.py``,
``parameter_servers.py`` and ``byteps.py``; ``mpi.py`` starts ranks by mpirun.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dpro_search._text import text_without_secrets
from dpro_search.collect._files import open_private
from dpro_search.collect.launch.host_limits import NO_LIMITS, HostLimits
from dpro_search.errors import InputError, JobError, MissingCapabilityError
from dpro_search.runtime import HOOKS

_TAIL_LINES = 3
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 100


class Hosts(Protocol):
    """Hosts on this machine: with links of their own (`netns.ShapedHosts`), or with quotas only (`cpu_quota.CpuQuotas`)."""

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """`command` wrapped so that it runs on a host; in one and the same process."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One job to start."""

    command: tuple[str, ...]  # The training command; its first word decides which Python runs the rendezvous server.
    ranks: int = 2  # Number of ranks, on hosts of their own or all on this machine.
    ranks_per_host: int = 1  # Ranks side by side on each host; more than one needs hosts, and PyTorch or Open MPI.
    cores: tuple[int, ...] = ()  # Core of each rank; empty: not pinned.
    env: Mapping[str, str] = field(default_factory=dict)  # Variables on top of this process's environment, equal for all ranks.
    timeout_s: float = 3600  # How long it may run; then it is ended.
    limits: HostLimits = NO_LIMITS  # Of its hosts, beside the rate of their links.
    ends_with: tuple[Path, ...] = ()  # Files that the job writes: when all exist, it is ended at once. Empty: it ends by itself.

    def __post_init__(self) -> None:
        if not self.command:
            raise InputError("no command given: write it after '--', like '-- python train.py'")
        if self.ranks < 1:
            raise InputError(f"--hosts {self.ranks}: at least 1")
        if self.ranks_per_host < 1 or self.ranks % self.ranks_per_host:
            raise InputError(f"{self.ranks} ranks cannot be {self.ranks_per_host} on each host")
        if not self.timeout_s > 0:
            raise InputError(f"--timeout {self.timeout_s:g}: more than 0 seconds")
        self.limits.check_hosts(self.hosts)

    @property
    def hosts(self) -> int:
        """Number of hosts that the ranks need, where they have some of their own."""
        return self.ranks // self.ranks_per_host

    @property
    def thread_env(self) -> dict[str, str]:
        """One compute thread for ranks that have one core each, unless the job sets how many."""
        return {"OMP_NUM_THREADS": "1"} if self.cores and "OMP_NUM_THREADS" not in self.env else {}

    @property
    def interpreter(self) -> str:
        """The Python that runs the job: the command's first word if it is one, else `python3` on the path."""
        first = self.command[0]
        name = first if Path(first).name.startswith("python") else "python3"
        program = shutil.which(name)
        if program is None:
            raise InputError(f"'{name}': no such interpreter; name the one of the framework's environment")
        return program


def this_machines_cores() -> tuple[int, ...]:
    """Those that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def default_cores(ranks: int, ranks_per_host: int = 1, limits: HostLimits = NO_LIMITS) -> tuple[int, ...]:
    """Spread the ranks over the cores that this process may use, one core each; hosts have their own, as far as they go.

    Hosts with quotas that share cores share them so that each core has about as much to give; those of more than a core for a rank
    are not pinned.
    """
    available = this_machines_cores()
    if any(cpus > ranks_per_host for cpus in limits.cpus):
        return ()
    if ranks_per_host == 1 and ranks > len(available) and limits.cpus:
        return _balanced(limits.cpus, available)
    hosts = ranks // ranks_per_host
    each = min(max(len(available) // hosts, 1), ranks_per_host)
    of_host = [[available[(host * each + i) % len(available)] for i in range(each)] for host in range(hosts)]
    return tuple(of_host[rank // ranks_per_host][rank % ranks_per_host % each] for rank in range(ranks))


def _balanced(cpus: Sequence[float], available: Sequence[int]) -> tuple[int, ...]:
    """Core of each host: the largest quotas first, each to the core that has given the least."""
    given = dict.fromkeys(available, 0.0)
    core_of: dict[int, int] = {}
    for host in sorted(range(len(cpus)), key=lambda host: -cpus[host]):
        core_of[host] = min(available, key=lambda core: given[core])
        given[core_of[host]] += cpus[host]
    return tuple(core_of[host] for host in range(len(cpus)))


def environment_python(environment: str) -> Path:
    """The interpreter of an environment that ``scripts/make_env.sh`` builds, whether it was built or not."""
    root = Path(os.environ.get("DPRO_SEARCH_ENVS") or Path.home() / ".cache" / "dpro-search" / "envs")
    return root / environment / "bin" / "python"


def require_framework(interpreter: str, modules: Sequence[str], environment: str = "tensorflow") -> None:
    """Raise `MissingCapabilityError` unless the interpreter imports the modules, which make_env.sh's `environment` has, or pip."""
    code = "import importlib.util as u, sys; sys.exit(next((m for m in sys.argv[1:] if u.find_spec(m) is None), 0))"
    done = subprocess.run([interpreter, "-c", code, *modules], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        missing = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "nothing"
        remedy = f"build an environment with 'scripts/make_env.sh {environment}', use its python"
        if not environment:
            remedy = f"install it there: {interpreter} -m pip install {' '.join(modules)}"
        raise MissingCapabilityError(f"{interpreter}: cannot import {missing}; {remedy}")


def run_ranks(
    spec: JobSpec,
    out: Path,
    rank_env: Sequence[Mapping[str, str]],
    *,
    hosts: Hosts | None = None,
    hook: Mapping[str, str] | None = None,
    several_on_a_host: bool = False,
    on_poll: Callable[[], None] = lambda: None,
) -> None:
    """Run the ranks of a job of any framework to their end; output of rank r goes to ``out/rank{r}/log``.

    Parameters
    ----------
    rank_env
        What each rank's environment has of its own.
    hook
        Settings of the recorder (``MODE``, ``WARMUP``, ...); None: the job runs without it.
    several_on_a_host
        Whether the framework starts so where `spec` has several ranks on each host.
    on_poll
        Called several times a second while the ranks run.

    Raises
    ------
    JobError
        A rank failed or the job took longer than its spec allows; the last lines of its output are in the message.
    """
    if spec.ranks_per_host > 1 and not several_on_a_host:
        raise InputError("several ranks on a host: only jobs on Open MPI are started so (Horovod with HOROVOD_CONTROLLER=mpi)")
    require_tools()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(spec.ranks):
            folder = out / f"rank{rank}"
            env = {**os.environ, **spec.env, **rank_env[rank], "DPRO_SEARCH_HOOK_RANK": str(rank)}
            if hook is not None:
                env |= hook_env(hook, out, env)
            core = spec.cores[rank] if spec.cores else -1
            processes.append(
                start_process(spec.command, folder, env, core=core, on=(hosts, rank // spec.ranks_per_host) if hosts else None)
            )
        wait_for(
            processes,
            out,
            spec,
            lambda rank, code: JobError(f"rank {rank} ended with code {code}: {log_tail(out / f'rank{rank}' / 'log')}"),
            on_poll,
        )
    finally:
        for process in processes:
            end_process(process)


def start_process(
    command: Sequence[str],
    folder: Path,
    env: Mapping[str, str],
    *,
    core: int = -1,
    on: tuple[Hosts, int] | None = None,
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process of a job, whose output goes to ``log`` of a folder that is made if it is missing.

    It is killed when this process ends, whatever ends it; everything before the command is an exec of one and the same process.

    Parameters
    ----------
    core
        The core that it is pinned to; -1: not pinned.
    on
        The hosts and the number of the one that it runs on; None: on this machine as it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = ["taskset", "-c", str(core), *command] if core >= 0 else list(command)
    if on is not None:
        hosts, number = on
        words = hosts.command(number, words)
    words = ["setpriv", "--pdeathsig", "KILL", *words]
    with open_private(folder / "log") as log:
        return subprocess.Popen(words, env=env, cwd=cwd, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def require_tools() -> None:
    """Raise `MissingCapabilityError` unless what starts and pins ranks is installed."""
    missing = [tool for tool in ("setpriv", "taskset") if not shutil.which(tool)]
    if missing:
        raise MissingCapabilityError(f"starting and pinning processes needs {', '.join(missing)}: install util-linux")


def hook_env(hook: Mapping[str, str], out: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Variables that bring the recorder with its settings into the ranks of a job whose environment is `env`.

    They are equal for all ranks: the recorder finds its rank's number, and so its folder ``out/rank{r}``, on its own.
    """
    settings = {**hook, "OUT": str(out.resolve() / "rank{rank}")}
    path = os.pathsep.join(p for p in (str(HOOKS), env.get("PYTHONPATH", "")) if p)
    return {**{f"DPRO_SEARCH_HOOK_{key}": value for key, value in settings.items()}, "PYTHONPATH": path}


def wait_for(
    processes: Sequence[subprocess.Popen[bytes]],
    out: Path,
    spec: JobSpec,
    failure: Callable[[int, int], JobError],
    on_poll: Callable[[], None] = lambda: None,
) -> None:
    """Wait until all processes have ended well, or the files exist with which the job is to end.

    Raises `failure(position, code)` of the first process that ended otherwise, and `JobError` when the time of the job is up.
    """
    deadline = time.monotonic() + spec.timeout_s
    while True:
        codes = [process.poll() for process in processes]
        for position, code in enumerate(codes):
            if code not in (None, 0):
                raise failure(position, code)
        if all(code == 0 for code in codes) or (spec.ends_with and all(path.exists() for path in spec.ends_with)):
            return
        if time.monotonic() > deadline:
            last = log_tail(out / "rank0" / "log")
            raise JobError(
                f"the job took longer than {spec.timeout_s:.0f} s (--timeout) and was ended; last output of rank 0: {last}"
            )
        on_poll()
        time.sleep(0.1)


def log_tail(log: Path) -> str:
    """The last lines of a log, as one, without the values of keys, tokens and passwords."""
    text = text_without_secrets(log.read_text(errors="replace")) if log.is_file() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-_TAIL_LINES:])[-400:] or "no output"


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a rank (or the process that started them) and what it started: its whole process group."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """A port of this machine that no process listens on, outside of those that the system hands out on its own.

    Between this call and the moment when a process of the job listens there, seconds pass, in which its other processes ask the
    system for ports of their own: one of these must not be the meeting point (a ps-lite server there ends with ``is_scheduler_``).
    """
    first, last = (int(word) for word in _RANGE.read_text().split())
    candidates = [port for port in range(1024, 65536) if not first <= port <= last]
    for port in [*random.sample(candidates, min(_TRIES, len(candidates))), 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            port_number: int = probe.getsockname()[1]
            return port_number
    raise OSError("no TCP port of 127.0.0.1 is free")
