"""`Job`: what every verb asks of one job, whatever its framework and scheme are. `kinds/_kind.py` shows how a kind defines its own.

A kind defines `Job.lower`, which turns a scenario into what is replayed; the answers that every kind gives in the same way follow
from it here. What a kind can be asked is data: its `settings` and flags. Another question is refused with a line that names the
kinds that can.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec
import numpy as np

from dpro_search._text import listed
from dpro_search.collect.trace import Floats, TensorInfo, Trace
from dpro_search.errors import InputError
from dpro_search.graph.measured import (
    ProfiledSteps,
    measured_iteration_us,
    profiled_iterations_us,
    recording_doubt,
    replay_error,
    without_step,
)
from dpro_search.kinds._answers import ParallelSetting, PlanFacts, ReplayedStep, SearchFacts
from dpro_search.kinds._diagnosis import Diagnosis
from dpro_search.kinds._names import registered
from dpro_search.kinds._options import PlanOptions
from dpro_search.kinds._terms import Term
from dpro_search.kinds._work import Work
from dpro_search.machine import Calibration
from dpro_search.quantities import memory_shortage_text
from dpro_search.replay.lowered import Lowered
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import Scenario
from dpro_search.space.tensorflow.fusion_moves import contiguous_groups
from dpro_search.space.transformations import PlanSpace

if TYPE_CHECKING:
    from dpro_search.deploy.parts.part import DescribedWorkload
    from dpro_search.replay.outputs import MeasuredOps
    from dpro_search.replay.timeline import Timeline
    from dpro_search.space.tensor_groups import TensorGroups


_LONGEST_US = 30 * 24 * 3600e6  # of an iteration: nobody trains with steps of a month
# Fields of a scenario, the setting that each is, and what a job without it cannot do.
_CHANGES = (
    ("global_batch", "global_batch", "be predicted with another batch"),
    ("sequence", "sequence", "be predicted with sequences of another length"),
    ("precision", "precision", "be predicted in another precision"),
    ("measured_us", "measured", "be told what a step takes without the profiler"),
    ("target_loss", "target_loss", "be trained to a loss"),
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Recorded steps beside their own replay."""

    measured_us: float | None  # What was measured of an iteration; None: a single step was recorded, of which no iteration follows.
    prediction: Prediction  # What was predicted of the same.
    error_pct: float  # Signed for one step; the mean of absolute errors for several.
    ops: int  # How many ops were replayed.
    seconds: float = 0.0  # How long that took.
    # baseline_us, baseline_error_pct: The mean of the other steps as a prediction of a held-out step, and its error; None: unknown.
    baseline_us: float | None = None
    baseline_error_pct: float | None = None
    steps: tuple[ReplayedStep, ...] = ()  # Each step with its own durations, where the kind of job tells.


