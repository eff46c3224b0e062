"""Hosts on one machine: network namespaces behind a bridge, with a bandwidth limit on every link, and CPU quotas.

Needs root, `ip` and `tc`. Names are unique per process, and `ShapedHosts` removes what it made when it ends: on exit, on an
exception, on SIGTERM and SIGHUP; after a SIGKILL the next start on this machine removes what the dead process left.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from dpro_search.collect.launch import cpu_quota
from dpro_search.collect.launch.cpu_quota import CpuQuotas
from dpro_search.collect.launch.host_limits import NO_LIMITS, CpusChange, HostChange, HostLimits, burst_bytes
from dpro_search.collect.launch.made_here import TAG_PATTERN, MadeHere, dead_tags, kill, own_tag
from dpro_search.collect.launch.while_running import changing
from dpro_search.errors import InputError, MissingCapabilityError

# Linux's own congestion control: another choice of the machine would make its recordings differ from those of others. As a property
# of the route, for a namespace may not make it its default on a machine that does not allow it to every process.
_CUBIC = ("congctl", "cubic")


class ShapedHosts(MadeHere):
    """N hosts ``h0 .. hN-1``, each with its own address on one bridge; a context manager.

    Parameters
    ----------
    count
        Number of hosts.
    rate_bps
        Limit of every link in each direction, bits a second; None: not shaped.
    limits
        CPU quotas, which need control groups as well, and what changes while the context lasts.
    """

    def __init__(self, count: int, rate_bps: float | None = None, limits: HostLimits = NO_LIMITS) -> None:
        if not 1 <= count <= 200:
            raise InputError(f"--hosts {count}: between 1 and 200")
        super().__init__()
        self.names = tuple(f"h{i}" for i in range(count))
        self._tag = own_tag()
        self._subnet = f"10.{77 + os.getpid() // 250 % 100}.{os.getpid() % 250}"
        self._rate_bps = rate_bps
        self._limits = limits
        self._quotas = CpuQuotas(count, limits.cpus) if limits.has_quotas else None
        self._hosts_file = Path(tempfile.gettempdir()) / f"{self._tag}.hosts"

    @property
    def bridge_address(self) -> str:
        """Address at which the hosts reach this process."""
        return f"{self._subnet}.254"

    @property
    def subnet(self) -> str:
        """The network of the bridge and all hosts, in CIDR form."""
        return f"{self._subnet}.0/24"

    def address(self, host: int) -> str:
        """Address of a host on the bridge."""
        return f"{self._subnet}.{host + 1}"

    def _make(self) -> None:
        _require_tools()
        remove_leftovers()
        if self._quotas is not None:
            self._made.enter_context(self._quotas)
        self._made.callback(self._remove)
        self._create()
        self._made.enter_context(changing(self._limits.changes, self._change))

    def _create(self) -> None:
        bridge = f"{self._tag}b"
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{self.bridge_address}/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for i in range(len(self.names)):
            space, outer = self._space(i), self._outer(i)
            _run("ip", "netns", "add", space)
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "link", "set", outer, "master", bridge, "up")
            _run("ip", "-n", space, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
            _run("ip", "-n", space, "link", "set", "eth0", "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            here = ("dev", "eth0", "proto", "kernel", "scope", "link", "src", self.address(i))
            _run("ip", "-n", space, "route", "replace", self.subnet, *here, *_CUBIC)
        lines = ["127.0.0.1 localhost", *(f"{self.address(i)} {name}" for i, name in enumerate(self.names))]
        self._hosts_file.write_text("\n".join(lines) + "\n")
        self.set_rate(self._rate_bps)

    def set_rate(self, rate_bps: float | None, host: int | None = None) -> None:
        """Change the limit of every link now, or of one host's, in each direction; None lifts it."""
        if host is None:
            self._rate_bps = rate_bps
        for i in range(len(self.names)) if host is None else (host,):
            for prefix in (("tc",), ("tc", "-n", self._space(i))):
                device = self._outer(i) if len(prefix) == 1 else "eth0"
                if rate_bps is None:
                    _run(*prefix, "qdisc", "del", "dev", device, "root", check=False)
                    continue
                burst = burst_bytes(rate_bps)
                limit = 4 * 1024 * 1024 + burst
                shape = ["tbf", "rate", f"{int(rate_bps)}bit", "burst", str(burst), "limit", str(limit)]
                _run(*prefix, "qdisc", "replace", "dev", device, "root", *shape)

    def _change(self, change: HostChange) -> None:
        if isinstance(change, CpusChange):
            assert self._quotas is not None
            self._quotas.set_cpus(change.host, change.cpus)
        else:
            self.set_rate(change.rate_bps, change.host)

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """`command` wrapped so that it runs on a host, with the host's name and a hosts file of all of them."""
        script = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'
        wrapped = ["unshare", "--uts", "--mount", "sh", "-c", script, "sh", self.names[host], str(self._hosts_file)]
        words = ["ip", "netns", "exec", self._space(host), *wrapped, *command]
        return words if self._quotas is None else self._quotas.command(host, words)

    def sent_bytes(self, host: int) -> int:
        """Bytes that the host has put on its link so far."""
        output = _run("ip", "netns", "exec", self._space(host), "cat", "/sys/class/net/eth0/statistics/tx_bytes")
        return int(output)

    def _remove(self) -> None:
        _remove(self._tag)
        self._hosts_file.unlink(missing_ok=True)

    def _space(self, host: int) -> str:
        return f"{self._tag}h{host}"

    def _outer(self, host: int) -> str:
        return f"{self._tag}v{host}"


@contextlib.contextmanager
def shaped_hosts(count: int, rate_bps: float | None, shaped: bool, limits: HostLimits) -> Iterator[ShapedHosts | None]:
    """Hosts behind limited links, or None where the job is to run on this machine as it is; `InputError` for `limits` there."""
    if shaped:
        with ShapedHosts(count, rate_bps, limits) as hosts:
            yield hosts
        return
    if limits:
        raise InputError("--host-cpus and --host-change are of hosts with links of their own: record the job with --rate as well")
    yield None


def remove_leftovers() -> list[str]:
    """Remove hosts whose creator was killed; returns their tags."""
    listed = _run("ip", "netns", "list") + _run("ip", "-o", "link")
    dead = dead_tags(match[0] for match in re.finditer(rf"\b{TAG_PATTERN}[hbv]", listed))
    for tag in dead:
        _remove(tag)
        (Path(tempfile.gettempdir()) / f"{tag}.hosts").unlink(missing_ok=True)
    return sorted({*dead, *cpu_quota.remove_leftovers()})


def _remove(tag: str) -> None:
    for line in _run("ip", "netns", "list", check=False).splitlines():
        space = line.split()[0] if line.split() else ""
        if re.fullmatch(rf"{tag}h\d+", space):
            kill(_run("ip", "netns", "pids", space, check=False).split())
            _run("ip", "netns", "del", space, check=False)
    for device in re.findall(rf"^\d+: ({tag}[bv]\d*)", _run("ip", "-o", "link", check=False), re.MULTILINE):
        _run("ip", "link", "del", device, check=False)


def _require_tools() -> None:
    missing = [tool for tool in ("ip", "tc", "unshare") if not shutil.which(tool)]
    if missing:
        raise MissingCapabilityError(f"shaped hosts need {', '.join(missing)}: install iproute2 and util-linux")
    if os.geteuid() != 0:
        raise MissingCapabilityError("shaped hosts need root (network namespaces); run as root or leave out --rate")


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise MissingCapabilityError(f"'{' '.join(command)}' failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
