"""Corrections of predictions by what real runs measured: `validate` leaves them in the run folder, `run --calibrate RUN` uses them.

A prediction says where an iteration goes (computation, exposed communication, ...). Real runs of the recorded setting and of some
plans say how long it was. Fitted is one factor for each part, by ridge regression towards 1: the factors are as far from 1 as the
measurements ask for, against a prior that puts them within `PRIOR` of it. So a machine that computes more slowly than when it
was recorded, or a link that carries less, corrects all plans, by how much of it they use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dpro_search.collect._files import DAMAGED, write_file
from dpro_search.collect.trace import CommSettings, Floats, TensorInfo
from dpro_search.errors import InputError
from dpro_search.search.objective import Objective
from dpro_search.search.robustness import sampled_of
from dpro_search.space.plan import Plan, Prediction

CALIBRATION_VERSION = 1
PRIOR = 0.15  # standard deviation of a factor before anything was measured
_LEAST_NOISE = 0.01  # relative; no median of real runs is known better
_FILE = "calibration.json"
_REST = "rest"  # what the parts of a prediction leave of its iteration


class MeasuredPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A prediction and what real runs measured; `noise` is the relative standard deviation of `measured_us`."""

    plan: Plan
    predicted_us: float
    breakdown_us: dict[str, float]
    measured_us: float
    noise: float = _LEAST_NOISE


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Factors of the parts of a prediction.

    Attributes
    ----------
    factors
        By name of the part; 1 where the prediction was right.
    points
        What they were fitted to.
    error_before_pct, error_after_pct
        Mean absolute error of the predictions of the points, as they were and with factors from all the other points; None with
        fewer than two points.
    """

    version: int = CALIBRATION_VERSION
    factors: dict[str, float]
    points: tuple[MeasuredPoint, ...]
    error_before_pct: float | None = None
    error_after_pct: float | None = None

    @staticmethod
    def fit(points: Sequence[MeasuredPoint]) -> Calibration:
        """Factors that bring predictions nearest to what was measured; raises `InputError` if nothing was."""
        if not points:
            raise InputError("nothing was measured, so there is nothing to calibrate with; run 'dpro-search validate' first")
        before = [abs(point.predicted_us / point.measured_us - 1) * 100 for point in points]
        after: list[float] = []
        for left_out in points if len(points) > 1 else ():
            factors = _factors([point for point in points if point is not left_out])
            after.append(abs(_scaled(left_out.predicted_us, left_out.breakdown_us, factors) / left_out.measured_us - 1) * 100)
        return Calibration(
            factors=_factors(points),
            points=tuple(points),
            error_before_pct=float(np.mean(before)),
            error_after_pct=float(np.mean(after)) if after else None,
        )

    def save(self, run: Path) -> None:
        """Write ``calibration.json`` into a run folder, in place of an older one."""
        write_file(run / _FILE, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @staticmethod
    def load(run: Path) -> Calibration:
        """What `validate` left in a run folder; raises `InputError` if there is none, or it is damaged."""
        path = run / _FILE
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Calibration)
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); make it with 'dpro-search validate'") from error
        except DAMAGED as error:
            raise InputError(f"{path}: not a calibration ({error}); make it again with 'dpro-search validate'") from error
        if found.version != CALIBRATION_VERSION:
            raise InputError(
                f"{path}: calibration version {found.version}, this program reads {CALIBRATION_VERSION}; validate again"
            )
        if not _usable(found.factors):
            raise InputError(f"{path}: a factor is not above 0; make it again with 'dpro-search validate'")
        return found

    @property
    def named(self) -> str:
        """The factors as text, which `factors_named` reads: what tells searches with different ones from each other."""
        return msgspec.json.encode(self.factors, order="sorted").decode()

    def corrected(self, prediction: Prediction) -> Prediction:
        """A prediction with the factors on its parts; its interval keeps its relative width."""
        us = prediction.iteration_us
        corrected_us = _scaled(us, prediction.breakdown_us, self.factors)
        low, high = prediction.interval_us
        return msgspec.structs.replace(
            prediction,
            iteration_us=corrected_us,
            interval_us=(low / us * corrected_us, high / us * corrected_us),
            breakdown_us={name: part * self.factors.get(name, 1.0) for name, part in prediction.breakdown_us.items()},
        )


class CalibratedObjective:
    """An `Objective` whose predictions are corrected."""

    def __init__(self, objective: Objective, calibration: Calibration) -> None:
        self._objective = objective
        self._calibration = calibration

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Those of the objective."""
        return self._objective.tensors

    @property
    def recorded(self) -> CommSettings:
        """Those of the objective."""
        return self._objective.recorded

    def predict(self, plan: Plan) -> Prediction:
        """The objective's prediction, corrected."""
        return self._calibration.corrected(self._objective.predict(plan))

    def sampled(self, plan: Plan, *, samples: int, seed: int = 0) -> Floats:
        """The objective's replays in other luck, corrected by as much as its prediction."""
        prediction = self._objective.predict(plan)
        factor = self._calibration.corrected(prediction).iteration_us / prediction.iteration_us
        return factor * sampled_of(self._objective).sampled(plan, samples=samples, seed=seed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while it is unpickled, before there is an objective
            raise AttributeError(name)
        return getattr(self._objective, name)


def factors_named(text: str, where: str) -> dict[str, float]:
    """The factors of a `Calibration.named`; raises `InputError` that names `where` if they are none."""
    try:
        factors = msgspec.json.decode(text, type=dict[str, float])
    except DAMAGED as error:
        raise InputError(f"{where}: not factors of a calibration ({error}); search again with --calibrate") from error
    if not _usable(factors):
        raise InputError(f"{where}: a factor is not above 0; search again with --calibrate")
    return factors


def uncorrected(point: MeasuredPoint, factors: Mapping[str, float]) -> MeasuredPoint:
    """A point whose prediction had these factors on its parts, as it was without them."""
    parts = {name: us / factors.get(name, 1.0) for name, us in _parts(point.predicted_us, point.breakdown_us).items()}
    total_us = sum(parts.values())
    del parts[_REST]
    return msgspec.structs.replace(point, predicted_us=total_us, breakdown_us=parts)


def _usable(factors: Mapping[str, float]) -> bool:
    return all(np.isfinite(factor) and factor > 0 for factor in factors.values())


def _factors(points: Sequence[MeasuredPoint]) -> dict[str, float]:
    """Factor of each part: the mode of the posterior under independent normal priors around 1."""
    names = list(dict.fromkeys(name for point in points for name in _parts(point.predicted_us, point.breakdown_us)))
    rows: list[Floats] = []
    residuals: list[float] = []
    for point in points:
        sigma_us = max(point.noise, _LEAST_NOISE) * point.measured_us
        parts = _parts(point.predicted_us, point.breakdown_us)
        rows.append(np.array([parts.get(name, 0.0) for name in names]) / sigma_us)
        residuals.append((point.measured_us - point.predicted_us) / sigma_us)
    system = np.vstack([np.array(rows), np.eye(len(names)) / PRIOR])
    wanted = np.concatenate([np.array(residuals), np.zeros(len(names))])
    change = np.linalg.lstsq(system, wanted, rcond=None)[0]
    return {name: float(max(1 + change[k], 0.1)) for k, name in enumerate(names)}


def _parts(predicted_us: float, breakdown_us: Mapping[str, float]) -> dict[str, float]:
    """A prediction as a sum of parts."""
    return {**breakdown_us, _REST: predicted_us - sum(breakdown_us.values())}


def _scaled(predicted_us: float, breakdown_us: Mapping[str, float], factors: Mapping[str, float]) -> float:
    return sum(part * factors.get(name, 1.0) for name, part in _parts(predicted_us, breakdown_us).items())
