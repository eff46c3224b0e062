"""Corrections of predictions by real runs: `validate` writes them into the run folder, `run --calibrate RUN` applies them.

`correction.Correction` is the model. This module has its file, the objective that applies it, and the text in ``run.json`` that
names the correction of a run's predictions. A later validation removes that correction first, and keeps the earlier measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dpro_search._regular_files import read_regular
from dpro_search.collect._files import DAMAGED, write_file
from dpro_search.collect.trace import CommSettings, Floats, TensorInfo
from dpro_search.errors import InputError
from dpro_search.search.correction import Correction, Knobs, Session, half_width, knobs_of, mean_errors_pct
from dpro_search.search.objective import Objective, reevaluator_of, sampled_of
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.plan_json import by_setting, decoded
from dpro_search.space.transformations import PlanSpace

CALIBRATION_VERSION = 3  # 2: all settings were fields of a plan
_FILE = "calibration.json"


class Calibration(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Measured settings, which correct the predictions of other settings."""

    version: int = CALIBRATION_VERSION
    # What was measured, of this run and of those that it was calibrated with; without any, nothing is corrected.
    sessions: tuple[Session, ...] = ()
    knobs: Knobs = {}  # Recorded values of plan fields.
    # error_before_pct, error_after_pct: Mean absolute error of the predictions of the changed settings, as they were and corrected
    # by all other measurements; None where no changed setting was measured.
    error_before_pct: float | None = None
    error_after_pct: float | None = None

    @staticmethod
    def fit(sessions: Sequence[Session], recorded: Mapping[str, object] | None = None) -> Calibration:
        """The calibration of measured sessions.

        Parameters
        ----------
        recorded
            Recorded values of plan fields (`PlanningFacts.values`), from which the similarity of two plans follows.

        Raises
        ------
        InputError
            Nothing was measured.
        """
        if not sessions:
            raise InputError("nothing was measured, so there is nothing to calibrate with; run 'dpro-search validate' first")
        knobs = knobs_of(recorded or {})
        errors = mean_errors_pct(sessions, knobs)
        before, after = (None, None) if errors is None else errors
        return Calibration(sessions=tuple(sessions), knobs=knobs, error_before_pct=before, error_after_pct=after)

    def save(self, run: Path) -> None:
        """Write ``calibration.json`` into a run folder, in place of an older one."""
        write_file(run / _FILE, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @staticmethod
    def load(run: Path) -> Calibration:
        """The calibration that `validate` left in a run folder; raises `InputError` if none exists, or it is damaged."""
        path = run / _FILE
        try:
            raw = read_regular(path)
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); make it with 'dpro-search validate'") from error
        try:
            version = msgspec.json.decode(raw, type=_Versioned).version
            if version not in (2, CALIBRATION_VERSION):
                known = f"this program reads 2 to {CALIBRATION_VERSION}"
                raise InputError(f"{path}: calibration version {version}, {known}; validate again")
            calibration = msgspec.structs.replace(decoded(raw, Calibration), version=CALIBRATION_VERSION)
        except DAMAGED as error:
            raise InputError(f"{path}: not a calibration ({error}); make it again with 'dpro-search validate'") from error
        if not calibration.sessions or not _usable(calibration.sessions):
            raise InputError(f"{path}: a measured or predicted time is not above 0; make it again with 'dpro-search validate'")
        return calibration

    @property
    def named(self) -> str:
        """The measurements as text, which `calibration_named` reads. It identifies the correction of a search."""
        return msgspec.json.encode(by_setting(_Named(sessions=self.sessions, knobs=self.knobs)), order="sorted").decode()

    @property
    def summary(self) -> str:
        """Describe the correction and its error in one line."""
        if not self.sessions:
            return "No correction: nothing was measured."
        changed = [point for session in self.sessions for point in session.changed]
        factors = [self._correction.of(point.plan, point.half_width)[0] for point in changed]
        recorded = next((session.recorded for session in self.sessions if session.recorded is not None), None)
        parts = []
        if recorded is not None:
            parts.append(f"of the recorded setting by {_percent(self._correction.of(Plan(), recorded.half_width)[0])}")
        if factors:
            settings = "the measured setting" if len(factors) == 1 else f"the {len(factors)} measured settings"
            by = _percent(factors[0]) if len(factors) == 1 else f"{_percent(min(factors))} to {_percent(max(factors))}"
            carried = _percent(float(np.exp(self._correction.carried)))
            parts.append(f"of {settings} by {by}; settings that are unlike all of these change by {carried}")
        text = f"The correction changes the prediction {' and '.join(parts)}."
        if self.error_before_pct is not None and self.error_after_pct is not None:
            text += _error_sentence(self.error_before_pct, self.error_after_pct)
        if any(session.machine_changed for session in self.sessions):
            text += " The machine has changed since the recording: only the gains of plans are corrected."
        return text

    def corrected(self, prediction: Prediction, plan: Plan) -> Prediction:
        """A plan's prediction, corrected by the measurements; the parts of the breakdown keep their shares."""
        if not self.sessions:
            return prediction
        us = prediction.iteration_us
        factor, narrowing = self._correction.of(plan, half_width(us, prediction.interval_us))
        low, high = (factor * (us + (limit - us) * narrowing) for limit in prediction.interval_us)
        return msgspec.structs.replace(
            prediction,
            iteration_us=us * factor,
            interval_us=(low, high),
            breakdown_us={name: part * factor for name, part in prediction.breakdown_us.items()},
        )

    def uncorrected(self, prediction: Prediction, plan: Plan) -> Prediction:
        """The inverse of `corrected`."""
        if not self.sessions:
            return prediction
        _, narrowing = self._correction.of(plan, 1.0)  # the same for every width
        factor, _ = self._correction.of(plan, half_width(prediction.iteration_us, prediction.interval_us) / narrowing)
        us = prediction.iteration_us / factor
        low, high = (us + (limit / factor - us) / narrowing for limit in prediction.interval_us)
        return msgspec.structs.replace(
            prediction,
            iteration_us=us,
            interval_us=(low, high),
            breakdown_us={name: part / factor for name, part in prediction.breakdown_us.items()},
        )

    @cached_property
    def _correction(self) -> Correction:
        return Correction(self.sessions, self.knobs)


