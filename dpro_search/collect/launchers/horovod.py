"""Horovod jobs: of TensorFlow, on Gloo or on MPI with HOROVOD_CONTROLLER=mpi, and of MXNet, always on MPI."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from dpro_search.collect.assemble.common import RankFile, RawJobFile
from dpro_search.collect.assemble.horovod_phases import EXACT_GROUPS, HorovodJobFile
from dpro_search.collect.assemble.mxnet_horovod import FORMAT as MXNET_FORMAT
from dpro_search.collect.assemble.mxnet_horovod import MxnetHorovodHookFile, assemble_mxnet_horovod, read_mxnet_horovod_hook
from dpro_search.collect.assemble.tensorflow_horovod import FORMAT, HookFile, assemble, read_hook
from dpro_search.collect.launch.horovod_gloo import run_horovod_gloo
from dpro_search.collect.launch.mpi import run_mpi_job
from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.collect.launchers._base import LaunchedJob, Launcher
from dpro_search.collect.trace import CommSettings, Trace
from dpro_search.errors import InputError, JobError

_CONTROLLER = "HOROVOD_CONTROLLER"
_CONTROLLERS = ("gloo", "mpi")
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class HorovodLauncher(Launcher):
    """The part that Horovod jobs of all frameworks share: their controller, their knobs, and rank 0's timeline."""

    comm: str = "horovod"

    @property
    def knobs(self) -> frozenset[str]:
        return frozenset({_CONTROLLER, EXACT_GROUPS})

    def controller(self, spec: JobSpec) -> str:
        """The library that the job's ranks negotiate over: gloo or mpi."""
        name = spec.env.get(_CONTROLLER, os.environ.get(_CONTROLLER, "gloo")).lower()
        if name not in _CONTROLLERS:
            raise InputError(f"{_CONTROLLER}={name}: known are {', '.join(_CONTROLLERS)}")
        return name

    def job_file(self, job: RawJobFile, spec: JobSpec, shaped: bool) -> HorovodJobFile:
        env = {**os.environ, **spec.env}
        exact = {EXACT_GROUPS: env[EXACT_GROUPS]} if env.get(EXACT_GROUPS, "0") != "0" else {}
        facts = {**msgspec.structs.asdict(job), "knobs": {_CONTROLLER: self.controller(spec), **exact}}
        return HorovodJobFile(**facts, settings=settings_of(env))

    def start(self, run: LaunchedJob) -> None:
        env = dict(run.spec.env)
        if run.mode == "record":
            timeline = (run.folder / "horovod_timeline.json").resolve()
            env |= {"HOROVOD_TIMELINE": str(timeline), "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
        on_mpi = self.controller(run.spec) == "mpi"
        if on_mpi:
            env |= {_CONTROLLER: "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}
        started = run_mpi_job if on_mpi else run_horovod_gloo
        started(replace(run.spec, env=env), run.folder, hosts=run.hosts, hook=run.hook)


@dataclass(frozen=True, kw_only=True)
class TensorFlowHorovod(HorovodLauncher):
    """TensorFlow's, whose hooks know which gradients each all-reduce carries."""

    framework: str = "tensorflow"
    format: str = FORMAT
    environment: str = "tensorflow"
    modules: tuple[str, ...] = ("tensorflow", "horovod.tensorflow")

    def assemble(self, raw: Path) -> Trace:
        return assemble(raw)

    def read_hook(self, folder: Path) -> HookFile:
        return read_hook(folder / "hook.json")

    def require_groups(self, hook: RankFile, groups: tuple[tuple[str, ...], ...]) -> None:
        """Raise `JobError` unless the job's all-reduces carry exactly the groups, beside tensors that go alone."""
        assert isinstance(hook, HookFile)
        members: dict[str, set[str]] = {}
        for gradient in hook.gradients:
            members.setdefault(gradient.op, set()).add(gradient.name)
        missing = [group for group in groups if set(group) not in members.values()]
        if missing:
            raise JobError(
                f"the job does not follow the plan: nothing carries the group of '{missing[0][0]}' and {len(missing[0]) - 1} more; "
                "use planned_tape of the folder that DPRO_SEARCH_PLAN names in place of hvd.DistributedGradientTape, or its "
                "planned_groups for groups= of hvd.DistributedOptimizer (Keras fit)"
            )


@dataclass(frozen=True, kw_only=True)
class MxnetHorovod(HorovodLauncher):
    """MXNet's, which are on MPI whatever the environment selects, with one compute thread where each rank has one core."""

    framework: str = "mxnet"
    format: str = MXNET_FORMAT
    environment: str = "mxnet"
    modules: tuple[str, ...] = ("mxnet", "horovod.mxnet")

    def controller(self, spec: JobSpec) -> str:
        """MPI."""
        return "mpi"

    def start(self, run: LaunchedJob) -> None:
        spec = replace(run.spec, env={**run.spec.env, **run.spec.thread_env})
        super().start(replace(run, spec=spec))

    def assemble(self, raw: Path) -> Trace:
        return assemble_mxnet_horovod(raw)

    def read_hook(self, folder: Path) -> MxnetHorovodHookFile:
        return read_mxnet_horovod_hook(folder)


def settings_of(env: Mapping[str, str]) -> CommSettings:
    """Horovod's knobs under an environment: its own defaults where a variable is not set."""
    try:
        threshold = int(env.get("HOROVOD_FUSION_THRESHOLD", 128 * _MIB))
        cycle_ms = float(env.get("HOROVOD_CYCLE_TIME", 1))
    except ValueError as error:
        raise InputError(f"HOROVOD_FUSION_THRESHOLD or HOROVOD_CYCLE_TIME is not a number ({error})") from error
    return CommSettings(fusion_threshold_bytes=threshold, cycle_time_us=cycle_ms * 1000)


TENSORFLOW_HOROVOD = TensorFlowHorovod()
MXNET_HOROVOD = MxnetHorovod()
