"""Draws and times programs of all tasks in chunks, each a file: what was interrupted goes on (needs the environment `tvm`).

A round draws `PER_CHUNK` programs of every task, in an order that is the same everywhere, so that any prefix holds all models. One
chunk in `REPEATED` is drawn and timed a second time in the next round, which shows how far times repeat.
"""

from __future__ import annotations

import json
import os
import platform
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from experiments.tensor_programs.timing import fastest_us  # First: it sets the number of threads.
from experiments.tensor_programs.workloads import Task, tasks

ISAS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
PER_CHUNK = 4
REPEATED = 12
TRIES = 2  # Of a chunk that ends the process.
LONGEST_S = 240  # A compiler that takes longer never ends: the process does, and the next one goes on.


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some programs of a task."""

    task: Task
    round: int
    repeat: bool

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.round:03d}-{self.task.name}{'-repeat' if self.repeat else ''}"

    @property
    def seed(self) -> int:
        """Of its schedules; the same for a repeat."""
        return 1 + self.round


def chunks(programs: int) -> Iterator[Chunk]:
    """Until `programs` were drawn, repeats not counted."""
    every = tasks()
    random.Random(0).shuffle(every)
    drawn = 0
    for turn in range(programs):
        for place, task in enumerate(every):
            if drawn >= programs:
                return
            yield Chunk(task=task, round=turn, repeat=False)
            drawn += PER_CHUNK
            if turn and (place + turn) % REPEATED == 0:
                yield Chunk(task=task, round=turn - 1, repeat=True)


def collect(out: Path, programs: int, pause_while: Path | None, share: tuple[int, int]) -> Iterator[str]:
    """Writes the chunks that are missing, and says so after each.

    share: which of how many processes this one is; each takes every so many-th chunk.
    """
    out.mkdir(parents=True, exist_ok=True)
    machine = device()
    for place, chunk in enumerate(chunks(programs)):
        path, tries = out / f"{chunk.name}.npz", out / f"{chunk.name}.tries"
        tried = tries.read_text().splitlines() if tries.is_file() else []
        if place % share[1] != share[0] or path.is_file() or len(tried) >= TRIES:
            continue
        while pause_while is not None and pause_while.exists():
            time.sleep(5)
        tries.write_text("\n".join([*tried, "the process ended while it ran this chunk"]))  # Stays where a program crashes it.
        signal.alarm(LONGEST_S)
        try:
            rows = measured(chunk)
        except KeyboardInterrupt:
            tries.write_text("\n".join(tried))
            raise
        except Exception as error:  # Any failure of a compiler: the chunk is left out, and what happened is kept.
            tries.write_text("\n".join([*tried, repr(error).replace("\n", " ")]))
            yield f"{chunk.name}: failed: {error!r}"
            continue
        finally:
            signal.alarm(0)
        unfinished = out / f".{chunk.name}.unfinished.npz"
        np.savez_compressed(unfinished, **rows, machine=json.dumps(machine | {"load": os.getloadavg()[0], "time": time.time()}))
        unfinished.rename(path)
        tries.unlink()
        yield f"{chunk.name}: {len(rows['us'])} programs"


def measured(chunk: Chunk) -> dict[str, Any]:
    """Columns of a chunk."""
    import tvm
    import tvm_ffi

    from experiments.tensor_programs import programs

    dims = programs.tensors(chunk.task)
    values = programs.arguments(dims, chunk.seed)
    found = programs.random_programs(chunk.task, PER_CHUNK, chunk.seed)
    times = []
    for program in found:
        built = [tvm.compile(program.module, target=programs.target(isa)) for isa in ISAS]
        times.append(fastest_us([one["main"] for one in built], values))
    nests = [[[nest.extents, nest.kinds, nest.unroll, nest.strides, nest.writes] for nest in program.nests] for program in found]
    return {
        "us": np.array(times),
        "leaf_count": np.array([len(program.leaves) for program in found]),
        "leaves": np.concatenate([program.leaves for program in found]),
        "positions": np.concatenate([program.positions for program in found]),
        "hash": np.array([str(tvm_ffi.structural_hash(program.module)) for program in found]),
        "nests": json.dumps(nests),
        "task": json.dumps([chunk.task.op, chunk.task.dims, chunk.task.models]),
        "seed": chunk.seed,
        "repeat": chunk.repeat,
    }


def device() -> dict[str, Any]:
    """What rows say of the machine."""
    cpu: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    for line in info.read_text().split("\n\n")[0].splitlines() if info.is_file() else []:
        key, _, value = line.partition(":")
        cpu[key.strip()] = value.strip()
    name = " ".join(cpu.get(key, "") for key in ("model name",)) or platform.processor()
    return {
        "cpu": name,
        "cpu_family": cpu.get("cpu family", ""),
        "cpu_model": cpu.get("model", ""),
        "tvm": metadata.version("apache-tvm"),
        "tvm_ffi": metadata.version("apache-tvm-ffi"),
    }
