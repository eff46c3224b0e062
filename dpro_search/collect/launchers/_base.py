"""How jobs of one kind are started, recorded and measured: `Launcher`.

What `record` and `time` do is the same for all kinds of jobs, and calls what a kind has of its own in this order:

    record   job_file   require   hosts_needed   start   assemble                     -> Trace
    time                require   hosts_needed   start   read_hook   require_groups   -> StepTimes

A kind has at least `start`, `assemble` and `read_hook`; the others have a default. The folder of a run holds ``job.json`` and a
folder ``rank{r}`` for every rank, in which the rank's hook leaves ``hook.json`` with its steps. How the ranks come to run is the
concern of `start` alone: one process each, mpirun, or a launcher of the framework's own; pinned to cores, or with a GPU each and no
core; with other processes beside them.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from dpro_search._text import holds_secrets
from dpro_search.collect._files import require_new, scratch_folder, write_file
from dpro_search.collect.assemble.common import RankFile, RawJobFile, read_json
from dpro_search.collect.launch.netns import ShapedHosts, shaped_hosts
from dpro_search.collect.launch.ranks import JobSpec, require_framework
from dpro_search.collect.launch.step_times import StepSchedule, StepTimes, step_times
from dpro_search.collect.launch.while_running import Watch, watched
from dpro_search.collect.this_machine import LoadMeter, load_warning, machine
from dpro_search.collect.trace import Trace
from dpro_search.collect.trace_meta import MachineLoad
from dpro_search.errors import DproSearchError, MissingCapabilityError

_LOAD = "load.json"
_LEAST_ROOM_BYTES = 1 << 20  # a disk with less is full: a rank's files are larger


@dataclass(frozen=True, kw_only=True)
class LaunchedJob:
    """One run of a job."""

    spec: JobSpec  # The job.
    folder: Path  # Where its raw files go.
    hosts: ShapedHosts | None  # Hosts of its own; None: it runs on this machine as it is.
    # schedule, mode: Which steps are profiled, and whether they are: "time" only reads the clock.
    schedule: StepSchedule
    mode: Literal["record", "time"]
    framework: str  # Whose recorder is to enter the ranks.

    @property
    def hook(self) -> dict[str, str]:
        """Settings of the recorder in the ranks."""
        return {**self.schedule.hook(self.mode), "FRAMEWORK": self.framework}


@dataclass(frozen=True, kw_only=True)
class Launcher(ABC):
    """One framework with one way to communicate."""

    # framework, comm: What the job trains and communicates with, as `collect` names them.
    framework: str
    comm: str
    format: str  # `TraceMeta.format` of what is recorded.
    environment: str  # Of `scripts/make_env.sh`, that has the framework.
    modules: tuple[str, ...]  # What the job's interpreter must import.
    servers: bool = False  # Whether there are processes beside the ranks that a trace has as ranks of their own, after the others.

    def record(
        self,
        spec: JobSpec,
        out: Path,
        *,
        rate_bps: float | None = None,
        shaped: bool = False,
        schedule: StepSchedule | None = None,
        keep_raw: Path | None = None,
        watch: Watch | None = None,
    ) -> Trace:
        """Run a job with the hooks on and write its trace to the new folder `out`.

        Parameters
        ----------
        shaped
            Give the ranks hosts of their own with links of `rate_bps` bits a second (None: not limited); needs root.
        keep_raw
            Where to leave the raw files as well.
        watch
            Called now and then while the job runs.

        Raises
        ------
        InputError
            `out` exists, or the job holds nothing to record.
        JobError
            The job failed.
        MissingCapabilityError
            The framework, a permission or disk space is missing.
        """
        require_new(out)
        job = RawJobFile(
            format=self.format,
            ranks=spec.ranks,
            command=spec.command,
            machine=machine(),
            recorded_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            rate_bps=rate_bps,
            host_cpus=spec.limits.cpus,
            host_changes=spec.limits.changes_text,
        )
        job = self.job_file(job, spec, shaped)
        self.require(spec)
        with raw_folder(keep_raw) as raw:
            write_file(raw / "job.json", msgspec.json.encode(job), private=holds_secrets(job.command))
            meter = LoadMeter()
            with watched(raw, watch):
                self._run(spec, raw, schedule or StepSchedule(), "record", rate_bps, shaped)
            if (load := meter.read()) is not None:
                write_file(raw / _LOAD, msgspec.json.encode(load))
            trace = self.trace_of(raw)
            trace.save(out)
            return trace

    def trace_of(self, raw: Path) -> Trace:
        """The trace of a recorded job from its raw folder, with the machine's load; errors are those of `assemble`."""
        trace = self.assemble(raw)
        if not (raw / _LOAD).is_file():
            return trace
        load = read_json(raw / _LOAD, MachineLoad, "no load was measured")
        warning = load_warning(load)
        warnings = (*trace.meta.warnings, *([warning] if warning else []))
        return replace(trace, meta=msgspec.structs.replace(trace.meta, load=load, warnings=warnings))

    def time(
        self,
        spec: JobSpec,
        *,
        rate_bps: float | None = None,
        shaped: bool = False,
        warmup: int = 5,
        expected_groups: tuple[tuple[str, ...], ...] | None = None,
        watch: Watch | None = None,
    ) -> StepTimes:
        """Run a job and measure its steps; the hooks only read the clock.

        Parameters
        ----------
        rate_bps, shaped, watch
            As in `record`.
        warmup
            Steps that are left out.
        expected_groups
            Names of the tensors that must travel together; None: not checked, like kinds whose hooks do not report it.

        Raises
        ------
        JobError
            The job failed, ran too few steps, or does not follow the groups.
        MissingCapabilityError
            The framework or a permission is missing.
        """
        self.require(spec)
        with raw_folder(None) as raw:
            with watched(raw, watch):
                self._run(spec, raw, StepSchedule(warmup=max(warmup, 2)), "time", rate_bps, shaped)
            hooks = [self.read_hook(raw / f"rank{rank}") for rank in range(spec.ranks)]
            if expected_groups:
                self.require_groups(hooks[0], expected_groups)
            return step_times(hooks, warmup)

    def _run(
        self,
        spec: JobSpec,
        folder: Path,
        schedule: StepSchedule,
        mode: Literal["record", "time"],
        rate_bps: float | None,
        shaped: bool,
    ) -> None:
        with shaped_hosts(self.hosts_needed(spec), rate_bps, shaped, spec.limits) as hosts:
            self.start(LaunchedJob(spec=spec, folder=folder, hosts=hosts, schedule=schedule, mode=mode, framework=self.framework))

    def require(self, spec: JobSpec) -> None:
        """Raise `MissingCapabilityError` unless the job can run here."""
        require_framework(spec.interpreter, self.modules, self.environment)

    def job_file(self, job: RawJobFile, spec: JobSpec, shaped: bool) -> RawJobFile:
        """Content of ``job.json``; a kind adds what only it has. Raises `InputError` for an invalid setting."""
        return job

    @property
    def knobs(self) -> frozenset[str]:
        """Variables that a trace may set when its job runs again; a trace names others at will, and they stay unset."""
        return frozenset()

    def hosts_needed(self, spec: JobSpec) -> int:
        """How many hosts all processes have together."""
        return spec.hosts

    @abstractmethod
    def start(self, run: LaunchedJob) -> None:
        """Start the job's processes, with the hooks in the ranks, and wait for their end.

        Raises
        ------
        JobError
            One failed, or the job took longer than its spec allows; the last lines of its output are in the message.
        """

    @abstractmethod
    def assemble(self, raw: Path) -> Trace:
        """Build the trace of a recorded job from its raw folder.

        Raises
        ------
        InputError
            A rank is missing, or the job holds nothing to record.
        TraceFormatError
            A file is damaged, or contradicts another.
        """

    @abstractmethod
    def read_hook(self, folder: Path) -> RankFile:
        """Read what the hook of the rank of a folder wrote; raises `InputError` or `TraceFormatError` that name the file."""

    def require_groups(self, hook: RankFile, groups: tuple[tuple[str, ...], ...]) -> None:  # noqa: B027 (a default: hooks do not report it)
        """Raise `JobError` if a rank's hook reports that other tensors than these travelled together."""


@contextlib.contextmanager
def raw_folder(keep: Path | None) -> Iterator[Path]:
    """Folder for a job's raw files: the one to keep, made if it is missing, or one that is removed afterwards if None."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        with _with_room(keep, "--keep-raw"):
            yield keep
        return
    with scratch_folder("raw") as folder, _with_room(folder, "TMPDIR"):
        yield folder


@contextlib.contextmanager
def _with_room(folder: Path, setting: str) -> Iterator[None]:
    """Report a full disk as the cause of a failure: ranks that cannot write look like ranks that did nothing."""
    try:
        yield
    except DproSearchError as error:
        if isinstance(error, MissingCapabilityError) or shutil.disk_usage(folder).free >= _LEAST_ROOM_BYTES:
            raise
        where = f"set {setting} to a folder on another disk, or make room"
        raise MissingCapabilityError(f"{folder}: {os.strerror(errno.ENOSPC)} for the files of the job's ranks; {where}") from error
