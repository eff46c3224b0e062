"""`Job`: what a kind of job knows of one job, whatever is asked of it. `kinds/_kind.py` shows how a kind defines its own.

A kind defines `Job.lower`, which turns a scenario into what is replayed. The answers that every kind gives in the same way follow
from it in `JobInScenario` and in `analysis`. What a kind can be asked is data: its `settings` and `abilities`. Another question is
refused with a line that names the kinds that can.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeVar

import msgspec
import numpy as np

from dpro_search._text import listed
from dpro_search.collect.trace import CommSettings, Floats, TensorInfo, Trace
from dpro_search.errors import InputError
from dpro_search.graph.measured import (
    ProfiledSteps,
    measured_iteration_us,
    profiled_iterations_us,
    recording_doubt,
    replay_error,
    without_step,
)
from dpro_search.kinds._answers import ParallelSetting, PlanFacts, SearchFacts, Term
from dpro_search.kinds._comparison import Comparison, MeasuredIterations, compared_with
from dpro_search.kinds._diagnosis import Diagnosis
from dpro_search.kinds._names import registered
from dpro_search.kinds._options import PlanOptions
from dpro_search.kinds._work import Work
from dpro_search.machine import Calibration
from dpro_search.quantities import memory_shortage_text
from dpro_search.replay.lowered import Lowered
from dpro_search.replay.timeline import Timeline
from dpro_search.search.correction import plan_covariance
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import Scenario
from dpro_search.space.tensorflow.fusion_moves import contiguous_groups
from dpro_search.space.transformations import PlanSpace

if TYPE_CHECKING:
    from dpro_search.deploy.parts.part import DescribedWorkload
    from dpro_search.space.tensor_groups import TensorGroups

_LONGEST_US = 30 * 24 * 3600e6  # of an iteration: nobody trains with steps of a month
OneJob = TypeVar("OneJob", bound="Job")

# Questions that not every kind of job answers: replays with durations drawn anew; replays from some of the profiled steps;
# scenarios that say under which plan the job runs to begin with.
Ability = Literal["samples", "steps", "begins_with"]

# Fields of a scenario, the setting that each is, and what a job without it cannot do.
_CHANGES = (
    ("global_batch", "global_batch", "be predicted with another batch"),
    ("sequence", "sequence", "be predicted with sequences of another length"),
    ("precision", "precision", "be predicted in another precision"),
    ("measured_us", "measured", "be told what a step takes without the profiler"),
    ("target_loss", "target_loss", "be trained to a loss"),
    ("begins_with", "begins_with", "begin with another setting than the recorded one"),
)


class Job(ABC):
    """One job. It is the same in every scenario: what depends on one is an argument. Deterministic."""

    title: str  # What its kind is called: "a Horovod job".
    trace: Trace | None = None  # The recording that it comes from; None: it was described.
    recorded: CommSettings | None = None  # Horovod's knobs in the recording; None for other kinds of jobs.
    tensors: tuple[TensorInfo, ...]  # The communicated tensors, in the order in which they become ready.
    askable: tuple[str, ...] = ()  # Plan fields that text can set in a scenario, whether or not a space has them now.
    # Other changes of a scenario: some of "groups", "global_batch", "sequence", "precision", `CLUSTER_SETTINGS`, `SCALES`.
    settings: ClassVar[tuple[str, ...]] = ()
    abilities: ClassVar[tuple[Ability, ...]] = ("samples",)
    usual_trials: ClassVar[int] = 500  # Plans that a search evaluates unless it is told how many.

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

    # What is replayed.

    @abstractmethod
    def lower(self, scenario: Scenario, *, steps: ProfiledSteps | None = None) -> Lowered:
        """The job in a scenario, ready to be replayed.

        Parameters
        ----------
        steps
            Profiled steps that the job is replayed from; None: all steps, without the profiler's overhead.

        Raises
        ------
        InputError
            The job cannot follow the plan, be predicted with the other changes, or be replayed from some of its steps.
        """

    @abstractmethod
    def plans(self, scenario: Scenario) -> PlanSpace:
        """The space of plans in a scenario; it has the fields of the scenario's plan."""

    def elsewhere(self, scenario: Scenario) -> tuple[Job, Scenario]:
        """The job that stands for this one in a scenario, and what of the scenario is left: another one on other machines."""
        return self, scenario

    def scenario(self, changes: Iterable[str], base: Scenario | None = None) -> Scenario:
        """A scenario (None: as recorded) with changes as text; raises `InputError` for what the job does not have."""
        return (base or Scenario()).changed(changes, known=(*self.askable, *self.settings), job=self.title)

    # What was measured, and how well the model fits it.

    def measurement(self, scenario: Scenario) -> MeasuredIterations:
        """The measurement that the prediction of a scenario without a plan is compared with."""
        if self.trace is None:
            return MeasuredIterations()
        median_us, iterations_us = measured_iteration_us(self.trace), self.trace.iterations_us()
        has_mean = median_us is not None and len(iterations_us)
        return MeasuredIterations(
            median_us=median_us, mean_us=float(iterations_us.mean()) if has_mean else None, iterations_us=iterations_us
        )

    def compared(self, step: int | None) -> Comparison:
        """A profiled step, predicted from all others; None: each profiled step, replayed with its own durations.

        Raises `InputError` if the step was not profiled. What communication costs is fitted on all steps that are replayed.
        """
        if "steps" not in self.abilities:
            how = "step by step (--own-durations)" if step is None else "without one of its steps (--holdout-step)"
            raise self.cannot("steps", f"be {'replayed' if step is None else 'predicted'} {how}")
        assert self.trace is not None, "only recorded jobs have profiled steps"
        if step is not None:
            others, measured_us = without_step(self.trace, step)
            lowered = self.lower(Scenario(), steps=ProfiledSteps(replayed=others, fitted=others))
            return compared_with(lowered, measured_us, lowered.replayable.iterations().iteration_us / measured_us - 1)
        steps_us = profiled_iterations_us(self.trace)
        step_by_step = [self.lower(Scenario(), steps=ProfiledSteps(replayed=(number,))) for number in steps_us]
        replayed_us = np.array([lowered.replayable.iterations().iteration_us for lowered in step_by_step])
        all_us = np.array(list(steps_us.values()))
        error = float(np.abs(replayed_us / all_us - 1).mean())
        return compared_with(self.lower(Scenario(), steps=ProfiledSteps()), float(all_us.mean()), error)

    def plan_errors(self, here: JobInScenario, predictions: Mapping[Plan, Prediction]) -> Floats:
        """Covariance of the errors of predicted plans, as logarithms of step times, [plans, plans]."""
        return plan_covariance(predictions, here.space.job.values)

    def learned(
        self, here: JobInScenario, measured_us: Mapping[Plan, tuple[float, float]], *, same_job: bool
    ) -> Mapping[str, float]:
        """Changes of speed that measured plans make most probable, by the name of the setting.

        Only for jobs of which `learns_speeds` is true.

        Parameters
        ----------
        measured_us
            Time of a step, and the standard deviation of its logarithm, of each measured plan; at least one.
        same_job
            Whether the changes are for plans of the same job, and not of another one on the same devices.
        """
        raise NotImplementedError

    @property
    def learns_speeds(self) -> bool:
        """Whether measured plans change speeds of devices and links (`learned`); else they correct plan by plan (`Calibration`)."""
        return False

    # What people want to know about it.

    @property
    def origin(self) -> str:
        """The origin of the setting without a plan, in a word."""
        return "described" if self.trace is None else "recorded"

    def work(self, scenario: Scenario) -> Work | None:
        """Work of an iteration, for a job that knows it without a recording."""
        return None

    def questions(self, scenario: Scenario) -> Mapping[str, Plan]:
        """Plans worth a look, by how ``--set`` takes them: `diagnose` shows their gains, and a search tries them first.

        Plans that the job cannot follow may be among them; both pass these over.
        """
        return {}

    @abstractmethod
    def diagnose(self, here: JobInScenario) -> Diagnosis:
        """Why an iteration without a plan takes as long as it does; of ranks that behave alike one, with how many they are."""

    def plan_facts(self, here: JobInScenario, plan: Plan) -> PlanFacts:
        """Facts that `replay` reports beside the prediction of a plan."""
        return PlanFacts()

    def objective(self, here: JobInScenario) -> JobObjective[Any]:  # Any: its own type
        """The job as a search asks it, with what it tells about the plans that it lists."""
        return JobObjective(here, self)

    def rank_parts_us(self, lowered: Lowered) -> Mapping[int, Mapping[str, float]]:
        """Parts of a replayed iteration, which add up to it, for each rank by its number in the job; empty: not known."""
        return {}

    def perfetto(self, lowered: Lowered, *, recorded: bool) -> bytes:
        """An iteration for ui.perfetto.dev; where `recorded`, beside the measured step."""
        from dpro_search.replay.outputs import perfetto_json

        timeline = lowered.replayable.timeline()
        return perfetto_json(timeline, first_iteration=timeline.iterations - 1)

    # Parts of the report, and of an export.

    def terms(self, scenario: Scenario) -> tuple[Term, ...]:
        """Fitted numbers of its cost model."""
        return ()

    def tensor_groups(self, here: JobInScenario, step: int | None, best: Plan | None) -> TensorGroups | None:
        """Which tensors travel together, as recorded and under the best plan; None: not known.

        Parameters
        ----------
        step
            The recorded step to look at; None: none was recorded op by op.
        best
            None: no search, or no plan beside the recorded setting.
        """
        return None

    def parallel_setting(self, here: JobInScenario, plan: Plan, name: str) -> ParallelSetting | None:
        """A plan of a parallel job under a name; None for other kinds of jobs."""
        return None

    def workload(self, scenario: Scenario) -> Callable[[Plan], DescribedWorkload] | None:
        """The described parallel job under a plan; None: it is no such job."""
        return None

    # Refusals.

    def check_changes(self, scenario: Scenario, steps: ProfiledSteps | None = None) -> None:
        """Raise `InputError` for changes, other than of the plan, that are not among `settings`, and for a choice of steps."""
        if steps is not None and "steps" not in self.abilities:
            raise self.cannot("steps", "be replayed from some of its profiled steps")
        for name, setting, what in _CHANGES:
            if getattr(scenario, name) is not None and setting not in (*self.settings, *self.abilities):
                raise self.cannot(setting, what)

    def cannot(self, needs: str, what: str) -> InputError:
        """The error for what this kind of job cannot do; it names the kinds that can.

        `needs`: the setting or the ability that a kind has which can.
        """
        able = [kind.title for kind in registered() if needs in (*kind.job_type.settings, *kind.job_type.abilities)]
        return InputError(f"{self.title} cannot {what}" + (f"; {listed(able)} can" if able else ""))


