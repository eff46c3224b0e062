"""`RecordedSteps`: the recorded steps of a trace as graphs, ready to be replayed; what does not depend on a scenario is kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import CollectiveKind, Ints, Trace
from dpro_search.costmodel.collectives.recorded import CollectivePrices
from dpro_search.errors import InputError
from dpro_search.graph.recorded_collectives import pipelines_of
from dpro_search.replay.device_time import busiest_us
from dpro_search.replay.replayer import replay
from dpro_search.space.recorded.events import CLOSES, RUNS, steps_in_order
from dpro_search.space.recorded.ops import RecordedOps, recorded_ops, transfer_limits_us
from dpro_search.space.recorded.scales import OpCategories, scaled
from dpro_search.space.recorded.step_edit import StepEdit
from dpro_search.space.recorded.step_graph import graph_of_all, graph_of_step, iterations_us, unmeasured_text
from dpro_search.space.replay_graph import ReplayGraph
from dpro_search.space.scenario import Scale

_STALLS = 1.5
"""A step that takes more than so many times the median stalls: steps of steady jobs differ far less, by 3 % (`step_spread` of the
constants)."""

SMALL = 0.01  # share of an iteration: errors of the clocks below it are as small as the replay's own (`replay_error`)


class StepTime(NamedTuple):
    """Result of the replay of a step."""

    iteration_us: float  # Settled iteration of the step's graph.
    settled: bool  # Whether the replay settled.
    busy_us: float  # How long the busiest device computes in it.


@dataclass(frozen=True, kw_only=True)
class MeasuredSteps:
    """Measured iterations of recorded steps."""

    iterations_us: Mapping[int, float]  # By step.
    # Length of the first recorded step, which has no measured iteration, because the end of the step before it was not recorded;
    # None: it was measured by itself, or it is left out.
    first_us: float | None = None
    first: int = -1  # Number of that step.

    def without(self, steps: Sequence[int]) -> MeasuredSteps:
        """All but some of the steps."""
        kept_us = {step: us for step, us in self.iterations_us.items() if step not in steps}
        return replace(self, iterations_us=kept_us, first_us=None if self.first in steps else self.first_us)

    @property
    def median_us(self) -> float | None:
        """Median of the measured iterations; None where only one step was recorded."""
        return float(np.median(list(self.iterations_us.values()))) if self.iterations_us else None

    @property
    def mean_us(self) -> float | None:
        """Mean of the measured iterations (`mean_of`); None where only one step was recorded."""
        return self.mean_of(list(self.iterations_us.values())) if self.iterations_us else None

    def mean_of(self, steps_us: Sequence[float]) -> float:
        """Mean of the measured steps, or of replays of them.

        If the first recorded step did not stall, it counts like the median, so that the mean of stalls that come every few steps is
        not too high.
        """
        return float(np.mean([*steps_us, float(np.median(steps_us))] if self._first_is_ordinary else [*steps_us]))

    @property
    def stalled(self) -> tuple[int, int]:
        """How many measured steps stall, that is, take more than 1.5 times the median; and of how many."""
        measured = np.array(list(self.iterations_us.values()))
        stalled = int((measured > _STALLS * np.median(measured)).sum()) if len(measured) else 0
        return stalled, len(measured) + self._first_is_ordinary

    @property
    def _first_is_ordinary(self) -> bool:
        """Whether the first recorded step was not measured, and took no longer than one that does not stall."""
        return self.first_us is not None and self.median_us is not None and self.first_us <= _STALLS * self.median_us


def _measured_steps(trace: Trace) -> MeasuredSteps:
    """The distance of each step's end from that of the step before it."""
    measured_us, steps = iterations_us(trace), trace.steps
    if not len(steps.index):
        return MeasuredSteps(iterations_us=measured_us)
    first = steps_in_order(trace)[0]
    of_first = steps.index == first
    first_us = None if first in measured_us else float(steps.end_us[of_first].max() - steps.start_us[of_first].min())
    return MeasuredSteps(iterations_us=measured_us, first_us=first_us, first=first)


