"""`this_machine`: the host that this process runs on, read from Linux and, where there are NVIDIA GPUs, from nvidia-smi.

With GPUs, ranks are these; without, each core that this process may use is a device, as on the testbed.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import msgspec

from dpro_search.cluster import bundled
from dpro_search.cluster.cluster import Cluster, HostGroup
from dpro_search.cluster.device import Device, Peaks, Provenance
from dpro_search.cluster.host import Host, Nics
from dpro_search.cluster.link import Link
from dpro_search.errors import InputError

_SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# Operations a cycle in single precision: two units that multiply and add vectors of 512, 256 or 128 bits.
_FP32_PER_CYCLE = {"avx512f": 64, "avx2": 32}
_FEWEST_FP32_PER_CYCLE = 16
_LOOPBACK = Link(level="loopback", latency_us=20.0)
_LOOPBACK_SOURCE = (
    "loopback.latency",
    "estimated: half a round trip of 8 bytes by TCP; 19 to 21 us on another machine, of two cores",
)


def this_machine() -> Cluster:
    """One host: what is here.

    Raises
    ------
    InputError
        GPUs of several kinds are here: a host has devices of one kind.
    """
    gpus = _gpus()
    cores = len(os.sched_getaffinity(0))
    nics = _nics()
    seen = [("nic.rate", "measured: /sys/class/net")] if nics is not None else []
    if not gpus:
        source = Provenance(source="read from Linux", exceptions=(_LOOPBACK_SOURCE, *seen))
        host = Host(device=_core(cores), devices=cores, links=(_LOOPBACK,), nics=nics, cpu_cores=cores)
        return Cluster(name="this machine", groups=(HostGroup(count=1, host=host),), provenance=source)
    if len(set(gpus)) > 1:
        kinds = ", ".join(sorted({name for name, _ in gpus}))
        raise InputError(f"this-machine has GPUs that differ ({kinds}): describe those that a job uses in a cluster file")
    name, memory_bytes = gpus[0]
    device, links, known = _known_gpu(name, memory_bytes, len(gpus))
    source = Provenance(source="read from Linux and nvidia-smi", exceptions=tuple(sorted([known, *seen])))
    host = Host(device=device, devices=len(gpus), links=links, nics=nics, cpu_cores=cores)
    return Cluster(name="this machine", groups=(HostGroup(count=1, host=host),), provenance=source)


def _known_gpu(name: str, memory_bytes: int, count: int) -> tuple[Device, tuple[Link, ...], tuple[str, str]]:
    """The device that a driver's name means, its links, and where these are from: the usual machine, if it has as many devices."""
    unknown = (Link(level="pcie", latency_us=1.0),)
    no_links = ("pcie", "estimated: nothing is known of the links; their rate is not limited")
    bundled_name = bundled.aliases("device").get(bundled.plain(name))
    if bundled_name is None:
        source = Provenance(source="nvidia-smi; no bundled device has this name, so that its peaks are not known")
        return Device(name=name, vendor="NVIDIA", kind="gpu", memory_bytes=memory_bytes, provenance=source), unknown, no_links
    device = bundled.device(bundled_name)
    exceptions = {**dict(device.provenance.exceptions), "memory": "measured: memory.total of nvidia-smi"}
    source = Provenance(source=device.provenance.source, exceptions=tuple(sorted(exceptions.items())))
    device = msgspec.structs.replace(device, memory_bytes=memory_bytes, provenance=source)
    usual = bundled.usual_machine(bundled_name)
    if usual is None or bundled.machine(usual).groups[0].host.devices < count:
        return device, unknown, no_links
    host = bundled.machine(usual).groups[0].host.with_devices(count)
    links = tuple(msgspec.structs.replace(link, hosts=1) for link in host.links)
    return device, links or unknown, ("nvlink", f"derived: as in {usual}, the machine that these GPUs usually are part of")


