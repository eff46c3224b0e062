"""The raw files of a recorded distributed PyTorch job: ``job.json`` and, in ``rank{r}/``, what each rank wrote.

``hook.json`` has step times and what DistributedDataParallel, or the units of a fully sharded model, report about themselves,
``kineto.json.gz`` the profile of some steps, and ``execution.json.gz``, which recordings with older versions of PyTorch lack, the
execution trace of the last of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect.assemble.common import RankFile, no_profiled_step, read_json
from dpro_search.collect.assemble.torch.execution import ExecutionTrace, read_execution_trace
from dpro_search.collect.assemble.torch.host_spans import HostSpans, read_host_spans
from dpro_search.errors import InputError, TraceFormatError

FORMAT = "pytorch-ddp"
FSDP_FORMAT = "pytorch-fsdp"
_MARK = "dpro_search.step"
_LARGEST = 2**48  # bytes; more are damaged


class TorchParameter(msgspec.Struct):
    """A parameter whose gradient is communicated; the whole of it where ranks have parts."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


class DdpFacts(msgspec.Struct, kw_only=True):
    """DDP's report about itself. `buckets`: in the order of their all-reduces, each the indices of its parameters."""

    buckets: list[list[int]]
    bucket_cap_bytes: int
    world_size: int
    threads: int
    backend: str
    parameters: list[TorchParameter]
    buffer_bytes: list[int]
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    comm_hook: str = ""  # name of the function that reduces the buckets in DDP's place
    ready_order: list[int] = []  # indices of the parameters as their gradients became ready in an early step


class FsdpUnit(msgspec.Struct, kw_only=True):
    """Modules whose parameters are communicated together."""

    name: str  # Of the module within the model; empty for the model itself, which has what is in no other unit.
    parameters: list[int]  # Indices of its parameters.
    ranks: int  # How many ranks its parameters are divided among.
    # Of all its parameters as they are gathered, with padding and in the type of element that the forward pass uses.
    gathered_bytes: int
    reshards: bool = True  # Whether its parameters are given up after the forward pass and gathered again for the backward pass.
    # Whether its all-gathers are waited for where the parameters are needed, not where they are enqueued.
    asynchronous: bool = False


class FsdpFacts(msgspec.Struct, kw_only=True):
    """The report of a model that ``fully_shard`` divided into units."""

    units: list[FsdpUnit]
    world_size: int
    backend: str
    parameters: list[TorchParameter]


class TorchModule(msgspec.Struct):
    """A module whose forward passes the profile marks; see `ModuleInfo`."""

    name: str
    type: str
    member: bool


class TorchHookFile(RankFile, kw_only=True):
    """``hook.json`` of one rank; a mark is [ns before, ns after] the annotation at the start of a profiled step.

    `modules` are in the model's order; None: recorded before they were kept, or not of a DistributedDataParallel job.
    """

    marks: list[tuple[int, int]]
    ddp: DdpFacts | None = None
    fsdp: FsdpFacts | None = None
    modules: list[TorchModule] | None = None
    other_models: int = 0


def read_torch_hook(path: Path) -> TorchHookFile:
    """Read what the hook of one rank wrote; raises `InputError` or `TraceFormatError` that name the file."""
    return read_json(
        path, TorchHookFile, "this rank ran no DistributedDataParallel and no fully_shard module, or its process was killed"
    )


@dataclass(frozen=True)
class RawRank:
    """The files that one rank wrote, read and checked."""

    folder: Path
    hook: TorchHookFile
    spans: HostSpans
    origin_ns: float  # epoch time of the spans' zero
    origin_residual_us: float
    execution: ExecutionTrace | None

    @property
    def ddp(self) -> DdpFacts:
        """The facts of a DistributedDataParallel job."""
        assert self.hook.ddp is not None
        return self.hook.ddp

    @property
    def fsdp(self) -> FsdpFacts:
        """The facts of a fully sharded job."""
        assert self.hook.fsdp is not None
        return self.hook.fsdp

    @property
    def backend(self) -> str:
        """The library that moves the bytes."""
        facts = self.hook.ddp or self.hook.fsdp
        return "" if facts is None else facts.backend


def read_rank(folder: Path, kind: str = FORMAT) -> RawRank:
    """Read a rank's folder of a job of a format; raises `InputError` or `TraceFormatError` that name the file."""
    hook = read_torch_hook(folder / "hook.json")
    if not hook.steps:
        raise InputError(
            f"{folder}/hook.json: no training step was seen; one begins with the forward of a DistributedDataParallel or "
            "of a fully_shard-ed module"
        )
    if hook.marks and kind == FORMAT and hook.fsdp is not None:
        raise InputError(f"{folder}/hook.json: the model was divided by fully_shard; record it with --comm fsdp")
    if hook.marks and kind == FSDP_FORMAT and hook.ddp is not None:
        raise InputError(f"{folder}/hook.json: the model is a DistributedDataParallel; record it with --comm ddp")
    if not hook.marks or (hook.ddp is None and hook.fsdp is None):
        raise no_profiled_step(folder, hook)
    _check_facts(folder, hook)
    if hook.fsdp is not None and any(unit.ranks != hook.fsdp.world_size for unit in hook.fsdp.units):
        raise InputError(f"{folder}/hook.json: a unit is sharded over some of the ranks only; record jobs that shard over all")
    profile, execution = folder / "kineto.json.gz", folder / "execution.json.gz"
    spans = read_host_spans(profile)
    origin_ns, residual_us = _origin(folder, hook, spans)
    executed = read_execution_trace(execution, spans) if execution.is_file() else None
    return RawRank(folder, hook, spans, origin_ns, residual_us, executed)


def _check_facts(folder: Path, hook: TorchHookFile) -> None:
    """Raise `TraceFormatError` where parameters are in two places or in none, or a size is impossible."""
    facts = [("ddp.buckets", hook.ddp.buckets, hook.ddp.parameters)] if hook.ddp is not None else []
    if hook.fsdp is not None:
        facts.append(("fsdp.units", [unit.parameters for unit in hook.fsdp.units], hook.fsdp.parameters))
    for what, members, parameters in facts:
        indices = [index for group in members for index in group]
        if not indices or sorted(indices) != sorted(set(indices)) or not 0 <= min(indices) <= max(indices) < len(parameters):
            raise TraceFormatError(f"{folder}/hook.json: {what} does not name each parameter at most once; record the job again")
        if any(not 0 <= parameter.size_bytes < _LARGEST for parameter in parameters):
            raise TraceFormatError(f"{folder}/hook.json: a parameter has an impossible size; record the job again")
    if hook.fsdp is not None and any(not 0 <= unit.gathered_bytes < _LARGEST for unit in hook.fsdp.units):
        raise TraceFormatError(f"{folder}/hook.json: a unit has an impossible size; record the job again")


def _origin(folder: Path, hook: TorchHookFile, spans: HostSpans) -> tuple[float, float]:
    """When the profile's clock was zero, from the marks; and the half-width of what they leave open, in us."""
    start_us = np.sort(spans.start_us[spans.named(_MARK)])
    if len(start_us) != len(hook.marks):
        raise TraceFormatError(
            f"{folder}: the profile has {len(start_us)} of {len(hook.marks)} marks of steps; record the job again"
        )
    before, after = np.array(hook.marks, dtype=np.float64).T
    earliest, latest = (before - start_us * 1e3).max(), (after - start_us * 1e3).min()
    # Marks that contradict each other (the clock was set meanwhile) leave the middle, and a residual that shows it.
    return float((earliest + latest) / 2), float(abs(latest - earliest) / 2e3)
