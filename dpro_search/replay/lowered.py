"""`Lowered`: a job in a scenario, ready to be replayed. Each kind of job makes one (`Job.lower`), and every verb asks it.

    Job, Scenario --Job.lower--> Lowered --replay--> IterationTimes --ErrorModel--> Prediction
                                         `---------> Timeline

Everything about the scenario is applied already: the plan, the cluster, the batch and the scales of speeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from dpro_search.collect.trace import Floats
from dpro_search.machine import Calibration
from dpro_search.replay.iterations import IterationTimes
from dpro_search.replay.timeline import Timeline
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.plan import Prediction

_Z_90 = 1.64  # standard deviations within which nine in ten values of a normal distribution lie


class Replayable(Protocol):
    """One of the engines, with what it replays."""

    @property
    def op_count(self) -> int:
        """Number of ops in an iteration."""

    def iterations(self, *, detailed: bool = False) -> IterationTimes:
        """The iteration time, as fast as a search needs it; only if `detailed`, its breakdown is certain to be there."""

    def sampled_us(self, *, samples: int, seed: int = 0, on_sample: Callable[[], None] = lambda: None) -> Floats:
        """Iteration times of replays with durations drawn anew, [samples]; one seed gives the same draws for every plan.

        `on_sample` is called after each replay, from the calling thread.
        """

    def timeline(self) -> Timeline:
        """The iteration op by op, as people need it."""


@dataclass(frozen=True, kw_only=True)
class ErrorModel:
    """Errors of a prediction. They are independent of each other, and each is stated so that it holds in nine of ten cases."""

    model: float  # Error of the model, relative to the prediction.
    # Signed relative error of the replay of the recorded setting. 0: it is so small that `model` includes it, or not known.
    replay: float = 0.0
    floor_us: float = 0.0  # The least that an iteration can take; 0: not known.
    plan_us: float = 0.0  # Error of the costs of changes that the plan makes, in us; 0: they are as certain as the recording.

    def interval_us(self, times: IterationTimes) -> tuple[float, float]:
        """The interval that should hold the measured median: errors of several sources add up as the root of their squares."""
        middle_us = times.iteration_us
        model_us = math.hypot(self.model * middle_us, self.plan_us)
        low_us, high_us = times.interval_us or (middle_us - times.spread_us, middle_us + times.spread_us)
        interval_us = middle_us - math.hypot(model_us, middle_us - low_us), middle_us + math.hypot(model_us, high_us - middle_us)
        return with_replay_error(interval_us, middle_us, self.replay, max(self.floor_us, times.floor_us))


def with_replay_error(interval_us: tuple[float, float], iteration_us: float, error: float, floor_us: float) -> tuple[float, float]:
    """An interval that includes the error of the replay of the recorded setting in both directions, but begins at a floor.

    Parameters
    ----------
    error
        Signed, relative to what was measured.
    floor_us
        The least that an iteration can take; 0: not known.
    """
    ratio = max(1 + error, 1 / (1 + error)) if error > -1 else math.inf
    low_us = iteration_us - math.hypot(iteration_us - interval_us[0], iteration_us * (1 - 1 / ratio))
    high_us = iteration_us + math.hypot(interval_us[1] - iteration_us, iteration_us * (ratio - 1))
    # If the replay is too slow, the busy time that it has may be too long as well.
    return max(low_us, min(floor_us, iteration_us / max(1 + error, 1.0))), high_us


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A job in a scenario."""

    replayable: Replayable
    error: ErrorModel
    as_recorded: bool  # Whether the scenario is the recorded setting: no plan, no other cluster, no other speeds.
    cluster: ClusterSpec  # Cores and links of the ranks.
    calibration: Calibration | None = None  # Origin of the model error; None: it was not measured.
    assumptions: tuple[str, ...] = ()  # Sentences that say what predictions take for granted in this scenario.
    resamples: int = 0  # Replays with durations drawn anew, whose mean is reported; 0: one replay is reported.
    peak_memory_bytes: int | None = None  # Peak memory of the rank that needs most; None: not known.
    infeasible: str | None = None  # Why the job could not run like this; None: it could.
    unplaced: Mapping[str, str] = field(default_factory=dict)  # Recorded ops that have no place in the graph, and why.

    def prediction(self, times: IterationTimes) -> Prediction:
        """The prediction from a replay, with its interval."""
        return Prediction(
            iteration_us=times.iteration_us,
            interval_us=self.error.interval_us(times),
            breakdown_us=times.breakdown_us,
            peak_memory_bytes=self.peak_memory_bytes,
            source="recorded" if self.as_recorded else "extrapolated",
            settled=times.settled,
            infeasible=self.infeasible,
            floor_us=max(self.error.floor_us, times.floor_us),
            mean_us=times.mean_us,
        )

    def reported(self, *, detailed: bool = True) -> Prediction:
        """The prediction that people see, which may take longer than the one that a search needs."""
        times = self.replayable.iterations(detailed=detailed)
        return self.prediction(self._resampled(times) if self.resamples else times)

    def _resampled(self, times: IterationTimes) -> IterationTimes:
        """The times scaled to their mean over replays with durations drawn anew, with the spread of these."""
        sampled_us = self.replayable.sampled_us(samples=self.resamples)
        mean_us = float(sampled_us.mean())
        return replace(
            times,
            iteration_us=mean_us,
            breakdown_us={part: us * mean_us / times.iteration_us for part, us in times.breakdown_us.items()},
            spread_us=_Z_90 * float(sampled_us.std()),
        )
