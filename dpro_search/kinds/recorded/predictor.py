"""`RecordedPredictor`: the iteration time of a job whose trace carries streams and dependencies, as recorded or with changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats, Ints, Trace
from dpro_search.costmodel.step_spread import interval_us
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.graph.recorded_collectives import pipelines_of
from dpro_search.kinds._facts import graph_change
from dpro_search.replay.device_time import RankTime, busiest_us, mean_breakdown_us, mean_times, rank_times
from dpro_search.replay.replayer import replay
from dpro_search.replay.sensitivity import StagesEven
from dpro_search.replay.sentences import differs_from_median
from dpro_search.replay.timeline import Timeline
from dpro_search.space.recorded.events import CLOSES, steps_in_order
from dpro_search.space.recorded.ops import RecordedOps, recorded_ops, transfer_limits_us
from dpro_search.space.recorded.scales import OpSorts, scaled
from dpro_search.space.recorded.step_graph import graph_of_all, graph_of_step, iterations_us, unmeasured_text
from dpro_search.space.replay_graph import ReplayGraph
from dpro_search.space.scenario import Scale

_STALLS = 1.5
"""A step that takes more than so many times the median stalls: steps of steady jobs differ far less, by 3 % (`step_spread` of the
constants)."""


SMALL = 0.01  # share of an iteration: errors of the clocks below it are as small as the replay's own (`replay_error`)


class _Replay(NamedTuple):
    iteration_us: float  # Settled iteration of a step's graph.
    settled: bool  # Whether the replay settled.
    busy_us: float  # How long the busiest device computes in it.


@dataclass(frozen=True, kw_only=True)
class RecordedPrediction:
    """An iteration time."""

    # Median over the recorded steps: of each, the settled distance of iterations that all have its ops, order and durations.
    iteration_us: float
    steps_us: tuple[float, ...]  # The iteration time of each of these steps.
    interval_us: tuple[float, float]  # Where another step should lie (see `costmodel.step_spread`).
    ranks: tuple[RankTime, ...]  # What each rank's devices do in such an iteration: parts that add up to it.
    settled: bool  # Whether all replays settled.
    busy_us: float  # The least time that the busiest device computes in one of these steps.
    mean_us: (
        float  # Mean over the recorded steps, which steps that stall make longer than the median (`RecordedPredictor.mean_us`).
    )

    @property
    def stalls(self) -> bool:
        """Whether steps that stall make the mean noticeably longer than the median."""
        return differs_from_median(self.mean_us, self.iteration_us)

    @property
    def breakdown_us(self) -> dict[str, float]:
        """The parts of an iteration, mean over ranks."""
        return mean_breakdown_us(self.ranks)


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A step, predicted from all others, beside the usual guess: the median iteration of the other steps."""

    step: int
    measured_us: float
    prediction: RecordedPrediction
    baseline_us: float

    @property
    def error_pct(self) -> float:
        """Signed error of the prediction."""
        return (self.prediction.iteration_us / self.measured_us - 1) * 100

    @property
    def baseline_error_pct(self) -> float:
        """Signed error of the usual guess."""
        return (self.baseline_us / self.measured_us - 1) * 100


