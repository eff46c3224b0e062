"""Export and validation of the plans of a run folder: what the verbs `export` and `validate` do."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from dpro_search._text import without_secrets
from dpro_search.collect._files import write_file
from dpro_search.collect.launch.step_times import StepTimes
from dpro_search.collect.trace import Floats
from dpro_search.deploy.chosen import ChosenPlan, PlansOfRun
from dpro_search.deploy.export import ExportedFiles, export_plan
from dpro_search.deploy.jobs import RecordedJob
from dpro_search.deploy.kept_rounds import FinishedRound, RoundsFile
from dpro_search.deploy.measure_scripts import PlanToMeasure
from dpro_search.deploy.measured_plans import fitted_calibration
from dpro_search.deploy.parts.part import JobFacts, Target
from dpro_search.deploy.targets import parts_of, targets_for, targets_named
from dpro_search.deploy.validate import Validation, typical_us, validate
from dpro_search.errors import DproSearchError, InputError, JobError
from dpro_search.search import SearchResult
from dpro_search.search.calibration import Calibration
from dpro_search.search.run_folder import RunInfo, SearchedCluster
from dpro_search.space.describe import describe
from dpro_search.space.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """The facts that an export needs about a job: the possible targets of its plans, and facts to check a plan with."""

    name: str  # "tensorflow with horovod"
    targets: tuple[Target, ...]
    facts: JobFacts
    doubt: str | None = None  # Why predictions from its recording are not to be trusted.
    usual: Target | None = None  # That of its framework, where several can follow a plan.


def export_from(
    source: Path,
    out: Path,
    known: Sequence[Target],
    deployed: Callable[[RunInfo], Deployed],
    *,
    targets: Sequence[str] = (),
    number: int | None = None,
    environment_only: bool = False,
) -> ExportedFiles:
    """Write the files that a real job needs to follow a plan.

    Parameters
    ----------
    known
        All targets; the first is the default for a plan without a recording.
    deployed
        What is known of a search's job; raises `DproSearchError` if it is not there.
    targets
        Names of targets; empty: those of the job that the plan needs.
    number
        Of a run's plan; None: the one that `validate` proved, else the best.
    environment_only
        Only plans that need no change of the script.

    Raises
    ------
    InputError
        There is no such plan, `out` exists, or the targets cannot express the plan.
    """
    if source.is_dir():
        run = PlansOfRun(source)
        to = _Destination.of(run, known, deployed, targets)
        chosen = _chosen(run, to, number, environment_only)
    elif number is not None:
        raise InputError(f"--plan {number}: only with the folder of a search, and {source} is not a folder")
    else:
        to, chosen = _Destination.of(None, known, deployed, targets), ChosenPlan(plan=Plan.load(source))
        if environment_only and to.changes_script(chosen.plan):
            raise InputError(f"{source}: {describe(chosen.plan)} needs a change of the script; leave out --environment-only")
    notes = (*to.notes, *chosen.notes)
    if to.doubt is not None:  # nothing is promised
        chosen, notes = replace(chosen, expected=None), (*notes, f"Warning: {to.doubt}.")
    chosen = replace(chosen, notes=notes)
    measured = None if chosen.number is None else PlanToMeasure(run=source, number=chosen.number)
    exported = export_plan(chosen.plan, out, to.targets(chosen.plan), to.facts, chosen.expected, known, chosen.about, measured)
    return replace(exported, number=chosen.number)


def _chosen(run: PlansOfRun, to: _Destination, number: int | None, environment_only: bool) -> ChosenPlan:
    """The plan of a run to export, with a note on another one that needs no change of the script."""
    if environment_only and number is not None:
        raise InputError(f"--environment-only chooses the plan: leave out --plan {number}")
    best = run.chosen(run.preferred[0] if number is None else number)
    if not to.changes_script(best.plan):
        return best
    others = (other for other in run.preferred if run.faster(other) and not to.changes_script(run.plans[other]))
    other = next(others, None)
    if environment_only and other is None:
        raise InputError(f"{run.folder}: every plan that is faster needs a change of the script; leave out --environment-only")
    if other is None:
        return best
    if environment_only:
        return run.chosen(other)
    note = f"Plan {other} ({describe(run.plans[other])}) needs no change of the script: `--environment-only` exports it."
    return replace(best, notes=(*best.notes, note))


@dataclass(frozen=True, kw_only=True)
class _Destination:
    """The job that plans are exported for: its targets (empty: not known), names of wanted ones, doubt about its recording."""

    known: Sequence[Target]
    available: Sequence[Target] = ()
    names: Sequence[str] = ()  # Of targets that were asked for.
    usual: Target | None = None
    facts: JobFacts | None = None
    doubt: str | None = None
    notes: tuple[str, ...] = ()  # What the predictions assume, or could not be checked.

    @staticmethod
    def of(
        run: PlansOfRun | None, known: Sequence[Target], deployed: Callable[[RunInfo], Deployed], names: Sequence[str]
    ) -> _Destination:
        targets_named(names, known)  # all are known
        if run is None or run.info is None:
            return _Destination(known=known, names=names)
        cluster = run.info.cluster
        notes = assumptions(cluster)
        try:
            job = deployed(run.info)
        except DproSearchError as error:  # it has moved, or is damaged
            notes = (*notes, f"The plan was not checked against its recording ({error}).")
            return _Destination(known=known, names=names, notes=notes)
        if not job.targets:
            raise InputError(
                f"{run.folder}: plans of {job.name} cannot be exported yet; set in its framework what plans/plan-N.json says"
            )
        foreign = [target for target in targets_named(names, (*job.targets, *known)) if target not in job.targets]
        if foreign:
            able = ", ".join(map(str, job.targets))
            raise InputError(f"--target {foreign[0]}: the recorded job is {job.name}, whose plans are followed by {able}")
        facts = job.facts
        if cluster is not None:
            facts = replace(facts, ranks=cluster.ranks, ranks_per_host=cluster.ranks_per_host)
        return _Destination(
            known=known, available=job.targets, names=names, usual=job.usual, facts=facts, doubt=job.doubt, notes=notes
        )

    def targets(self, plan: Plan) -> tuple[Target, ...]:
        """Those that follow a plan; raises `InputError` if they cannot."""
        if self.names:  # of targets with one name that of the job, or one that has a setting of the plan
            others = sorted(self.known, key=lambda target: {*plan.settings}.isdisjoint(target.fields))
            return targets_named(self.names, (*self.available, *others))
        return targets_for(plan, self.available, self.usual) if self.available else targets_for(plan, self.known, self.known[0])

    def changes_script(self, plan: Plan) -> bool:
        """Whether the job's script must change for a plan; also where nothing follows it."""
        try:
            parts = parts_of(plan, self.targets(plan), self.facts, self.known)
        except InputError:
            return True
        return any(part.changes_script for part in parts.values())


