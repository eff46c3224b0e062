"""`facts_of_run`, `facts_of_source`: the content of a report, gathered from a run folder or a recording."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from dpro_search._regular_files import open_regular
from dpro_search._text import numbers_text, without_secrets
from dpro_search._version import __version__
from dpro_search.analysis.efficiency import efficiency_of, table_rows
from dpro_search.analysis.predict import predicted
from dpro_search.analysis.search import Deployment, search_answer, servers_note
from dpro_search.collect._files import DAMAGED
from dpro_search.collect.sample import sample_of
from dpro_search.collect.trace import Trace, TraceMeta
from dpro_search.deploy.measured_plans import reported
from dpro_search.deploy.validate import Validation, is_beyond_noise
from dpro_search.errors import DproSearchError, InputError
from dpro_search.kinds import Description, JobInScenario, ParallelSetting, described_in, job_of, kind_of, load_source
from dpro_search.kinds._job_on_cluster import searched_job
from dpro_search.kinds._work import efficiency
from dpro_search.report import PageFacts
from dpro_search.report.quality import HeldOutStep
from dpro_search.report.timeline import Lane, StepTimeline, kinds_by_name, measured_lanes, predicted_lanes, typical_step
from dpro_search.report.units import count
from dpro_search.search.run_folder import RunInfo, SearchedCluster, Trial
from dpro_search.space.describe import describe
from dpro_search.space.plan import Plan
from dpro_search.space.plan_json import decoded
from dpro_search.space.scenario import Scenario

if TYPE_CHECKING:
    from dpro_search.report.planner import Planner
    from dpro_search.search.result import SearchResult

LEAST_PLANS = 200  # of a described job
_HELD_OUT = 6  # steps, spread over the recording
_MOST = 1e15  # of any time or size in a result: thirty years, a petabyte


OnPart = Callable[[str], None]


def facts_of_source(path: Path, on_part: OnPart = lambda part: None) -> PageFacts:
    """The content of a report of a recording or a description; `on_part` is called with what is about to be done, in words."""
    return _Gathered(path, on_part).facts(Path(os.path.realpath(path)).name)


def facts_of_run(
    run: Path, trace: Path | None, on_part: OnPart = lambda part: None, *, least_plans: int = LEAST_PLANS
) -> PageFacts:
    """The content of a report of a search; `on_part` as in `facts_of_source`.

    Parameters
    ----------
    trace
        The path of its trace, if it has moved.
    least_plans
        Plans of a described job to show: if the search priced fewer, further ones are priced.

    Raises
    ------
    InputError
        The run folder is damaged or was interrupted before its first result, or the trace is not the search's.
    """
    from dpro_search.search import SearchResult
    from dpro_search.search.request import digest_of
    from dpro_search.search.run_folder import read_run

    info, result = read_run(run), SearchResult.load(run)
    if not result.plans:
        raise InputError(f"{run / 'result.json'}: no plans in it; search again with 'dpro-search run'")
    folder = trace or Path(info.trace)
    is_trace = (folder / "trace.npz").is_file() and (folder / "meta.json").is_file()
    if not is_trace and described_in(folder) is None:
        raise InputError(f"{folder}: the trace of this search is no longer there; give its new path with --trace")
    if digest_of(folder) != info.trace_digest:
        raise InputError(f"{folder}: not the trace of this search; give that one with --trace")
    gathered = _Gathered(folder, on_part, info)
    servers = kind_of(gathered.source).servers(gathered.source)
    search = search_answer(gathered.here, result, Deployment(servers=servers))
    named = {ranked.plan: row.title for row, ranked in zip(search.plans, result.plans, strict=True)}
    if note := servers_note([ranked.plan for ranked in result.plans], servers):
        gathered.notes.append(note)
    best = next((ranked.plan for ranked in result.plans if ranked.plan != Plan()), None)
    gathered.provenance += [
        ("run folder", str(run)),
        ("search", f"{result.trials} trials by '{info.sampler}', seed {info.seed}, {result.seconds:.1f} s, {result.stopped}"),
        ("search begun", info.created),
        *([("options", ", ".join(f"{name}={value}" for name, value in info.options.items()))] if info.options else []),
        ("trace digest", f"SHA-256 {info.trace_digest}"),
    ]
    names = {ranked.plan: ranked.name for ranked in (*result.plans, *result.front) if ranked.name}
    names[Plan()] = gathered.unchanged
    read = read_trials(run / "trials.jsonl", result.trials, gathered.notes)
    trials = [_row(trial, names) for trial in read]
    if (work := gathered.here.work) is not None:
        for trial in trials:
            trial["cost_per_million_tokens"] = efficiency(work, trial["iteration_us"]).cost_per_million_tokens
    validation = _validation(run, gathered, named)
    for name, content in (("result.json", search), ("trials.jsonl", trials), ("validation.json", validation)):
        _refuse_impossible(run / name, msgspec.to_builtins(content))
    return gathered.facts(
        Path(os.path.realpath(run)).name,
        best=best,
        best_name="" if best is None else named[best],
        search=search,
        baseline=result.baseline,
        trials=trials,
        validation=validation,
        reported=[(named.get(one.plan) or describe(one.plan), one) for one in reported(run)],
        corrected_pct=None if gathered.here.job.learns_speeds else _corrected_pct(run),
        cluster=None if info.cluster is None else info.cluster.facts,
        planner=gathered.planner(result, read, info, least_plans),
    )


def _options_of(cluster: SearchedCluster | None) -> list[str]:
    """Options of `replay` for the cluster of a search; its name ends with the changes."""
    if cluster is None:
        return []
    name = cluster.name.removesuffix("".join(f", {change}" for change in cluster.changes))
    changes = [word for change in cluster.changes for word in ("--set", change)]
    return [*(["--cluster", name] if cluster.machines is not None else []), *changes]


def _refuse_impossible(path: Path, content: object) -> None:
    """Raise `InputError` for a number in a file that cannot be a time or a size."""
    if isinstance(content, Mapping | list | tuple):
        for value in content.values() if isinstance(content, Mapping) else content:
            _refuse_impossible(path, value)
    elif isinstance(content, int | float) and not abs(content) <= _MOST:
        raise InputError(f"{path}: {content:.3g} is not a time or a size; make the file again")


class _Gathered:
    """The content from the trace or description; methods add to `notes` and `provenance`.

    Attributes
    ----------
    path
        The path of the trace or description.
    here
        The job as recorded, or on the cluster of a search.
    trace
        The recording that predictions can be compared with; None: nothing was measured.
    """

    def __init__(self, path: Path, on_part: OnPart, info: RunInfo | None = None) -> None:
        on_part("reading the trace")
        self.on_part, self.path = on_part, path
        self.source = load_source(path)
        elsewhere = info is not None and info.cluster is not None
        recorded = job_of(self.source)
        self.here = recorded if info is None else searched_job(recorded, info)
        self.trace = None if elsewhere or isinstance(self.source, Description) else self.source
        if isinstance(self.source, Description):
            self.notes, self.provenance = list(self.source.warnings), _described(path, self.source)
        else:
            self.notes, self.provenance = list(self.source.meta.warnings), _provenance(path, self.source)
        if (doubt := recorded.recording_doubt) is not None:
            self.notes.append(doubt)

    @property
    def unchanged(self) -> str:
        """The name of the setting without a plan, as `PageFacts.unchanged`."""
        compared = self.here.objective().facts().baseline
        return f"as {self.here.job.origin}" if compared is UNSET or compared.usual_plan is None else "usual plan"

    @property
    def sample_validation(self) -> Validation | None:
        """Real runs that came with a bundled recording; None: it is none, or was never validated."""
        sample = None if self.trace is None else sample_of(self.path)
        return None if sample is None or sample.validation is None else Validation.load(sample.folder)

    def facts(self, name: str, best: Plan | None = None, best_name: str = "", **searched: Any) -> PageFacts:
        """All content; `searched` are the fields of a search."""
        self.on_part("replaying the recording")
        replay = predicted(self.here, Plan(), changed=self.trace is None)
        settings = self._settings(best, best_name)
        step = None if self.trace is None else typical_step(self.trace)
        self.on_part("making the timeline of a step")
        timeline = StepTimeline(lanes=(), step=None) if settings else step_timeline(self.here, self.trace, step, self.notes)
        self.on_part("asking what would gain")
        work = efficiency_of(self.here, Scenario(), {}, replay.iteration_us)
        diagnosis = self.here.diagnose()
        with_sample = None if searched.get("validation") else self.sample_validation
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        made = [
            ("report made", f"{now} by dpro-search {__version__}"),
            ("with", shlex.join(["dpro-search", *without_secrets(sys.argv[1:])])),
        ]
        return PageFacts(
            name=name,
            replay=replay,
            diagnosis=diagnosis,
            efficiency=table_rows(work),
            timeline=timeline,
            settings=settings,
            groups=self.here.job.tensor_groups(self.here, step, best),
            held_out=self._held_out(),
            terms=self.here.job.terms(self.here.scenario),
            provenance=[*self.provenance, *made],
            notes=tuple(self.notes),
            described=isinstance(self.source, Description),
            sample_runs=None if with_sample is None else _with_strict_noise(with_sample),
            **searched,
        )

    def _settings(self, best: Plan | None, best_name: str) -> tuple[ParallelSetting, ...]:
        """The described setting of a parallel job and the best plan; empty for other jobs."""
        job = self.here.job
        described = job.parallel_setting(self.here, Plan(), self.unchanged)
        planned = None if best is None else job.parallel_setting(self.here, best, best_name)
        return tuple(setting for setting in (described, planned) if setting is not None)

    def planner(self, result: SearchResult, trials: Sequence[Trial], info: RunInfo, least: int) -> Planner | None:
        """All priced plans of a described parallel job; None for other jobs."""
        from dpro_search.parallel.job import ParallelJob, limit_bytes

        job, here, work = self.here.job, self.here, self.here.work
        if not isinstance(job, ParallelJob) or work is None:
            return None
        from dpro_search.parallel.answers.priced import priced_plans
        from dpro_search.report.planner import Planner

        if (limit := info.options.get("memory_limit_bytes")) is not None:
            here = here.limited_to(int(limit))
        best = next((ranked for ranked in result.plans if ranked.plan != Plan() and ranked.prediction.infeasible is None), None)
        first = [(Plan(), result.baseline), *([] if best is None else [(best.plan, best.prediction)])]
        plans = priced_plans(
            here,
            [*first, *((trial.plan, trial.prediction) for trial in trials)],
            [plan for plan, _ in reversed(first)],
            least,
            lambda done: self.on_part(f"pricing plans: {done}"),
        )
        memory = here.objective().facts().memory
        price = work.price_per_device_hour_usd
        return Planner(
            plans=plans,
            best=None if best is None else best.plan,
            unchanged=self.unchanged,
            limit_bytes=limit_bytes(here, job.prepared(here.scenario)),
            searched_bytes=None if memory is UNSET else memory.limit_bytes,
            tokens=work.tokens,
            flops_us=None if work.flops is None or not work.peak_flops_per_s else work.flops / work.peak_flops_per_s * 1e6,
            usd_per_us=None if price is None else price * work.devices / 3600e6,
            command=["dpro-search", "replay", str(self.path), *_options_of(info.cluster)],
        )

    def _held_out(self) -> list[HeldOutStep]:
        """Some profiled steps, each predicted from the others, if the kind of job supports that."""
        if self.trace is None:
            return []
        steps = sorted({*self.trace.steps.index[self.trace.steps.traced].tolist()})
        held_out_steps: list[HeldOutStep] = []
        for step in steps[1 :: max((len(steps) - 1) // _HELD_OUT, 1)][:_HELD_OUT]:
            self.on_part(f"predicting step {step} from all others")
            try:
                held = self.here.job.compared(step)
            except DproSearchError:
                continue
            if held.measured_us is None or held.error_pct is None:
                continue
            predicted_us = held.measured_us * (1 + held.error_pct / 100)
            held_out_steps.append(HeldOutStep(step=step, measured_us=held.measured_us, predicted_us=predicted_us))
        return held_out_steps


def step_timeline(here: JobInScenario, trace: Trace | None, step: int | None, notes: list[str]) -> StepTimeline:
    """The replayed step, from the content of a Perfetto file, and the recorded one of a trace; `notes` says what is missing."""
    predicted: list[Lane] = []
    try:
        content = here.job.perfetto(here.lowered(Plan()), recorded=trace is not None)
        predicted = predicted_lanes(msgspec.json.decode(content)["traceEvents"])
    except InputError as refusal:
        notes.append(f"the timeline has no replayed lanes ({refusal})")
    measured = [] if trace is None or step is None else measured_lanes(trace, step, kinds_by_name(predicted))
    return StepTimeline(lanes=(*predicted, *measured), step=step if measured else None)


def trials_of_run(path: Path, count: int, notes: list[str], names: Mapping[Plan, str]) -> list[dict[str, Any]]:
    """The readable part of the journal as rows of the report.

    `names` are those of plans that are known by another name than `describe` gives.
    """
    return [_row(trial, names) for trial in read_trials(path, count, notes)]


def read_trials(path: Path, count: int, notes: list[str]) -> list[Trial]:
    """The readable part of the journal, without locking it: a search may be writing it."""
    try:
        with open_regular(path) as file:
            lines = list(itertools.islice(file, count))
    except OSError as error:
        notes.append(f"the progress of the search is not shown ({path}: {error.strerror})")
        return []
    trials: list[Trial] = []
    for number, line in enumerate(lines):
        try:
            trials.append(decoded(line, Trial))
        except DAMAGED as error:
            notes.append(f"trials from {number} on are not shown ({path}: line {number + 1} is damaged: {error})")
            break
    return trials


def _row(trial: Trial, names: Mapping[Plan, str]) -> dict[str, Any]:
    """A trial as `PageFacts.trials` has it."""
    return {
        "number": trial.number,
        "origin": trial.origin,
        "iteration_us": trial.prediction.iteration_us,
        "peak_memory_bytes": trial.prediction.peak_memory_bytes,
        "infeasible": trial.prediction.infeasible,
        "name": names.get(trial.plan) or describe(trial.plan),
    }


def _validation(run: Path, gathered: _Gathered, names: Mapping[Plan, str]) -> Validation | None:
    """The real runs of a run folder, else those that came with the sample, of plans that the search lists; None: no plan ran.

    Raises `InputError` if the file is damaged.
    """
    validation = Validation.load(run)
    if validation is not None:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime((run / "validation.json").stat().st_mtime))
    else:
        validation = gathered.sample_validation
        if validation is None or not any(ran.plan in names for ran in validation.plans):
            return None
        when = "with the sample"
        gathered.notes.append("The real runs came with the sample; on this machine: dpro-search validate RUN.")
    gathered.provenance.append(("validated", f"{when}, {validation.rounds} rounds"))
    return _with_strict_noise(validation)


def _with_strict_noise(validation: Validation) -> Validation:
    """A validation in which no interval of a gain beyond the noise touches 1.00, as it could in those of older versions."""
    plans = (
        msgspec.structs.replace(row, beyond_noise=is_beyond_noise(row.speedup_measured, row.speedup_interval, validation.noise_pct))
        for row in validation.plans
    )
    return msgspec.structs.replace(validation, plans=tuple(plans))


def _corrected_pct(run: Path) -> tuple[float, float] | None:
    """Mean error of the predictions that were validated, before and after correction; None if not known."""
    from dpro_search.search.calibration import Calibration

    if not (run / "calibration.json").is_file():
        return None
    calibration = Calibration.load(run)
    if calibration.error_before_pct is None or calibration.error_after_pct is None:
        return None
    return calibration.error_before_pct, calibration.error_after_pct


def _described(path: Path, description: Description) -> list[tuple[str, str]]:
    return [("description", os.path.realpath(path)), ("framework", description.framework), *description.provenance]


def _clocks(meta: TraceMeta) -> str:
    """How the clocks of the hosts were compared, and what is left of their differences."""
    residual_us = max(meta.clock.residual_us, default=0.0)
    return meta.clock.method + (f"; they agree within {residual_us:.1f} µs" if residual_us else "")


def _ranks(meta: TraceMeta) -> str:
    """How many, their numbers where they are not 0, 1, 2..., and their hosts where these are known."""
    numbers = f" ({numbers_text(meta.numbers)} of the job's {meta.world_size})" if meta.world_size not in (None, meta.ranks) else ""
    hosts = [host for host in dict.fromkeys(meta.hosts) if host]
    return f"{count(meta.ranks, 'rank')}{numbers}" + (
        f" on {count(len(hosts), 'host')} ({', '.join(hosts)})" if hosts else ", hosts not known"
    )


def _provenance(folder: Path, trace: Trace) -> list[tuple[str, str]]:
    meta = trace.meta
    rows = [
        ("trace", os.path.realpath(folder)),
        ("recorded", meta.recorded_at),
        ("format", meta.format),
        ("framework", f"{meta.framework}, communication by {meta.comm}"),
        ("ranks", _ranks(meta)),
        ("devices", meta.device),
        ("link rate", "" if meta.rate_bps is None else f"{meta.rate_bps / 1e9:g} Gbit/s per host and direction"),
        ("CPUs of the hosts", ", ".join(f"{cpus:g}" for cpus in meta.host_cpus)),
        ("changes of the hosts", ", ".join(meta.host_changes)),
        ("machine", meta.machine),
        ("versions", ", ".join(f"{name} {version}" for name, version in meta.versions.items())),
        ("settings", ", ".join(f"{name}={value}" for name, value in meta.knobs.items())),
        ("command of the job", shlex.join(without_secrets(meta.command))),
        ("clocks", _clocks(meta)),
        ("overhead of recording", "" if meta.overhead_pct is None else f"{meta.overhead_pct:.1f} %"),
        ("events", f"{len(trace.events):,} in {len(set(trace.steps.index.tolist()))} steps"),
        ("left out by the reader", ", ".join(f"{count:,} {reason}" for reason, count in meta.dropped.items())),
    ]
    return [(title, value) for title, value in rows if value]