class RecordedPredictor:
    """Predictions from the recorded steps, without those in `without`.

    Parameters
    ----------
    trace
        Events with streams and dependencies, of at least one step.
    without
        Steps that must not be used.

    Raises
    ------
    GraphError
        Nothing ran in a step.
    """

    def __init__(self, trace: Trace, *, without: Sequence[int] = ()) -> None:
        self._trace = trace
        self._without = tuple(without)
        self._asked: dict[tuple[int, tuple[Scale, ...]], _Replay] = {}  # by step, of the last changes
        self._replays: dict[int, _Replay] = {}  # by step, without changes

    @cached_property
    def ops(self) -> RecordedOps:
        """The ops of all steps."""
        return recorded_ops(self._trace)

    @cached_property
    def iterations_us(self) -> dict[int, float]:
        """Measured iterations by step, of the steps in use."""
        return {step: us for step, us in iterations_us(self._trace).items() if step not in self._without}

    @property
    def left_out(self) -> str:
        """A sentence on steps without a measured iteration, whose ends are in the wrong order; empty if there are none."""
        return unmeasured_text(self._trace)

    @property
    def measured_iteration_us(self) -> float | None:
        """Median of the measured iterations; None where only one step was recorded."""
        measured = list(self.iterations_us.values())
        return float(np.median(measured)) if measured else None

    @cached_property
    def graph(self) -> ReplayGraph:
        """The step whose replay is the median, or next above it; a sample for each step in use."""
        return graph_of_step(self.ops, self.middle_step, self._without)

    @cached_property
    def middle_step(self) -> int:
        """The step whose replay is the median, or next above it."""
        return self._middle(())[-1]

    @cached_property
    def sorts(self) -> OpSorts:
        """Classes of single ops that scales can name."""
        return OpSorts(self._trace, self.ops)

    @property
    def has_launches(self) -> bool:
        """Whether kernels and their launches were recorded, or else operations of another sort."""
        return bool(self.sorts.launch.any())

    def with_ops(self, ops: RecordedOps) -> RecordedPredictor:
        """The same steps with other durations of their ops."""
        changed = RecordedPredictor(self._trace, without=self._without)
        changed.__dict__["ops"] = ops
        return changed

    def predict(self, scales: Sequence[Scale] = (), *, steps: Sequence[int] | None = None) -> RecordedPrediction:
        """The iteration time with all of the changes.

        Parameters
        ----------
        steps
            Of these steps only; None: of all that were measured.

        Raises
        ------
        InputError
            A change is about nothing in the trace.
        """
        used = self._measured_steps() if steps is None else steps
        replays = [self._replayed(step, scales) for step in used]
        steps_us = [one.iteration_us for one in replays]
        iteration_us = float(np.median(steps_us))
        spread_us = self._with_clock_error(interval_us(steps_us, iteration_us), iteration_us, used, scales)
        middle = self._middle(scales, used)
        return RecordedPrediction(
            iteration_us=iteration_us,
            steps_us=tuple(steps_us),
            interval_us=self._with_batch(self._with_unknown(spread_us, scales, middle[-1]), scales, steps),
            ranks=mean_times([rank_times(self._timeline(step, scales)) for step in middle]),
            settled=all(one.settled for one in replays),
            busy_us=min(one.busy_us for one in replays),
            mean_us=self.mean_us(steps_us),
        )

    def _with_batch(
        self, interval_us: tuple[float, float], scales: Sequence[Scale], steps: Sequence[int] | None
    ) -> tuple[float, float]:
        """An interval that also holds the step whose kernels take what they take with the recorded batch.

        Kernels that read weights, or do not fill the device, take no longer for more samples; the trace does not tell which.
        """
        others = [scale for scale in scales if scale.what != "batch"]
        if len(others) == len(scales):
            return interval_us
        same_us = self.predict(others, steps=steps).iteration_us
        return min(interval_us[0], same_us), max(interval_us[1], same_us)

    def _with_unknown(self, interval_us: tuple[float, float], scales: Sequence[Scale], step: int) -> tuple[float, float]:
        """An interval that also holds what the change comes to if time that nothing explains is of the part that changes."""
        if not (self._graph_of(step).op_kind == OpKind.UNKNOWN).any():
            return interval_us
        here_us = self._replayed(step, scales).iteration_us
        low_us, high_us = interval_us
        for alternative in self._alternatives(scales):
            ratio = replay(self._changed(step, (*scales, *alternative))).iteration_us / max(here_us, np.finfo(np.float64).tiny)
            low_us, high_us = min(low_us, low_us * ratio), max(high_us, high_us * ratio)
        return low_us, high_us

    def _alternatives(self, scales: Sequence[Scale]) -> Iterator[list[Scale]]:
        """Changes of unknown time that a what-if may imply: all that make it shorter, and all that make it longer."""
        of_unknown = [scale.of_unknown for scale in scales]
        for chosen in ([one for one in of_unknown if one.factor < 1], [one for one in of_unknown if one.factor > 1]):
            if chosen:
                yield chosen

    def _with_clock_error(
        self, spread_us: tuple[float, float], iteration_us: float, steps: Sequence[int], scales: Sequence[Scale]
    ) -> tuple[float, float]:
        """The interval with what the error of the ranks' clocks makes of the transfers."""
        ends = [float(np.median([end._replayed(step, scales).iteration_us for step in steps])) for end in self._clock_ends]
        below_us, above_us = (
            max([iteration_us - us for us in ends], default=0.0),
            max([us - iteration_us for us in ends], default=0.0),
        )
        low_us = iteration_us - float(np.hypot(iteration_us - spread_us[0], max(below_us, 0.0)))
        return max(low_us, 0.0), iteration_us + float(np.hypot(spread_us[1] - iteration_us, max(above_us, 0.0)))

    @cached_property
    def _clock_ends(self) -> tuple[RecordedPredictor, ...]:
        """The same job with transfers as short and as long as the clocks allow; nothing if that is a small part of an iteration."""
        residual_us, measured_us = self.clock_residual_us, self.measured_iteration_us
        if not residual_us or (measured_us is not None and residual_us <= SMALL * measured_us):
            return ()
        shortest_us, longest_us = transfer_limits_us(self._trace, self.ops, residual_us)
        return self._at_durations(shortest_us), self._at_durations(longest_us)

    @property
    def clock_residual_us(self) -> float:
        """How far apart the clocks of the ranks may be."""
        return max(self._trace.meta.clock.residual_us, default=0.0)

    def _at_durations(self, duration_us: Floats) -> RecordedPredictor:
        return self.with_ops(replace(self.ops, duration_us=duration_us))

    def mean_us(self, steps_us: Sequence[float]) -> float:
        """Mean of the measured steps, or of replays of them.

        The first recorded step has no measured iteration, because the end of the step before it was not recorded. If it did not
        stall, it counts like the median, so that the mean of stalls that come every few steps is not too high.
        """
        values = [*steps_us, float(np.median(steps_us))] if self._first_is_ordinary else [*steps_us]
        return float(np.mean(values))

    @property
    def measured_mean_us(self) -> float | None:
        """Mean of the measured iterations (`mean_us`); None where only one step was recorded."""
        measured = list(self.iterations_us.values())
        return self.mean_us(measured) if measured else None

    @property
    def stalled(self) -> tuple[int, int]:
        """How many measured steps stall, that is, take more than 1.5 times the median; and of how many."""
        measured = np.array(list(self.iterations_us.values()))
        stalled = int((measured > _STALLS * np.median(measured)).sum()) if len(measured) else 0
        return stalled, len(measured) + self._first_is_ordinary

    @cached_property
    def _first_is_ordinary(self) -> bool:
        """Whether the first recorded step is in use, was not measured, and took no longer than one that does not stall."""
        measured_us, steps = self.measured_iteration_us, self._trace.steps
        if measured_us is None or not len(steps.index):
            return False
        first = steps_in_order(self._trace)[0]
        if first in self.iterations_us or first in self._without:
            return False
        of_first = steps.index == first
        return float(steps.end_us[of_first].max() - steps.start_us[of_first].min()) <= _STALLS * measured_us

    def timeline(self, scales: Sequence[Scale] = ()) -> Timeline:
        """The replay of the step whose iteration is the median, or next above it."""
        return self._timeline(self.timeline_step(scales), scales)

    def rows(self, scales: Sequence[Scale] = ()) -> Ints:
        """Which of `ops` each op of `timeline` is, [n]; empty where its ops are no single events."""
        return self.rows_of_step(self.timeline_step(scales))

    def rows_of_step(self, step: int) -> Ints:
        """Which of `ops` each op of a step is, [n]; empty where its ops are no single events."""
        return np.flatnonzero(self.ops.step == step)

    def timeline_step(self, scales: Sequence[Scale] = ()) -> int:
        """The step that `timeline` replays."""
        return self._middle(scales)[-1]

    def sampled(self, scales: Sequence[Scale] = (), *, samples: int) -> Floats:
        """Iteration times of the middle step with durations drawn from all steps, [samples]."""
        sampled_us: Floats = replay(self._scaled(self.middle_step, self.graph, scales), samples=samples).sampled_us
        return sampled_us

    def fewer_steps(self, predictions: int, most_ops: int) -> Sequence[int] | None:
        """The middle step, where so many predictions would replay more than so many ops; else None, for all steps."""
        used = self._measured_steps()
        return None if predictions * len(self.graph) * len(used) <= most_ops else [self.middle_step]

    def held_out(self, step: int) -> HeldOut:
        """Predict a measured step from all others; raises `InputError` if it was not measured or there are no others."""
        measured = self.iterations_us
        others = [us for other, us in measured.items() if other != step]
        if step not in measured or not others:
            known = f"{min(measured)} to {max(measured)}" if measured else "none"
            raise InputError(
                f"--holdout-step {step}: steps with a measured iteration are {known}; two are needed (the first recorded has none)"
            )
        predictor = RecordedPredictor(self._trace, without=(*self._without, step))
        predictor.__dict__["ops"] = self.ops  # they are the same, and take longest
        predictor._replays = self._replays
        return HeldOut(
            step=step,
            measured_us=measured[step],
            prediction=predictor.predict(),
            baseline_us=float(np.median(others)),
        )

    def own_durations(self) -> dict[int, tuple[float, float]]:
        """Measured and replayed iteration of each step, all steps replayed one after the other with the durations that each had.

        With one step only, how long it took from the first event to the last device end.
        """
        ops = self.ops
        end_us = replay(graph_of_all(ops)).times.end_us
        last = {step: float(end_us[_ends(ops, step)].max()) for step in ops.steps}
        if len(ops.steps) == 1:
            step = ops.steps[0]
            return {step: (self._window_us(), last[step])}
        replayed = {step: last[step] - last[before] for before, step in zip(ops.steps, ops.steps[1:], strict=False)}
        measured_and_replayed = {step: (us, replayed[step]) for step, us in self.iterations_us.items() if step in replayed}
        if not measured_and_replayed:
            raise InputError("no two consecutive steps of the trace have ops: nothing to compare a replay with")
        return measured_and_replayed

    def _window_us(self) -> float:
        events = self._trace.events
        inside = np.isin(events.step, self._trace.steps.index)
        return float(self._trace.steps.end_us.max() - events.start_us[inside].min())

    def _middle(self, scales: Sequence[Scale], steps: Sequence[int] | None = None) -> list[int]:
        """The step with the median replay; of an even number the two around it."""
        used = self._measured_steps() if steps is None else steps
        order = sorted(used, key=lambda step: self._replayed(step, scales).iteration_us)
        return order[(len(order) - 1) // 2 : len(order) // 2 + 1]

    def _replayed(self, step: int, scales: Sequence[Scale]) -> _Replay:
        """The replay of a step's graph.

        Without changes it is kept, where it is the same whichever steps are left out: with the step's own durations only. With
        changes, those of the last question are kept.
        """
        with_own_durations = not scales and self._has_own_durations(step)
        key = (step, tuple(scales))
        if with_own_durations and step in self._replays:
            return self._replays[step]
        if key not in self._asked:
            timeline = self._timeline(step, scales)
            if next(iter(self._asked), key)[1] != key[1]:
                self._asked.clear()
            self._asked[key] = _Replay(timeline.iteration_us, timeline.settled, self._busy_us(step, timeline.graph))
        if with_own_durations:
            self._replays[step] = self._asked[key]
        return self._asked[key]

    def _busy_us(self, step: int, graph: ReplayGraph) -> float:
        """How long the busiest device computes in a step, without idle time that is part of ops because nothing explains it."""
        if not self.ops.on_device.any():
            return 0.0  # a thread that waits for a core is no busy device
        rows = self.rows_of_step(step)
        idle_us = self.ops.unexplained_us[rows] if len(rows) == len(graph) else np.zeros(len(graph))
        return busiest_us(graph, idle_us)

    def _has_own_durations(self, step: int) -> bool:
        """Whether the durations of all ops of a step are known from that step alone."""
        return bool(self.ops.known[self.ops.step == step].all())

    def _timeline(self, step: int, scales: Sequence[Scale]) -> Timeline:
        return replay(self._changed(step, scales))

    def _changed(self, step: int, scales: Sequence[Scale]) -> ReplayGraph:
        """The graph of a step with all of the changes."""
        return self._scaled(step, self._graph_of(step), scales)

    def _scaled(self, step: int, graph: ReplayGraph, scales: Sequence[Scale]) -> ReplayGraph:
        if scales and self._trace.meta.unrecorded_devices:
            raise InputError(
                f"'{scales[0].text}': the trace has launches of kernels, but no record of the device that ran them, so that "
                "what a change of the job would bring is unknown; record again with permission to profile the device"
            )
        for scale in scales:
            scale = scale.at(self._trace.meta.numbers)
            if scale.what == "stages":
                graph = self._with_even_stages(graph, scale.text)
            elif scale.needs_ops:
                graph = self._sort_scaled(step, graph, scale)
            else:
                graph = graph_change(scale, self._trace.meta.ranks).apply(graph)
        return graph

    def _graph_of(self, step: int) -> ReplayGraph:
        return graph_of_step(self.ops, step, self._without, samples=False)

    @cached_property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """Places of the ranks of each pipeline; empty if there are none."""
        return pipelines_of(self._trace)

    def _with_even_stages(self, graph: ReplayGraph, text: str) -> ReplayGraph:
        if not self.pipelines:
            raise InputError(f"'{text}': the trace shows no messages between the stages of a pipeline")
        return StagesEven(pipelines=self.pipelines).apply(graph)

    def _sort_scaled(self, step: int, graph: ReplayGraph, scale: Scale) -> ReplayGraph:
        return scaled(self.sorts, step, graph, scale)

    def _measured_steps(self) -> list[int]:
        """Steps in use that have a measured iteration; all in use where none has."""
        used = [step for step in self.ops.steps if step not in self._without]
        return [step for step in used if step in self.iterations_us] or used


def _ends(ops: RecordedOps, step: int) -> npt.NDArray[np.bool_]:
    """Ops whose ends end a step: those of the devices; without any, those where scripts end it; else all."""
    in_step: npt.NDArray[np.bool_] = ops.step == step
    chosen = (in_step & ops.on_device, in_step & (ops.role == CLOSES), in_step)
    return next(ops_of_choice for ops_of_choice in chosen if ops_of_choice.any())
