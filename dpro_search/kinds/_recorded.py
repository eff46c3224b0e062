"""`RecordedPredictor`: the iteration time of a job whose trace carries streams and dependencies, as recorded or with changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Trace
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.graph.device_time import exclusive_parts
from dpro_search.replay.replayer import replay
from dpro_search.replay.sensitivity import Change
from dpro_search.replay.timeline import Timeline
from dpro_search.space.recorded import graph_of_all, graph_of_step, iterations_us
from dpro_search.space.recorded_ops import RecordedOps, recorded_ops
from dpro_search.space.replay_graph import ReplayGraph


@dataclass(frozen=True, kw_only=True)
class RecordedPrediction:
    """An iteration time."""

    # Median over the recorded steps: of each, the settled distance of iterations that all have its ops, order and durations.
    iteration_us: float
    interval_us: tuple[float, float]  # The smallest and the largest of these.
    # Of an iteration of the median of these, the mean over ranks of the time in which a rank's device computes, only communicates,
    # only waits for other ranks, or does nothing.
    breakdown_us: dict[str, float]
    settled: bool  # Whether all replays settled.


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
        self._replays: dict[int, tuple[float, bool]] = {}  # by step: its settled iteration and whether the replay settled

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
        """The step whose replay is the median, of which `predict` gives the breakdown; a sample for each step in use."""
        return graph_of_step(self.ops, self.middle_step, self._without)

    @cached_property
    def middle_step(self) -> int:
        """The step whose replay is the median, or next above it."""
        return _middle({step: self._replayed(step, ()) for step in self._measured_steps()})

    def predict(self, changes: Sequence[Change] = ()) -> RecordedPrediction:
        """The iteration time with all of the changes, none of which may name an op: ops have other numbers in other steps."""
        replays = {step: self._replayed(step, changes) for step in self._measured_steps()}
        found = np.array([us for us, _ in replays.values()])
        return RecordedPrediction(
            iteration_us=float(np.median(found)),
            interval_us=(float(found.min()), float(found.max())),
            breakdown_us=device_breakdown(self._timeline(_middle(replays), changes)),
            settled=all(settled for _, settled in replays.values()),
        )

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
        found = {step: (us, replayed[step]) for step, us in self.iterations_us.items() if step in replayed}
        if not found:
            raise InputError("no two consecutive steps of the trace have ops: nothing to compare a replay with")
        return found

    def _window_us(self) -> float:
        events = self._trace.events
        inside = np.isin(events.step, self._trace.steps.index)
        return float(self._trace.steps.end_us.max() - events.start_us[inside].min())

    def _replayed(self, step: int, changes: Sequence[Change]) -> tuple[float, bool]:
        """The settled iteration of a step's graph, and whether it settled.

        It is kept where it is the same whichever steps are left out: without changes, and with the step's own durations only.
        """
        own = not changes and self._has_own_durations(step)
        if own and step in self._replays:
            return self._replays[step]
        timeline = self._timeline(step, changes)
        found = timeline.iteration_us, timeline.settled
        if own:
            self._replays[step] = found
        return found

    def _has_own_durations(self, step: int) -> bool:
        """Whether the durations of all ops of a step are known from that step alone."""
        return bool(self.ops.known[self.ops.step == step].all())

    def _timeline(self, step: int, changes: Sequence[Change]) -> Timeline:
        return replay(changed(graph_of_step(self.ops, step, self._without, samples=False), changes))

    def _measured_steps(self) -> list[int]:
        """Steps in use that have a measured iteration; all in use where none has."""
        used = [step for step in self.ops.steps if step not in self._without]
        return [step for step in used if step in self.iterations_us] or used


def _middle(replays: Mapping[int, tuple[float, bool]]) -> int:
    """The step with the median replay, or the next above it."""
    return sorted(replays, key=lambda step: replays[step][0])[len(replays) // 2]


def changed(graph: ReplayGraph, changes: Sequence[Change]) -> ReplayGraph:
    """The graph with all of the changes."""
    for change in changes:
        graph = change.apply(graph)
    return graph


def device_breakdown(timeline: Timeline) -> dict[str, float]:
    """What the devices of a rank do in a settled iteration, mean over ranks (see `RecordedPrediction`).

    That is the time before it ends; where iterations overlap, a device works on others as well.
    """
    graph, times = timeline.graph, timeline.times
    until_us = timeline.iteration_end_us()[(timeline.iterations - 1) // 2]
    since_us = until_us - timeline.iteration_us
    start_us, moved_us, end_us = (np.clip(of, since_us, until_us) for of in (times.start_us, times.moved_us, times.end_us))
    moves = graph.op_kind == OpKind.COMM
    runs = moves | np.isin(graph.op_kind, (OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE, OpKind.IO, OpKind.SERVER))
    totals = np.zeros(3)
    for rank in range(graph.ranks):
        mine = np.tile(runs & (graph.rank_of_op == rank), timeline.iterations)
        totals += exclusive_parts(start_us[mine], moved_us[mine], end_us[mine], np.tile(moves, timeline.iterations)[mine])
    parts = dict(zip(("compute", "exposed_communication", "waiting_for_ranks"), (totals / graph.ranks).tolist(), strict=True))
    return parts | {"idle": max(timeline.iteration_us - sum(parts.values()), 0.0)}


def _ends(ops: RecordedOps, step: int) -> npt.NDArray[np.bool_]:
    """Ops whose ends end a step: those of the devices, of all where there is none."""
    mine: npt.NDArray[np.bool_] = ops.step == step
    on_device = mine & ops.on_device
    return on_device if on_device.any() else mine
