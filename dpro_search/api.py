"""The Python API: recordings and searches as values, which a notebook shows as tables.

>>> import dpro_search
>>> job = dpro_search.load()  # the bundled sample, or a folder that `dpro-search collect` or `import` wrote
>>> job
Recording(folder=...)
>>> abs(job.replay().error_pct) < 8  # the prediction of the recorded setting, beside its measurement
True
>>> job.replay(changes={"rate": "500mbit"}).iteration_us > job.replay().iteration_us
True

A method does what the verb of its name does on the command line, by the same code; results are in microseconds and bytes. What is
wrong with the arguments or the files is an error of `dpro_search.errors`, all of them children of `DproSearchError`, with one line
that says what to do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dpro_search._api_values import Diagnosis, RealRuns, Replay
from dpro_search.cli._jobs import ReplayRequest, verbs_of
from dpro_search.cli.run import describe, digest_of
from dpro_search.collect._files import write_file
from dpro_search.collect.sample import sample_trace_path
from dpro_search.collect.trace import Trace
from dpro_search.errors import DproSearchError, InputError
from dpro_search.report.html import table, to_text
from dpro_search.report.units import duration, ratio
from dpro_search.search import SearchResult, Trial
from dpro_search.search.run_folder import read_run
from dpro_search.space.plan import Plan, Prediction

if TYPE_CHECKING:
    from dpro_search.deploy.export import ExportedFiles

__all__ = [
    "Diagnosis",
    "DproSearchError",
    "Plan",
    "Prediction",
    "RealRuns",
    "Recording",
    "Replay",
    "Run",
    "import_trace",
    "load",
    "load_run",
]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A recorded job: its trace, and what can be asked of it.

    Attributes
    ----------
    folder
        Where the trace lies.
    trace
        Events, steps, tensors and provenance, in columns.
    """

    folder: Path
    trace: Trace = field(repr=False)

    def replay(
        self,
        plan: Plan | None = None,
        *,
        changes: Mapping[str, object] | None = None,
        what_if: Sequence[str] = (),
        holdout_step: int | None = None,
        samples: int | None = None,
    ) -> Replay:
        """Predict the iteration time, as recorded or changed.

        Parameters
        ----------
        plan
            A strategy; None: as recorded.
        changes
            What ``--set`` takes, like ``{"fusion_threshold_bytes": 2**20, "ranks": 4, "rate": "500mbit"}``.
        what_if
            Questions about the job itself: ``compute=0.9``, ``rank1.compute=0.9``, ``bandwidth=2``, ``communication=0``.
        holdout_step
            Predict this profiled step from all the others.
        samples
            Replay so many times with durations drawn anew; the quantiles are in ``facts["quantiles_us"]``.

        Raises
        ------
        InputError
            The job does not know what was asked for.

        Examples
        --------
        >>> job = load()
        >>> job.replay(Plan(fusion_threshold_bytes=0)).measured_us is None  # another setting has no measurement
        True
        >>> sorted(job.replay().breakdown_us)
        ['compute', 'contention', 'exposed_communication']
        """
        asked = tuple(f"{key}={value}" for key, value in (changes or {}).items())
        with tempfile.TemporaryDirectory(prefix="dpro-search-plan-") as folder:
            path = None
            if plan is not None and plan != Plan():
                path = Path(folder) / "plan.json"
                path.write_bytes(plan.to_json())
            request = ReplayRequest(plan=path, changes=asked, what_ifs=tuple(what_if), holdout_step=holdout_step, samples=samples)
            if request.compares and request.changed:
                raise InputError("holdout_step compares with the recording: leave out plan, changes and what_if")
            facts = verbs_of(self.trace).replay_trace(self.trace, request)
        return Replay(
            iteration_us=facts["predicted_iteration_us"],
            interval_us=tuple(facts["interval_us"]),
            measured_us=facts["measured_iteration_us"],
            error_pct=facts["error_pct"],
            breakdown_us=facts["breakdown_us"],
            peak_memory_bytes=facts["peak_memory_bytes"],
            facts=facts,
        )

    def diagnose(self) -> Diagnosis:
        """Show what an iteration waits for, which rank comes late, and what each improvement would gain.

        Examples
        --------
        >>> gains = load().diagnose().gains
        >>> gains[0]["gain_us"] >= gains[-1]["gain_us"]
        True
        """
        facts = verbs_of(self.trace).diagnose_trace(self.trace)
        return Diagnosis(
            iteration_us=facts["iteration_us"],
            measured_us=facts["measured_iteration_us"],
            findings=tuple(facts["findings"]),
            gains=tuple(facts["gains"]),
            facts=facts,
        )

    def search(
        self,
        *,
        trials: int = 500,
        sampler: str = "auto",
        seed: int = 0,
        out: str | Path | None = None,
        workers: int = 1,
        timeout_s: float | None = None,
        until_settled: bool = False,
        on_trial: Callable[[Trial], None] | None = None,
    ) -> Run:
        """Price plans and keep the best, in a run folder. One that exists is continued.

        Parameters
        ----------
        trials
            Plans to price, the recorded setting included.
        sampler, seed
            How plans are chosen; the same seed gives the same plans.
        out
            The run folder; None: a name in ``runs/`` that says trace, sampler and seed.
        workers
            Processes that price plans.
        timeout_s
            End after this time, with what was found by then.
        until_settled
            End when more trials are expected to gain less than predictions are sure of.
        on_trial
            Called after each trial.

        Raises
        ------
        InputError
            The folder belongs to another search, or there is nothing to search.
        MissingCapabilityError
            The disk cannot take the results.

        Examples
        --------
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = load().search(trials=20, sampler="mcmc", out=f"{folder}/run")
        >>> run.result.trials
        20
        >>> run.speedup >= 1
        True
        """
        from dpro_search.replay.plan_predictor import plan_predictor
        from dpro_search.search import run_search

        folder = Path("runs") / f"{self.folder.resolve().name}-{sampler}-seed{seed}" if out is None else Path(out)
        result = run_search(
            plan_predictor(self.trace),
            trials=trials,
            sampler=sampler,
            seed=seed,
            out=folder,
            trace=str(self.folder.resolve()),
            trace_digest=digest_of(self.folder),
            on_trial=on_trial,
            timeout_s=timeout_s,
            workers=workers,
            until_settled=until_settled,
        )
        return Run(folder=folder, result=result)

    def report(self, out: str | Path) -> Path:
        """Write one HTML page on the recording, which needs nothing else to be read; returns its path."""
        from dpro_search.cli._report_facts import facts_of_trace
        from dpro_search.report import render

        write_file(Path(out), render(facts_of_trace(self.folder)).encode())
        return Path(out)

    def _repr_html_(self) -> str:
        from dpro_search.replay.evaluate import measured_iteration_us

        meta, measured_us = self.trace.meta, measured_iteration_us(self.trace)
        rows = [
            ("framework", f"{meta.framework}, communication by {meta.comm}"),
            ("ranks", f"{meta.ranks} on {len(set(meta.hosts))} hosts"),
            ("events", f"{len(self.trace.events)}"),
            ("communicated tensors", f"{len(self.trace.tensors)}"),
            ("recorded", meta.recorded_at),
        ]
        if measured_us is not None:
            rows.append(("measured iteration", duration(measured_us)))
        return to_text(table(f"Recording {self.folder.name}", ("", "value"), [row for row in rows if row[1]]))


