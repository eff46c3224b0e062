"""`RecordedPredictor`: the iteration time of a job whose trace carries streams and dependencies, as recorded or with changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats, Trace
from dpro_search.costmodel.step_spread import interval_us
from dpro_search.errors import InputError
from dpro_search.kinds._facts import graph_change
from dpro_search.replay.device_time import RankTime, mean_breakdown_us, mean_times, rank_times
from dpro_search.replay.replayer import replay
from dpro_search.replay.timeline import Timeline
from dpro_search.space.recorded import graph_of_all, graph_of_step, iterations_us, typical_step
from dpro_search.space.recorded_ops import RecordedOps, recorded_ops
from dpro_search.space.recorded_scales import OpSorts, scaled
from dpro_search.space.replay_graph import ReplayGraph
from dpro_search.space.scenario import Scale


@dataclass(frozen=True, kw_only=True)
class RecordedPrediction:
    """An iteration time.

    Attributes
    ----------
    iteration_us
        Median over the recorded steps: of each, the settled distance of iterations that all have its ops, order and durations.
    steps_us
        The iteration time of each of these steps.
    interval_us
        Where another step should lie (see `costmodel.step_spread`).
    ranks
        What each rank's devices do in such an iteration: parts that add up to it.
    settled
        Whether all replays settled.
    """

    iteration_us: float
    steps_us: tuple[float, ...]
    interval_us: tuple[float, float]
    ranks: tuple[RankTime, ...]
    settled: bool

    @property
    def breakdown_us(self) -> dict[str, float]:
        """The parts of an iteration, mean over ranks."""
        return mean_breakdown_us(self.ranks)

    @staticmethod
    def of(replays: Sequence[Timeline]) -> RecordedPrediction:
        """From the replay of each step."""
        found = np.array([timeline.iteration_us for timeline in replays])
        order = np.argsort(found, kind="stable")
        middle = order[(len(found) - 1) // 2 : len(found) // 2 + 1]  # two of an even number, whose mean is the median
        iteration_us = float(np.median(found))
        return RecordedPrediction(
            iteration_us=iteration_us,
            steps_us=tuple(found.tolist()),
            interval_us=interval_us(found.tolist(), iteration_us),
            ranks=mean_times([rank_times(replays[index]) for index in middle.tolist()]),
            settled=all(timeline.settled for timeline in replays),
        )


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A step, predicted from all others, beside the usual guess: the median iteration of the other steps."""

    step: int
    measured_us: float
    predicted_us: float
    baseline_us: float

    @property
    def error_pct(self) -> float:
        """Signed error of the prediction."""
        return (self.predicted_us / self.measured_us - 1) * 100

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

    @cached_property
    def ops(self) -> RecordedOps:
        """The ops of all steps."""
        return recorded_ops(self._trace)

    @cached_property
    def iterations_us(self) -> dict[int, float]:
        """Measured iterations by step, of the steps in use."""
        return {step: us for step, us in iterations_us(self._trace).items() if step not in self._without}

    @property
    def measured_iteration_us(self) -> float | None:
        """Median of the measured iterations; None where only one step was recorded."""
        measured = list(self.iterations_us.values())
        return float(np.median(measured)) if measured else None

    @cached_property
    def graph(self) -> ReplayGraph:
        """The typical step; a sample for each step in use."""
        return graph_of_step(self.ops, typical_step(self._trace, self._without), self._without)

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
        return RecordedPrediction.of([replay(self._scaled(step, self._graph_of(step), scales)) for step in used])

    def fewer_steps(self, predictions: int, most_ops: int) -> Sequence[int] | None:
        """The typical step, where so many predictions would replay more than so many ops; else None, for all steps."""
        used = self._measured_steps()
        return None if predictions * len(self.graph) * len(used) <= most_ops else [typical_step(self._trace, self._without)]

    @property
    def has_launches(self) -> bool:
        """Whether kernels and their launches were recorded, or else operations of another sort."""
        return bool(self.sorts.launch.any())

    def timeline(self, scales: Sequence[Scale] = ()) -> Timeline:
        """The replay of the step whose iteration is the median, the longer one of two."""
        replays = [replay(self._scaled(step, self._graph_of(step), scales)) for step in self._measured_steps()]
        return sorted(replays, key=lambda timeline: timeline.iteration_us)[len(replays) // 2]

    @cached_property
    def sorts(self) -> OpSorts:
        """What can be asked about single ops."""
        return OpSorts(self._trace, self.ops)

    def sampled(self, scales: Sequence[Scale] = (), *, samples: int) -> Floats:
        """Iteration times of the typical step with durations drawn from all steps, [samples]."""
        graph = self._scaled(typical_step(self._trace, self._without), self.graph, scales)
        found: Floats = replay(graph, samples=samples).sampled_us
        return found

    def _scaled(self, step: int, graph: ReplayGraph, scales: Sequence[Scale]) -> ReplayGraph:
        for scale in scales:
            scale.check_rank(self._trace.meta.ranks)
            if scale.needs_ops:
                graph = self._sort_scaled(step, graph, scale)
            else:
                graph = graph_change(scale, self._trace.meta.ranks).apply(graph)
        return graph

    def _graph_of(self, step: int) -> ReplayGraph:
        return graph_of_step(self.ops, step, self._without, samples=False)

    def _sort_scaled(self, step: int, graph: ReplayGraph, scale: Scale) -> ReplayGraph:
        return scaled(self.sorts, step, graph, scale)

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
        return HeldOut(
            step=step,
            measured_us=measured[step],
            predicted_us=predictor.predict().iteration_us,
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
        found = {step: (us, replayed[step]) for step, us in self.iterations_us.items() if step in replayed}
        if not found:
            raise InputError("no two consecutive steps of the trace have ops: nothing to compare a replay with")
        return found

    def _window_us(self) -> float:
        events = self._trace.events
        inside = np.isin(events.step, self._trace.steps.index)
        return float(self._trace.steps.end_us.max() - events.start_us[inside].min())

    def _measured_steps(self) -> list[int]:
        """Steps in use that have a measured iteration; all in use where none has."""
        used = [step for step in self.ops.steps if step not in self._without]
        return [step for step in used if step in self.iterations_us] or used


def _ends(ops: RecordedOps, step: int) -> npt.NDArray[np.bool_]:
    """Ops whose ends end a step: those of the devices, of all where there is none."""
    mine: npt.NDArray[np.bool_] = ops.step == step
    on_device = mine & ops.on_device
    return on_device if on_device.any() else mine
