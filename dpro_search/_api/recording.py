"""A job as a value of the Python API: its predictions, diagnosis, search and exports; `dpro_search.api` opens it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from dpro_search._api import views
from dpro_search._api.errors import page_path, speaks_python
from dpro_search._api.run import Run
from dpro_search._api.values import Diagnosis, Microseconds, Replay
from dpro_search._api.views import Tabular
from dpro_search.analysis import predict
from dpro_search.analysis.predict import ReplayRequest
from dpro_search.collect._files import write_file
from dpro_search.collect.trace import EventKind, Trace
from dpro_search.errors import InputError
from dpro_search.graph.measured import measured_iteration_us
from dpro_search.kinds import Description, PlanOptions, Source, files_of, job_of, searchable
from dpro_search.kinds._job_on_cluster import job_on_cluster
from dpro_search.kinds._measured_runs import learned_changes
from dpro_search.quantities import parse_bytes
from dpro_search.report.html import table, to_text
from dpro_search.report.timeline import typical_step
from dpro_search.report.units import duration
from dpro_search.space.plan import Plan

if TYPE_CHECKING:
    from dpro_search.analysis.expect import Expectation
    from dpro_search.deploy.export import ExportedFiles
    from dpro_search.search import Trial


@dataclass(frozen=True, kw_only=True)
class Recording(Tabular):
    """A job that was recorded or described: its predictions, diagnosis and search."""

    folder: Path  # Path of the trace folder, or of the file that describes the job.
    source: Source = field(repr=False)  # A trace or a description.

    @property
    def trace(self) -> Trace:
        """Events, steps, tensors and provenance, in columns; raises `InputError` for a job that was described."""
        if not isinstance(self.source, Trace):
            raise InputError(f"{self.folder}: describes a job that was not recorded: there is no trace")
        return self.source

    def __repr__(self) -> str:
        return f"Recording(folder={str(self.folder)!r}, source={self.source!r})"

    @speaks_python
    def replay(
        self,
        plan: Plan | None = None,
        *,
        cluster: str | None = None,
        changes: Mapping[str, object] | None = None,
        what_if: str | Sequence[str] = (),
        holdout_step: int | None = None,
        samples: int | None = None,
    ) -> Replay:
        """Predict the iteration time, as recorded or changed.

        Parameters
        ----------
        plan
            A plan; None: the recorded setting.
        cluster
            What the job runs on, like "16xhgx-h100" or a TOML file; None: as recorded.
        changes
            Other settings, ranks and rates, like ``{"bucket_cap_bytes": "5MiB", "ranks": 4, "rate": "500mbit"}``. A setting
            of several values takes a list, like ``{"stage_layers": [7, 8, 8, 7]}`` or ``{"kept_units": ["head", "layer.7"]}``.
        what_if
            What-if changes of costs: ``compute=0.9``, ``rank1.compute=0.9``, ``bandwidth=2``, ``communication=0``.
        holdout_step
            Predict this profiled step from all the others.
        samples
            Number of replays with resampled durations; the quantiles are in ``facts["quantiles_us"]``.

        Raises
        ------
        InputError
            The job does not support a requested change.

        Examples
        --------
        >>> from dpro_search import load
        >>> job = load()
        >>> job.replay(Plan.of(bucket_cap_bytes=2**20)).measured_us is None  # another setting has no measurement
        True
        >>> sorted(job.replay().breakdown_us)
        ['compute', 'contention', 'exposed_communication']
        """
        if plan is not None and not isinstance(plan, Plan):
            raise TypeError(f"plan must be a Plan, not {type(plan).__name__}; changes takes a dict")
        if samples is not None and samples < 1:
            raise InputError(f"samples must be at least 1, not {samples}")
        request = ReplayRequest(
            plan=plan or Plan(),
            cluster=cluster,
            changes=(*_texts(changes), *_several(what_if)),
            holdout_step=holdout_step,
            samples=samples,
        )
        return Replay.of(predict.replay(job_of(self.source), request))

    @speaks_python
    def diagnose(self, *, cluster: str | None = None, changes: Mapping[str, object] | None = None) -> Diagnosis:
        """Show what an iteration waits for, which rank comes late, and what each improvement would gain.

        Parameters
        ----------
        cluster
            What the job runs on, like "16xhgx-h100" or a TOML file; None: as recorded.
        changes
            Of cluster and speeds, like ``{"ranks": 64, "compute": 0.9}``.

        Examples
        --------
        >>> from dpro_search import load
        >>> gains = load().diagnose().gains
        >>> gains[0]["gain_us"] >= gains[-1]["gain_us"]
        True
        """
        diagnosis = job_on_cluster(job_of(self.source), cluster, _texts(changes), verb="diagnose").job.diagnose()
        facts = msgspec.to_builtins(diagnosis)
        return Diagnosis(
            iteration_us=Microseconds(diagnosis.iteration_us),
            measured_us=Microseconds.known(diagnosis.measured_iteration_us),
            findings=diagnosis.findings,
            gains=tuple(facts["gains"]),
            facts=facts,
        )

    @speaks_python
    def expect(
        self,
        measured: Mapping[str, object] | None = None,
        *,
        changes: Mapping[str, object] | None = None,
        with_next: bool = False,
    ) -> Expectation:
        """Compare a described job with measured numbers, and rank the causes that could explain a difference.

        Parameters
        ----------
        measured
            The numbers, like ``{"tokens_per_second": 9000, "memory": "61GiB"}``; ``dpro-search expect --help`` has their names.
        changes
            Settings of the job, like ``{"tp": 4}``.
        with_next
            Whether to say which measurement to make next.

        Raises
        ------
        InputError
            The job was recorded, or numbers contradict each other or the hardware.
        """
        from dpro_search.analysis.expect import expect

        job = job_of(self.source)
        here, plan = job.under(job.job.scenario(_texts(changes)))
        return expect(here, _texts(measured), plan=plan, with_next=with_next)

    @speaks_python
    def search(
        self,
        *,
        trials: int = 500,
        sampler: str = "auto",
        seed: int = 0,
        out: str | Path | None = None,
        with_: str | Sequence[str] = (),
        allow_lossy: bool = False,
        memory_limit_bytes: int | str | None = None,
        cluster: str | None = None,
        changes: Mapping[str, object] | None = None,
        cluster_model: str | Path | None = None,
        precision_table: str | Path | None = None,
        all_reduce_model: str | Path | None = None,
        calibrate: str | Path | None = None,
        quantile: float | None = None,
        workers: int = 1,
        timeout_s: float | None = None,
        until_settled: bool = False,
        on_trial: Callable[[Trial], None] | None = None,
    ) -> Run:
        """Predict plans and keep the best, in a run folder; an existing one, also of ``dpro-search run``, is continued.

        Parameters
        ----------
        trials
            Number of plans to evaluate, the recorded setting included.
        sampler, seed
            What proposes plans, and its random seed; equal seeds give equal plans.
        out
            The run folder; None: a folder in ``runs/`` named by trace, sampler and seed.
        with_
            Transformations of compute to search as well: some of "op-fusion", "precision", "recomputation" and "accumulation"
            (TensorFlow with Horovod), "precision" and "recomputation" (PyTorch's DistributedDataParallel).
        allow_lossy
            Also search lossy changes: gradients in fp16 (Horovod, DistributedDataParallel, BytePS), by PowerSGD
            (DistributedDataParallel) or in 2 bits (KVStore).
        memory_limit_bytes
            Memory limit of a rank, like ``2**31`` or "72GiB"; recomputation and gradient accumulation are searched as well.
        cluster, changes
            What the job runs on, and changes of cluster and speeds, as in `diagnose`.
        cluster_model, precision_table
            Model of the durations of fused ops (a folder of ``dpro-search fit``; None: the bundled one), and table of op
            durations in bfloat16.
        all_reduce_model
            Model of Open MPI's all-reduce algorithms (a folder of ``dpro-search fit``): plans of a Horovod job on MPI may then
            choose algorithms by size.
        calibrate
            A run folder: predictions are corrected by its real runs.
        quantile
            Re-rank the best plans by this quantile over resampled durations, for example 0.9.
        workers
            Number of search processes.
        timeout_s
            End after this time, with the plans found by then.
        until_settled
            End when the expected further gain is below the prediction error.
        on_trial
            Called after each trial.

        Raises
        ------
        InputError
            The folder belongs to another search, there is nothing to search, or the job does not support an option.
        MissingCapabilityError
            The disk cannot take the results.

        Examples
        --------
        >>> import tempfile
        >>> from dpro_search import load
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = load().search(trials=20, sampler="mcmc", out=f"{folder}/run")
        >>> run.result.trials
        20
        >>> run.speedup >= 1
        True

        With micro-batches, a memory limit of two gigabytes, and plans ranked by the 0.9 quantile:

        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = load(sample="resnet50_2ranks_2gbit").search(
        ...         trials=20, sampler="mcmc", out=f"{folder}/run", with_=["accumulation"], memory_limit_bytes=2**31, quantile=0.9
        ...     )
        >>> 0 <= run.result.plans[0].beats_recorded <= 1  # share of the draws in which it is faster
        True
        """
        from dpro_search.search import run_search
        from dpro_search.search.request import SearchRequest, usual_run

        options = PlanOptions(
            compute=frozenset(_several(with_)),
            allow_lossy=allow_lossy,
            memory_limit_bytes=parse_bytes(memory_limit_bytes) if isinstance(memory_limit_bytes, str) else memory_limit_bytes,
            cluster_model=None if cluster_model is None else Path(cluster_model),
            precision_table=None if precision_table is None else Path(precision_table),
            all_reduce_model=None if all_reduce_model is None else Path(all_reduce_model),
        )
        calibrated = None if calibrate is None else Path(calibrate)
        learned = learned_changes(self.folder, calibrated, cluster)
        job, named, place = job_on_cluster(job_of(self.source, options), cluster, (*learned, *_texts(changes)), verb="run")
        request = SearchRequest.of(
            self.folder, searchable(job), options.named | named | files_of(self.source), None if learned else calibrated
        )
        folder = usual_run(self.folder, sampler, seed) if out is None else Path(out)
        result = run_search(
            request.objective,
            trials=trials,
            sampler=sampler,
            seed=seed,
            out=folder,
            trace=request.trace,
            trace_digest=request.trace_digest,
            on_trial=on_trial,
            timeout_s=timeout_s,
            workers=workers,
            options=request.options,
            cluster=place,
            until_settled=until_settled,
            quantile=quantile,
        )
        return Run(folder=folder, result=result)

    @speaks_python
    def export(self, plan: Plan, out: str | Path, *, targets: Sequence[str] = ()) -> ExportedFiles:
        """Write the files that the job needs to follow a plan of your own into the new folder `out`.

        Parameters
        ----------
        targets
            Targets, like "ddp" or "torchtitan"; empty: those of the job that the plan needs.

        Raises
        ------
        InputError
            The folder exists, or no target can express the plan.

        Examples
        --------
        >>> import tempfile
        >>> from dpro_search import load
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     exported = load().export(Plan.of(bucket_cap_bytes=2**20), f"{folder}/tuned")
        >>> sorted(exported.files)
        ['README.md', 'ddp.json', 'ddp.py', 'plan.json']
        """
        from dpro_search.deploy.export import export_plan
        from dpro_search.deploy.targets import targets_for, targets_named
        from dpro_search.kinds import all_targets, deployed_job

        here = job_of(self.source)
        deployed, known = deployed_job(self.source, here), all_targets()
        chosen = targets_named(targets, known) if targets else targets_for(plan, deployed.targets, deployed.usual)
        prediction = here.predict(plan)
        if prediction.infeasible:
            raise InputError(f"{plan!r}: {prediction.infeasible}")
        return export_plan(plan, Path(out), chosen, deployed.facts, (prediction, here.predict(Plan())), known)

    @speaks_python
    def report(self, out: str | Path) -> Path:
        """Write one self-contained HTML page on the recording; returns its path."""
        from dpro_search.report import render
        from dpro_search.report.gathered import facts_of_source

        write_file(page_path(out), render(facts_of_source(self.folder)).encode())
        return Path(out)

    def columns(self) -> dict[str, Any]:
        """The recorded events; ``kind`` and ``name`` as text, ``tensor`` the name of the communicated tensor or None."""
        events = self.trace.events
        kinds = {int(kind): kind.name.lower() for kind in EventKind}
        tensors = np.array([*(tensor.name for tensor in self.trace.tensors), None], dtype=object)
        return {
            "rank": events.rank,
            "kind": [kinds[kind] for kind in events.kind.tolist()],
            "name": np.array(self.trace.names, dtype=object)[events.name],
            "stream": events.stream,
            "step": events.step,
            "start_us": events.start_us,
            "end_us": events.end_us,
            "tensor": tensors[events.tensor],
            "size_bytes": events.size_bytes,
        }

    @speaks_python
    def plot(self, rank: int = 0, *, step: int | None = None, ax: Any = None) -> Any:
        """Draw one step of a rank with matplotlib, the replayed lanes above the recorded ones; returns the axes.

        Parameters
        ----------
        step
            A profiled step; None: the one of median length.
        ax
            Axes to draw on; None: those of a new figure.
        """
        from dpro_search.report.gathered import step_timeline

        profiled = self.trace.steps.index[self.trace.steps.traced].tolist()
        if step is not None and step not in profiled:
            known = f"choose a step from {min(profiled)} to {max(profiled)}" if profiled else "no step was"
            raise InputError(f"step {step} was not profiled; {known}")
        shown = typical_step(self.trace) if step is None else step
        timeline = step_timeline(job_of(self.trace), self.trace, shown, [])
        lanes = [lane for lane in timeline.lanes if lane.rank == rank]
        if not lanes:
            raise InputError(f"rank {rank} has no events to plot; ranks are {', '.join(map(str, timeline.ranks)) or 'none'}")
        return views.timeline(lanes, f"{self.folder.name}: rank {rank}" + ("" if shown is None else f", step {shown}"), ax)

    def _repr_html_(self) -> str:
        if isinstance(self.source, Description):
            return to_text(table(f"Description {self.folder.name}", ("", "value"), self.source.provenance))
        meta, measured_us = self.trace.meta, measured_iteration_us(self.trace)
        rows = [
            ("framework", f"{meta.framework}, communication by {meta.comm}"),
            ("ranks", f"{meta.ranks} on {len(set(meta.hosts))} hosts" if any(meta.hosts) else f"{meta.ranks}"),
            ("events", f"{len(self.trace.events)}"),
            ("communicated tensors", f"{len(self.trace.tensors)}"),
            ("recorded", meta.recorded_at),
        ]
        if measured_us is not None:
            rows.append(("measured iteration", duration(measured_us)))
        return to_text(table(f"Recording {self.folder.name}", ("", "value"), [row for row in rows if row[1]]))


def _texts(changes: Mapping[str, object] | None) -> tuple[str, ...]:
    """Changes as the command line writes them; raises `InputError` for what is no value of one."""
    texts = []
    for key, value in (changes or {}).items():
        values = list(value) if isinstance(value, list | tuple) else [value]
        if not values or not all(isinstance(one, str | bool | int | float | np.integer | np.floating) for one in values):
            raise InputError(f"changes: {key} is {value!r}; give a number, a text or a list, and leave out what stays as recorded")
        joint = "+" if any(isinstance(one, str) for one in values) else ","
        words = (
            str(int(one)) if isinstance(one, bool) else repr(float(one)) if isinstance(one, float) else str(one) for one in values
        )
        texts.append(f"{key}={joint.join(words)}")
    return tuple(texts)


def _several(values: str | Sequence[str]) -> Sequence[str]:
    """One value as a sequence of one."""
    return (values,) if isinstance(values, str) else values