class CalibratedObjective:
    """An `Objective` whose predictions are corrected."""

    def __init__(self, objective: Objective, calibration: Calibration) -> None:
        self._objective = objective
        self._calibration = calibration

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """The recorded knobs of the objective."""
        return self._objective.tensors

    @property
    def recorded(self) -> CommSettings | None:
        """The recorded knobs of the objective."""
        return self._objective.recorded

    @property
    def space(self) -> PlanSpace:
        """The plan space of the objective."""
        return self._objective.space

    def predict(self, plan: Plan) -> Prediction:
        """The objective's prediction, corrected."""
        return self._calibration.corrected(self._objective.predict(plan), plan)

    def reevaluated(self, plan: Plan) -> Prediction:
        """The objective's re-evaluation of a plan, corrected; its prediction, if it has no re-evaluation."""
        reevaluator = reevaluator_of(self._objective)
        return self._calibration.corrected(
            self._objective.predict(plan) if reevaluator is None else reevaluator.reevaluated(plan), plan
        )

    def sampled(self, plan: Plan, *, samples: int, seed: int = 0) -> Floats:
        """The objective's iteration times over resampled durations, corrected by the same factor as its prediction."""
        prediction = self._objective.predict(plan)
        factor = self._calibration.corrected(prediction, plan).iteration_us / prediction.iteration_us
        return factor * sampled_of(self._objective).sampled(plan, samples=samples, seed=seed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while it is unpickled, before there is an objective
            raise AttributeError(name)
        return getattr(self._objective, name)


def calibration_named(text: str, where: str) -> Calibration:
    """The calibration of a text `Calibration.named`; raises `InputError`, which names `where`, if it is not one."""
    try:
        named = decoded(text, _Named)
    except DAMAGED as error:
        raise InputError(f"{where}: not a calibration of this version ({error}); search again with --calibrate") from error
    if not _usable(named.sessions):
        raise InputError(f"{where}: a measured or predicted time is not above 0; search again with --calibrate")
    return Calibration(sessions=named.sessions, knobs=named.knobs)


class _Versioned(msgspec.Struct):
    version: int


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    sessions: tuple[Session, ...]
    knobs: Knobs


def _error_sentence(before_pct: float, after_pct: float) -> str:
    """How far predictions of measured settings are off, without the correction and with one made from the other settings."""
    before, after = f"{before_pct:.1f} %", f"{after_pct:.1f} %"
    if before == after:
        return f" The correction does not change the mean error of the measured settings, {before}."
    return f" Mean error of the measured settings: {before} without the correction, {after} with each corrected by the others."


def _usable(sessions: Sequence[Session]) -> bool:
    points = [point for session in sessions for point in session.points]
    times = [us for point in points for us in (point.predicted_us, point.measured_us)]
    times += [session.recording_us for session in sessions if session.recording_us is not None]
    return all(0 < us < np.inf for us in times) and all(
        0 <= point.half_width < np.inf and 0 <= point.noise < np.inf for point in points
    )


def _percent(factor: float) -> str:
    return f"{(factor - 1) * 100:+.1f} %"