class RecordedSteps:
    """The steps of a trace whose events carry streams and dependencies.

    Parameters
    ----------
    trace
        Events of at least one step.
    ops
        The ops of all steps, perhaps with other durations than the recorded ones; None: as recorded.
    prepare
        Cuts the ops of a step where plans change them.
    part_bytes
        Gives the bytes of collectives that the trace has without a size, by event.

    Attributes
    ----------
    kept
        Replays of single steps as they are, which are the same whichever other steps are left out.
    """

    # Whether the steps are samples of a long job, which do not follow each other.
    are_samples: ClassVar[bool] = False

    def __init__(
        self,
        trace: Trace,
        *,
        ops: RecordedOps | None = None,
        prepare: Callable[[StepEdit, int], None] = lambda edit, step: None,
        part_bytes: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        self.trace, self._ops, self._prepare, self._part_bytes = trace, ops, prepare, part_bytes
        self.kept: dict[int, StepTime] = {}
        self._prepared: dict[tuple[int, tuple[int, ...]], StepEdit] = {}

    @cached_property
    def ops(self) -> RecordedOps:
        """The ops of all steps; raises `GraphError` if nothing ran in them."""
        return recorded_ops(self.trace) if self._ops is None else self._ops

    def with_ops(self, ops: RecordedOps) -> RecordedSteps:
        """The same steps with other durations of their ops."""
        return RecordedSteps(self.trace, ops=ops, prepare=self._prepare, part_bytes=self._part_bytes)

    # The recording.

    @cached_property
    def measured(self) -> MeasuredSteps:
        """Measured iterations of all steps."""
        return _measured_steps(self.trace)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the recorded steps, in order."""
        return self.ops.steps

    @property
    def unmeasured(self) -> str:
        """A sentence on steps without a measured iteration, whose ends are in the wrong order; empty if none exist."""
        return unmeasured_text(self.trace)

    def refused_holdout(self, step: int) -> InputError:
        """The error for a step that cannot be predicted from all others."""
        measured_us = self.measured.iterations_us
        known = f"{min(measured_us)} to {max(measured_us)}" if measured_us else "none"
        return InputError(
            f"--holdout-step {step}: steps with a measured iteration are {known}; two are needed (the first recorded has none)"
        )

    @property
    def clock_residual_us(self) -> float:
        """How far apart the clocks of the ranks may be."""
        return max(self.trace.meta.clock.residual_us, default=0.0)

    @cached_property
    def clock_ends(self) -> tuple[RecordedSteps, ...]:
        """The steps with transfers as short and as long as the clocks allow; nothing if that is a small part of an iteration."""
        residual_us, measured_us = self.clock_residual_us, self.measured.median_us
        if not residual_us or (measured_us is not None and residual_us <= SMALL * measured_us):
            return ()
        limits_us = transfer_limits_us(self.trace, self.ops, residual_us)
        return tuple(self.with_ops(replace(self.ops, duration_us=duration_us)) for duration_us in limits_us)

    # Sorts of ops.

    @cached_property
    def categories(self) -> OpCategories:
        """Classes of single ops that scales can name."""
        return OpCategories(self.trace, self.ops)

    @property
    def has_launches(self) -> bool:
        """Whether kernels and their launches were recorded, or else operations of another kind."""
        return bool(self.categories.launch.any())

    @cached_property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """Places of the ranks of each pipeline; empty if none exist."""
        return pipelines_of(self.trace)

    @cached_property
    def prices(self) -> CollectivePrices:
        """Times of collectives on the cluster that the ops' durations are of."""
        return prices_of(self.trace, self.ops, self._part_bytes())

    # Graphs of single steps.

    def graph(self, step: int, without: Sequence[int] = ()) -> ReplayGraph:
        """The graph of a step; durations that are not its own are medians over the other steps, but for those left out."""
        return graph_of_step(self.ops, step, without, samples=False)

    def sampled_graph(self, step: int, without: Sequence[int] = ()) -> ReplayGraph:
        """The graph of a step with a sample of durations for each step, but for those left out."""
        return graph_of_step(self.ops, step, without)

    def scaled(self, step: int, graph: ReplayGraph, scale: Scale) -> ReplayGraph:
        """The graph of a step with one category of its ops changed; raises `InputError` if it has none of these."""
        return scaled(self.categories, step, graph, scale)

    def rows(self, step: int) -> Ints:
        """Which of `ops` each op of a step's graph is, [n]; empty where its ops are no single events."""
        return np.flatnonzero(self.ops.step == step)

    def has_own_durations(self, step: int) -> bool:
        """Whether the durations of all ops of a step are known from that step alone."""
        return bool(self.ops.known[self.ops.step == step].all())

    def busy_us(self, step: int, graph: ReplayGraph) -> float:
        """How long the busiest device computes in a step, without idle time that is part of ops because nothing explains it."""
        if not self.ops.on_device.any():
            return 0.0  # a thread that waits for a core is no busy device
        rows = self.rows(step)
        idle_us = self.ops.unexplained_us[rows] if len(rows) == len(graph) else np.zeros(len(graph))
        return busiest_us(graph, idle_us)

    def edit(self, step: int, without: tuple[int, ...] = ()) -> StepEdit:
        """A step as it is, cut where plans change it."""
        if (step, without) not in self._prepared:
            self._prepared[step, without] = self.edit_of(step, self.graph(step, without))
        return self._prepared[step, without].copy()

    def edit_of(self, step: int, graph: ReplayGraph) -> StepEdit:
        """The graph of a step with other durations, cut where plans change it."""
        edit = StepEdit(self.ops, step, graph)
        self._prepare(edit, step)
        return edit

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
        measured_and_replayed = {step: (us, replayed[step]) for step, us in self.measured.iterations_us.items() if step in replayed}
        if not measured_and_replayed:
            raise InputError("no two consecutive steps of the trace have ops: nothing to compare a replay with")
        return measured_and_replayed

    def _window_us(self) -> float:
        events = self.trace.events
        inside = np.isin(events.step, self.trace.steps.index)
        return float(self.trace.steps.end_us.max() - events.start_us[inside].min())


def _ends(ops: RecordedOps, step: int) -> npt.NDArray[np.bool_]:
    """Ops whose ends end a step: those of the devices; without any, those where scripts end it; else all."""
    in_step: npt.NDArray[np.bool_] = ops.step == step
    chosen = (in_step & ops.on_device, in_step & (ops.role == CLOSES), in_step)
    return next(ops_of_choice for ops_of_choice in chosen if ops_of_choice.any())


def prices_of(trace: Trace, ops: RecordedOps, known_bytes: Mapping[int, int]) -> CollectivePrices:
    """Prices of the trace's collectives whose sizes are known.

    If all ranks were recorded, every occurrence counts. If only one was, the minimum over the steps counts, because it contains the
    least waiting.

    Parameters
    ----------
    known_bytes
        Sizes of events that have none in the trace.
    """
    events = trace.events
    of_kind: dict[CollectiveKind, list[tuple[int, float]]] = defaultdict(list)
    alone: dict[tuple[CollectiveKind, int, int], list[float]] = defaultdict(list)
    for op in np.flatnonzero((ops.event >= 0) & np.isin(ops.step, ops.steps)).tolist():
        event = int(ops.event[op])
        kind, size = CollectiveKind(int(events.collective_kind[event])), int(events.size_bytes[event])
        size = size if size > 0 else known_bytes.get(event, -1)
        if kind is CollectiveKind.UNKNOWN or size <= 0 or ops.role[op] != RUNS:
            continue
        us = float(ops.duration_us[op] - ops.unexplained_us[op])
        if ops.collective[op] >= 0:
            of_kind[kind].append((size, us))
        else:
            alone[kind, int(events.tensor[event]), size].append(us)
    for (kind, _, size), durations_us in alone.items():
        of_kind[kind].append((size, min(durations_us)))
    return CollectivePrices(of_kind)
