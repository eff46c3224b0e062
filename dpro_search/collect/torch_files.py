"""The raw files of a recorded PyTorch DistributedDataParallel job: ``job.json`` and, in ``rank{r}/``, what each rank wrote.

``hook.json`` has step times and what DDP says of itself, ``kineto.json.gz`` the profile of some steps, and ``execution.json.gz``,
which recordings with older versions of PyTorch lack, the execution trace of the last of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect.assembly import RankFile, read_json
from dpro_search.collect.readers.kineto_cpu import HostSpans, read_host_spans
from dpro_search.collect.torch_execution import ExecutionTrace, read_execution_trace
from dpro_search.errors import InputError, TraceFormatError

FORMAT = "pytorch-ddp"
_MARK = "dpro_search.step"


class DdpParameter(msgspec.Struct):
    """A parameter that DDP reduces."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


class DdpFacts(msgspec.Struct, kw_only=True):
    """What DDP says of itself. `buckets`: in the order of their all-reduces, each the indices of its parameters."""

    buckets: list[list[int]]
    bucket_cap_bytes: int
    world_size: int
    threads: int
    backend: str
    parameters: list[DdpParameter]
    buffer_bytes: list[int]
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    comm_hook: str = ""  # name of the function that reduces the buckets in DDP's place
    ready_order: list[int] = []  # indices of the parameters as their gradients became ready in an early step


class TorchHookFile(RankFile, kw_only=True):
    """``hook.json`` of one rank; a mark is [ns before, ns after] the annotation at the start of a profiled step."""

    marks: list[tuple[int, int]]
    ddp: DdpFacts | None
    other_models: int = 0


class TorchJobFile(msgspec.Struct, kw_only=True):
    """``job.json``: what only the launcher knows."""

    format: str
    ranks: int
    command: tuple[str, ...]
    machine: str
    recorded_at: str
    rate_bps: float | None = None


def read_torch_hook(path: Path) -> TorchHookFile:
    """Read what the hook of one rank wrote; raises `InputError` or `TraceFormatError` that name the file."""
    return read_json(path, TorchHookFile, "this rank ran no DistributedDataParallel module, or its process was killed")


@dataclass(frozen=True)
class RawRank:
    """What one rank wrote, read and checked."""

    folder: Path
    hook: TorchHookFile
    ddp: DdpFacts
    spans: HostSpans
    origin_ns: float  # epoch time of the spans' zero
    origin_residual_us: float
    execution: ExecutionTrace | None


def read_rank(folder: Path) -> RawRank:
    """Read a rank's folder; raises `InputError` or `TraceFormatError` that name the file."""
    hook = read_torch_hook(folder / "hook.json")
    if not hook.steps:
        raise InputError(f"{folder}/hook.json: no training step was seen; a step begins with a DistributedDataParallel's forward")
    ddp = hook.ddp
    if ddp is None or not hook.marks:
        raise InputError(f"{folder}/hook.json: only {len(hook.steps)} steps ran, none was profiled; run more or lower --warmup")
    indices = [index for bucket in ddp.buckets for index in bucket]
    if not indices or sorted(indices) != sorted(set(indices)) or not 0 <= min(indices) <= max(indices) < len(ddp.parameters):
        raise TraceFormatError(f"{folder}/hook.json: ddp.buckets does not name each parameter at most once; record the job again")
    if any(parameter.size_bytes < 0 for parameter in ddp.parameters):
        raise TraceFormatError(f"{folder}/hook.json: ddp.parameters has a negative size; record the job again")
    profile, execution = folder / "kineto.json.gz", folder / "execution.json.gz"
    spans = read_host_spans(profile)
    origin_ns, residual_us = _origin(folder, hook, spans)
    executed = read_execution_trace(execution, profile) if execution.is_file() else None
    return RawRank(folder, hook, ddp, spans, origin_ns, residual_us, executed)


def _origin(folder: Path, hook: TorchHookFile, spans: HostSpans) -> tuple[float, float]:
    """When the profile's clock was zero, from the marks; and the half-width of what they leave open, in us."""
    start_us = np.sort(spans.start_us[spans.named(_MARK)])
    if len(start_us) != len(hook.marks):
        raise TraceFormatError(
            f"{folder}: the profile has {len(start_us)} of {len(hook.marks)} marks of steps; record the job again"
        )
    before, after = np.array(hook.marks, dtype=np.float64).T
    earliest, latest = (before - start_us * 1e3).max(), (after - start_us * 1e3).min()
    # Marks that contradict each other (the clock was set meanwhile) leave the middle, and say so by the residual.
    return float((earliest + latest) / 2), float(abs(latest - earliest) / 2e3)
