"""`Kind` and `Job`: what every verb asks of a recorded or described job, whatever its framework and scheme are.

A kind of job is one module of this package (or a small package) with a constant ``KIND``, and one line in `kinds._names`:

    class MyKind(Kind):                          class MyJob(Job):
        title = "a job of mine"                      space = PlanSpace(...)
        formats = ("my-format",)                     def of(cls, trace, options): ...
        job_name = "my.package:MyJob"                def _predict(self, plan): ...
        launcher_names = ("my.package:MINE",)        def timeline(self, plan): ...
                                                     def diagnose(self): ...

A `DescribedKind` has ``read(path)`` in place of ``formats``: its jobs come from a file, and their `Job.trace` is None. Settings
that only its plans have are a subclass of `SchemeSettings` (`space/schemes.py`) in the same module.

A verb calls `Kind.job` once, then asks the `Job`. What a job does not override it cannot do: the question is refused with a line
that names the kinds that can. ``tests/kinds/conformance.py`` holds what every kind must pass.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import msgspec
import numpy as np

from dpro_search.cluster import Cluster
from dpro_search.collect.trace import Floats, TensorInfo, Trace
from dpro_search.deploy.parts.part import JobFacts as DeployedFacts
from dpro_search.deploy.parts.part import Servers, Target
from dpro_search.errors import InputError
from dpro_search.graph.measured import measured_iteration_us, recording_doubt
from dpro_search.kinds._names import registered
from dpro_search.kinds._work import Work
from dpro_search.machine import VARIABLE, Calibration
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.moves import contiguous_groups
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import ClusterChange, Scale, Scenario
from dpro_search.space.transformations import PlanSpace

if TYPE_CHECKING:
    from dpro_search.collect.launchers._base import Launcher
    from dpro_search.replay.outputs import MeasuredOps
    from dpro_search.replay.timeline import Timeline
    from dpro_search.report.groups import TensorGroups
    from dpro_search.report.quality import Term

COMPUTE = ("op-fusion", "precision", "recomputation", "accumulation")  # transformations that a search tries only where asked for
_COMPUTE_OF_FIELD = {
    "op_clusters": "op-fusion",
    "bfloat16_ops": "precision",
    "bfloat16_modules": "precision",
    "recomputed_ops": "recomputation",
    "recomputed_modules": "recomputation",
    "micro_batches": "accumulation",
}
_LOSSY = ("compression", "micro_batches", "reduce_dtype")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What plans may do beyond communication."""

    compute: frozenset[str] = frozenset()  # Some of `COMPUTE`.
    allow_lossy: bool = False  # Also what changes the numbers: compression of gradients, batch normalisation over smaller batches.
    memory_limit_bytes: int | None = None  # Plans that need more than that on a rank are infeasible; None: no limit.
    # cluster_model, precision_table: What fused ops take: a folder of 'dpro-search fit', None: the package's model. What bfloat16
    # does to ops: a table of `costmodel.precision`, which "precision" needs.
    cluster_model: Path | None = None
    precision_table: Path | None = None
    # What all-reduces by each of Open MPI's algorithms take, a folder of 'dpro-search fit'; plans of a Horovod job on MPI then
    # choose among them. None: all-reduces are as recorded.
    all_reduce_model: Path | None = None

    def __post_init__(self) -> None:
        unknown = self.compute.difference(COMPUTE)
        if unknown:
            raise InputError(f"transformation '{min(unknown)}' is unknown (known: {', '.join(COMPUTE)})")
        if self.memory_limit_bytes is not None and self.memory_limit_bytes <= 0:
            raise InputError(f"the memory limit must be above 0 bytes, not {self.memory_limit_bytes}")

    @property
    def named(self) -> dict[str, str | Path]:
        """What decides predictions beside the trace, by name: for the run folder of a search."""
        found: dict[str, str | Path] = {}
        if self.compute:
            found["with"] = ",".join(sorted(self.compute))
        if self.allow_lossy:
            found["allow_lossy"] = "yes"
        if self.memory_limit_bytes is not None:
            found["memory_limit_bytes"] = str(self.memory_limit_bytes)
        for name in ("cluster_model", "precision_table", "all_reduce_model"):
            path: Path | None = getattr(self, name)
            if path is not None:
                found[name] = path
        if machine := os.environ.get(VARIABLE):
            found["machine"] = Path(machine)
        return found

    def allowing(self, plan: Plan) -> PlanOptions:
        """The options under which a plan with the fields of this one is legal: what is requested is predicted, not proposed."""
        return replace(
            self,
            compute=self.compute | {_COMPUTE_OF_FIELD[name] for name in plan.settings if name in _COMPUTE_OF_FIELD},
            allow_lossy=self.allow_lossy or any(name in plan.settings for name in _LOSSY),
        )


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table for people: a title, names of columns, rows of cells; only the first column may be long."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Recorded steps beside their own replay."""

    measured_us: float  # What was measured.
    prediction: Prediction  # What was predicted of the same.
    error_pct: float  # Signed for one step; the mean of absolute errors for several.
    ops: int  # How many ops were replayed.
    seconds: float = 0.0  # How long that took.
    more: Mapping[str, Any] = field(default_factory=dict)  # Facts that the kind of job adds to the output of `replay`.


