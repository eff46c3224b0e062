"""Jobs of PyTorch that are split by whatever means: the profiles of all ranks, with process groups and the axes of meshes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect.assembly import JobFile, RankFile, completed, no_profiled_step, read_job, read_json, steps_of
from dpro_search.collect.launch.torch_ranks import run_torch_ranks
from dpro_search.collect.launchers._base import Launcher, Run
from dpro_search.collect.trace import ProcessGroup, Steps, Trace
from dpro_search.errors import InputError

FORMAT = "pytorch-mesh"
PROFILE = "profile.json.gz"


class ParallelHookFile(RankFile, kw_only=True):
    """``hook.json`` of one rank; an axis is its name in a mesh and the ranks of the rank's group along it."""

    axes: list[tuple[str, tuple[int, ...]]] = msgspec.field(default_factory=list)
    profiled: bool = False


@dataclass(frozen=True, kw_only=True)
class ParallelLauncher(Launcher):
    """Starts the ranks as torchrun would; a step is one of the optimizer's."""

    framework: str = "pytorch"
    environment: str = "torch"
    modules: tuple[str, ...] = ("torch",)

    def start(self, run: Run) -> None:
        hook = {**run.hook, "FRAMEWORK": FORMAT}
        run_torch_ranks(run.spec, run.folder, hosts=run.hosts, hook=hook)

    def assemble(self, raw: Path) -> Trace:
        return assemble_parallel(raw)

    def read_hook(self, folder: Path) -> ParallelHookFile:
        return _hook(folder)


def assemble_parallel(raw: Path) -> Trace:
    """The trace of a job from its raw folder: what `import` makes of the ranks' profiles, with what the hooks saw beside them.

    Raises
    ------
    InputError
        A rank profiled no step.
    TraceFormatError
        A file is damaged.
    """
    from dpro_search.collect.readers.kineto import read  # needs scipy

    job = read_job(raw, JobFile, FORMAT)
    folders = [raw / f"rank{rank}" for rank in range(job.ranks)]
    hooks = [_hook(folder) for folder in folders]
    for folder, hook in zip(folders, hooks, strict=True):
        if not hook.profiled:
            raise no_profiled_step(folder, hook)
    trace = read([folder / PROFILE for folder in folders])
    meta = msgspec.structs.replace(
        trace.meta,
        comm="gloo" if trace.meta.comm == "nccl" and not trace.meta.devices else trace.meta.comm,
        command=tuple(job.command),
        versions=hooks[0].versions,
        cores=tuple(len(hook.cores) for hook in hooks),
    )
    axes = {ranks: name for hook in hooks for name, ranks in hook.axes}
    return completed(replace(trace, meta=meta, groups=_with_axes(trace.groups, axes), steps=_all_steps(trace.steps, hooks)))


def _hook(folder: Path) -> ParallelHookFile:
    hook: ParallelHookFile = read_json(
        folder / "hook.json", ParallelHookFile, "no optimizer of torch.optim stepped on this rank, or its process was killed"
    )
    if not hook.steps:
        raise InputError(f"{folder}/hook.json: no training step was seen; one ends with the step of an optimizer of torch.optim")
    return hook


def _with_axes(groups: tuple[ProcessGroup, ...], axes: dict[tuple[int, ...], str]) -> tuple[ProcessGroup, ...]:
    """Groups of ranks that are those of an axis are named so; PyTorch leaves that of a mesh of one axis without a name."""
    return tuple(
        msgspec.structs.replace(group, description=f"mesh_{axes[group.ranks]}")
        if group.ranks in axes and not group.description.startswith("mesh_")
        else group
        for group in groups
    )


def _all_steps(profiled: Steps, hooks: list[ParallelHookFile]) -> Steps:
    """The profiled steps, and those that were timed without the profiler, on the profile's clock."""
    timed = steps_of(hooks, hooks[0].steps[0][0])
    parts = []
    for rank in range(len(hooks)):
        own, others = profiled.select(profiled.rank == rank), timed.select(timed.rank == rank)
        both = np.intersect1d(own.index, others.index)
        if not len(both):
            return profiled
        shift_us = float(np.median(own.start_us[np.isin(own.index, both)] - others.start_us[np.isin(others.index, both)]))
        kept = others.select(~others.traced & ~np.isin(others.index, own.index))
        parts += [replace(kept, start_us=kept.start_us + shift_us, end_us=kept.end_us + shift_us), own]
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(profiled)}
    order = np.lexsort((columns["index"], columns["rank"]))
    return Steps(**{name: column[order] for name, column in columns.items()})


PYTORCH_MESH = ParallelLauncher(comm="mesh", format=FORMAT)
