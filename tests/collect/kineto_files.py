"""Kineto profiles as tests write them: every record is spelled as the profiler spells it; and what tests ask of their traces."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from dpro_search.collect.trace import DependencyKind, Trace

START = 1_700_000_000_000_000
MAIN, AUTOGRAD = 100, 101
STREAM, COLLECTIVES = 7, 20


class Profile:
    """Records of one rank; times in us."""

    def __init__(self, *, pid: int = 100, device: int = 0, first_id: int = 1, old: bool = False) -> None:
        self.pid, self.device, self.old = pid, device, old
        self.records: list[dict[str, Any]] = []
        self._id = first_id

    def add(
        self, cat: str, name: str, ts: float, dur: float, tid: Any, args: dict[str, Any] | None = None, pid: Any = None
    ) -> None:
        cat = (
            {"kernel": "Kernel", "cpu_op": "Operator", "cuda_runtime": "Runtime", "gpu_memcpy": "Memcpy"}.get(cat, cat)
            if self.old
            else cat
        )
        pid = self.pid if pid is None else pid
        self.records.append({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args or {}})

    def step(self, number: int, ts: float, dur: float) -> None:
        self.add("user_annotation", f"ProfilerStep#{number}", ts, dur, MAIN)
        self.add("gpu_user_annotation", f"ProfilerStep#{number}", ts + 5, dur, STREAM, pid=self.device)

    def op(self, name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> None:
        self.add("cpu_op", name, ts, dur, tid, args)

    def frame(self, name: str, ts: float, dur: float, tid: int = MAIN) -> None:
        """A call of a Python function or module."""
        self.add("python_function", name, ts, dur, tid)

    def call(self, name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> int:
        """A call of the runtime; returns its correlation id."""
        self._id += 1
        self.add("cuda_runtime", name, ts, dur, tid, {"correlation": self._id, **args})
        return self._id

    def kernel(
        self, name: str, ts: float, dur: float, *, launched: float | None = None, stream: int = STREAM, tid: int = MAIN,
        cat: str = "kernel", call: str = "cudaLaunchKernel", call_us: float = 5.0, **args: Any,
    ) -> None:  # fmt: skip
        """A device op, with the call that launched it unless `launched` is None."""
        ids = {} if launched is None else {"correlation": self.call(call, launched, call_us, tid)}
        self.add(
            cat,
            name,
            ts,
            dur,
            f"stream {stream}" if self.old else stream,
            {"device": self.device, "stream": stream, **ids, **args},
            self.device,
        )

    def write(self, path: Path, *, header: dict[str, Any] | None = None, bare: bool = False, indent: int | None = None) -> Path:
        value: Any = (
            self.records
            if bare
            else {"schemaVersion": 1, **(header or {}), "traceEvents": self.records, "traceName": str(path.name)}
        )
        data = json.dumps(value, indent=indent).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def distributed(rank: int, world: int) -> dict[str, Any]:
    return {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world}}


def small_job(*, old: bool = False, steps: int = 3, shift_us: float = 0.0, **options: Any) -> Profile:
    """Steps of two kernels on one stream, launched 20 us apart; the second runs 100 us, a step takes 200 us."""
    profile = Profile(old=old, **options)
    for number in range(steps):
        begin = START + 200 * number + shift_us
        profile.step(number, begin, 190)
        profile.op("aten::mm", begin + 5, 30)
        profile.kernel("gemm", begin + 20, 40, launched=begin + 10)
        profile.kernel("relu", begin + 60, 100, launched=begin + 30)
    return profile


def collective_job(rank: int, *, late_us: float = 0.0, shift_us: float = 0.0, parts: int = 10, **more) -> Profile:
    """All-reduces that end together; rank 1 enqueues `late_us` after rank 0."""
    profile = Profile(pid=100 + rank, device=rank)
    begin = START + shift_us
    profile.step(0, begin, 1000.0 * parts)
    for part in range(parts):
        at, late = begin + 1000 * part, late_us * rank + 7 * part * (1 - rank)
        profile.kernel("gemm", at + 20, 50, launched=at + 10)
        profile.call("cudaStreamWaitEvent", at + 75, 1)
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"
        begins = at + 100 + late
        profile.kernel(name, begins, at + 900 + 0.5 * rank - begins, launched=at + 90, stream=COLLECTIVES, **more)
    return profile


def needs(trace: Trace, kind: DependencyKind) -> set[tuple[str, str]]:
    """Names of source and target."""
    dependencies = trace.dependencies
    name = [trace.names[i] for i in trace.events.name.tolist()]
    return {
        (name[s], name[t]) for s, t, k in zip(dependencies.source, dependencies.target, dependencies.kind, strict=True) if k == kind
    }


def one(trace: Trace, name: str) -> int:
    (event,) = np.flatnonzero(trace.events.name == trace.names.index(name))
    return int(event)