def assumptions(cluster: SearchedCluster | None) -> tuple[str, ...]:
    """Assumptions of predictions for a cluster other than the recorded one, a sentence each."""
    if cluster is None:
        return ()
    ranks = f"{cluster.ranks} rank{'s' if cluster.ranks > 1 else ''}"
    sentences = [f"The plan was searched for {cluster.name} ({ranks}), where no run of the job was measured."]
    sentences += [f"Assumed: {sentence}." for sentence in cluster.assumed]
    return (*sentences, f"Interval: {cluster.interval}.") if cluster.interval else tuple(sentences)


def validate_run(
    run: Path,
    recorded_us: Floats,
    job: RecordedJob,
    knobs: Mapping[str, object],
    *,
    top: int = 3,
    rounds: int = 2,
    most_rounds: int | None = None,
    warmup: int = 5,
    timeout_s: float | None = None,
    elsewhere: bool = False,
    run_recorded_command: bool = False,
    on_start: Callable[[str, int, int], None] = lambda name, done, total: None,
    on_run: Callable[[str, StepTimes | JobError], None] = lambda name, run: None,
    on_kept: Callable[[int], None] = lambda rounds: None,
) -> tuple[Validation, Calibration]:
    """Run the best plans of a search for real; writes ``validation.json`` and ``calibration.json`` into the run folder.

    Finished rounds are kept in the run folder until then: an interrupted validation continues after them.

    Parameters
    ----------
    recorded_us, job
        The iterations of the recording, [n], and the job that runs again.
    knobs
        Recorded values of plan fields (`space.transformations.PlanningFacts.values`).
    run_recorded_command
        Whether a command that comes from the trace may run.
    rounds, most_rounds, warmup, timeout_s, on_start, on_run
        Of `validate.validate`.
    on_kept
        Called with the number of rounds that the run folder has: before the first run, and after each round.
    elsewhere
        Whether the job runs on another cluster than the recorded one, so that the recording's time is not compared.

    Raises
    ------
    InputError
        `run` is no finished search, or the command comes from the trace and may not run.
    JobError
        The recorded setting or every plan failed, or the script follows none of the plans.
    """
    if job.command_from_trace and not run_recorded_command:
        command = shlex.join(without_secrets(job.spec.command))
        raise InputError(
            f"the command comes from the trace, and would run with your permissions: {command}; "
            "if you trust it, add --run-recorded-command; if not, give your own after '--'"
        )
    result = SearchResult.load(run)
    chosen = [(number, ranked) for number, ranked in enumerate(result.plans, 1) if ranked.plan != Plan()][:top]
    plans = [(ranked.plan, ranked.prediction) for _, ranked in chosen]
    for plan, _ in plans:
        targets_for(plan, job.targets)  # before anything runs
    kept = RoundsFile(run, job, [plan for plan, _ in plans], warmup)
    on_kept(len(kept.rounds))

    def keep(finished: FinishedRound) -> None:
        kept.add(finished)
        on_kept(len(kept.rounds))

    validation = validate(
        job,
        result.baseline,
        plans,
        numbers=[number for number, _ in chosen],
        rounds=rounds,
        most_rounds=most_rounds,
        warmup=warmup,
        timeout_s=timeout_s,
        kept=kept.rounds,
        precision=job.precision,
        target_loss=job.target_loss,
        on_start=on_start,
        on_run=on_run,
        on_round=keep,
    )
    if len(recorded_us) and not elsewhere:
        validation = msgspec.structs.replace(validation, recorded_us=typical_us([recorded_us]))
    validation = msgspec.structs.replace(validation, paced=job.paced is not None, trained=job.trained())
    write_file(run / "validation.json", msgspec.json.format(msgspec.json.encode(validation), indent=1) + b"\n")
    calibration = fitted_calibration(run, knobs)
    calibration.save(run)
    kept.remove()
    return validation, calibration