class Job(ABC):
    """One job: predictions of its plans, and its diagnosis. Deterministic."""

    title: str  # What its kind is called: "a Horovod job".
    trace: Trace | None = None  # The recording that it comes from; None: it was described.
    tensors: tuple[TensorInfo, ...]  # The communicated tensors, in the order in which they become ready.
    recorded: Any = None  # Horovod's knobs in the recording (`CommSettings`); None for other kinds of jobs.
    space: PlanSpace  # Which plans there are.
    askable: tuple[str, ...] = ()  # Plan fields that text can set in a scenario, whether or not `space` has them now.
    # What else a scenario can change: some of "groups", "ranks", "cores", "rate", "compute", "bandwidth", "communication".
    settings: ClassVar[tuple[str, ...]] = ()
    unplaced: Mapping[str, str] = MappingProxyType({})  # Recorded ops that have no place in the graph, and why.
    memory_limit_bytes: int | None = None

    @classmethod
    def of(cls, source: Any, options: PlanOptions) -> Self:
        """The job of a trace, or of a description.

        Raises
        ------
        InputError
            The options ask for what such a job does not have.
        GraphError
            The trace cannot be replayed.
        """
        raise NotImplementedError

    @property
    def calibration(self) -> Calibration | None:
        """What the model error of predictions was calibrated on; None: intervals are the spread of recorded steps alone."""
        return None

    # What a plan costs.

    def predict(self, plan: Plan) -> Prediction:
        """What one iteration would cost under a plan; raises `InputError` for a plan that the job cannot follow."""
        self.space.check(plan)
        found, limit = self._predict(plan), self.memory_limit_bytes
        peak = found.peak_memory_bytes
        if limit is None or (peak is not None and peak <= limit):
            return found
        needed = "an amount of memory that is not known" if peak is None else f"{peak / 2**20:.0f} MiB"
        reason = f"needs {needed}, and may have {limit / 2**20:.0f}"
        return msgspec.structs.replace(found, infeasible=reason)

    @abstractmethod
    def _predict(self, plan: Plan) -> Prediction:
        """The prediction of a legal plan, whatever memory it needs."""

    def sampled(self, plan: Plan, *, samples: int, seed: int = 0, on_sample: Callable[[], None] = lambda: None) -> Floats:
        """Iteration times of replays with durations drawn anew, [samples]; the same draws for every plan.

        Raises `InputError` if this kind of job has one duration of each op only.
        """
        raise self.cannot("sampled", "be replayed with other durations")

    def replayed(self, plan: Plan) -> Prediction:
        """What `replay` reports of a plan: `predict` with a breakdown, and what it leaves out to be fast."""
        return self.predict(plan)

    def more_facts(self, plan: Plan) -> dict[str, Any]:
        """What `replay` reports of a plan beside a prediction, for its JSON."""
        return {}

    def reasons(self, plans: Sequence[Plan]) -> tuple[str, ...]:
        """Why the first of some ranked plans is the best of them, and what the others lose, in sentences."""
        return ()

    # What else can be asked of it.

    @property
    def work(self) -> Work | None:
        """What an iteration does, of a job that knows it without a recording."""
        return None

    @property
    def nothing_to_search(self) -> str:
        """Why there are no plans of such a job, for a job whose space is empty."""
        of_what = self.title if self.trace is None else f"the trace ({self.trace.meta.format}) is of a job"
        return f"{of_what} whose knobs are not known: there is nothing to search"

    @property
    def measured_iteration_us(self) -> float | None:
        """The measured iteration that the prediction of the recorded setting is compared with; None: not measured."""
        return None if self.trace is None else measured_iteration_us(self.trace)

    @property
    def recording_doubt(self) -> str | None:
        """Why predictions from the recording are not to be trusted, where its own replay is far from what was measured; or None."""
        return recording_doubt(self.predict(Plan()).iteration_us, self.measured_iteration_us)

    def measured_iterations_us(self) -> Floats:
        """The measured iterations whose median `measured_iteration_us` is, [n]."""
        return np.zeros(0) if self.trace is None else self.trace.iterations_us()

    def under(self, scenario: Scenario) -> tuple[Job, Plan]:
        """The job on the scenario's cluster with its speeds, and the scenario's plan; raises `InputError` for what it cannot be."""
        job: Job = self
        plan = scenario.plan
        if scenario.groups is not None:
            if scenario.groups < 1:
                raise InputError(f"groups must be at least 1, not {scenario.groups}")
            plan = plan.changed(tensor_groups=contiguous_groups(self.tensors, scenario.groups))
        if scenario.cluster != ClusterChange():
            job = job.moved(scenario.cluster)
        for scale in scenario.scales:
            job = job.scaled(scale)
        return job, plan

    @property
    def cluster(self) -> ClusterSpec:
        """What the job runs on."""
        assert self.trace is not None, "a described job has its own"
        return ClusterSpec.of(self.trace.meta)

    def moved(self, change: ClusterChange) -> Job:
        """The same job on a changed cluster; raises `InputError` for what it cannot be predicted on."""
        if not change.on_gpus:
            return self.on(change.applied(self.cluster))
        assert change.machines is not None, "on GPUs"
        if change.cores is not None:
            raise InputError(f"cores={change.cores}: ranks on {change.machines.name} have a GPU each; leave cores out")
        machines, rate_bps = change.machines, change.rate_bps
        if rate_bps is not None:
            machines = machines.at_nic_rate(None if math.isinf(rate_bps) else rate_bps, "given as rate=")
        return self.at_scale(machines, change.ranks)

    def starting_from(self, plan: Plan) -> Job:
        """The job that runs under a plan to begin with: its empty plan is that. Of a job that was written down, not recorded."""
        raise self.cannot("starting_from", "begin with another setting than the recorded one")

    def on(self, cluster: ClusterSpec) -> Self:
        """The same job on another cluster."""
        raise self.cannot("on", "be predicted on another cluster")

    def left_out(self, change: ClusterChange) -> tuple[str, ...]:
        """What predictions under a change do not know and take for granted, a sentence each.

        Of a recorded job nothing without a change; of a described one what its description leaves open.
        """
        return (*change.left_out, *ranks_in_turn(self.cluster.ranks, self.recorded_ranks))

    @property
    def recorded_ranks(self) -> int:
        """Ranks whose computation is known."""
        assert self.trace is not None, "a described job says so itself"
        return self.trace.meta.ranks

    def at_scale(self, cluster: Cluster, ranks: int | None = None) -> Job:
        """The same job on the devices of a cluster of another kind, where what was measured of communication does not hold.

        Parameters
        ----------
        ranks
            On the first devices; None: one on each.
        """
        raise self.cannot("at_scale", "be predicted on a cluster of other devices")

    def scaled(self, scale: Scale) -> Self:
        """The same job with a part that takes another time."""
        raise self.cannot("scaled", "be predicted with other speeds")

    def allowing(self, plan: Plan, options: PlanOptions) -> Job:
        """The same job with a space that has the fields of a plan, predicted with the models that the options name."""
        return self

    # One iteration, op by op.

    @abstractmethod
    def op_count(self, plan: Plan) -> int:
        """How many ops an iteration under a plan has."""

    @abstractmethod
    def timeline(self, plan: Plan) -> Timeline:
        """A replay of a plan, op by op."""

    def measured_ops(self, timeline: Timeline) -> MeasuredOps | None:
        """The recorded step that a timeline of the recorded setting is shown beside; None: there is none."""
        return None

    def perfetto(self, plan: Plan, *, recorded: bool) -> bytes:
        """An iteration for ui.perfetto.dev; where `recorded`, beside the measured step."""
        from dpro_search.replay.outputs import perfetto_json

        timeline = self.timeline(plan)
        measured = self.measured_ops(timeline) if recorded else None
        return perfetto_json(timeline, measured=measured, first_iteration=timeline.iterations - 1)

    # How well the model fits the recording.

    def held_out(self, step: int) -> Comparison:
        """A profiled step, predicted from all others; raises `InputError` if it was not profiled."""
        raise self.cannot("held_out", "be predicted without one of its steps (--holdout-step)")

    def own_durations(self) -> Comparison:
        """Each profiled step, replayed with its own durations."""
        raise self.cannot("own_durations", "be replayed step by step (--own-durations)")

    def terms(self) -> tuple[Term, ...]:
        """Fitted numbers of its cost model, for the report."""
        return ()

    # What people want to know about it.

    @abstractmethod
    def diagnose(self) -> dict[str, Any]:
        """The facts that `diagnose` prints as JSON.

        At least ``iteration_us``, ``measured_iteration_us``, ``critical_path``, ``critical_ops``, ``ranks``, ``gains``,
        ``findings``, ``warnings``.
        """

    @abstractmethod
    def tables(self, facts: Mapping[str, Any]) -> list[Table]:
        """The facts of `diagnose` as tables for people."""

    def tensor_groups(self, step: int | None, best: Plan | None) -> TensorGroups | None:
        """Which tensors travel together, as recorded and under the best plan; None: not known.

        Parameters
        ----------
        step
            The recorded step to look at; None: none was recorded op by op.
        best
            None: no search, or no plan beside the recorded setting.
        """
        return None

    def cannot(self, method: str, what: str) -> InputError:
        """The error for a question that this kind of job cannot answer: it names the kinds that can."""
        able = [kind.title for kind in registered() if getattr(kind.job_type, method) is not getattr(Job, method)]
        return InputError(f"{self.title} cannot {what}" + (f"; {' and '.join(able)} can" if able else ""))


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
        found: type[Job] = resolve_name(self.job_name)
        return found

    @abstractmethod
    def recognises(self, source: _Source, /) -> bool:
        """Whether a source of its type is of such a job."""

    def job(self, source: _Source, /, options: PlanOptions) -> Job:
        """The job of a source; raises what `Job.of` raises."""
        return self.job_type.of(source, options)

    @property
    def launchers(self) -> tuple[Launcher, ...]:
        """What records and times such jobs; empty: they cannot be started here."""
        return tuple(map(resolve_name, self.launcher_names))

    def servers(self, source: _Source, /) -> Servers:
        """The parameter servers of a job, which in a trace are ranks behind those that train."""
        return Servers()

    def targets_of(self, framework: str) -> tuple[Target, ...]:
        """Those of `targets` that jobs of a framework have."""
        return self.targets

    @abstractmethod
    def facts(self, source: _Source, /) -> DeployedFacts:
        """What an export can check a plan against."""


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
    """A kind of job that a file describes."""

    def text(self, wanted: Wanted) -> str | None:
        """A commented file that `read` takes; None: this kind writes none. Raises `InputError` for what cannot be described."""
        return None

    @abstractmethod
    def read(self, path: Path) -> _Described | None:
        """The description in a file; None: it is of another kind. Raises `InputError` for one of this kind with an error in it."""

    def recognises(self, source: _Described) -> bool:
        return True

    def facts(self, source: _Described) -> DeployedFacts:
        return DeployedFacts(framework=source.framework or None)


