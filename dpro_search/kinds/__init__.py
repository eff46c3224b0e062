"""The kinds of jobs: ``job_of(load_source(path))`` is what every verb begins with; nothing above this package knows a kind's name.

A new kind is a module with a constant ``KIND`` (see `kinds._kind`) and one line in `kinds._names`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, cast

from dpro_search.collect.trace import Trace
from dpro_search.collect.trace_meta import on_this_machine
from dpro_search.errors import InputError
from dpro_search.kinds import _names
from dpro_search.kinds._answers import STEP_PARTS, ParallelSetting, Term
from dpro_search.kinds._comparison import Comparison
from dpro_search.kinds._diagnosis import Diagnosis, Table
from dpro_search.kinds._job import Job, JobInScenario, JobObjective
from dpro_search.kinds._job_on_cluster import searched_job
from dpro_search.kinds._kind import AnyKind, DescribedKind, Description, Kind, Source, Wanted
from dpro_search.kinds._options import COMPUTE, PlanOptions
from dpro_search.space.scenario import Scenario
from dpro_search.space.schemes import import_kinds_by

if TYPE_CHECKING:
    from dpro_search.collect.capture import CapturedGraph
    from dpro_search.collect.capture.runner import CaptureRequest
    from dpro_search.collect.launchers._base import Launcher
    from dpro_search.collect.tables.parallel_times import ParallelTimes
    from dpro_search.deploy.jobs import RecordedJob
    from dpro_search.deploy.of_run import Deployed
    from dpro_search.deploy.parts.part import Target
    from dpro_search.search.run_folder import RunInfo

__all__ = [
    "COMPUTE",
    "STEP_PARTS",
    "AnyKind",
    "Comparison",
    "DescribedKind",
    "Description",
    "Diagnosis",
    "Job",
    "JobInScenario",
    "Kind",
    "ParallelSetting",
    "PlanOptions",
    "Source",
    "Table",
    "Term",
    "Wanted",
    "all_targets",
    "assemble_raw",
    "captured_text",
    "deployed",
    "deployed_job",
    "describable_names",
    "described_in",
    "described_job",
    "description_text",
    "files_of",
    "job_of",
    "kind_of",
    "kinds",
    "launcher_for",
    "launchers",
    "load_source",
    "recorded_job",
    "searchable",
    "targets_of",
    "timed_job",
    "write_captured",
]


import_kinds_by(_names.registered)


def kinds() -> tuple[AnyKind[Any], ...]:
    """All known kinds."""
    return cast("tuple[AnyKind[Any], ...]", _names.registered())


def load_source(path: Path) -> Source:
    """The source of a job: the trace in a folder, or the description in a file.

    Raises
    ------
    InputError
        It is neither, or is damaged.
    """
    description = described_in(path)
    if description is None and path.is_file() and path.suffix.lower() == ".toml":
        raise InputError(f"{path}: {_why_no_description(path)}; 'dpro-search describe MODEL --cluster C > {path.name}' writes one")
    return description or Trace.load(path)


def _why_no_description(path: Path) -> str:
    if not path.stat().st_size:
        return "the file is empty, so that it describes no job (a command that failed leaves such a file)"
    return "describes no job: it has none of the keys model, global_batch and sequence"


def described_in(path: Path) -> Description | None:
    """The description in a file or a folder of some kind's; None: it is none. Raises `InputError` for a damaged one."""
    for kind in kinds() if path.exists() else ():
        if isinstance(kind, DescribedKind) and (path.is_file() or kind.reads_folders):
            described = kind.read(path)
            if described is not None:
                return cast("Description", described)
    return None


def description_text(request: Wanted) -> str:
    """A commented file that describes a job; raises `InputError` for what cannot be described."""
    texts = (kind.text(request) for kind in kinds() if isinstance(kind, DescribedKind))
    return next(text for text in texts if text is not None)


def describable_names() -> dict[str, list[str]]:
    """Names that `description_text` knows, by title: "models", "clusters" (machines, then devices), "frameworks"."""
    kinds_of_names = [kind.names() for kind in kinds() if isinstance(kind, DescribedKind)]
    return {title: list(names) for names_of_kind in kinds_of_names for title, names in names_of_kind.items()}


def captured_text(graph: CapturedGraph, name: str, cluster: str | None) -> str:
    """The file of a captured model's job, whose graph is in a file of that name beside it; `cluster` None: as large as the mesh."""
    texts = (kind.captured_text(graph, name, cluster) for kind in kinds() if isinstance(kind, DescribedKind))
    return next(text for text in texts if text is not None)


def write_captured(request: CaptureRequest, out: Path, cluster: str | None, on_progress: Callable[[str], None]) -> CapturedGraph:
    """Capture a model's training step into the new folder `out`: ``graph.json``, and ``job.toml``, which describes the job.

    Parameters
    ----------
    cluster
        The cluster of ``job.toml``; None: as many devices as the mesh has ranks.
    on_progress
        Called with a few words on each part of the work.

    Raises
    ------
    InputError
        `out` exists, or the model cannot be captured.
    """
    from dpro_search.collect._files import require_new, written_folder
    from dpro_search.collect.capture import written_graph
    from dpro_search.collect.capture.runner import capture

    require_new(out)
    graph = capture(request, on_progress)
    with written_folder(out) as folder:
        (folder / "graph.json").write_bytes(written_graph(graph))
        (folder / "job.toml").write_text(captured_text(graph, "graph.json", cluster))
    return graph


def files_of(source: Source) -> dict[str, Path]:
    """Files beside a trace or a description that predictions depend on, by name."""
    return dict(source.files) if isinstance(source, Description) else {}


