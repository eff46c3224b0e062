"""What a run of workers that only exchange arrays tells: the window of its steps, and core time in it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect.trace import Floats


class Told(msgspec.Struct):
    """A worker's last line: when its counted steps began and ended, and its core time of a step."""

    begin_ns: int
    end_ns: int
    cpu_us: float


def told_by(worker: Path) -> Told:
    """What a worker of this folder printed; libraries may have printed more behind it."""
    lines = (worker / "log").read_text().strip().splitlines()
    return msgspec.json.decode(next(line for line in reversed(lines) if line.startswith("{")), type=Told)


def server_cpu_ns(server: Path) -> tuple[Floats, Floats]:
    """When a server's core time was read, and what it was, [readings] each."""
    at_ns, cpu_ns = np.array(msgspec.json.decode((server / "cpu.json").read_bytes()), float).T
    return at_ns, cpu_ns