@dataclass(frozen=True, kw_only=True)
class Run:
    """A search and what became of it.

    Attributes
    ----------
    folder
        The run folder.
    result
        Baseline and best plans with their predictions, fastest first.
    """

    folder: Path
    result: SearchResult = field(repr=False)

    @property
    def best(self) -> Plan:
        """The plan with the shortest predicted iteration; the empty one if none beats the recorded setting."""
        return self.result.plans[0].plan

    @property
    def speedup(self) -> float:
        """Predicted iteration time of the recorded setting over that of the best plan."""
        return self.result.plans[0].speedup

    def export(self, out: str | Path, *, targets: Sequence[str] = (), plan: int = 0) -> ExportedFiles:
        """Write the files with which a real job follows a plan (0: the best) into the new folder `out`.

        Parameters
        ----------
        targets
            What follows the plan, like "horovod" or "xla"; empty: what the job has and the plan needs.

        Raises
        ------
        InputError
            The folder exists, there is no such plan, or the targets cannot express it.
        """
        from dpro_search.deploy.of_run import export_from
        from dpro_search.deploy.targets import Target

        unknown = sorted({*targets} - {*Target})
        if unknown:
            raise InputError(f"target '{unknown[0]}' is unknown (known: {', '.join(Target)})")
        return export_from(self.folder, Path(out), targets=[Target(name) for name in targets], number=plan)

    def validate(
        self,
        command: Sequence[str] = (),
        *,
        top: int = 3,
        rounds: int = 2,
        most_rounds: int | None = None,
        warmup: int = 5,
        trace: str | Path | None = None,
    ) -> RealRuns:
        """Run the recorded setting and the best plans for real, in turn, and compare with the predictions.

        Parameters
        ----------
        command
            The training command of one rank; empty: the recorded one.
        top
            How many plans.
        rounds, most_rounds, warmup
            Times that everything runs at least, and at most while a median is not known to 2 %; steps of each run to leave out.
        trace
            Where the recording lies now, if it has moved.

        Raises
        ------
        InputError
            The job cannot be started here, or cannot follow a plan.
        JobError
            A run failed, or its script does not follow a plan.
        """
        from dpro_search.deploy.of_run import validate_run

        moved = None if trace is None else Path(trace)
        found, _ = validate_run(
            self.folder, tuple(command), top=top, rounds=rounds, most_rounds=most_rounds, warmup=warmup, trace=moved
        )
        facts = msgspec.to_builtins(found)
        return RealRuns(
            baseline_us=found.baseline_us, noise_pct=found.noise_pct, plans=found.plans, refused=found.refused, facts=facts
        )

    def report(self, out: str | Path, *, trace: str | Path | None = None) -> Path:
        """Write one HTML page on the search; returns its path. `trace`: where the recording lies now, if it has moved."""
        from dpro_search.cli._report_facts import facts_of_run
        from dpro_search.report import render

        write_file(Path(out), render(facts_of_run(self.folder, None if trace is None else Path(trace))).encode())
        return Path(out)

    def _repr_html_(self) -> str:
        rows = [
            (
                describe(ranked.plan),
                duration(ranked.prediction.iteration_us),
                " to ".join(map(duration, ranked.prediction.interval_us)),
                ratio(ranked.speedup) + ("" if ranked.gain_certain else " ?"),
            )
            for ranked in self.result.plans
        ]
        caption = f"Search of {self.result.trials} plans ({self.folder.name}); ? = not certain"
        return to_text(table(caption, ("plan", "iteration#", "interval#", "speed-up#"), rows))