def _gpus() -> list[tuple[str, int]]:
    """Name and memory in bytes of each GPU that nvidia-smi lists; none without it, or where it fails."""
    try:
        done = subprocess.run(_SMI, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    gpus = []
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        name, _, mebibytes = line.rpartition(",")
        if name.strip() and mebibytes.strip().isdigit():
            gpus.append((name.strip(), int(mebibytes) * 2**20))
    return gpus


def _core(cores: int) -> Device:
    """One core of this machine's CPU, with its part of the memory."""
    lines = dict(_pairs(Path("/proc/cpuinfo")))
    memory = dict(_pairs(Path("/proc/meminfo"))).get("MemTotal", "")
    kibibytes = memory.split()[0] if memory else ""
    source = Provenance(
        source="/proc/cpuinfo",
        exceptions=(("memory", "derived: MemTotal of /proc/meminfo over the cores that this process may use"),),
    )
    return Device(
        name=f"one core of {lines.get('model name', 'an unknown CPU')}",
        vendor=lines.get("vendor_id", "unknown"),
        kind="cpu",
        memory_bytes=int(kibibytes) * 1024 // cores if kibibytes.isdigit() else None,
        provenance=source,
    )


def core_of_this_machine(memory_bytes_per_s: float) -> Device:
    """One core with the specs that cost models need, as Linux tells them; the rate of its memory must have been measured."""
    core = _core(len(os.sched_getaffinity(0)))
    lines = dict(_pairs(Path("/proc/cpuinfo")))
    megahertz = lines.get("cpu MHz", "")
    clock_hz = float(megahertz) * 1e6 if re.fullmatch(r"\d+(\.\d+)?", megahertz) else None
    flags = lines.get("flags", "").split()
    per_cycle = next((count for flag, count in _FP32_PER_CYCLE.items() if flag in flags), _FEWEST_FP32_PER_CYCLE)
    caches = {
        (path / "level").read_text().strip(): path / "size" for path in sorted(_CACHES.glob("index*")) if (path / "size").exists()
    }
    size = caches["2"].read_text().strip() if "2" in caches else ""
    exceptions = {
        **dict(core.provenance.exceptions),
        "memory_rate": "measured: a copy in PyTorch, read and written, on one thread",
        "peak.fp32": f"derived: {per_cycle} operations a cycle (two FMA units) at the clock of /proc/cpuinfo",
        "l2_cache": "read from /sys/devices/system/cpu/cpu0/cache",
    }
    return msgspec.structs.replace(
        core,
        peak=Peaks(fp32=None if clock_hz is None else per_cycle * clock_hz),
        memory_bytes_per_s=memory_bytes_per_s,
        l2_cache_bytes=int(size[:-1]) * 1024 if re.fullmatch(r"\d+K", size) else None,
        cores=1,
        clock_hz=clock_hz,
        provenance=Provenance(source=core.provenance.source, exceptions=tuple(sorted(exceptions.items()))),
    )


def _pairs(path: Path) -> list[tuple[str, str]]:
    """``key : value`` lines of a file of the kernel, the first of each key last, so that it is the one a dict keeps."""
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    split = [line.partition(":") for line in lines if ":" in line]
    return [(key.strip(), value.strip()) for key, _, value in reversed(split) if value.strip()]


def _nics() -> Nics | None:
    """The fastest network cards that are up and say how fast they are; None without one."""
    rates_bps: list[float] = []
    for speed in sorted(Path("/sys/class/net").glob("*/speed")):
        try:
            if (speed.parent / "device").exists() and (speed.parent / "operstate").read_text().strip() == "up":
                rates_bps.append(float(speed.read_text()) * 1e6)
        except (OSError, ValueError):  # a card that is down cannot be asked
            continue
    known = [rate for rate in rates_bps if rate > 0]
    if not known:
        return None
    return Nics(count=1, link=Link(level="nic", rate_bps=max(known)))
