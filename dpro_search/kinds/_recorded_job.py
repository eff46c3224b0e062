"""`RecordedSteps`: what jobs have in common that are predicted from their recorded streams and dependencies, op by op."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from dpro_search.collect.trace import Floats, Trace
from dpro_search.kinds._base import Comparison, Job, Table
from dpro_search.kinds._recorded import RecordedPrediction, RecordedPredictor
from dpro_search.machine import Calibration, machine_constants
from dpro_search.replay.timeline import Timeline
from dpro_search.report.groups import TensorGroups, recorded_groups
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import OP_SCALES, SCALES, Scale
from dpro_search.space.transformations import JobFacts, PlanSpace


class RecordedSteps(Job):
    """Predictions of the recorded steps with other speeds. The empty plan is its only one: other plans need a model of the job."""

    trace: Trace
    settings: ClassVar[tuple[str, ...]] = (*SCALES, *OP_SCALES)

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.predictor = self._predictor()
        self.tensors = trace.tensors
        self.space = PlanSpace(JobFacts(name=self.title, tensors=trace.tensors), [])
        self._scales: tuple[Scale, ...] = ()

    def _predictor(self, *, without: Sequence[int] = ()) -> RecordedPredictor:
        """Of all steps but some."""
        return RecordedPredictor(self.trace, without=without)

    def scaled(self, scale: Scale) -> Self:
        changed = copy.copy(self)
        changed._scales = (*self._scales, scale)
        return changed

    def _predict(self, plan: Plan) -> Prediction:
        return _prediction(self.predictor, self._scales)

    @property
    def calibration(self) -> Calibration:
        """The spread of the recorded steps, with that of other profiles as a prior (`costmodel.step_spread`)."""
        constants, meta = machine_constants(), self.trace.meta
        steps = len(self.predictor.iterations_us)
        ranks = f"{meta.ranks} {'rank' if meta.ranks == 1 else 'ranks'}"
        own = f"{steps} measured iterations of {ranks}" if steps > 1 else f"one step of {ranks}: no spread was measured"
        return Calibration(
            calibrated=steps > 1,
            model_error=(constants.gpu.replay_error, constants.gpu.replay_error),
            widening=1.0,
            on=own,
            rests_on=f"{own}; the spread of other jobs' profiles counts as {constants.gpu.step_spread_steps:g} more",
        )

    @property
    def measured_iteration_us(self) -> float | None:
        return self.predictor.measured_iteration_us

    def measured_iterations_us(self) -> Floats:
        return np.array(list(self.predictor.iterations_us.values()))

    def sampled(self, plan: Plan, *, samples: int, seed: int = 0, on_sample: Callable[[], None] = lambda: None) -> Floats:
        return self.predictor.sampled(self._scales, samples=samples)

    def op_count(self, plan: Plan) -> int:
        return len(self.predictor.graph)

    def timeline(self, plan: Plan) -> Timeline:
        return self.predictor.timeline(self._scales)

    def held_out(self, step: int) -> Comparison:
        started = time.perf_counter()
        held = self.predictor.held_out(step)
        return Comparison(
            measured_us=held.measured_us,
            prediction=as_prediction(held.prediction, "recorded"),
            error_pct=held.error_pct,
            ops=len(self.predictor.graph),
            seconds=time.perf_counter() - started,
            more={"baseline_iteration_us": held.baseline_us, "baseline_error_pct": held.baseline_error_pct},
        )

    def own_durations(self) -> Comparison:
        pairs = self.predictor.own_durations()
        errors = {step: (replayed / true - 1) * 100 for step, (true, replayed) in pairs.items()}
        measured, predicted = (float(np.mean(column)) for column in zip(*pairs.values(), strict=True))
        started = time.perf_counter()
        prediction = _prediction(self.predictor, ())
        return Comparison(
            measured_us=measured,
            prediction=prediction,
            error_pct=float(np.mean(np.abs(list(errors.values())))),
            ops=len(self.predictor.graph),
            seconds=time.perf_counter() - started,
            more={
                "predicted_iteration_us": predicted,
                "steps": [{"step": step, "error_pct": value} for step, value in errors.items()],
            },
        )

    def diagnose(self) -> dict[str, Any]:
        from dpro_search.kinds._recorded_diagnosis import diagnosis

        return diagnosis(self.trace, self.predictor)

    def tables(self, facts: Mapping[str, Any]) -> list[Table]:
        from dpro_search.kinds._recorded_diagnosis import diagnosis_tables

        return diagnosis_tables(facts)

    def tensor_groups(self, step: int | None, best: Plan | None) -> TensorGroups | None:
        recorded = () if step is None else recorded_groups(self.trace, step)
        return TensorGroups(groups={"as recorded": recorded}) if any(group.count > 1 for group in recorded) else None


def _prediction(predictor: RecordedPredictor, scales: tuple[Scale, ...]) -> Prediction:
    return as_prediction(predictor.predict(scales), "extrapolated" if scales else "recorded")


def as_prediction(found: RecordedPrediction, source: str) -> Prediction:
    """A prediction of recorded steps as all jobs give it; memory is not known."""
    return Prediction(
        iteration_us=found.iteration_us,
        interval_us=found.interval_us,
        breakdown_us=found.breakdown_us,
        peak_memory_bytes=None,
        source=source,
        settled=found.settled,
    )
