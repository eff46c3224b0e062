"""Correction of the predictions of settings that did not run, from those that did: a `Residual` over settings.

The logarithm of measured over predicted time is modelled as a sum of

* the state of the machine during the runs, one number for all of them. It is estimated from the recorded setting: its iteration
  time now, compared with that of the recording. So a measured plan corrects predicted *gains*. The share `CARRIED` of the state
  is expected in later runs; none of it if the state differs by more than runs of one job usually do;
* the model error of the setting. Its standard deviation follows from the interval of the prediction. Its correlation between
  settings is `similarity`. The error of the recorded setting is independent of the others, because that setting is not
  extrapolated;
* the noise of the measurement.

A setting that is similar to a measured one is corrected by nearly its error, and its interval shrinks. One that is similar to none
stays as it was. A corrected prediction never leaves the original interval. ``experiments/validation/calibration.md`` shows how the
constants were chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from dpro_search.collect.trace import Floats, Ints
from dpro_search.costmodel.residual import Residual
from dpro_search.space.plan import Plan, Prediction

Knobs = dict[str, bool | float | str]
_Settings = Sequence[tuple[Knobs | None, float]]
"""Values of plan fields (None: the recorded setting), each with the standard deviation that its model error has beforehand."""

CARRIED = 0.5  # recording and validation are two samples of a varying machine: the next is expected between them
_STATE = 0.05  # standard deviation of the machine's state; recordings of one job differ by about 4 % from run to run
_CHANGED = (
    0.05  # relative; if the recorded setting differs from its recording by more (and more than its noise), the machine has changed
)
LEAST_NOISE = 0.04  # relative; of a median of a few runs
_RECORDING_NOISE = 0.01
_SIMILAR_RATIO = 1.5  # logarithm of the ratio of two sizes at which their similarity has fallen to 1/e
_SIGMAS = 1.645  # half the width of a normal distribution's 90 % interval, in standard deviations


class MeasuredPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A prediction, not corrected, and what real runs measured; `noise` is the relative standard deviation of `measured_us`."""

    plan: Plan
    predicted_us: float
    interval_us: tuple[float, float]
    measured_us: float
    noise: float = LEAST_NOISE

    @property
    def residual(self) -> float:
        """Logarithm of measured over predicted."""
        return math.log(self.measured_us / self.predicted_us)

    @property
    def half_width(self) -> float:
        """Half the width of the prediction's interval, relative to the prediction."""
        return half_width(self.predicted_us, self.interval_us)


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """Runs in one state of the machine: interleaved ones of `validate`, or runs that somebody else reported."""

    recorded: MeasuredPoint | None = None  # The recorded setting; None: it was not measured.
    changed: tuple[MeasuredPoint, ...] = ()  # Other settings.
    recording_us: float | None = None  # What the recorded setting took when it was recorded; None: not known.

    @property
    def points(self) -> tuple[MeasuredPoint, ...]:
        """Everything that was measured, the recorded setting first."""
        return self.changed if self.recorded is None else (self.recorded, *self.changed)

    @property
    def machine_changed(self) -> bool:
        """Whether the recorded setting differs from its recording and its prediction by more than the noise."""
        return self.recorded is not None and abs(math.exp(self._change) - 1) > max(self.recorded.noise, _CHANGED)

    @property
    def state_spread(self) -> float:
        """Standard deviation of the machine's state; at least the observed change, so that it is not attributed to plans."""
        return max(_STATE, abs(self._change))

    @property
    def _change(self) -> float:
        """Logarithm of the recorded setting's time over that of its recording, or over its prediction if that is nearer."""
        if self.recording_us is None or self.recorded is None:
            return 0.0
        return min(math.log(self.recorded.measured_us / self.recording_us), self.recorded.residual, key=abs)