class JobInScenario:
    """A job in a scenario. Deterministic.

    Parameters
    ----------
    scenario
        Changes under every plan. The space of plans has the fields of its plan, which is left out of `scenario` then.
    memory_limit_bytes
        Plans that need more are infeasible; None: no limit but what the kind of job knows.
    recorded_error
        The `replay_error` of the job that this one comes from; None: this one is as it was recorded.

    Attributes
    ----------
    space
        Which plans there are.
    """

    def __init__(
        self,
        job: Job,
        scenario: Scenario | None = None,
        *,
        memory_limit_bytes: int | None = None,
        recorded_error: float | None = None,
    ) -> None:
        scenario = Scenario() if scenario is None else scenario
        self.job, self.scenario, self.space = job, replace(scenario, plan=Plan()), job.plans(scenario)
        self.memory_limit_bytes, self._recorded_error = memory_limit_bytes, recorded_error
        self._last_lowered: tuple[Plan, Lowered] | None = None  # a verb asks several questions about one plan

    @property
    def title(self) -> str:
        """The name of its kind."""
        return self.job.title

    @property
    def trace(self) -> Trace | None:
        """The recording that it comes from; None: it was described."""
        return self.job.trace

    # Other scenarios.

    def under(self, scenario: Scenario) -> tuple[JobInScenario, Plan]:
        """The job in a scenario that comes after this one, and the scenario's plan; raises `InputError` for what it cannot be."""
        plan = scenario.plan
        if scenario.groups is not None:
            if scenario.groups < 1:
                raise InputError(f"groups must be at least 1, not {scenario.groups}")
            plan = plan.changed(tensor_groups=contiguous_groups(self.job.tensors, scenario.groups))
        job, rest = self.job.elsewhere(self.scenario.then(replace(scenario, plan=plan, groups=None)))
        moved = JobInScenario(job, rest, memory_limit_bytes=self.memory_limit_bytes, recorded_error=self.replay_error)
        moved._lower(plan)  # raises what it raises before anything is predicted
        return moved, plan

    def limited_to(self, memory_bytes: int | None) -> JobInScenario:
        """The job with plans that need more memory infeasible; raises `InputError` if the trace does not tell what it takes."""
        if memory_bytes is not None and self.predict(Plan()).peak_memory_bytes is None:
            raise InputError("the memory limit cannot be kept: the trace does not tell how much memory the job takes")
        return JobInScenario(self.job, self.scenario, memory_limit_bytes=memory_bytes, recorded_error=self._recorded_error)

    # One plan.

    def lowered(self, plan: Plan) -> Lowered:
        """The job under a plan, with the error of the recorded setting's replay."""
        lowered, error = self._lower(plan), self.replay_error
        return replace(lowered, error=replace(lowered.error, replay=error)) if error else lowered

    def _lower(self, plan: Plan) -> Lowered:
        if self._last_lowered is None or self._last_lowered[0] != plan:
            self._last_lowered = plan, self.job.lower(replace(self.scenario, plan=plan))
        return self._last_lowered[1]

    def predict(self, plan: Plan) -> Prediction:
        """Predicted cost of one iteration under a plan; raises `InputError` for a plan that the job cannot follow."""
        self.space.check(plan)
        lowered = self.lowered(plan)
        return self._within_limit(_possible(lowered.prediction(lowered.replayable.iterations())))

    def replayed(self, plan: Plan) -> Prediction:
        """The prediction that `replay` reports: as `predict`, with a breakdown and with what `predict` leaves out to be fast."""
        return self._within_limit(self.lowered(plan).reported())

    def _within_limit(self, prediction: Prediction) -> Prediction:
        """The prediction, infeasible where it needs more memory than the limit that was given."""
        limit = self.memory_limit_bytes
        peak = prediction.peak_memory_bytes
        if limit is None or (peak is not None and peak <= limit):
            return prediction
        return msgspec.structs.replace(prediction, infeasible=memory_shortage_text(peak, limit))

    def sampled(self, plan: Plan, *, samples: int, seed: int = 0, on_sample: Callable[[], None] = lambda: None) -> Floats:
        """Iteration times of replays with durations drawn anew, [samples]; the same draws for every plan.

        Raises `InputError` if this kind of job has one duration of each op only.
        """
        if "samples" not in self.job.abilities:
            raise self.job.cannot("samples", "be replayed with other durations")
        return self.lowered(plan).replayable.sampled_us(samples=samples, seed=seed, on_sample=on_sample)

    def timeline(self, plan: Plan) -> Timeline:
        """A replay of a plan, op by op."""
        return self._lower(plan).replayable.timeline()

    # Without a plan.

    @property
    def cluster(self) -> ClusterSpec:
        """Cores and links that the job runs on."""
        return self._lower(Plan()).cluster

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Assumptions of predictions, a sentence each.

        For a recorded job in its recorded setting none; for a described one what its description leaves open.
        """
        return self._lower(Plan()).assumptions

    @property
    def work(self) -> Work | None:
        """Work of an iteration, for a job that knows it without a recording."""
        return self.job.work(self.scenario)

    @property
    def calibration(self) -> Calibration | None:
        """Calibration of the model error of predictions; None: intervals are the spread of recorded steps alone."""
        known = self._lower(Plan()).calibration
        if known is None or not known.rests_on or not self.replay_error:
            return known
        error = f"the replay of the recorded setting is off by {self.replay_error * 100:+.0f} %, which is included"
        return msgspec.structs.replace(known, rests_on=f"{known.rests_on}; {error}")

    @cached_property
    def replay_error(self) -> float:
        """Relative error of the replay of the recorded setting, where it is too large to be part of the intervals already; else 0.

        A job on another cluster or with other speeds has that of the recorded job.
        """
        if self._recorded_error is not None:
            return self._recorded_error
        measured_us = self.measurement.median_us
        if measured_us is None:
            return 0.0
        return replay_error(self.job.lower(Scenario()).replayable.iterations().iteration_us, measured_us)

    @property
    def measurement(self) -> MeasuredIterations:
        """The measurement that the prediction without a plan is compared with."""
        return self.job.measurement(self.scenario)

    @property
    def recording_doubt(self) -> str | None:
        """Why predictions from the recording are not to be trusted, where its own replay is far from what was measured; or None."""
        return None if self.trace is None else self.doubt_of(self.predict(Plan()).iteration_us)

    def doubt_of(self, predicted_us: float) -> str | None:
        """The same for a prediction of the recorded setting that was made already."""
        residual_us = 0.0 if self.trace is None else max(self.trace.meta.clock.residual_us, default=0.0)
        return recording_doubt(predicted_us, self.measurement.median_us, residual_us)

    def diagnose(self) -> Diagnosis:
        """Why an iteration takes as long as it does: see `Job.diagnose`."""
        return self.job.diagnose(self)

    # A search.

    @property
    def nothing_to_search(self) -> str:
        """Why there are no plans, for a job whose space is empty."""
        of_what = self.title if self.trace is None else f"the trace ({self.trace.meta.format}) is of a job"
        return self.space.why_empty or f"{of_what} whose knobs are not known: there is nothing to search"

    def objective(self, tried_first: Sequence[Plan] = ()) -> JobObjective[Any]:  # Any: the type of the job
        """The job as a search asks it; it tries some plans first, which are legal."""
        objective = self.job.objective(self)
        if tried_first:
            objective.space = self.space.asking_first(tried_first)
        return objective


class JobObjective(Generic[OneJob]):
    """An `Objective` (`search/objective.py`) that predicts by replay. A kind's own may have the optional methods named there.

    Attributes
    ----------
    job
        The job of `here`, of its own type.
    space
        The plans of the search.
    """

    def __init__(self, here: JobInScenario, job: OneJob) -> None:
        self.here, self.job, self.space = here, job, here.space

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """See `Job.tensors`."""
        return self.job.tensors

    @property
    def recorded(self) -> CommSettings | None:
        """See `Job.recorded`."""
        return self.job.recorded

    def predict(self, plan: Plan) -> Prediction:
        """See `JobInScenario.predict`."""
        return self.here.predict(plan)

    def sampled(self, plan: Plan, *, samples: int, seed: int = 0) -> Floats:
        """See `JobInScenario.sampled`."""
        return self.here.sampled(plan, samples=samples, seed=seed)

    def reasons(self, plans: Sequence[Plan]) -> tuple[str, ...]:
        """Why the first of some ranked plans is the best of them, and what the others lose, in sentences."""
        return ()

    def facts(self) -> SearchFacts:
        """The setting that a search compares its plans with, and the memory that these may take."""
        return SearchFacts()


def _possible(prediction: Prediction) -> Prediction:
    """The prediction; raises `InputError` if time stamps must be damaged for an iteration to take so long."""
    us = prediction.iteration_us
    if not 0 <= us <= _LONGEST_US or (us == 0 and prediction.source == "recorded"):
        raise InputError(
            f"an iteration of {us:.3g} us is not possible: time stamps of the recording are damaged (one is far from the others, "
            "or all are equal); record the job again, or take the damaged records out of the files"
        )
    return prediction


def ranks_in_turn(ranks: int, known: int) -> tuple[str, ...]:
    """The assumption of a job of more ranks than were recorded, as a sentence; empty for others."""
    return (f"{ranks} ranks compute like the {known} recorded ones, in turn",) if ranks > known else ()
