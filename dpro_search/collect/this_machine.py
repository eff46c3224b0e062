"""Facts about this machine that recordings and tables keep, and how busy it was with other work while a job was recorded."""

from __future__ import annotations

import os
import platform
import resource
import time
from pathlib import Path

from dpro_search.collect.trace_meta import MachineLoad

_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 7)  # columns user, nice, system, steal; without interrupts, which the job's own messages cause
_MOST_SHARE = 0.1  # of the machine's cores, that other work may use


def processor() -> str:
    """Name of the processor's model."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor()) or "unknown processor"


def machine() -> str:
    """This machine in a line: processor, cores, kernel."""
    return f"{processor()}, {os.cpu_count()} cores, Linux {platform.release()}"


def boot_id() -> str:
    """Equal for all processes that share a kernel, and so a clock, as the hooks write it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class LoadMeter:
    """Measures from its creation on. What the job used is known when its processes have ended and were waited for."""

    def __init__(self) -> None:
        self._started_s, self._own_s, self._busy_s = time.monotonic(), _own_s(), _busy_s()

    def read(self) -> MachineLoad | None:
        """The load so far; None where the machine does not tell it."""
        busy_s = _busy_s()
        seconds = time.monotonic() - self._started_s
        if busy_s is None or self._busy_s is None or seconds <= 0:
            return None
        job, all_work = (_own_s() - self._own_s) / seconds, (busy_s - self._busy_s) / seconds
        return MachineLoad(cores=os.cpu_count() or 1, job_cores=job, other_cores=max(all_work - job, 0.0))


def load_warning(load: MachineLoad) -> str | None:
    """A sentence about a machine that was too busy to measure on; None: it was not."""
    if load.other_cores <= _MOST_SHARE * load.cores:
        return None
    return (
        f"other processes used {load.other_cores:.1f} of the machine's {load.cores} cores while the job was recorded, so its times "
        "may be too long: record it again on an idle machine"
    )


def _own_s() -> float:
    """CPU time of this process and of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def _busy_s() -> float | None:
    """CPU time of all processes since the machine started."""
    try:
        columns = [int(text) for text in _STAT.read_text().split("\n", 1)[0].split()[1:]]
        return sum(columns[i] for i in _BUSY) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