class Job(ABC):
    """One job: predictions of its plans in a scenario, and its diagnosis. Deterministic."""

    title: str  # What its kind is called: "a Horovod job".
    trace: Trace | None = None  # The recording that it comes from; None: it was described.
    tensors: tuple[TensorInfo, ...]  # The communicated tensors, in the order in which they become ready.
    recorded: Any = None  # Horovod's knobs in the recording (`CommSettings`); None for other kinds of jobs.
    space: PlanSpace  # Which plans there are.
    askable: tuple[str, ...] = ()  # Plan fields that text can set in a scenario, whether or not `space` has them now.
    # Other changes of a scenario: some of "groups", "global_batch", "sequence", "precision", `CLUSTER_SETTINGS`, `SCALES`.
    settings: ClassVar[tuple[str, ...]] = ()
    replays_steps: ClassVar[bool] = False  # Whether `lower` can replay the job from some of its profiled steps.
    can_begin_with: ClassVar[bool] = False  # Whether a scenario can say under which plan it runs to begin with.
    varies: ClassVar[bool] = True  # Whether durations of its ops vary, so that they can be drawn anew (`sampled`).
    unplaced: Mapping[str, str] = MappingProxyType({})  # Recorded ops that have no place in the graph, and why.
    scenario: Scenario = Scenario()  # Differences from the recording under every plan; see `under`.
    memory_limit_bytes: int | None = None
    _replay_error: float | None = None  # See `replay_error`; None: not computed yet.
    _last_lowered: tuple[Scenario, Lowered] | None = None  # See `_lowered_in`.

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

    @abstractmethod
    def lower(self, scenario: Scenario, *, steps: ProfiledSteps | None = None) -> Lowered:
        """The job in a scenario, ready to be replayed. It does not depend on `Job.scenario`.

        Parameters
        ----------
        steps
            Profiled steps that the job is replayed from; None: all steps, without the profiler's overhead.

        Raises
        ------
        InputError
            The job cannot follow the plan, be predicted with the other changes, or be replayed from some of its steps.
        """

    def lowered(self, plan: Plan) -> Lowered:
        """The job under a plan in `scenario`, with the error of the recorded setting's replay."""
        lowered = self._lowered_in(replace(self.scenario, plan=plan))
        error = self.replay_error
        return replace(lowered, error=replace(lowered.error, replay=error)) if error else lowered

    def _lowered_in(self, scenario: Scenario) -> Lowered:
        """The job as `lower` gives it; the last one is kept, because a verb asks several questions about one scenario."""
        if self._last_lowered is None or self._last_lowered[0] != scenario:
            self._last_lowered = scenario, self.lower(scenario)
        return self._last_lowered[1]

    def plans(self, scenario: Scenario) -> PlanSpace:
        """The space of plans in a scenario; it has the fields of the scenario's plan."""
        return self.space

    @property
    def calibration(self) -> Calibration | None:
        """Calibration of the model error of predictions; None: intervals are the spread of recorded steps alone."""
        return self._lowered_in(self.scenario).calibration

    # What a plan costs.

    def predict(self, plan: Plan) -> Prediction:
        """Predicted cost of one iteration under a plan; raises `InputError` for a plan that the job cannot follow."""
        self.space.check(plan)
        lowered = self.lowered(plan)
        return self._within_limit(_possible(lowered.prediction(lowered.replayable.iterations())))

    def _within_limit(self, prediction: Prediction) -> Prediction:
        """The prediction, infeasible where it needs more memory than the limit that was given."""
        limit = self.memory_limit_bytes
        peak = prediction.peak_memory_bytes
        if limit is None or (peak is not None and peak <= limit):
            return prediction
        return msgspec.structs.replace(prediction, infeasible=memory_shortage_text(peak, limit))

    @property
    def replay_error(self) -> float:
        """Relative error of the replay of the recorded setting, where it is too large to be part of the intervals already; else 0.

        A job on another cluster or with other speeds has that of the recorded job (`under`).
        """
        if self._replay_error is None:
            measured_us = self.measured_iteration_us
            if measured_us is None:
                self._replay_error = 0.0
            else:
                self._replay_error = replay_error(self.lower(Scenario()).replayable.iterations().iteration_us, measured_us)
        return self._replay_error

    def sampled(self, plan: Plan, *, samples: int, seed: int = 0, on_sample: Callable[[], None] = lambda: None) -> Floats:
        """Iteration times of replays with durations drawn anew, [samples]; the same draws for every plan.

        Raises `InputError` if this kind of job has one duration of each op only.
        """
        if not self.varies:
            raise self.cannot("varies", "be replayed with other durations")
        return self.lowered(plan).replayable.sampled_us(samples=samples, seed=seed, on_sample=on_sample)

    def replayed(self, plan: Plan) -> Prediction:
        """The prediction that `replay` reports: as `predict`, with a breakdown and with what `predict` leaves out to be fast."""
        return self._within_limit(self.lowered(plan).reported())

    def plan_facts(self, plan: Plan) -> PlanFacts:
        """Facts that `replay` reports beside the prediction of a plan."""
        return PlanFacts()

    def reasons(self, plans: Sequence[Plan]) -> tuple[str, ...]:
        """Why the first of some ranked plans is the best of them, and what the others lose, in sentences."""
        return ()

    def search_facts(self) -> SearchFacts:
        """The setting that a search compares its plans with, and the memory that these may take."""
        return SearchFacts()

    # What else can be asked of it.

    @property
    def questions(self) -> Mapping[str, Plan]:
        """Plans worth a look, by how ``--set`` takes them: `diagnose` shows their gains, and a search tries them first.

        Plans that the job cannot follow may be among them; both pass these over.
        """
        return {}

    @property
    def work(self) -> Work | None:
        """Work of an iteration, for a job that knows it without a recording."""
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
        return self.doubt_of(self.predict(Plan()).iteration_us, self.measured_iteration_us)

    def doubt_of(self, predicted_us: float, measured_us: float | None) -> str | None:
        """The same for a prediction of the recorded setting that was made already."""
        residual_us = 0.0 if self.trace is None else max(self.trace.meta.clock.residual_us, default=0.0)
        return recording_doubt(predicted_us, measured_us, residual_us)

    def measured_iterations_us(self) -> Floats:
        """The measured iterations whose median `measured_iteration_us` is, [n]."""
        return np.zeros(0) if self.trace is None else self.trace.iterations_us()

    @property
    def measured_mean_us(self) -> float | None:
        """Mean of the measured iterations, which steps that stall make longer than the median; None: not measured."""
        measured_us = self.measured_iterations_us()
        return None if self.measured_iteration_us is None or not len(measured_us) else float(measured_us.mean())

    def under(self, scenario: Scenario) -> tuple[Job, Plan]:
        """The job in a scenario, which comes after its own, and the scenario's plan; raises `InputError` for what it cannot be."""
        plan = scenario.plan
        if scenario.groups is not None:
            if scenario.groups < 1:
                raise InputError(f"groups must be at least 1, not {scenario.groups}")
            plan = plan.changed(tensor_groups=contiguous_groups(self.tensors, scenario.groups))
        return self._in(self.scenario.then(replace(scenario, plan=plan, groups=None))), plan

    def _in(self, scenario: Scenario) -> Job:
        """The job, asked in a scenario."""
        self._lowered_in(scenario)  # raises what it raises before anything is predicted
        job = copy.copy(self)
        job.scenario, job.space = replace(scenario, plan=Plan()), self.plans(scenario)
        job._replay_error = self.replay_error
        return job

    @property
    def cluster(self) -> ClusterSpec:
        """Cores and links that the job runs on."""
        return self._lowered_in(self.scenario).cluster

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Assumptions of predictions in `scenario`, a sentence each.

        For a recorded job in its recorded setting none; for a described one what its description leaves open.
        """
        return self._lowered_in(self.scenario).assumptions

    @property
    def origin(self) -> str:
        """The origin of the setting without a plan, in a word."""
        return "described" if self.trace is None else "recorded"

    def allowing(self, plan: Plan, options: PlanOptions) -> Job:
        """The same job with a space that has the fields of a plan, predicted with the models that the options name."""
        return self

    # One iteration, op by op.

    def op_count(self, plan: Plan) -> int:
        """How many ops an iteration under a plan has."""
        return self.lowered(plan).replayable.op_count

    def timeline(self, plan: Plan) -> Timeline:
        """A replay of a plan, op by op."""
        return self.lowered(plan).replayable.timeline()

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
        if not self.replays_steps:
            raise self.cannot("replays_steps", "be predicted without one of its steps (--holdout-step)")
        assert self.trace is not None, "only recorded jobs have profiled steps"
        others, measured_us = without_step(self.trace, step)
        lowered = self.lower(Scenario(), steps=ProfiledSteps(replayed=others, fitted=others))
        error = lowered.replayable.iterations().iteration_us / measured_us - 1
        return _comparison(lowered, measured_us, error)

    def rank_parts_us(self) -> Mapping[int, Mapping[str, float]]:
        """Parts of a replayed iteration, which add up to it, for each rank by its number in the job; empty: not known."""
        return {}

    def own_durations(self) -> Comparison:
        """Each profiled step, replayed with its own durations. What communication costs is fitted on all steps."""
        if not self.replays_steps:
            raise self.cannot("replays_steps", "be replayed step by step (--own-durations)")
        assert self.trace is not None, "only recorded jobs have profiled steps"
        steps_us = profiled_iterations_us(self.trace)
        step_by_step = [self.lower(Scenario(), steps=ProfiledSteps(replayed=(step,))) for step in steps_us]
        replayed_us = np.array([lowered.replayable.iterations().iteration_us for lowered in step_by_step])
        measured_us = np.array(list(steps_us.values()))
        error = float(np.abs(replayed_us / measured_us - 1).mean())
        return _comparison(self.lower(Scenario(), steps=ProfiledSteps()), float(measured_us.mean()), error)

    def terms(self) -> tuple[Term, ...]:
        """Fitted numbers of its cost model, for the report."""
        return ()

    @property
    def workload(self) -> Callable[[Plan], DescribedWorkload] | None:
        """The described parallel job under a plan, for its export; None: it is no such job."""
        return None

    # What people want to know about it.

    @abstractmethod
    def diagnose(self) -> Diagnosis:
        """Why an iteration without a plan takes as long as it does; of ranks that behave alike one, with how many they are."""

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

    def parallel_setting(self, plan: Plan, name: str) -> ParallelSetting | None:
        """A plan of a parallel job as the report shows it under a name; None for other kinds of jobs."""
        return None

    def check_changes(self, scenario: Scenario, steps: ProfiledSteps | None = None) -> None:
        """Raise `InputError` for changes, other than of the plan, that are not among `settings`, and for a choice of steps."""
        if steps is not None and not self.replays_steps:
            raise self.cannot("replays_steps", "be replayed from some of its profiled steps")
        for name, setting, what in _CHANGES:
            if getattr(scenario, name) is not None and setting not in self.settings:
                raise self.cannot(setting, what)
        if scenario.begins_with is not None and not self.can_begin_with:
            raise self.cannot("can_begin_with", "begin with another setting than the recorded one")

    def cannot(self, needs: str, what: str) -> InputError:
        """The error for what this kind of job cannot do; it names the kinds that can.

        `needs`: the setting or the flag of the class (`varies`) that a kind has which can.
        """
        able = [
            kind.title for kind in registered() if needs in kind.job_type.settings or getattr(kind.job_type, needs, False) is True
        ]
        return InputError(f"{self.title} cannot {what}" + (f"; {listed(able)} can" if able else ""))


def _comparison(lowered: Lowered, measured_us: float, error: float) -> Comparison:
    """Recorded steps beside a job that is replayed from them, once again, to see how long that takes; `error` is relative."""
    started = time.perf_counter()
    prediction = lowered.reported()
    seconds = time.perf_counter() - started
    return Comparison(
        measured_us=measured_us,
        prediction=prediction,
        error_pct=error * 100,
        ops=lowered.replayable.op_count,
        seconds=seconds,
    )


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


def with_memory_limit(job: Job, limit_bytes: int | None) -> Job:
    """The job with plans that need more memory infeasible; raises `InputError` if the trace does not tell what it takes."""
    if limit_bytes is not None:
        if job.predict(Plan()).peak_memory_bytes is None:
            raise InputError("the memory limit cannot be kept: the trace does not tell how much memory the job takes")
        job.memory_limit_bytes = limit_bytes
    return job
