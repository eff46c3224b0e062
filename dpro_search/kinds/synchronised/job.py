"""`SynchronisedJob`: when a job of workers of unequal speed reaches its target loss, by the synchronisation scheme."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Self

import msgspec
import numpy as np

from dpro_search.collect.trace import TensorInfo
from dpro_search.errors import InputError
from dpro_search.graph.measured import ProfiledSteps
from dpro_search.kinds._answers import ConvergenceFacts, TrainingFacts, fields_of
from dpro_search.kinds._comparison import MeasuredIterations
from dpro_search.kinds._diagnosis import Diagnosis, PredictedGain, Table, critical_ops, critical_table, gain_table, sorted_gains
from dpro_search.kinds._job import Job, JobInScenario, JobObjective, ranks_in_turn
from dpro_search.kinds._options import PlanOptions
from dpro_search.kinds.synchronised.recording import ShortRuns
from dpro_search.kinds.synchronised.training import Trainings, WhichScheme
from dpro_search.kinds.synchronised.training_replay import TrainingReplay, WorkerFacts
from dpro_search.quantities import time_text
from dpro_search.replay.lowered import ErrorModel, Lowered
from dpro_search.replay.path.segments import path_totals
from dpro_search.replay.synchronisation import TimeToLoss
from dpro_search.runtime.schemes import Scheme, parse_scheme
from dpro_search.search.objective import BoundedPlan
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import ClusterChange, Scale, Scenario
from dpro_search.space.transformations import PlanningFacts, PlanSpace

_SLOW = 1.5  # times the median step: a worker that is named
_HOPELESS = 20.0  # times: one that gives next to nothing
_WAITING = 0.05  # of worker time, that is worth a sentence
_TRIED = ("adsp(commits=1)", "asp", "fixed-adacomm(steps=8)", "local-sgd(steps=8)")
_REASONS = 2  # plans behind the best that a search explains


class SynchronisedJob(Job):
    """A job with the workers of its recording, or with others. An iteration is a training to the target loss."""

    title = "a job of workers of unequal speed"
    askable = ("synchronisation",)
    settings = ("ranks", "speeds", "delay", "target_loss", "compute", "communication")
    abilities = ("begins_with",)

    @classmethod
    def of(cls, source: ShortRuns, options: PlanOptions) -> Self:
        for name in ("compute", "all_reduce_model", "cluster_model", "precision_table"):
            if getattr(options, name):
                raise InputError(f"{cls.title} has no plans for '{name.replace('_', ' ')}'; it changes synchronisation")
        return cls(source)

    def __init__(self, source: ShortRuns) -> None:
        self._source = source
        elements = source.runs[0].elements
        whole = TensorInfo(name="parameters", node="parameters", dtype="float32", shape=(elements,), size_bytes=4 * elements)
        self.tensors = (whole,)  # a commit holds all
        self._fitted: dict[float, Trainings] = {}  # by target loss
        self._simulated: dict[tuple[Scenario, Scheme], TimeToLoss] = {}  # by the scenario without its plan
        self._spaces: dict[Scenario, PlanSpace] = {}  # by the scenario without its plan

    @property
    def origin(self) -> str:
        return "recorded"

    # A scenario: workers, links, target and scheme.

    def plans(self, scenario: Scenario) -> PlanSpace:
        unplanned = replace(scenario, plan=Plan())
        if unplanned not in self._spaces:
            if scenario.begins_with is not None:
                self.plans(replace(unplanned, begins_with=None)).check(scenario.begins_with)
            self._spaces[unplanned] = self._space(unplanned)
        return self._spaces[unplanned]

    def _space(self, scenario: Scenario) -> PlanSpace:
        """The schemes that the workers of a scenario can follow."""
        trainings = self._trainings(scenario)
        facts = PlanningFacts(name=self.title, tensors=self.tensors, values={"synchronisation": str(self.today(scenario))})
        which = WhichScheme(
            facts,
            workers=trainings.workers,
            longest_s=trainings.longest_s,
            momentum=trainings.factors,
            collectives=self._source.framework != "mxnet",
        )
        return PlanSpace(facts, [which])

    def lower(self, scenario: Scenario, *, steps: ProfiledSteps | None = None) -> Lowered:
        self.check_changes(scenario, steps)
        plan, unplanned = scenario.plan, replace(scenario, plan=Plan())
        self.plans(unplanned).check(plan)
        trainings = self._trainings(unplanned)
        scheme = self.today(scenario) if plan.synchronisation is None else parse_scheme(plan.synchronisation)
        if (unplanned, scheme) not in self._simulated:
            self._simulated[unplanned, scheme] = trainings.predicted(scheme)
        replayable = TrainingReplay(training=self._simulated[unplanned, scheme], paces=trainings.paces(scheme))
        never = f"does not reach a loss of {trainings.target_loss:g} within {replayable.end_s:.0f} s"
        return Lowered(
            replayable=replayable,
            error=ErrorModel(model=0.0),
            as_recorded=scenario == Scenario(),
            cluster=ClusterSpec(cores=tuple(range(trainings.workers))),
            assumptions=self._assumptions(scenario.cluster, trainings.workers),
            infeasible=never if replayable.training.time_s is None else None,
        )

    def today(self, scenario: Scenario) -> Scheme:
        """The scheme without a plan."""
        begins_with = scenario.begins_with
        if begins_with is None or begins_with.synchronisation is None:
            return self._source.runs[0].scheme
        return parse_scheme(begins_with.synchronisation)

    def _trainings(self, scenario: Scenario) -> Trainings:
        """Trainings of the workers of a scenario, to its target; raises `InputError` for what they cannot be."""
        trainings = _with_workers(self._fitted_to(self._source.target_loss), scenario.cluster)
        for scale in scenario.scales:
            trainings = self._scaled(trainings, scale)
        if scenario.target_loss is None:
            return trainings
        fitted = self._fitted_to(scenario.target_loss)
        return replace(fitted, step_s=trainings.step_s, commit_s=trainings.commit_s, delay_s=trainings.delay_s)

    def _fitted_to(self, loss: float) -> Trainings:
        """Trainings of the recorded workers to a loss."""
        if loss not in self._fitted:
            self._fitted[loss] = Trainings.of(self._source.runs, loss)
        return self._fitted[loss]

    def _scaled(self, trainings: Trainings, scale: Scale) -> Trainings:
        if scale.rank is not None:
            scale.check_rank(trainings.workers)
        if scale.what == "communication" and scale.rank is None and scale.group is None:
            commit_s = {way: each * scale.factor for way, each in trainings.commit_s.items()}
            return replace(trainings, commit_s=commit_s, delay_s=trainings.delay_s * scale.factor)
        if scale.what != "compute":
            raise self.cannot("compute", f"be asked '{scale.text}'")
        if not scale.factor > 0:
            raise InputError(f"'{scale.text}': steps of no time are not simulated; the factor must be above 0")
        numbers = range(trainings.workers) if scale.rank is None else (scale.rank,)
        step_s = tuple(each * scale.factor if worker in numbers else each for worker, each in enumerate(trainings.step_s))
        return replace(trainings, step_s=step_s)

    def _assumptions(self, change: ClusterChange, workers: int) -> tuple[str, ...]:
        in_turn = () if change.speeds is not None else ranks_in_turn(workers, self._source.workers)
        known_ways = {run.scheme.collective for run in self._source.runs}
        if len(known_ways) == 2:
            return in_turn
        known, other = "an update at a server", "an all-reduce"
        if True in known_ways:
            known, other = other, known
        return (*in_turn, f"{other} takes as long as {known}, of which a run was recorded")

    def target_loss(self, scenario: Scenario) -> float:
        """The target loss in a scenario."""
        return self._source.target_loss if scenario.target_loss is None else scenario.target_loss

    # One training.

    def measurement(self, scenario: Scenario) -> MeasuredIterations:
        """The recorded runs of the job as it is that reached its target."""
        if scenario != Scenario():
            return MeasuredIterations()
        first, target_loss = self._source.runs[0], self._source.target_loss
        alike = (run for run in self._source.runs if run.scheme == first.scheme and run.workers == first.workers)
        reached = [run.curve for run in alike if run.curve[1].min() <= target_loss]
        measured_us = np.array([1e6 * time_s[np.argmax(loss <= target_loss)] for time_s, loss in reached])
        if not len(measured_us):
            return MeasuredIterations()
        return MeasuredIterations(
            median_us=float(np.median(measured_us)), mean_us=float(measured_us.mean()), iterations_us=measured_us
        )

    def plan_facts(self, here: JobInScenario, plan: Plan) -> TrainingFacts:
        training, convergence = training_replay(here.lowered(plan)).training, self._trainings(here.scenario).convergence
        target_loss = self.target_loss(here.scenario)
        return TrainingFacts(
            synchronisation=str(training.scheme),
            target_loss=target_loss,
            time_to_loss_s=training.time_s,
            training_steps=training.steps,
            commits=training.commits,
            sent_bytes=2 * 4 * self._source.runs[0].elements * training.commits,
            waiting_share=training.waiting_share,
            convergence=ConvergenceFacts(drift=convergence.drift, staleness=convergence.staleness, runs=convergence.runs),
            notes=(f"An iteration is a training to a loss of {target_loss:g} by {training.scheme}.",),
        )

    def objective(self, here: JobInScenario) -> SchemeObjective:
        return SchemeObjective(here, self)

    def diagnose(self, here: JobInScenario) -> Diagnosis:
        plan, trainings = Plan(), self._trainings(here.scenario)
        prediction, replayed = here.replayed(plan), training_replay(here.lowered(plan))
        timeline, workers = replayed.timeline(), replayed.workers()
        gains = _gains_of(self, here.scenario, prediction.iteration_us, trainings.step_s)
        return TrainingDiagnosis(
            iteration_us=prediction.iteration_us,
            measured_iteration_us=here.measurement.median_us,
            breakdown_us=prediction.breakdown_us,
            critical_path=path_totals(timeline),
            critical_ops=critical_ops(timeline),
            ranks=workers,
            gains=gains,
            findings=_findings(replayed.training, trainings, workers, gains),
            warnings=tuple(self._source.warnings),
            **fields_of(self.plan_facts(here, plan)),
        )


class SchemeObjective(JobObjective[SynchronisedJob]):
    """A job of workers of unequal speed, as a search asks it."""

    def reasons(self, plans: Sequence[Plan]) -> tuple[str, ...]:
        words = [f"An iteration is a training to a loss of {self.job.target_loss(self.here.scenario):g}."]
        words += [f"Plan {number}: {self._work(plan)}." for number, plan in enumerate(plans[:_REASONS], 1)]
        return (*words, f"Today: {self._work(Plan())}.")

    def _work(self, plan: Plan) -> str:
        training = training_replay(self.here.lowered(plan)).training
        waiting = f"waiting {training.waiting_share:.0%} of the time"
        return f"{training.scheme}, {training.steps} steps and {training.commits} commits, {waiting}"

    def ranked(self, settled: Callable[[Hashable, float], bool]) -> Iterator[BoundedPlan]:
        """All plans: they are few, and no bound is known without a simulation."""
        yield BoundedPlan(Plan(), 0.0)
        (which,) = self.space.transformations
        assert isinstance(which, WhichScheme)
        for scheme in which.schemes():
            plan = self.space.simplest(Plan(synchronisation=str(scheme)))
            if plan != Plan():
                yield BoundedPlan(plan, 0.0)


def training_replay(lowered: Lowered) -> TrainingReplay:
    """The training of a job that `SynchronisedJob.lower` made."""
    assert isinstance(lowered.replayable, TrainingReplay)
    return lowered.replayable


def _with_workers(trainings: Trainings, change: ClusterChange) -> Trainings:
    """With the workers and links of a changed cluster."""
    if change.machines is not None:
        title = SynchronisedJob.title
        raise InputError(f"{change.machines.name}: {title} is predicted for workers of given speeds: --set speeds=1:1:2:3")
    if change.speeds is not None and change.ranks is not None:
        raise InputError("ranks and speeds both say how many workers there are: give one of them")
    if change.speeds is not None:
        trainings = trainings.with_speeds(change.speeds)
    if change.ranks is not None:
        trainings = trainings.with_workers(change.ranks)
    if trainings.workers < 2:
        raise InputError("one worker has nobody to exchange updates with; ask for two or more")
    if change.delay_us is not None:
        trainings = replace(trainings, delay_s=change.delay_us / 1e6)
    return trainings


def _gains_of(job: Job, scenario: Scenario, base_us: float, step_s: Sequence[float]) -> tuple[PredictedGain, ...]:
    """Gains of some changes: other schemes, faster links, a slow worker as fast as the median one."""
    median_s, slowest = float(np.median(step_s)), int(np.argmax(step_s))
    questions = ["communication=0", *(f"synchronisation={scheme}" for scheme in _TRIED)]
    if step_s[slowest] > median_s:
        questions.append(f"rank{slowest}.compute={median_s / step_s[slowest]:.4g}")
    shorter_us = {}
    for text in questions:
        try:
            lowered = job.lower(job.scenario([text], scenario))
        except InputError:
            continue
        iteration_us = lowered.replayable.iterations().iteration_us
        if lowered.infeasible is None and iteration_us < base_us:
            shorter_us[text] = iteration_us
    return sorted_gains(base_us, shorter_us)


def _findings(
    training: TimeToLoss, trainings: Trainings, workers: Sequence[WorkerFacts], gains: Sequence[PredictedGain]
) -> tuple[str, ...]:
    """Sentences."""
    target = f"a loss of {trainings.target_loss:g}"
    said = [f"An iteration is a training to {target} by {training.scheme}: {training.steps} steps, {training.commits} commits."]
    if training.time_s is None:
        said.append(f"{training.scheme} does not reach {target} within {training.simulated.end_s:.0f} s.")
    if training.waiting_share > _WAITING:
        waiting = max(workers, key=lambda row: row.waited_us).rank
        said.append(f"Workers wait for each other {training.waiting_share:.0%} of their time, worker {waiting} most.")
    median_s = float(np.median(trainings.step_s))
    for worker, step_s in enumerate(trainings.step_s):
        if step_s > _HOPELESS * median_s:
            said.append(f"Worker {worker} is {step_s / median_s:.0f} times slower than the median one: leave it out.")
        elif step_s > _SLOW * median_s:
            said.append(f"Worker {worker} takes {step_s / median_s:.1f} times as long for a step as the median one.")
    if gains and gains[0].gain_us > 0:
        best = gains[0]
        said.append(f"'{best.what_if}' would take {time_text(best.predicted_iteration_us)}.")
    return tuple(said)


class TrainingDiagnosis(Diagnosis, frozen=True, kw_only=True, omit_defaults=True):
    """The diagnosis of a training to a target loss; see `kinds._answers.TrainingFacts`."""

    breakdown_us: Mapping[str, float]
    synchronisation: str
    target_loss: float
    time_to_loss_s: float | None
    training_steps: int
    commits: int
    sent_bytes: int = msgspec.field(name="bytes")
    waiting_share: float
    convergence: ConvergenceFacts
    notes: tuple[str, ...]
    ranks: tuple[WorkerFacts, ...]

    @property
    def tables(self) -> Sequence[Table]:
        rows = [
            (str(row.host), time_text(row.step_us), str(row.steps), str(row.commits), *map(time_text, row.parts_us.values()))
            for row in self.ranks
        ]
        columns = ("worker", "a step", "steps", "commits", "in steps", "in commits", "waiting")
        return (
            Table(title="workers", columns=columns, rows=rows),
            gain_table(self.gains, self.iteration_us),
            critical_table(self.critical_ops),
        )
