"""`PipelinePredictor`: the step time of a pipeline-parallel job that was recorded at operation level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from dpro_search.collect.readers.straggler_analysis import FORMAT
from dpro_search.collect.trace import Ints, Trace
from dpro_search.errors import InputError
from dpro_search.kinds.recorded.predictor import HeldOut, RecordedPredictor
from dpro_search.replay.device_time import busiest_us
from dpro_search.replay.replayer import replay
from dpro_search.replay.sensitivity import StragglerGone
from dpro_search.space.recorded.pipeline_parallel import pipeline_graph
from dpro_search.space.replay_graph import ReplayGraph
from dpro_search.space.scenario import Scale


def recorded_predictor(trace: Trace, *, without: Sequence[int] = ()) -> RecordedPredictor:
    """The predictor for a trace that is not of a Horovod job: by operation where it was recorded so, else by streams."""
    kind = PipelinePredictor if trace.meta.format == FORMAT else RecordedPredictor
    return kind(trace, without=without)


class PipelinePredictor(RecordedPredictor):
    """As `RecordedPredictor`, but for recordings whose steps are samples of a long job.

    Such steps do not follow each other, so what is measured and predicted is a step by itself: from its start to the last end of
    any rank. Steps are graphs of `space.recorded.pipeline_parallel`.
    """

    @cached_property
    def iterations_us(self) -> dict[int, float]:
        """Measured lengths by step, of the steps in use."""
        steps = self._trace.steps
        lengths = dict(zip(steps.index.tolist(), (steps.end_us - steps.start_us).tolist(), strict=True))
        return {step: us for step, us in sorted(lengths.items()) if step not in self._without}

    @cached_property
    def graph(self) -> ReplayGraph:
        """The step with the median durations of the steps in use; a sample for each."""
        return pipeline_graph(self._trace, list(self.iterations_us))

    @property
    def left_out(self) -> str:
        return ""  # steps are measured by themselves

    @property
    def has_launches(self) -> bool:
        return False

    def rows_of_step(self, step: int) -> Ints:
        return np.zeros(0, np.int64)

    def _busy_us(self, step: int, graph: ReplayGraph) -> float:
        return busiest_us(graph, np.zeros(len(graph)))

    def _graph_of(self, step: int) -> ReplayGraph:
        return pipeline_graph(self._trace, [step])

    def _measured_steps(self) -> list[int]:
        return list(self.iterations_us)

    def _sort_scaled(self, step: int, graph: ReplayGraph, scale: Scale) -> ReplayGraph:
        if scale.what == "usual" and scale.rank is not None:
            return StragglerGone(rank=scale.rank).apply(graph)
        raise InputError(f"'{scale.text}': the trace holds operations of a pipeline, not kernels and their launches")

    def held_out(self, step: int) -> HeldOut:
        """Predict a recorded step from all others; raises `InputError` if it was not recorded or there are no others."""
        measured = self.iterations_us
        others = [us for other, us in measured.items() if other != step]
        if step not in measured or not others:
            raise InputError(f"--holdout-step {step}: {len(measured)} steps were recorded, from {min(measured)} to {max(measured)}")
        predictor = PipelinePredictor(self._trace, without=(*self._without, step))
        predictor._replays = self._replays
        return HeldOut(
            step=step,
            measured_us=measured[step],
            prediction=replace(predictor.predict(), iteration_us=replay(predictor.graph).iteration_us),
            baseline_us=float(np.median(others)),
        )

    def own_durations(self) -> dict[int, tuple[float, float]]:
        """Measured and replayed length of each step, with the durations that it had itself."""
        return {step: (us, replay(pipeline_graph(self._trace, [step])).iteration_us) for step, us in self.iterations_us.items()}

    def _has_own_durations(self, step: int) -> bool:
        return True
