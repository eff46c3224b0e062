"""`RecordedReplay`: recorded steps under a plan and with changes of speed, each replayed by itself.

The iteration time is the median over the steps. The time of a step is the settled distance between iterations that all have the
ops, order and durations of that step. The interval says where another step should lie (`costmodel.intervals`), and reaches as far
as what the recording leaves open: the error of the ranks' clocks, time of devices that nothing explains, kernels that may not grow
with the batch, prices of collectives that a plan adds, and the cost models of another cluster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dpro_search.collect.trace import Floats, Ints
from dpro_search.costmodel.intervals import step_interval_us
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.kinds.recorded.steps import MeasuredSteps, RecordedSteps, StepTime
from dpro_search.replay.device_time import RankTime, mean_breakdown_us, mean_times, rank_times
from dpro_search.replay.iterations import IterationTimes
from dpro_search.replay.replayer import replay, settled_us
from dpro_search.replay.sensitivity import StagesEven, graph_change
from dpro_search.replay.sentences import differs_from_median
from dpro_search.replay.timeline import Timeline
from dpro_search.space.recorded.step_edit import StepEdit
from dpro_search.space.replay_graph import ReplayGraph
from dpro_search.space.scenario import Scale

Interval = tuple[float, float]
_NO_UNKNOWN = Scale(text="unknown=0", what="unknown", factor=0.0)


@dataclass(frozen=True, kw_only=True)
class Rewriting:
    """A plan's changes of recorded steps, and their errors (90 %)."""

    rewrite: Callable[[StepEdit, int], None]  # Changes a prepared step.
    unplanned: RecordedReplay  # The same steps without the plan.
    price_error: float  # Error of the prices of collectives, relative.
    compute_error_us: float  # Error of the core time of compute that the plan adds.


