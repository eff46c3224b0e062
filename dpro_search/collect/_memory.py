"""How much memory a process may still take, so that a file that would need more is refused before it is unpacked."""

from __future__ import annotations

import ctypes
import re
import resource
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_UNKNOWN = 1 << 62


def available_bytes() -> int:
    """Memory that the machine, the container and `ulimit -v` leave; a very large number if none of them is known."""
    return max(min(_of_machine(), _of_container(), _of_process()), 0)


def give_back() -> None:
    """Give freed memory back to the system: glibc keeps what many small arrays took, and takes more for large ones."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # another C library
        trim(0)


def _of_machine() -> int:
    match = re.search(r"MemAvailable:\s+(\d+) kB", _text(Path("/proc/meminfo")))
    return int(match[1]) * 1024 if match else _UNKNOWN


def _of_container() -> int:
    most, used = _text(_CGROUP / "memory.max").strip(), _text(_CGROUP / "memory.current").strip()
    return int(most) - int(used) if most.isdecimal() and used.isdecimal() else _UNKNOWN


def _of_process() -> int:
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = re.search(r"VmSize:\s+(\d+) kB", _text(Path("/proc/self/status")))
    return most - int(used[1]) * 1024 if most != resource.RLIM_INFINITY and used else _UNKNOWN


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
