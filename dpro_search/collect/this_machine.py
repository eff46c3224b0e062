"""Facts about this machine that recordings and tables keep."""

from __future__ import annotations

import os
import platform
from pathlib import Path


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