def load(folder: str | Path | None = None) -> Recording:
    """Open a trace folder; None: the bundled sample, a real job of two ranks.

    Raises
    ------
    InputError
        It is no trace, or is damaged.

    Examples
    --------
    >>> load().trace.meta.ranks
    2
    >>> load("nowhere")
    Traceback (most recent call last):
    dpro_search.errors.InputError: nowhere: not a trace folder, meta.json is missing; make one with 'dpro-search collect'
    """
    path = sample_trace_path() if folder is None else Path(folder)
    return Recording(folder=path, trace=Trace.load(path))


def import_trace(sources: Sequence[str | Path], out: str | Path) -> Recording:
    """Turn raw files of one job, of any format that ``dpro-search import`` knows, into the new trace folder `out`.

    Raises
    ------
    InputError
        A file is of no known format, or `out` exists.
    """
    from dpro_search.collect.readers import importers

    if Path(out).exists():
        raise InputError(f"{out}: exists already; remove it or choose another folder")
    trace = importers.import_trace([Path(source) for source in sources])
    trace.save(Path(out))
    return Recording(folder=Path(out), trace=trace)


def load_run(folder: str | Path) -> Run:
    """Open the run folder of an earlier search.

    Raises
    ------
    InputError
        It is none, is damaged, or the search has no result yet.
    """
    path = Path(folder)
    read_run(path)
    result = SearchResult.load(path)
    if not result.plans:
        raise InputError(f"{path / 'result.json'}: no plans in it; search again with 'dpro-search run'")
    # The folder may have been moved, or made by somebody else: nothing goes where its files say.
    return Run(folder=path, result=msgspec.structs.replace(result, run=str(path)))
