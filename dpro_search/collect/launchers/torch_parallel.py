"""Jobs of PyTorch that are split by whatever means: the profiles of all ranks, with process groups and the axes of meshes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect.assemble.common import RankFile, RawJobFile, no_profiled_step, read_job, read_json, steps_of
from dpro_search.collect.launch.torch_ranks import run_torch_ranks
from dpro_search.collect.launchers._base import LaunchedJob
from dpro_search.collect.launchers.torch import TorchLauncher
from dpro_search.collect.trace import CollectiveKind, ProcessGroup, Trace
from dpro_search.errors import InputError

FORMAT = "pytorch-mesh"
PROFILE = "profile.json.gz"


class ParallelHookFile(RankFile, kw_only=True):
    """``hook.json`` of one rank; an axis is its name in a mesh and the ranks of the rank's group along it."""

    axes: list[tuple[str, tuple[int, ...]]] = msgspec.field(default_factory=list)
    profiled: bool = False


@dataclass(frozen=True, kw_only=True)
class ParallelLauncher(TorchLauncher):
    """Starts the ranks as torchrun would; a step is one of the optimizer's."""

    def start(self, run: LaunchedJob) -> None:
        run_torch_ranks(run.spec, run.folder, hosts=run.hosts, hook={**run.hook, "FRAMEWORK": FORMAT})

    def assemble(self, raw: Path) -> Trace:
        return assemble_parallel(raw)

    def read_hook(self, folder: Path) -> RankFile:
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
    from dpro_search.collect.readers.kineto.importer import read  # needs scipy

    job = read_job(raw, RawJobFile, FORMAT)
    folders = [raw / f"rank{rank}" for rank in range(job.ranks)]
    hooks = [_hook(folder) for folder in folders]
    for folder, hook in zip(folders, hooks, strict=True):
        if not hook.profiled:
            raise no_profiled_step(folder, hook)
    trace = read([folder / PROFILE for folder in folders])
    meta = msgspec.structs.replace(
        trace.meta,
        command=tuple(job.command),
        versions=hooks[0].versions,
        cores=tuple(len(hook.cores) for hook in hooks),
        overhead_pct=_overhead_pct(hooks),
    )
    axes = {ranks: name for hook in hooks for name, ranks in hook.axes}
    return _with_axes(replace(trace, meta=meta), axes)


def _hook(folder: Path) -> ParallelHookFile:
    hook: ParallelHookFile = read_json(
        folder / "hook.json", ParallelHookFile, "no optimizer of torch.optim stepped on this rank, or its process was killed"
    )
    if not hook.steps:
        raise InputError(f"{folder}/hook.json: no training step was seen; one ends with the step of an optimizer of torch.optim")
    return hook


def _with_axes(trace: Trace, axes: dict[tuple[int, ...], str]) -> Trace:
    """Groups of ranks that are those of an axis are named so, and messages have their two ranks and the axis between these.

    PyTorch leaves the group of a mesh of one axis without a name.
    """
    groups = {group: number for number, group in enumerate(trace.groups)}
    events = trace.events
    column = events.group.copy()
    messages = np.flatnonzero(
        np.isin(events.collective_kind, (CollectiveKind.SEND, CollectiveKind.RECV)) & (events.collective >= 0)
    )
    ranks_of: dict[int, set[int]] = {}
    for row in messages:
        ranks_of.setdefault(int(events.collective[row]), set()).add(int(events.rank[row]))
    for row in messages:
        ends = tuple(sorted(ranks_of[int(events.collective[row])]))
        axis = next((name for ranks, name in axes.items() if set(ends) <= set(ranks)), None)
        pair = ProcessGroup(description="" if axis is None else f"mesh_{axis}", ranks=ends, size=len(ends))
        column[row] = groups.setdefault(pair, len(groups))
    named = tuple(
        msgspec.structs.replace(group, description=f"mesh_{axes[group.ranks]}")
        if group.ranks in axes and not group.description.startswith("mesh_")
        else group
        for group in groups
    )
    return replace(trace, groups=named, events=replace(events, group=column))


def _overhead_pct(hooks: list[ParallelHookFile]) -> float | None:
    """Overhead of profiling in per cent; None if fewer than three iterations ran with or without the profiler."""
    timed = steps_of(hooks, hooks[0].steps[0][0])
    medians_us = []
    for traced in (True, False):
        lengths = []
        for rank in range(len(hooks)):
            rank_steps = timed.select((timed.rank == rank) & (timed.traced == traced))
            lengths += np.diff(rank_steps.start_us)[np.diff(rank_steps.index) == 1].tolist()
        if len(lengths) < 3:
            return None
        medians_us.append(float(np.median(lengths)))
    return (medians_us[0] / medians_us[1] - 1) * 100


PYTORCH_MESH = ParallelLauncher(comm="mesh", format=FORMAT)