@dataclass(frozen=True)
class Correction:
    """The errors of settings, as far as the measurements of some sessions tell them."""

    sessions: tuple[Session, ...]  # What was measured; at least one.
    knobs: Knobs  # Recorded values of plan fields (see `knobs_of`); a plan that does not set a field keeps them.

    def of(self, plan: Plan, half_width: float) -> tuple[float, float]:
        """Factor on the prediction of a plan, and on the width of its interval (at most 1).

        Parameters
        ----------
        half_width
            Half the width of the prediction's interval, relative to the prediction.
        """
        prior = half_width / _SIGMAS
        (expected,), (explained,) = self._residual.expected_and_explained([(self._knobs_under(plan), prior)])
        low, high = math.log(max(1 - half_width, 0.1)), math.log(1 + half_width)
        shift = min(max(float(expected) + self.carried, low), high)
        return math.exp(shift), math.sqrt(max(1 - float(explained) / max(prior**2, 1e-12), 0.0))

    @cached_property
    def carried(self) -> float:
        """The part of the machine's state that is expected in later runs, as a logarithm."""
        states = [
            session.state_spread**2 * float(self._residual.weights[self._session == number].sum())
            for number, session in enumerate(self.sessions)
            if not session.machine_changed
        ]
        return CARRIED * float(np.mean(states)) if states else 0.0

    @cached_property
    def _points(self) -> list[MeasuredPoint]:
        """Measured points, and the recordings as points of a state that is 0, [observations]."""
        measured = [point for session in self.sessions for point in session.points]
        recordings = [
            msgspec.structs.replace(session.recorded, measured_us=session.recording_us)
            for session in self.sessions
            if session.recording_us is not None and session.recorded is not None
        ]
        return [*measured, *recordings[:1]]

    @cached_property
    def _session(self) -> Ints:
        """Number of the session of each observation, -1: the recording, [observations]."""
        numbers = [number for number, session in enumerate(self.sessions) for _ in session.points]
        return np.array([*numbers, *[-1] * (len(self._points) - len(numbers))])

    @cached_property
    def _residual(self) -> Residual[_Settings]:
        """Errors of the observations. All in one session share the state of the machine, which no other setting does."""
        state = np.array([session.state_spread**2 for session in self.sessions] + [0.0])[self._session]
        same_state = np.where(self._session[:, None] == self._session, state, 0.0)
        noise = np.where(self._session >= 0, [max(point.noise, LEAST_NOISE) for point in self._points], _RECORDING_NOISE)
        return Residual(
            covariance=_covariance,
            points=[(self._knobs_under(point.plan), point.half_width / _SIGMAS) for point in self._points],
            errors=np.array([point.residual for point in self._points]),
            noise=same_state + np.diag(noise**2),
        )

    def _knobs_under(self, plan: Plan) -> Knobs | None:
        """Values of plan fields under a plan; None: it is the recorded setting."""
        return None if plan == Plan() else self.knobs | knobs_of(plan)


def _covariance(left: _Settings, right: _Settings) -> Floats:
    """Covariance of the model errors of settings, [left, right]; the recorded setting resembles no other."""
    similarities = [
        [similarity(one, other) if one is not None and other is not None else float(one is other) for other, _ in right]
        for one, _ in left
    ]
    deviations = (np.array([deviation for _, deviation in settings]) for settings in (left, right))
    covariance: Floats = np.array(similarities) * np.outer(*deviations)
    return covariance


def plan_covariance(predictions: Mapping[Plan, Prediction], recorded: Mapping[str, object]) -> Floats:
    """Covariance of the logarithms' errors of predicted plans of one recorded job, [plans, plans].

    Parameters
    ----------
    predictions
        Plans, with the predictions whose intervals say how wide the errors are.
    recorded
        Recorded values of plan fields (`PlanningFacts.values`).
    """
    known = knobs_of(recorded)
    settings = [
        (
            None if plan == Plan() else known | knobs_of(plan),
            half_width(prediction.iteration_us, prediction.interval_us) / _SIGMAS,
        )
        for plan, prediction in predictions.items()
    ]
    return _covariance(settings, settings) + _STATE**2


def half_width(predicted_us: float, interval_us: tuple[float, float]) -> float:
    """Half the width of a prediction's interval, relative to the prediction."""
    return (interval_us[1] - interval_us[0]) / 2 / predicted_us


def knobs_of(plan: Plan | Mapping[str, object]) -> Knobs:
    """The values that a plan (or the recorded values of its fields) sets, by field. Groupings count by their number of groups."""
    values = plan.settings if isinstance(plan, Plan) else plan
    return {name: _knob(name, value) for name, value in values.items() if value is not None}


def _knob(name: str, value: object) -> bool | float | str:
    if isinstance(value, bool | str):
        return value
    if name == "allreduce_algorithms":
        return str(value)
    return float(len(value)) if isinstance(value, tuple) else float(value)  # type: ignore[arg-type]


def similarity(one: Knobs, other: Knobs) -> float:
    """Correlation of the model errors of two settings, 0 to 1; smaller, the more fields differ and the more their sizes do."""
    return math.exp(-sum(_difference(one.get(name), other.get(name)) for name in one.keys() | other.keys()))


def _difference(one: bool | float | str | None, other: bool | float | str | None) -> float:
    """0 for equal values, towards 1 for others; sizes by their ratio. A sum of these makes a positive definite `similarity`."""
    if one == other:
        return 0.0
    if isinstance(one, float) and isinstance(other, float):
        return 1 - math.exp(-abs(math.log((one + 1) / (other + 1))) / _SIMILAR_RATIO)
    return 1.0


def mean_errors_pct(sessions: Sequence[Session], knobs: Knobs) -> tuple[float, float] | None:
    """Mean absolute error of the predictions of changed settings, %: as they were, and corrected by all other measurements.

    None where no changed setting was measured.
    """
    before, after = [], []
    for number, session in enumerate(sessions):
        for left_out in session.changed:
            rest = msgspec.structs.replace(session, changed=tuple(point for point in session.changed if point is not left_out))
            others = tuple(other for other in (*sessions[:number], rest, *sessions[number + 1 :]) if other.points)
            if not others:
                continue
            factor, _ = Correction(others, knobs).of(left_out.plan, left_out.half_width)
            before.append(abs(left_out.predicted_us / left_out.measured_us - 1) * 100)
            after.append(abs(left_out.predicted_us * factor / left_out.measured_us - 1) * 100)
    return (float(np.mean(before)), float(np.mean(after))) if before else None
