"""A search as a value of the Python API: its plans, their export and validation; `dpro_search.api` makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dpro_search._api import views
from dpro_search._api.errors import page_path, speaks_python
from dpro_search._api.values import RealRuns
from dpro_search._api.views import Tabular, columns_of
from dpro_search.collect._files import write_file
from dpro_search.errors import InputError
from dpro_search.report.html import table, to_text
from dpro_search.report.units import duration, ratio
from dpro_search.search import SearchResult
from dpro_search.space.describe import describe
from dpro_search.space.plan import Plan
from dpro_search.space.plan_json import by_setting

if TYPE_CHECKING:
    from dpro_search.analysis.measured import MeasuredAnswer
    from dpro_search.deploy.export import ExportedFiles


@dataclass(frozen=True, kw_only=True)
class Run(Tabular):
    """A finished search."""

    folder: Path  # The run folder.
    result: SearchResult = field(repr=False)  # Baseline and best plans with their predictions, fastest first.

    def __repr__(self) -> str:
        return f"Run(folder={str(self.folder)!r}, trials={self.result.trials}, speedup={self.speedup:.3f}, best={self.best!r})"

    @property
    def best(self) -> Plan:
        """The plan with the shortest predicted iteration; the empty one if none beats the recorded setting."""
        return self.result.plans[0].plan

    @property
    def speedup(self) -> float:
        """Predicted iteration time of the recorded setting over that of the best plan."""
        return self.result.plans[0].speedup

    def columns(self) -> dict[str, Any]:
        """The best plans: ``plan`` in words, ``predicted_iteration_us`` with ``low_us`` and ``high_us``, ``speedup``, ..."""
        rows = [
            {
                "plan": name,
                "predicted_iteration_us": ranked.prediction.iteration_us,
                "low_us": ranked.prediction.interval_us[0],
                "high_us": ranked.prediction.interval_us[1],
                "speedup": ranked.speedup,
                "gain_certain": ranked.gain_certain,
                "peak_memory_bytes": ranked.prediction.peak_memory_bytes,
            }
            for name, ranked in zip(self.result.names, self.result.plans, strict=True)
        ]
        return columns_of(rows, list(rows[0]))

    @speaks_python
    def plot(self, kind: Literal["progress", "pareto"] = "progress", ax: Any = None) -> Any:
        """Draw the search with matplotlib, on `ax` or a new figure; returns the axes.

        Parameters
        ----------
        kind
            "progress": the trials and the best so far; "pareto": iteration time over peak memory.

        Raises
        ------
        InputError
            The journal of the search is damaged or gone, or the plans do not differ in memory.
        """
        from dpro_search.report.gathered import trials_of_run

        draw = {"progress": views.progress, "pareto": views.pareto}.get(kind)
        if draw is None:
            raise InputError(f"kind must be 'progress' or 'pareto', not {kind!r}")
        notes: list[str] = []
        trials = trials_of_run(self.folder / "trials.jsonl", self.result.trials, notes, {})
        if not trials:
            raise InputError(f"{self.folder}: {'; '.join(notes) or 'no trials to plot'}")
        return draw(trials, ax)

    @speaks_python
    def export(self, out: str | Path, *, targets: Sequence[str] = (), plan: int | None = None) -> ExportedFiles:
        """Write the files that a real job needs to follow a plan into the new folder `out`.

        Parameters
        ----------
        plan
            Its number; None: the one that `validate` proved fastest, else the best (0).
        targets
            Targets, like "horovod" or "xla"; empty: those of the job that the plan needs.

        Raises
        ------
        InputError
            The folder exists, there is no such plan, or the targets cannot express it.
        """
        from dpro_search.deploy.of_run import export_from
        from dpro_search.kinds import all_targets, deployed

        return export_from(self.folder, Path(out), all_targets(), deployed, targets=targets, number=plan)

    @speaks_python
    def measured(
        self, plan: int, *, step_time: str | None = None, memory: str | None = None, log: str | Path | None = None
    ) -> MeasuredAnswer:
        """Store a real step time of a plan that ran elsewhere beside the prediction; the answer names the run to make next.

        Parameters
        ----------
        plan
            Its number; 0: the recorded or described setting.
        step_time, memory
            With units, like "12.4s" and "71GiB".
        log
            What the training program printed, in place of `step_time`.

        Raises
        ------
        InputError
            There is no such plan, the log has no steps, or the numbers contradict the plan or what devices can do.
        """
        from dpro_search.analysis.measured import record

        return record(self.folder, plan, step_time=step_time, memory=memory, log=None if log is None else Path(log))

    @speaks_python
    def validate(
        self,
        command: Sequence[str] = (),
        *,
        top: int = 3,
        rounds: int = 2,
        most_rounds: int | None = None,
        warmup: int = 5,
        timeout_s: float | None = None,
        trace: str | Path | None = None,
        run_recorded_command: bool = False,
        host_cpus: Sequence[float] = (),
        host_changes: Sequence[str] = (),
    ) -> RealRuns:
        """Run the recorded setting and the best plans for real, interleaved, and compare with the predictions.

        Parameters
        ----------
        command
            The training command of one rank; empty: the recorded one, which needs `run_recorded_command`.
        top
            Number of plans.
        rounds, most_rounds, warmup
            Minimum and maximum number of rounds (more than the minimum while a median is not known to 2 %), and steps to skip at
            the start of each run.
        timeout_s
            Time limit of a run; None: an hour, and for a plan five times the recorded setting's time, at least 300.
        trace
            Path of the recording, if it has moved.
        run_recorded_command
            Run the command that the trace names, with your permissions: only for a trace that you trust.
        host_cpus, host_changes
            CPU quotas of the hosts, in cores, and changes while the job runs, like "30s:h2.cpus=0.25"; empty: as recorded.

        Raises
        ------
        InputError
            The job cannot be started here, cannot follow a plan, or its command comes from the trace and may not run.
        JobError
            The recorded setting or every plan failed, or the script follows none of the plans.
        """
        from dpro_search.collect.launch.host_limits import HostLimits
        from dpro_search.kinds._real_runs import real_runs

        limits = HostLimits(cpus=tuple(host_cpus), changes_text=tuple(host_changes))
        validation, _ = real_runs(self.folder, None if trace is None else Path(trace), command, limits=limits).validate(
            top=top,
            rounds=rounds,
            most_rounds=most_rounds,
            warmup=warmup,
            timeout_s=timeout_s,
            run_recorded_command=run_recorded_command,
        )
        facts = by_setting(validation)
        return RealRuns(
            baseline_us=validation.baseline_us,
            noise_pct=validation.noise_pct,
            plans=validation.plans,
            refused=validation.refused,
            failed=validation.failed,
            facts=facts,
        )

    @speaks_python
    def report(self, out: str | Path, *, trace: str | Path | None = None) -> Path:
        """Write one HTML page on the search; returns its path. `trace`: path of the recording, if it has moved."""
        from dpro_search.report import render
        from dpro_search.report.gathered import facts_of_run

        write_file(page_path(out), render(facts_of_run(self.folder, None if trace is None else Path(trace))).encode())
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
