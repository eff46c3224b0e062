"""A TCP port for the processes of one job to meet at: `free_port`."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 100


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
            found: int = probe.getsockname()[1]
            return found
    raise OSError("no TCP port of 127.0.0.1 is free")