def ranks_in_turn(ranks: int, known: int) -> tuple[str, ...]:
    """The assumption of a job of more ranks than were recorded, as a sentence; empty for others."""
    return (f"{ranks} ranks compute like the {known} recorded ones, in turn",) if ranks > known else ()


def refuse_compute(options: PlanOptions, trace: Trace, fields: Sequence[str] = ()) -> None:
    """Raise `InputError` if the options ask for changes of compute, or for algorithms of MPI, which such jobs do not have.

    `fields`: what their plans change instead.
    """
    refuse_algorithms(options, trace)
    if options.compute:
        raise InputError(
            "only jobs of TensorFlow with Horovod, and of PyTorch's DistributedDataParallel, have plans for compute, and this "
            f"trace ({trace.meta.format}) is of neither" + (f"; its plans change {', '.join(fields)}" if fields else "")
        )


def refuse_algorithms(options: PlanOptions, trace: Trace) -> None:
    """Raise `InputError` if the options ask for algorithms of MPI, which such jobs do not have."""
    if options.all_reduce_model is not None:
        raise InputError(f"the all-reduce model is for Horovod jobs on Open MPI, and this trace ({trace.meta.format}) is of none")


def with_memory_limit(job: Job, limit_bytes: int | None) -> Job:
    """The job with plans that need more memory infeasible; raises `InputError` if the trace does not tell what it takes."""
    if limit_bytes is not None:
        if job.predict(Plan()).peak_memory_bytes is None:
            raise InputError("the memory limit cannot be kept: the trace does not tell how much memory the job takes")
        job.memory_limit_bytes = limit_bytes
    return job