@dataclass(frozen=True, kw_only=True)
class RecordedReplay:
    """The recorded steps in one scenario."""

    steps: RecordedSteps
    without: tuple[int, ...] = ()  # Steps that must not count, neither as structure nor as durations.
    only: tuple[int, ...] | None = None  # Steps to replay; None: all that were measured.
    scales: tuple[Scale, ...] = ()
    rewriting: Rewriting | None = None  # None: without a plan.
    # The steps with all durations at the low and at the high end of their 90 % intervals; None: on the recorded cluster.
    model_ends: tuple[RecordedSteps, RecordedSteps] | None = None

    @cached_property
    def measured(self) -> MeasuredSteps:
        """Measured iterations of the steps in use."""
        return self.steps.measured.without(self.without)

    @cached_property
    def replayed(self) -> dict[int, StepTime]:
        """The replay of each step: of those in use that have a measured iteration, or of all in use where none has."""
        if self.only is not None:
            return {step: self._step_time(step) for step in self.only}
        used = [step for step in self.steps.numbers if step not in self.without]
        return {step: self._step_time(step) for step in [step for step in used if step in self.measured.iterations_us] or used}

    @cached_property
    def iteration_us(self) -> float:
        """Median of the replayed steps."""
        return float(np.median([one.iteration_us for one in self.replayed.values()]))

    def _step_time(self, step: int) -> StepTime:
        is_kept = not self.scales and self.rewriting is None and self.steps.has_own_durations(step)
        if is_kept and step in self.steps.kept:
            return self.steps.kept[step]
        graph = self.graph(step)
        step_time = StepTime(*settled_us(graph), self.steps.busy_us(step, graph))
        if is_kept:
            self.steps.kept[step] = step_time
        return step_time

    # The protocol of what is replayed.

    @property
    def op_count(self) -> int:
        return len(self.timeline().graph)

    def iterations(self, *, detailed: bool = False) -> IterationTimes:
        return self._times

    def timeline(self) -> Timeline:
        return self._timelines[-1]

    def sampled_us(self, *, samples: int, seed: int = 0, on_sample: Callable[[], None] = lambda: None) -> Floats:
        if self.rewriting is None:
            step = self.as_recorded.middle_step
            graph = self._scaled(step, self.typical_graph)
            return replay(graph, samples=samples, seed=seed).sampled_us
        steps_us = np.array([one.iteration_us for one in self.replayed.values()])
        drawn_us: Floats = np.random.default_rng(seed).choice(steps_us, samples)
        return drawn_us

    @cached_property
    def _times(self) -> IterationTimes:
        steps_us = [one.iteration_us for one in self.replayed.values()]
        busy_us = min(one.busy_us for one in self.replayed.values())
        breakdown_us = mean_breakdown_us(self.rank_times)
        unscaled_interval_us = self._with_unknown(self._with_clock_error(step_interval_us(steps_us, self.iteration_us)))
        if self._at_recorded_batch is not self:
            unscaled_interval_us = self._with_batch(unscaled_interval_us)
            busy_us = min(busy_us, *(one.busy_us for one in self._at_recorded_batch.replayed.values()))
        if self.rewriting is None:
            low_us, high_us = self._with_model_error(unscaled_interval_us)
            if self.model_ends is not None:
                busy_us = min(busy_us, min(one.busy_us for one in self._at(self.model_ends[0]).replayed.values()))
        else:
            low_us, high_us = self._with_plan_error(unscaled_interval_us, breakdown_us["exposed_communication"], self.rewriting)
            if self.model_ends is not None:
                busy_us = min(busy_us, self.rewriting.unplanned.iterations().floor_us)
        return IterationTimes(
            iteration_us=self.iteration_us,
            settled=all(one.settled for one in self.replayed.values()),
            breakdown_us=breakdown_us,
            interval_us=(low_us, high_us),
            floor_us=busy_us,
            mean_us=self.measured.mean_of(steps_us),
        )

    # Details for people.

    @property
    def stalls(self) -> bool:
        """Whether steps that stall make the mean noticeably longer than the median."""
        times = self._times
        return times.mean_us is not None and differs_from_median(times.mean_us, times.iteration_us)

    @cached_property
    def middle_steps(self) -> tuple[int, ...]:
        """The step with the median replay; of an even number the two around it."""
        order = sorted(self.replayed, key=lambda step: self.replayed[step].iteration_us)
        return tuple(order[(len(order) - 1) // 2 : len(order) // 2 + 1])

    @property
    def middle_step(self) -> int:
        """The step whose replay is the median, or next above it: `timeline` shows it."""
        return self.middle_steps[-1]

    @cached_property
    def _timelines(self) -> tuple[Timeline, ...]:
        """Replays of the middle steps."""
        return tuple(replay(self.graph(step)) for step in self.middle_steps)

    @cached_property
    def rank_times(self) -> tuple[RankTime, ...]:
        """Activity of each rank's devices in an iteration: parts that add up to it."""
        return mean_times([rank_times(timeline) for timeline in self._timelines])

    @property
    def rows(self) -> Ints:
        """Which of the recorded ops each op of `timeline` is, [n]; empty where its ops are no single events."""
        return self.steps.rows(self.middle_step) if self.rewriting is None else np.zeros(0, np.int64)

    @cached_property
    def as_recorded(self) -> RecordedReplay:
        """The same steps without a plan and changes of speed."""
        return replace(self, scales=(), rewriting=None) if self.scales or self.rewriting is not None else self

    @cached_property
    def typical_graph(self) -> ReplayGraph:
        """The middle step without changes; a sample of durations for each step in use."""
        return self.steps.sampled_graph(self.as_recorded.middle_step, self.without)

    def fewer_steps(self, predictions: int, most_ops: int) -> RecordedReplay:
        """The same with the middle step alone, where so many predictions would replay more than so many ops."""
        if predictions * len(self.typical_graph) * len(self.replayed) <= most_ops:
            return self
        return replace(self, only=(self.middle_step,))

    # Graphs.

    def graph(self, step: int) -> ReplayGraph:
        """The graph of a step with the plan and all changes.

        Under a plan, changes of one category of recorded ops come before the step is rewritten, all others after.
        """
        if self.scales and self.steps.trace.meta.unrecorded_devices:
            raise InputError(
                f"'{self.scales[0].text}': the trace has launches of kernels, but no record of the device that ran them, so that "
                "what a change of the job would bring is unknown; record again with permission to profile the device"
            )
        if self.rewriting is None:
            return self._scaled(step, self.steps.graph(step, self.without))
        of_ops = tuple(scale for scale in self.scales if scale.needs_ops)
        foreign = next((scale for scale in of_ops if scale.what == "collectives" or scale.group is not None), None)
        if foreign is not None:
            raise InputError(f"'{foreign.text}': a plan posts other collectives than the recorded ones; use communication= with it")
        if of_ops:
            edit = self.steps.edit_of(step, replace(self, scales=of_ops, rewriting=None).graph(step))
        else:
            edit = self.steps.edit(step, self.without)
        self.rewriting.rewrite(edit, step)
        return replace(self, scales=tuple(scale for scale in self.scales if not scale.needs_ops))._scaled(step, edit.graph())

    def _scaled(self, step: int, graph: ReplayGraph) -> ReplayGraph:
        meta = self.steps.trace.meta
        for one in self.scales:
            scale = one.at(meta.numbers)
            if scale.what == "stages":
                graph = self._with_even_stages(graph, scale.text)
            elif scale.needs_ops:
                graph = self.steps.scaled(step, graph, scale)
            else:
                graph = graph_change(scale, meta.ranks).apply(graph)
        return graph

    def _with_even_stages(self, graph: ReplayGraph, text: str) -> ReplayGraph:
        if not self.steps.pipelines:
            raise InputError(f"'{text}': the trace shows no messages between the stages of a pipeline")
        return StagesEven(pipelines=self.steps.pipelines).apply(graph)

    # Parts of the interval.

    def _at(self, steps: RecordedSteps) -> RecordedReplay:
        """The same steps and changes with other durations."""
        return replace(self, steps=steps, model_ends=None, only=tuple(self.replayed))

    def _with_clock_error(self, interval: Interval) -> Interval:
        """The interval with the part of the transfers that the error of the ranks' clocks may be."""
        ends_us = [self._at(end).iteration_us for end in self.steps.clock_ends]
        return self._wider(interval, [self.iteration_us - us for us in ends_us], [us - self.iteration_us for us in ends_us])

    def _with_unknown(self, interval: Interval) -> Interval:
        """An interval that also holds what the changes come to if time that nothing explains is of the part that changes."""
        step = self.middle_step
        if not (self.steps.graph(step, self.without).op_kind == OpKind.UNKNOWN).any():
            return interval
        here_us = max(self.replayed[step].iteration_us, float(np.finfo(np.float64).tiny))
        low_us, high_us = interval
        for alternative in self._alternatives():
            ratio = settled_us(replace(self, scales=(*self.scales, *alternative)).graph(step))[0] / here_us
            low_us, high_us = min(low_us, low_us * ratio), max(high_us, high_us * ratio)
        return low_us, high_us

    def _alternatives(self) -> Iterator[Sequence[Scale]]:
        """Changes of unknown time that a what-if may imply: all that make it shorter, and all that make it longer."""
        of_unknown = [scale.of_unknown for scale in self.scales]
        for chosen in ([one for one in of_unknown if one.factor < 1], [one for one in of_unknown if one.factor > 1]):
            if chosen:
                yield chosen
        if self.rewriting is not None:  # Unknown time may be a wait for what the plan changes.
            yield [_NO_UNKNOWN]

    def _with_batch(self, interval: Interval) -> Interval:
        """An interval that also holds the step whose kernels take what they take with the recorded batch."""
        same_us = self._at_recorded_batch.iteration_us
        return min(interval[0], same_us), max(interval[1], same_us)

    @cached_property
    def _at_recorded_batch(self) -> RecordedReplay:
        """The steps without a change of the batch.

        Kernels that read weights, or do not fill the device, take no longer for more samples; the trace does not tell which.
        """
        others = tuple(scale for scale in self.scales if scale.what != "batch")
        return self if len(others) == len(self.scales) else replace(self, scales=others)

    def _with_model_error(self, interval: Interval) -> Interval:
        """The interval with the errors of the cost models of another cluster."""
        if self.model_ends is None:
            return interval
        low_us, high_us = (self._at(end).iteration_us for end in self.model_ends)
        return self._wider(interval, [self.iteration_us - low_us], [high_us - self.iteration_us])

    def _with_plan_error(self, interval: Interval, exposed_us: float, rewriting: Rewriting) -> Interval:
        """The interval with the error of collectives that nothing hides or that the job waits for, and of added compute.

        On another cluster the cost models' errors are as large as those of the steps without the plan, relative to the iteration.
        """
        more_us = [math.hypot(rewriting.price_error * exposed_us, rewriting.compute_error_us)]
        interval = self._wider(interval, more_us, more_us)
        if self.model_ends is None:
            return interval
        unplanned = rewriting.unplanned.iterations()
        assert unplanned.interval_us is not None, "recorded steps state their interval"
        below, above = (abs(end / unplanned.iteration_us - 1) * self.iteration_us for end in unplanned.interval_us)
        return self._wider(interval, [below], [above])

    def _wider(self, interval: Interval, below_us: Sequence[float], above_us: Sequence[float]) -> Interval:
        """The interval with an independent error in each direction: the largest of several, which count from 0."""
        below = math.hypot(self.iteration_us - interval[0], max(0.0, *below_us, 0.0))
        above = math.hypot(interval[1] - self.iteration_us, max(0.0, *above_us, 0.0))
        return max(self.iteration_us - below, 0.0), self.iteration_us + above
