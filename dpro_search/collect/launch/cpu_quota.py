"""CPU quotas of hosts on one machine: a control group of Linux for each host, of version 1 or 2.

Needs root. Groups are named and removed like the namespaces of `netns`: when `CpuQuotas` ends; after a SIGKILL at the next start.
A quota holds for all processes of a host together, in periods of 10 ms, longer for small quotas
(https://docs.kernel.org/scheduler/sched-bwc.html).
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpro_search.collect.launch.host_limits import CpusChange, HostChange, HostLimits
from dpro_search.collect.launch.made_here import TAG_PATTERN, MadeHere, dead_tags, kill, own_tag
from dpro_search.collect.launch.while_running import changing
from dpro_search.errors import InputError, MissingCapabilityError

_PERIOD_US = 10_000  # short beside a training step, so that a step of a quarter of a core takes four times as long each time
_LEAST_QUOTA_US = 1_000  # of the kernel
_END_S = 5.0  # killed processes leave their group within


@dataclass(frozen=True, kw_only=True)
class Controller:
    """Location of the kernel's CPU controller.

    Attributes
    ----------
    folder
        The group that holds those of the hosts.
    unified
        Whether it is of version 2.
    """

    folder: Path
    unified: bool

    @staticmethod
    def of(mounts: str) -> Controller | None:
        """From the text of ``/proc/self/mounts``; None: neither version has the CPU controller."""
        fields = [line.split() for line in mounts.splitlines()]
        for _, folder, kind, options, *_ in fields:
            if kind == "cgroup" and "cpu" in options.split(","):
                return Controller(folder=Path(folder), unified=False)
        for _, folder, kind, *_ in fields:
            known = Path(folder) / "cgroup.controllers"
            if kind == "cgroup2" and known.is_file() and "cpu" in known.read_text().split():
                return Controller(folder=Path(folder), unified=True)
        return None

    def make(self, name: str) -> Path:
        """A new group."""
        delegated = self.folder / "cgroup.subtree_control"
        if self.unified and "cpu" not in delegated.read_text().split():
            delegated.write_text("+cpu")
        group = self.folder / name
        group.mkdir()
        return group

    def limit(self, group: Path, cpus: float) -> None:
        """Let a group have the time of so many cores from now on."""
        period_us = max(_PERIOD_US, round(_LEAST_QUOTA_US / cpus))
        quota_us = max(round(cpus * period_us), _LEAST_QUOTA_US)
        if self.unified:
            (group / "cpu.max").write_text(f"{quota_us} {period_us}")
            return
        (group / "cpu.cfs_quota_us").write_text("-1")  # so that no step between two settings is refused
        (group / "cpu.cfs_period_us").write_text(str(period_us))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))


class CpuQuotas(MadeHere):
    """N hosts with quotas on this machine; a context manager.

    Parameters
    ----------
    count
        Number of hosts.
    cpus
        Quotas of the first ones, in cores; the others have none.
    """

    def __init__(self, count: int, cpus: Sequence[float]) -> None:
        super().__init__()
        self._count, self._cpus = count, tuple(cpus)
        self._groups: list[Path] = []
        self._controller: Controller

    def _make(self) -> None:
        self._controller = _controller()
        remove_leftovers()
        try:
            for host in range(self._count):
                self._groups.append(self._controller.make(f"{own_tag()}h{host}"))
                self._made.callback(_remove, self._groups[-1])
            for host, cpus in enumerate(self._cpus):
                self.set_cpus(host, cpus)
        except OSError as error:
            raise MissingCapabilityError(
                f"{error.filename or self._controller.folder}: CPU quotas of hosts cannot be set here ({error.strerror}); "
                "run as root outside of containers that own no control groups, or leave out --host-cpus"
            ) from error

    def set_cpus(self, host: int, cpus: float) -> None:
        """Change the quota of a host now."""
        self._controller.limit(self._groups[host], cpus)

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """`command` wrapped so that it runs under a host's quota; in one and the same process."""
        script = 'echo $$ >"$1" && shift && exec "$@"'
        return ["sh", "-c", script, "sh", str(self._groups[host] / "cgroup.procs"), *command]

    def put(self, host: int, pid: int) -> None:
        """Let a process that runs already, with what it starts from now on, be one of a host."""
        (self._groups[host] / "cgroup.procs").write_text(str(pid))


@contextlib.contextmanager
def hosts_with_quotas(count: int, limits: HostLimits) -> Iterator[CpuQuotas | None]:
    """Hosts with quotas and this machine's network, or None without limits; raises `InputError` for one of a link."""
    if not limits:
        yield None
        return
    changes = [change for change in limits.changes if isinstance(change, CpusChange)]
    if len(changes) < len(limits.changes):
        raise InputError("--host-change: workers of this job have no links of their own, only cpus can change: 30s:h2.cpus=0.25")
    with CpuQuotas(count, limits.cpus) as hosts:

        def change_quota(change: HostChange) -> None:
            assert isinstance(change, CpusChange)
            hosts.set_cpus(change.host, change.cpus)

        with changing(changes, change_quota):
            yield hosts


def remove_leftovers() -> list[str]:
    """Remove groups whose maker was killed; returns their tags."""
    controller = Controller.of(_mounts())
    groups = (
        []
        if controller is None
        else [path for path in controller.folder.iterdir() if re.fullmatch(rf"{TAG_PATTERN}h\d+", path.name)]
    )
    dead = dead_tags(group.name for group in groups)
    for group in groups:
        if group.name.rpartition("h")[0] in dead:
            _remove(group)
    return dead


def _remove(group: Path) -> None:
    """Remove a group once it is empty, which killed processes make it within moments."""
    deadline = time.monotonic() + _END_S
    while group.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            kill((group / "cgroup.procs").read_text().split())
            group.rmdir()
            return
        time.sleep(0.02)


def _controller() -> Controller:
    if os.geteuid() != 0:
        raise MissingCapabilityError("CPU quotas of hosts need root (control groups); run as root or leave out --host-cpus")
    controller = Controller.of(_mounts())
    if controller is None:
        raise MissingCapabilityError(
            "CPU quotas of hosts need control groups of Linux with the CPU controller, and none are here; leave out --host-cpus"
        )
    return controller


def _mounts() -> str:
    path = Path("/proc/self/mounts")
    return path.read_text() if path.is_file() else ""
