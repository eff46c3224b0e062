"""`RecordedSteps`: what jobs have in common that are predicted from their recorded streams and dependencies, op by op."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np

from dpro_search._text import shortened
from dpro_search.cluster import Cluster
from dpro_search.collect.trace import DependencyKind, EventKind, Floats, Trace
from dpro_search.collect.trace_meta import WORLD_SIZE
from dpro_search.kinds._answers import PlanFacts, ReplayedStep
from dpro_search.kinds._job import Comparison, Job, Table
from dpro_search.kinds.recorded.cluster import Elsewhere, elsewhere
from dpro_search.kinds.recorded.findings import unknown_time
from dpro_search.kinds.recorded.predictor import SMALL, RecordedPrediction, RecordedPredictor
from dpro_search.machine import Calibration, machine_constants
from dpro_search.quantities import time_text
from dpro_search.replay.timeline import Timeline
from dpro_search.space.cluster import ClusterSpec, spec_on
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.recorded.memory import peak_bytes
from dpro_search.space.scenario import OP_SCALES, SCALES, ClusterChange, Scale
from dpro_search.space.tensor_groups import TensorGroups, recorded_groups
from dpro_search.space.transformations import JobFacts, PlanSpace


class RecordedSteps(Job):
    """Predictions of the recorded steps with other speeds. The empty plan is its only one: other plans need a model of the job."""

    trace: Trace
    settings: ClassVar[tuple[str, ...]] = ("ranks", "rate", "recorded_on", "measured", *SCALES, *OP_SCALES)

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.predictor = self._predictor()
        self.tensors = trace.tensors
        self.space = PlanSpace(JobFacts(name=self.title, tensors=trace.tensors), [])
        self._scales: tuple[Scale, ...] = ()
        self._elsewhere: Elsewhere | None = None
        self._unprofiled: tuple[float, float] | None = None  # What a step takes without the profiler, and the host's factor.

    def _predictor(self, *, without: Sequence[int] = ()) -> RecordedPredictor:
        """A predictor that ignores the given steps."""
        return RecordedPredictor(self.trace, without=without)

    @property
    def _in_profile(self) -> RecordedPredictor:
        """A predictor of the steps as they were recorded, under the profiler."""
        return self.predictor if self._unprofiled is None and self._elsewhere is None else self._predictor()

    def moved(self, change: ClusterChange) -> Job:
        """Kinds that know more of a job than its recorded steps override `at_scale`, which all other machines go through."""
        if change.on_gpus and change.recorded_on is None:
            return super().moved(change)
        return self._moved(change)

    def at_scale(self, cluster: Cluster, ranks: int | None = None) -> Job:
        return self._moved(ClusterChange(machines=cluster, ranks=ranks))

    def _moved(self, change: ClusterChange) -> Self:
        """The recorded steps on other GPUs and links (`space.recorded.cluster_change`)."""
        changed = copy.copy(self)
        here = self._in_profile if self._unprofiled is None else self.predictor
        changed._elsewhere = elsewhere(self.trace, here, change)
        changed.predictor = changed._elsewhere.predictor
        return changed

    @property
    def cluster(self) -> ClusterSpec:
        if self._elsewhere is None:
            return super().cluster
        return spec_on(self._elsewhere.place.cluster, self._elsewhere.place.ranks).spec

    def left_out(self, change: ClusterChange) -> tuple[str, ...]:
        known = super().left_out(change) if self._elsewhere is None else self._elsewhere.assumed
        return (*known, *self.assumed())

    def assumed(self) -> Iterator[str]:
        """Assumptions of predictions about the recorded job, a sentence each."""
        if self._unprofiled is not None:
            step_us, factor = self._unprofiled
            yield (
                f"a step takes {time_text(step_us)} without the profiler, as given: host threads take {factor:.2f} times what they "
                "take in the profile"
            )
        for scale in self._scales:
            if scale.what == "batch":
                times = f"{scale.factor:g} times"
                yield (
                    f"with {times} the batch, kernels of the forward and backward pass take {times} as long, except for the "
                    "shortest; host threads, the optimizer and communication take as long as recorded; the interval reaches to "
                    "the step whose kernels take as long as recorded"
                )
        if left_out := self.predictor.left_out:
            yield left_out
        residual_us, measured_us = self.predictor.clock_residual_us, self.predictor.measured_iteration_us
        aligned = bool((self.trace.events.collective >= 0).any())  # a warning of the import names ranks whose clocks are not
        if aligned and measured_us is not None and residual_us > SMALL * measured_us:
            yield (
                f"the clocks of the ranks are known to within {time_text(residual_us)} only, which the interval includes: record "
                "more steps, for each collective helps to align them"
            )
        ranks, world = self.trace.meta.ranks, self.trace.meta.world_size or round(self.trace.meta.number_knob(WORLD_SIZE, 0))
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

    def measured_as(self, step_us: float) -> Self:
        """With the work of host threads as fast as it is without the profiler (`kinds.recorded.unprofiled`)."""
        from dpro_search.kinds.recorded.unprofiled import without_profiler

        changed = copy.copy(self)
        changed.predictor, factor = without_profiler(self.predictor, step_us)
        changed._unprofiled = step_us, factor
        return changed

    @property
    def host_factor(self) -> float:
        """Ratio of the host threads' time without the profiler to their time in the profile (`measured_as`)."""
        return 1.0 if self._unprofiled is None else self._unprofiled[1]

    def scaled(self, scale: Scale) -> Self:
        changed = copy.copy(self)
        changed._scales = (*self._scales, scale)
        return changed

    def _predict(self, plan: Plan) -> Prediction:
        if self._elsewhere is None:
            return _prediction(self.predictor, self._scales, self._peak_memory_bytes(plan))
        prediction = self.predictor.predict(self._scales)
        busy_us = min(prediction.busy_us, self._elsewhere.low.predict(self._scales).busy_us)
        prediction = replace(prediction, interval_us=self._elsewhere.interval_us(prediction, self._scales), busy_us=busy_us)
        return as_prediction(prediction, "extrapolated", self._peak_memory_bytes(plan))

    def plan_facts(self, plan: Plan) -> PlanFacts:
        if self.trace.meta.unrecorded_devices:
            return PlanFacts(notes=("Unknown: the recording has launches of kernels, but no record of the device that ran them.",))
        prediction = self.replayed(plan)
        unknown = unknown_time(prediction.breakdown_us.get("unknown", 0.0), prediction.iteration_us)
        return PlanFacts(notes=(unknown, *self._unknown_kernels())) if unknown else PlanFacts()

    def _unknown_kernels(self) -> Iterator[str]:
        """The kernels that unknown time belongs to, if it is that of kernels."""
        events = self.trace.events
        names = {self.trace.names[name]: None for name in events.name[events.kind == EventKind.UNKNOWN].tolist()}
        if names:
            shown = ", ".join(shortened(name, 60) for name in list(names)[:3]) + (", ..." if len(names) > 3 else "")
            yield f"It is not known whether these kernels compute or communicate: {shown}."

    def _peak_memory_bytes(self, plan: Plan) -> int | None:
        """The most that a rank's allocator had handed out while it was recorded; other speeds do not change it."""
        return peak_bytes(self.trace.memory)

    @property
    def calibration(self) -> Calibration:
        """The spread of the recorded steps, with that of other profiles as a prior (`costmodel.step_spread`)."""
        constants, meta = machine_constants(), self.trace.meta
        steps = len(self.predictor.iterations_us)
        ranks = f"{meta.ranks} {'rank' if meta.ranks == 1 else 'ranks'}"
        steps_used = (
            f"{steps} measured iterations of {ranks}" if steps > 1 else f"one step of {ranks}, whose spread was not measured"
        )
        spread = (
            f"where 9 of 10 further steps should lie, from {steps_used} and the usual spread of steps in profiles of other jobs"
        )
        if self.replay_error:
            spread += f"; the replay of the recorded setting is off by {self.replay_error * 100:+.0f} %, which is included"
        if self._elsewhere is not None:
            models = "the errors of predicted NCCL collectives on systems left out of the fit, and an estimate for kernels"
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

    @property
    def measured_iteration_us(self) -> float | None:
        if self._elsewhere is not None:
            return None
        return self.predictor.measured_iteration_us if self._unprofiled is None else self._unprofiled[0]

    def measured_iterations_us(self) -> Floats:
        return np.array(list(self.predictor.iterations_us.values()))

    @property
    def measured_mean_us(self) -> float | None:
        if self._elsewhere is not None or self._unprofiled is not None or self.predictor.measured_iteration_us is None:
            return None
        return self.predictor.measured_mean_us

    def sampled(self, plan: Plan, *, samples: int, seed: int = 0, on_sample: Callable[[], None] = lambda: None) -> Floats:
        return self.predictor.sampled(self._scales, samples=samples)

    def op_count(self, plan: Plan) -> int:
        return len(self.predictor.graph)

    def timeline(self, plan: Plan) -> Timeline:
        return self.predictor.timeline(self._scales)

    def perfetto(self, plan: Plan, *, recorded: bool) -> bytes:
        from dpro_search.kinds.recorded.timeline import about_ops, measured_step
        from dpro_search.replay.outputs import PredictedOps, perfetto_json

        predictor, trace, timeline = self.predictor, self.trace, self.timeline(plan)
        rows, measured = predictor.rows(self._scales), None
        if recorded and len(rows):
            measured = measured_step(trace, predictor.timeline_step(self._scales), timeline, predictor.ops, rows)
        return perfetto_json(
            timeline,
            measured=measured,
            first_iteration=timeline.iterations - 1,
            about=about_ops(trace, timeline, predictor.ops, rows, compared=recorded) if len(rows) else PredictedOps(),
            numbers=trace.meta.numbers,
        )

    def rank_parts_us(self) -> dict[int, Mapping[str, float]]:
        numbers = self.trace.meta.numbers
        return {numbers[row.rank]: row.breakdown_us for row in self.predictor.predict(self._scales).ranks}

    def held_out(self, step: int) -> Comparison:
        started = time.perf_counter()
        held = self._in_profile.held_out(step)
        return Comparison(
            measured_us=held.measured_us,
            prediction=as_prediction(held.prediction, "recorded", self._peak_memory_bytes(Plan())),
            error_pct=held.error_pct,
            ops=len(self.predictor.graph),
            seconds=time.perf_counter() - started,
            baseline_us=held.baseline_us,
            baseline_error_pct=held.baseline_error_pct,
        )

    def own_durations(self) -> Comparison:
        pairs = self._in_profile.own_durations()
        steps = tuple(
            ReplayedStep(step=step, measured_us=true, replayed_us=replayed, error_pct=(replayed / true - 1) * 100)
            for step, (true, replayed) in pairs.items()
        )
        started = time.perf_counter()
        prediction = _prediction(self.predictor, (), self._peak_memory_bytes(Plan()))
        return Comparison(
            measured_us=self.measured_iteration_us,
            prediction=prediction,
            error_pct=float(np.mean([abs(row.error_pct) for row in steps])),
            ops=len(self.predictor.graph),
            seconds=time.perf_counter() - started,
            steps=steps,
        )

    def diagnose(self) -> dict[str, Any]:
        from dpro_search.kinds.recorded.diagnosis import diagnosis

        facts = diagnosis(self.trace, self.predictor, profiled=self._unprofiled is None)
        return facts | {"measured_iteration_us": self.measured_iteration_us}

    def tables(self, facts: Mapping[str, Any]) -> list[Table]:
        from dpro_search.kinds.recorded.diagnosis import diagnosis_tables

        return diagnosis_tables(facts)

    def tensor_groups(self, step: int | None, best: Plan | None) -> TensorGroups | None:
        recorded = () if step is None else recorded_groups(self.trace, step)
        return TensorGroups(groups={"as recorded": recorded}) if any(group.count > 1 for group in recorded) else None


def _prediction(predictor: RecordedPredictor, scales: tuple[Scale, ...], peak_memory_bytes: int | None) -> Prediction:
    return as_prediction(predictor.predict(scales), "extrapolated" if scales else "recorded", peak_memory_bytes)


def as_prediction(recorded: RecordedPrediction, source: str, peak_memory_bytes: int | None = None) -> Prediction:
    """A prediction of recorded steps as all jobs give it."""
    return Prediction(
        iteration_us=recorded.iteration_us,
        interval_us=recorded.interval_us,
        breakdown_us=recorded.breakdown_us,
        peak_memory_bytes=peak_memory_bytes,
        source=source,
        settled=recorded.settled,
        floor_us=recorded.busy_us,
        mean_us=recorded.mean_us,
    )
