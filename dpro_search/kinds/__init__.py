"""The kinds of jobs: ``job_of(trace)`` is what every verb begins with; nothing above this package knows a kind's name.

A new kind is a module with a constant ``KIND`` (see `kinds._base`) and one line in `kinds._names`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from dpro_search.errors import InputError
from dpro_search.kinds import _names
from dpro_search.kinds._base import COMPUTE, Comparison, Job, Kind, PlanOptions, Table, with_memory_limit
from dpro_search.kinds._difference import difference

if TYPE_CHECKING:
    from pathlib import Path

    from dpro_search.collect.launchers._base import Launcher
    from dpro_search.collect.trace import Trace
    from dpro_search.deploy.jobs import RecordedJob
    from dpro_search.deploy.parts.part import Target

__all__ = [
    "COMPUTE",
    "Comparison",
    "Job",
    "Kind",
    "PlanOptions",
    "Table",
    "all_targets",
    "assemble_raw",
    "difference",
    "job_of",
    "kind_of",
    "kinds",
    "launcher_for",
    "launchers",
    "recorded_job",
    "searchable_job_of",
]


def kinds() -> tuple[Kind, ...]:
    """All known kinds."""
    return cast("tuple[Kind, ...]", _names.registered())


def kind_of(trace: Trace) -> Kind:
    """The kind of job that a trace is of."""
    one_by_one = (cast("Kind", _names.registered_kind(name)) for name in _names.KINDS)  # imports no more than it must
    return next(kind for kind in one_by_one if kind.recognises(trace))


def job_of(trace: Trace, options: PlanOptions | None = None) -> Job:
    """The job of a trace.

    Raises
    ------
    InputError
        The options ask for what such a job does not have.
    GraphError
        The trace cannot be replayed.
    """
    options = options or PlanOptions()
    return with_memory_limit(kind_of(trace).job(trace, options), options.memory_limit_bytes)


def searchable_job_of(trace: Trace, options: PlanOptions | None = None) -> Job:
    """The same, but raises `InputError` with the reason for a job that has no plans."""
    job = job_of(trace, options)
    if not job.space.fields:
        raise InputError(job.nothing_to_search)
    return job


def recorded_job(trace: Trace, command: Sequence[str] = ()) -> RecordedJob:
    """The job of a trace as it can run again, with `command` in place of the recorded one.

    Raises
    ------
    InputError
        Nothing here starts such jobs, or the trace does not tell the job's command.
    """
    from dpro_search.deploy.jobs import RecordedJob

    kind = kind_of(trace)
    launcher = next((each for each in kind.launchers if each.format == trace.meta.format), None)
    if launcher is None:
        known = ", ".join(each.format for each in launchers())
        raise InputError(f"a job of the kind '{trace.meta.format}' cannot be started here; the kinds that can: {known}")
    return RecordedJob.of(trace, launcher, kind.targets_of(trace.meta.framework), kind.facts(trace), command)


def launchers() -> tuple[Launcher, ...]:
    """What records and times the jobs of all kinds."""
    return tuple(launcher for kind in kinds() for launcher in kind.launchers)


def launcher_for(framework: str, comm: str) -> Launcher:
    """The launcher of a framework's jobs with a way to communicate; raises `InputError` if there is none."""
    for launcher in launchers():
        if (launcher.framework, launcher.comm) == (framework, comm):
            return launcher
    known = ", ".join(f"--framework {launcher.framework} --comm {launcher.comm}" for launcher in launchers())
    raise InputError(f"--framework {framework} --comm {comm}: cannot be recorded; known are {known}")


def assemble_raw(raw: Path) -> Trace:
    """Build the trace of a job from the raw folder that its launcher kept.

    Raises
    ------
    InputError
        It is no raw folder of a known recorder, a rank is missing, or the job held nothing to record.
    TraceFormatError
        A file is damaged, or contradicts another.
    """
    from dpro_search.collect.assembly import raw_format

    found = raw_format(raw)
    for launcher in launchers():
        if launcher.format == found:
            return launcher.assemble(raw)
    raise InputError(f"{raw}/job.json: raw files of '{found}'; known are {', '.join(each.format for each in launchers())}")


def all_targets() -> tuple[Target, ...]:
    """Everything that some kind's plans can be exported to, in the order of the kinds."""
    return tuple(dict.fromkeys(target for kind in kinds() for target in kind.targets))