def kind_of(source: Source) -> AnyKind[Any]:
    """The kind of job that a trace or a description is of."""
    one_by_one = (cast("AnyKind[Any]", _names.registered_kind(name)) for name in _names.KINDS)  # imports no more than it must
    return next(kind for kind in one_by_one if isinstance(source, kind.source_type) and kind.recognises(source))


def deployed(info: RunInfo) -> Deployed:
    """The facts that an export needs about the job of a search; raises `InputError` if its trace or description is not there."""
    source = load_source(Path(info.trace))
    job = job_of(source)
    return deployed_job(source, job if isinstance(source, Trace) else searched_job(job, info))


def deployed_job(source: Source, here: JobInScenario) -> Deployed:
    """Facts that an export needs of a job that was opened."""
    from dpro_search.deploy.of_run import Deployed

    kind = kind_of(source)
    if isinstance(source, Trace):
        name, framework = f"{source.meta.framework} with {source.meta.comm}", source.meta.framework
    else:
        name, framework = kind.title, source.framework
    return Deployed(
        name=name,
        targets=kind.targets_of(framework),
        facts=replace(kind.facts(source), workload=here.job.workload(here.scenario)),
        doubt=here.recording_doubt,
        usual=kind.usual_target(framework),
    )


def targets_of(source: Source) -> tuple[Target, ...]:
    """The targets that plans of a job can be exported to."""
    return kind_of(source).targets_of(source.meta.framework if isinstance(source, Trace) else source.framework)


def job_of(source: Source, options: PlanOptions | None = None) -> JobInScenario:
    """The job of a trace or of a description, as it was recorded or described.

    Raises
    ------
    InputError
        The options ask for what such a job does not have.
    GraphError
        The trace cannot be replayed.
    """
    options = options or PlanOptions()
    here = JobInScenario(kind_of(source).job(source, options))
    return here if options.memory_limit_bytes is None else here.limited_to(options.memory_limit_bytes)


def searchable(here: JobInScenario) -> JobObjective[Any]:  # Any: the type of the job
    """The job as a search asks it; its questions are tried first. Raises `InputError` with the reason if it has no plans."""
    space = here.space
    if not space.fields:
        raise InputError(here.nothing_to_search)
    questions = here.job.questions(here.scenario).values()
    return here.objective([space.simplest(plan) for plan in questions if space.refusal(plan) is None])


def recorded_job(trace: Source, command: Sequence[str] = ()) -> RecordedJob:
    """The job of a trace as it can run again, with `command` in place of the recorded one; or that of a description.

    Raises
    ------
    InputError
        Nothing here starts such jobs, or the source does not tell the job's command.
    """
    from dpro_search.deploy.jobs import RecordedJob

    if not isinstance(trace, Trace):
        return described_job(trace, job_of(trace), Path("runs"), command)
    kind = kind_of(trace)
    launcher = next((each for each in kind.launchers if each.format == trace.meta.format), None)
    if launcher is None and kind.profile_launcher_name:
        trace = replace(trace, meta=on_this_machine(trace.meta))
        launcher = resolve_name(kind.profile_launcher_name)
    if launcher is None:
        known = ", ".join(each.format for each in launchers())
        raise InputError(f"a job of the kind '{trace.meta.format}' cannot be started here; the kinds that can: {known}")
    return RecordedJob.of(trace, launcher, targets_of(trace), kind.facts(trace), command)


def described_job(
    description: Description, here: JobInScenario, run: Path, command: Sequence[str], *, paced: bool = False
) -> RecordedJob:
    """The job of a description as `here` has it, as it runs here: see `DescribedKind.real_job`."""
    kind = kind_of(description)
    assert isinstance(kind, DescribedKind)
    return kind.real_job(here, description, run, command, paced=paced)


def timed_job(
    source: Path, plans: Sequence[str], command: Sequence[str], out: Path, *, on_start: Callable[[str], None] = lambda what: None
) -> ParallelTimes:
    """Time blocks and exchanges of a described job here, and write them to a file: see `DescribedKind.timed`.

    Parameters
    ----------
    plans
        Settings of plans as ``--set`` takes them; empty: as the job runs today.
    on_start
        Called with what is timed next.
    """
    description = load_source(source)
    kind = kind_of(description)
    if isinstance(description, Trace) or not isinstance(kind, DescribedKind):
        raise InputError(f"{source}: a recording has the times of its ops; --collect parallel times jobs that a job.toml describes")
    here = job_of(description)
    scenarios = [Scenario().changed([text], known=here.job.askable, job=here.title) for text in plans] or [Scenario()]
    return kind.timed(here, description, [scenario.plan for scenario in scenarios], command, out, on_start=on_start)


def launchers() -> tuple[Launcher, ...]:
    """Launchers that record and time the jobs of all kinds."""
    return tuple(launcher for kind in kinds() for launcher in kind.launchers)


def launcher_for(framework: str, comm: str) -> Launcher:
    """The launcher of a framework's jobs with a way to communicate; raises `InputError` if none exists."""
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
    from dpro_search.collect.assemble.common import raw_format

    recorded_format = raw_format(raw)
    for launcher in launchers():
        if launcher.format == recorded_format:
            return launcher.trace_of(raw)
    raise InputError(
        f"{raw}/job.json: raw files of '{recorded_format}'; known are {', '.join(each.format for each in launchers())}"
    )


def all_targets() -> tuple[Target, ...]:
    """Everything that some kind's plans can be exported to, in the order of the kinds."""
    return tuple(dict.fromkeys(target for kind in kinds() for target in kind.targets))
