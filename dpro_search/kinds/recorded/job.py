"""`ProfiledJob`: what jobs have in common that are predicted from their recorded streams and dependencies, op by op."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np

from dpro_search._text import shortened
from dpro_search.collect.trace import DependencyKind, EventKind, Trace
from dpro_search.collect.trace_meta import WORLD_SIZE
from dpro_search.graph.measured import ProfiledSteps
from dpro_search.kinds._answers import PlanFacts, ReplayedStep
from dpro_search.kinds._comparison import Comparison, MeasuredIterations
from dpro_search.kinds._diagnosis import Diagnosis
from dpro_search.kinds._job import Job, JobInScenario
from dpro_search.kinds.recorded.cluster import StepsOnCluster, steps_on
from dpro_search.kinds.recorded.diagnosis import ProfileDiagnosis, diagnosis
from dpro_search.kinds.recorded.findings import unknown_time
from dpro_search.kinds.recorded.replay import RecordedReplay
from dpro_search.kinds.recorded.steps import SMALL, RecordedSteps
from dpro_search.machine import Calibration, machine_constants
from dpro_search.quantities import time_text
from dpro_search.replay.lowered import ErrorModel, Lowered
from dpro_search.replay.replayer import settled_us
from dpro_search.space.cluster import ClusterSpec, spec_on
from dpro_search.space.plan import Plan
from dpro_search.space.recorded.memory import peak_bytes
from dpro_search.space.scenario import OP_SCALES, SCALES, ClusterChange, Scale, Scenario
from dpro_search.space.tensor_groups import TensorGroups, recorded_groups
from dpro_search.space.transformations import PlanningFacts, PlanSpace


class _Unplanned(NamedTuple):
    """A scenario without a plan, which the plans of a search have in common."""

    scenario: Scenario
    steps: ProfiledSteps | None
    on_cluster: StepsOnCluster
    lowered: Lowered


class ProfiledJob(Job):
    """Predictions of the recorded steps with other speeds. The empty plan is its only one: other plans need a model of the job."""

    trace: Trace
    settings: ClassVar[tuple[str, ...]] = ("ranks", "rate", "recorded_on", "precision", "measured", *SCALES, *OP_SCALES)
    abilities = ("samples", "steps")
    _last_unplanned: _Unplanned | None = None  # See `_unplanned`.

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.tensors = trace.tensors

    @cached_property
    def recorded_steps(self) -> RecordedSteps:
        """The steps as they were recorded, under the profiler."""
        return RecordedSteps(self.trace)

    def plans(self, scenario: Scenario) -> PlanSpace:
        return PlanSpace(PlanningFacts(name=self.title, tensors=self.tensors), [])

    def lower(self, scenario: Scenario, *, steps: ProfiledSteps | None = None) -> Lowered:
        self.check_changes(scenario, steps)
        unplanned = self._unplanned(replace(scenario, plan=Plan()), steps)
        if scenario.plan == Plan():
            return unplanned.lowered
        return self._planned(unplanned.lowered, scenario.plan, unplanned.on_cluster)

    def _planned(self, lowered: Lowered, plan: Plan, on_cluster: StepsOnCluster) -> Lowered:
        """A job that was lowered without a plan, under one; raises `InputError` if it cannot follow the plan."""
        self.plans(Scenario()).check(plan)
        return lowered

    def _unplanned(self, scenario: Scenario, steps: ProfiledSteps | None = None) -> _Unplanned:
        """The job in a scenario without a plan. The last one is kept."""
        last = self._last_unplanned
        if last is not None and (last.scenario, last.steps) == (scenario, steps):
            return last
        recorded = self.recorded_steps
        of_steps = (scenario.cluster, scenario.measured_us, scenario.precision)
        if last is not None and (last.scenario.cluster, last.scenario.measured_us, last.scenario.precision) == of_steps:
            on_cluster = last.on_cluster
        else:
            on_cluster = steps_on(recorded, *of_steps)
        chosen = None if steps is None else steps.replayed
        without = () if chosen is None else tuple(step for step in recorded.numbers if step not in chosen)
        peak_memory_bytes, infeasible = self._memory(Plan(), on_cluster)
        place = on_cluster.moved_to
        lowered = Lowered(
            replayable=RecordedReplay(
                steps=on_cluster.steps,
                without=without,
                scales=scenario.scales,
                model_ends=on_cluster.model_ends,
            ),
            error=ErrorModel(model=0.0),
            as_recorded=not scenario.scales and on_cluster.model_ends is None,
            cluster=ClusterSpec.of(self.trace.meta) if place is None else spec_on(place.cluster, place.ranks).spec,
            calibration=self._calibration(on_cluster),
            assumptions=(*on_cluster.assumed, *self.assumed(on_cluster, scenario.scales)),
            peak_memory_bytes=peak_memory_bytes,
            infeasible=infeasible,
        )
        self._last_unplanned = _Unplanned(scenario, steps, on_cluster, lowered)
        return self._last_unplanned

    def assumed(self, on_cluster: StepsOnCluster, scales: Sequence[Scale]) -> Iterator[str]:
        """Assumptions of predictions from the recorded steps, a sentence each."""
        if on_cluster.unprofiled_us is not None:
            yield (
                f"a step takes {time_text(on_cluster.unprofiled_us)} without the profiler, as given: host threads take "
                f"{on_cluster.host_factor:.2f} times what they take in the profile"
            )
        for scale in scales:
            if scale.what == "batch":
                times = f"{scale.factor:g} times"
                yield (
                    f"with {times} the batch, kernels of the forward and backward pass take {times} as long, except for the "
                    "shortest; host threads, the optimizer and communication take as long as recorded; the interval reaches to "
                    "the step whose kernels take as long as recorded"
                )
        steps, meta = self.recorded_steps, self.trace.meta
        if on_cluster.unprofiled_us is None and meta.unprofiled_us is not None and meta.devices:
            time = time_text(meta.unprofiled_us)
            yield f"host threads are as slow as in the profile; a step without it took {time}, see --set measured=TIME"
        if unmeasured := steps.unmeasured:
            yield unmeasured
        residual_us, measured_us = steps.clock_residual_us, steps.measured.median_us
        aligned = bool((self.trace.events.collective >= 0).any())  # a warning of the import names ranks whose clocks are not
        if aligned and measured_us is not None and residual_us > SMALL * measured_us:
            yield (
                f"the clocks of the ranks are known to within {time_text(residual_us)} only, which the interval includes: record "
                "more steps, for each collective helps to align them"
            )
        ranks, world = meta.ranks, meta.world_size or round(meta.number_knob(WORLD_SIZE, 0))
        if world > ranks:
            yield (
                f"the job has {world} ranks, but only {ranks} {'was' if ranks == 1 else 'were'} imported: the others are taken to "
                f"compute like {'it' if ranks == 1 else 'these'}, and the recorded waits for them do not change"
            )
        needs = self.trace.dependencies
        if inferred := int((needs.kind == DependencyKind.INFERRED).sum()):
            yield (
                f"{inferred} of {len(needs)} dependencies are inferred, because no call in the profile shows them: in nearly every "
                "step, an op starts (or the host goes on) by the same time after another op ends, and nothing else explains that"
            )

    def plan_facts(self, here: JobInScenario, plan: Plan) -> PlanFacts:
        if self.trace.meta.unrecorded_devices:
            return PlanFacts(notes=("Unknown: the recording has launches of kernels, but no record of the device that ran them.",))
        prediction = here.replayed(plan)
        unknown = unknown_time(prediction.breakdown_us.get("unknown", 0.0), prediction.iteration_us)
        return PlanFacts(notes=(unknown, *self._unknown_kernels())) if unknown else PlanFacts()

    def _unknown_kernels(self) -> Iterator[str]:
        """The kernels that unknown time belongs to, if it is that of kernels."""
        events = self.trace.events
        names = {self.trace.names[name]: None for name in events.name[events.kind == EventKind.UNKNOWN].tolist()}
        if names:
            shown = ", ".join(shortened(name, 60) for name in list(names)[:3]) + (", ..." if len(names) > 3 else "")
            yield f"It is not known whether these kernels compute or communicate: {shown}."

    def _memory(self, plan: Plan, on_cluster: StepsOnCluster) -> tuple[int | None, str | None]:
        """The peak memory of a plan (None: not known), and why it does not fit (None: it does).

        Without a plan it is the most that a rank's allocator had handed out while it was recorded; other speeds do not change it.
        In another precision it is not known.
        """
        return None if on_cluster.precision is not None else peak_bytes(self.trace.memory), None

    def _calibration(self, on_cluster: StepsOnCluster) -> Calibration:
        """The spread of the recorded steps, with that of other profiles as a prior (`costmodel.intervals`)."""
        constants, meta = machine_constants(), self.trace.meta
        steps = len(self.recorded_steps.measured.iterations_us)
        ranks = f"{meta.ranks} {'rank' if meta.ranks == 1 else 'ranks'}"
        steps_used = (
            f"{steps} measured iterations of {ranks}" if steps > 1 else f"one step of {ranks}, whose spread was not measured"
        )
        spread = (
            f"where 9 of 10 further steps should lie, from {steps_used} and the usual spread of steps in profiles of other jobs"
        )
        if on_cluster.model_ends is not None:
            collectives = (
                ""
                if on_cluster.moved_to is None
                else "the errors of predicted NCCL collectives on systems left out of the fit, and "
            )
            models = f"{collectives}an estimate for kernels"
            return Calibration(
                calibrated=False, model_error=(0.0, 0.0), widening=1.0, on=steps_used, rests_on=f"{spread}; also {models}"
            )
        return Calibration(
            calibrated=steps > 1,
            model_error=(constants.gpu.replay_error, constants.gpu.replay_error),
            widening=1.0,
            on=steps_used,
            rests_on=spread,
        )

    def measurement(self, scenario: Scenario) -> MeasuredIterations:
        measured, given_us = self.recorded_steps.measured, scenario.measured_us
        iterations_us = np.array(list(measured.iterations_us.values()))
        if scenario.cluster != ClusterChange() or scenario.precision is not None:
            return MeasuredIterations(iterations_us=iterations_us)
        if given_us is not None:
            return MeasuredIterations(median_us=given_us, iterations_us=iterations_us)
        return MeasuredIterations(median_us=measured.median_us, mean_us=measured.mean_us, iterations_us=iterations_us)

    def perfetto(self, lowered: Lowered, *, recorded: bool) -> bytes:
        from dpro_search.kinds.recorded.timeline import about_ops, measured_step
        from dpro_search.replay.outputs import perfetto_json

        replay, trace = recorded_replay(lowered), self.trace
        timeline, rows = replay.timeline(), replay.rows
        if not len(rows):
            return perfetto_json(timeline, first_iteration=timeline.iterations - 1, numbers=trace.meta.numbers)
        ops = replay.steps.ops
        return perfetto_json(
            timeline,
            measured=measured_step(trace, replay.middle_step, timeline, ops, rows) if recorded else None,
            first_iteration=timeline.iterations - 1,
            about=about_ops(trace, timeline, ops, rows, compared=recorded),
            numbers=trace.meta.numbers,
        )

    def rank_parts_us(self, lowered: Lowered) -> dict[int, Mapping[str, float]]:
        numbers = self.trace.meta.numbers
        return {numbers[row.rank]: row.breakdown_us for row in recorded_replay(lowered).rank_times}

    def compared(self, step: int | None) -> Comparison:
        return self._own_durations() if step is None else self._held_out(step)

    def _held_out(self, step: int) -> Comparison:
        """A step, predicted from all others."""
        started = time.perf_counter()
        recorded = self.recorded_steps
        measured_us = dict(recorded.measured.iterations_us)
        step_us = measured_us.pop(step, None)
        if step_us is None or not measured_us:
            raise recorded.refused_holdout(step)
        others = tuple(number for number in recorded.numbers if number != step)
        lowered = self.lower(Scenario(), steps=ProfiledSteps(replayed=others, fitted=others))
        times = lowered.replayable.iterations()
        if recorded.are_samples:
            times = replace(times, iteration_us=settled_us(recorded_replay(lowered).typical_graph)[0])
        baseline_us = float(np.median(list(measured_us.values())))
        return Comparison(
            measured_us=step_us,
            prediction=lowered.prediction(times),
            error_pct=(times.iteration_us / step_us - 1) * 100,
            ops=self.lower(Scenario()).replayable.op_count,
            seconds=time.perf_counter() - started,
            baseline_us=baseline_us,
            baseline_error_pct=(baseline_us / step_us - 1) * 100,
        )

    def _own_durations(self) -> Comparison:
        """Each step, replayed with its own durations."""
        pairs = self.recorded_steps.own_durations()
        steps = tuple(
            ReplayedStep(step=step, measured_us=true, replayed_us=replayed, error_pct=(replayed / true - 1) * 100)
            for step, (true, replayed) in pairs.items()
        )
        started = time.perf_counter()
        lowered = self.lower(Scenario())
        return Comparison(
            measured_us=self.measurement(Scenario()).median_us,
            prediction=lowered.prediction(lowered.replayable.iterations()),
            error_pct=float(np.mean([abs(row.error_pct) for row in steps])),
            ops=lowered.replayable.op_count,
            seconds=time.perf_counter() - started,
            steps=steps,
        )

    def diagnose(self, here: JobInScenario) -> Diagnosis:
        return self._profile_diagnosis(here)

    def _profile_diagnosis(self, here: JobInScenario) -> ProfileDiagnosis:
        replay, scenario = recorded_replay(here.lowered(Plan())), here.scenario
        device = None if scenario.precision is not None else self._unplanned(replace(scenario, plan=Plan())).on_cluster.device
        return diagnosis(here, replay, is_profiled=scenario.measured_us is None, device=device)

    def tensor_groups(self, here: JobInScenario, step: int | None, best: Plan | None) -> TensorGroups | None:
        recorded = () if step is None else recorded_groups(self.trace, step)
        return TensorGroups(groups={"as recorded": recorded}) if any(group.count > 1 for group in recorded) else None


def recorded_replay(lowered: Lowered) -> RecordedReplay:
    """The replay of a job that `ProfiledJob.lower` made."""
    assert isinstance(lowered.replayable, RecordedReplay), "see `ProfiledJob.lower`"
    return lowered.replayable
