"""Draws and times programs of all tasks in chunks, each a file: what was interrupted goes on (needs the environment `tvm`).

A round draws `PER_CHUNK` programs of every task, in an order that is the same everywhere, so that any prefix holds all models. One
chunk in `REPEATED` is drawn and timed a second time later, which shows how far times repeat. A process that was forked after TVM
was imported measures some chunks; one whose compiler crashes or does not end is left out, and a new process goes on with the next.
"""

from __future__ import annotations

import json
import multiprocessing
import os
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
PER_CHUNK = 5
REPEATED, REPEATED_AFTER = 20, 20  # One chunk in so many is repeated, so many chunks later.
PER_PROCESS = 100  # Chunks: compiled programs stay in memory until a process ends.
LONGEST_S = 90  # A compiler that takes longer on a chunk never ends.


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some programs of a task."""

    task: Task
    round: int
    repeat: bool

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"{self.round:03d}-{self.task.name}{'-repeat' if self.repeat else ''}"

    @property
    def seed(self) -> int:
        """Seed of its schedules; the same for a repeat."""
        return 1 + self.round


def chunks(programs: int) -> Iterator[Chunk]:
    """Chunks in the order of measuring, until `programs` were drawn, repeats not counted."""
    every = tasks()
    random.Random(0).shuffle(every)
    places = range(-(-programs // PER_CHUNK))
    drawn = [Chunk(task=every[place % len(every)], round=place // len(every), repeat=False) for place in places]
    for place, chunk in enumerate(drawn):
        yield chunk
        before = place - REPEATED_AFTER
        if before >= 0 and before % REPEATED == 0:
            yield Chunk(task=drawn[before].task, round=drawn[before].round, repeat=True)


def collect(out: Path, programs: int, pause_while: Path | None, share: tuple[int, int]) -> Iterator[str]:
    """Writes the chunks that are missing, and says how far it is after each process.

    share: which of how many processes this one is; each takes every so many-th chunk.
    """
    import experiments.tensor_programs.programs  # noqa: F401  # Before processes are forked: it takes 20 s.

    out.mkdir(parents=True, exist_ok=True)
    every = [chunk for place, chunk in enumerate(chunks(programs)) if place % share[1] == share[0]]
    while missing := [chunk for chunk in every if not _path(out, chunk).is_file() and not _failure(out, chunk).is_file()]:
        while pause_while is not None and pause_while.exists():
            time.sleep(5)
        some = missing[:PER_PROCESS]
        process = multiprocessing.get_context("fork").Process(target=_measure_all, args=(out, some))
        process.start()
        process.join()
        if process.exitcode in (-signal.SIGTERM, -signal.SIGINT):
            raise KeyboardInterrupt
        if process.exitcode:
            last = next(chunk for chunk in some if not _path(out, chunk).is_file() and not _failure(out, chunk).is_file())
            _failure(out, last).write_text(f"the process ended by {process.exitcode}")
        yield f"{len(every) - len(missing)} of {len(every)} chunks, {time.strftime('%H:%M:%S')}"


def _path(out: Path, chunk: Chunk) -> Path:
    return out / f"{chunk.name}.npz"


def _failure(out: Path, chunk: Chunk) -> Path:
    return out / f"{chunk.name}.failed"


def _measure_all(out: Path, some: list[Chunk]) -> None:
    machine = device()
    for chunk in some:
        signal.alarm(LONGEST_S)
        try:
            rows = measured(chunk)
        except Exception as error:  # Any failure of a compiler: the chunk is left out, and what happened is kept.
            _failure(out, chunk).write_text(repr(error).replace("\n", " "))
            continue
        finally:
            signal.alarm(0)
        unfinished = out / f".{chunk.name}.unfinished.npz"
        np.savez_compressed(unfinished, **rows, machine=json.dumps(machine | {"load": os.getloadavg()[0], "time": time.time()}))
        unfinished.rename(_path(out, chunk))


def measured(chunk: Chunk) -> dict[str, Any]:
    """Columns of a chunk."""
    import tvm_ffi

    from experiments.tensor_programs import programs
    from experiments.tensor_programs.operators import tensors

    values = programs.arguments(tensors(chunk.task.op, chunk.task.dims), chunk.seed)
    drawn = programs.random_programs(chunk.task, PER_CHUNK, chunk.seed)
    times, rounds = [], []
    for program in drawn:
        us, counts = fastest_us(programs.compiled(program.module, ISAS), values)
        times.append(us)
        rounds.append(counts)
    nests = [
        [[nest.extents, nest.kinds, nest.unroll, nest.strides, nest.buffers, nest.sizes, nest.loops] for nest in program.nests]
        for program in drawn
    ]
    return {
        "us": np.array(times),
        "rounds": np.array(rounds, dtype=np.int8),
        "leaf_count": np.array([len(program.leaves) for program in drawn]),
        "leaves": np.concatenate([program.leaves for program in drawn]),
        "positions": np.concatenate([program.positions for program in drawn]),
        "hash": np.array([str(tvm_ffi.structural_hash(program.module)) for program in drawn]),
        "nests": json.dumps(nests),
        "task": json.dumps([chunk.task.op, chunk.task.dims, chunk.task.models]),
        "seed": chunk.seed,
        "repeat": chunk.repeat,
    }


def device() -> dict[str, Any]:
    """Facts of the machine: processor, caches, versions of the compiler."""
    cpu: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    for line in info.read_text().split("\n\n")[0].splitlines() if info.is_file() else []:
        key, _, value = line.partition(":")
        cpu[key.strip()] = value.strip()
    caches = [
        f"L{(place / 'level').read_text().strip()} {(place / 'size').read_text().strip()}"
        for place in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
        if (place / "type").read_text().strip() != "Instruction"
    ]
    return {
        "cpu": cpu.get("model name", ""),
        "vendor": cpu.get("vendor_id", ""),
        "cpu_family": cpu.get("cpu family", ""),
        "cpu_model": cpu.get("model", ""),
        "caches": caches,
        "tvm": metadata.version("apache-tvm"),
        "tvm_ffi": metadata.version("apache-tvm-ffi"),
    }
