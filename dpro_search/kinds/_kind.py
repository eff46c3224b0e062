"""`Kind`: how a kind of job is recognised, started, and made into a `Job`.

A kind of job is one module of this package (or a small package) with a constant ``KIND``, and one line in `kinds._names`:

    class MyKind(Kind):                          class MyJob(Job):
        title = "a job of mine"                      def of(cls, trace, options): ...
        formats = ("my-format",)                     def plans(self, scenario): ...
        job_name = "my.package:MyJob"                def lower(self, scenario, *, steps=None): ...
        launcher_names = ("my.package:MINE",)        def diagnose(self, here): ...

A `DescribedKind` has ``read(path)`` in place of ``formats``: its jobs come from a file, and their `Job.trace` is None. Settings
that only its plans have are a subclass of `SchemeSettings` (`space/schemes.py`) in the same module.

A verb makes a `JobInScenario` of the kind's `Job`, and asks that. ``tests/kinds/conformance.py`` holds what every kind must pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from dpro_search.collect.trace import Trace
from dpro_search.deploy.parts.part import JobFacts as DeployedFacts
from dpro_search.deploy.parts.part import Servers, Target
from dpro_search.errors import InputError
from dpro_search.kinds._job import Job
from dpro_search.kinds._options import PlanOptions

if TYPE_CHECKING:
    from dpro_search.collect.capture import CapturedGraph
    from dpro_search.collect.launchers._base import Launcher
    from dpro_search.collect.tables.parallel_times import ParallelTimes
    from dpro_search.deploy.jobs import RecordedJob
    from dpro_search.kinds._job import JobInScenario
    from dpro_search.space.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Description:
    """A job that was written down, not recorded: what a `DescribedKind` reads from a file. A kind adds fields of its own."""

    framework: str = ""  # Like that of a trace; decides which targets plans are exported to.
    provenance: tuple[tuple[str, str], ...] = ()  # Titles and values, for the report.
    warnings: tuple[str, ...] = ()  # Sentences that every verb with findings repeats.
    # Further files that it was read from, by a name: a search with other content is another one.
    files: Mapping[str, Path] = field(default_factory=dict)


Source = Trace | Description  # what a job comes from
_Source = TypeVar("_Source", bound=Source)
_Described = TypeVar("_Described", bound=Description)


class AnyKind(ABC, Generic[_Source]):
    """A kind of job: makes a `Job` of its sources, and knows how such a job is started and follows a plan.

    `Kind` is for jobs that were recorded, `DescribedKind` for those that were written down.
    """

    title: ClassVar[str]  # "a Horovod job".
    targets: ClassVar[tuple[Target, ...]] = ()  # What plans of such jobs can be exported to.
    source_type: ClassVar[type[Source]]
    # job_name, launcher_names: Where `job_type` and `launchers` are, "module:name"; they are imported when they are first needed.
    job_name: ClassVar[str]
    launcher_names: ClassVar[tuple[str, ...]] = ()
    # Where the launcher is that starts jobs of which a profile was imported, when their command is given; "": none does.
    profile_launcher_name: ClassVar[str] = ""

    @property
    def job_type(self) -> type[Job]:
        """The class of its jobs."""
        job_type: type[Job] = resolve_name(self.job_name)
        return job_type

    @abstractmethod
    def recognises(self, source: _Source, /) -> bool:
        """Whether a source of its type is of such a job."""

    def job(self, source: _Source, /, options: PlanOptions) -> Job:
        """The job of a source; raises what `Job.of` raises."""
        return self.job_type.of(source, options)

    @property
    def launchers(self) -> tuple[Launcher, ...]:
        """Launchers that record and time such jobs; empty: they cannot be started here."""
        return tuple(map(resolve_name, self.launcher_names))

    def servers(self, source: _Source, /) -> Servers:
        """The parameter servers of a job, which in a trace are ranks behind those that train."""
        return Servers()

    def targets_of(self, framework: str) -> tuple[Target, ...]:
        """Those of `targets` that jobs of a framework have."""
        return self.targets

    def usual_target(self, framework: str) -> Target | None:
        """The target of a framework's own jobs, where several of `targets_of` can follow a plan."""
        return None

    @abstractmethod
    def facts(self, source: _Source, /) -> DeployedFacts:
        """Facts against which an export can check a plan."""


class Kind(AnyKind[Trace]):
    """A kind of recorded job."""

    formats: ClassVar[tuple[str, ...]] = ()  # `TraceMeta.format` of its traces.
    source_type = Trace

    def recognises(self, trace: Trace) -> bool:
        return trace.meta.format in self.formats

    def facts(self, trace: Trace) -> DeployedFacts:
        return replace(DeployedFacts.of(trace), servers=self.servers(trace))


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A description that is to be written; None: what is usual."""

    model: str
    cluster: str
    global_batch: int | None = None  # Sequences of a step.
    sequence: int | None = None  # Tokens of a sequence.
    precision: str | None = None
    framework: str | None = None


class DescribedKind(AnyKind[_Described]):
    """A kind of job that a file describes, or, of a kind that says so, a folder."""

    reads_folders: ClassVar[bool] = False

    def text(self, request: Wanted) -> str | None:
        """A commented file that `read` takes; None: this kind writes none. Raises `InputError` for what cannot be described."""
        return None

    def names(self) -> Mapping[str, Sequence[str]]:
        """Names that a file can give, by what they are of: "models", "clusters", "frameworks"."""
        return {}

    def captured_text(self, graph: CapturedGraph, name: str, cluster: str | None) -> str | None:
        """A file that `read` takes, of a captured model whose graph is in a file of that name beside it; None: none."""
        return None

    @abstractmethod
    def read(self, path: Path) -> _Described | None:
        """The description in a file or folder; None: it is of another kind. Raises `InputError` for one that has an error in it."""

    def recognises(self, source: _Described) -> bool:
        return True

    def real_job(
        self, here: JobInScenario, source: _Described, run: Path, command: Sequence[str], *, paced: bool = False
    ) -> RecordedJob:
        """A job that a search priced, as a command runs it here.

        Parameters
        ----------
        run
            Folder of the search whose plans run.
        paced
            Whether its ranks wait in place of computing.

        Raises
        ------
        InputError
            Nothing here can run it, or it has no command.
        """
        raise InputError(f"{self.title} was never run: record it with 'dpro-search collect' and search that trace")

    def timed(
        self,
        here: JobInScenario,
        source: _Described,
        plans: Sequence[Plan],
        command: Sequence[str],
        out: Path,
        *,
        on_start: Callable[[str], None] = lambda what: None,
    ) -> ParallelTimes:
        """Time a rank's work under plans, and what ranks exchange, on this machine; adds to the file `out`, or writes it.

        Raises
        ------
        InputError
            Nothing here can run the job, or a plan is impossible.
        JobError
            A run failed.
        """
        raise InputError(f"{self.title} cannot be timed")

    def facts(self, source: _Described) -> DeployedFacts:
        return DeployedFacts(framework=source.framework or None)
