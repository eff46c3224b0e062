"""`calibrated`: predictions with efficiencies that are fitted to a fifth of the groups of rows, for each GPU and framework."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from dpro_search.replay.parallel_step import step_us
from dpro_search.space.mesh import Calibration, Workload
from experiments.truth.jobs import Kind, kind_of, workload_of
from experiments.truth.score import Scored, fifth, group_of

NAMES = tuple(field.name for field in fields(Calibration))
DELAYS = ("send_rank_us",)  # In us; all others are factors, fitted as logarithms.
DELAY_SCALE_US = 100.0
PRIOR = 0.1
"""Standard deviation of a factor's logarithm before it is seen (assumed)."""
ERROR = 0.15
"""The same of errors that are left (assumed); larger ones count for less than their square."""
DELAY_PRIOR = 3.0  # The same of delays, in hundreds of us.
MOST_ROWS = 16
"""Of a kind, to which it is fitted: a few minutes for all kinds."""


def calibrated(scored: Sequence[Scored], seed: int) -> list[Scored]:
    """The rows that are not of the fifth, predicted with what is fitted to it.

    Kinds of which the fifth has no row take what is fitted to all kinds together.
    """
    measured = [found for found in scored if found.timed]
    chosen = fifth([found.row for found in measured], seed)
    by_kind: dict[Kind, list[Scored]] = defaultdict(list)
    for found in measured:
        if group_of(found.row) in chosen:
            by_kind[kind_of(found.row)].append(found)
    generator = np.random.default_rng(seed)
    samples = {kind: _sample(members, generator) for kind, members in sorted(by_kind.items())}
    everyone = [found for members in samples.values() for found in members[: MOST_ROWS // 4]]
    common = fit(everyone, np.zeros(len(NAMES)))
    found_by_kind: Mapping[Kind, npt.NDArray[np.float64]] = {kind: fit(members, common) for kind, members in samples.items()}
    left = [found for found in measured if group_of(found.row) not in chosen]
    return [_with(found, found_by_kind.get(kind_of(found.row), common)) for found in left]


def fit(rows: Sequence[Scored], prior: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Parameters of a `Calibration` in the order of `NAMES`: least squares of logarithms, with weights that fall with the error."""
    workloads = [workload_of(found.row) for found in rows]
    measured = np.log([found.row.number("step_time_s") or 1.0 for found in rows])

    def residuals(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        calibration = calibration_of(values)
        logs = np.log([_seconds(workload, calibration) for workload in workloads])
        errors = (logs - measured) / ERROR
        robust = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
        return np.concatenate([robust, (values - prior) / widths])

    widths = np.array([DELAY_PRIOR if name in DELAYS else PRIOR for name in NAMES])
    lower = np.array([0.0 if name in DELAYS else -1.0 for name in NAMES])
    upper = np.array([10.0 if name in DELAYS else 1.5 for name in NAMES])
    start = np.clip(prior, np.where(lower < 0, lower + 0.01, 0.5), upper - 0.01)
    return np.asarray(least_squares(residuals, start, bounds=(lower, upper), diff_step=0.05, max_nfev=5).x)


def calibration_of(values: npt.NDArray[np.float64]) -> Calibration:
    """The calibration of a vector of parameters."""
    pairs = zip(NAMES, map(float, values), strict=True)
    return Calibration(**{name: value * DELAY_SCALE_US if name in DELAYS else float(np.exp(value)) for name, value in pairs})


def _seconds(workload: Workload, calibration: Calibration) -> float:
    return step_us(replace(workload, calibration=calibration)) / 1e6


def _with(found: Scored, values: npt.NDArray[np.float64]) -> Scored:
    seconds = _seconds(workload_of(found.row), calibration_of(values))
    return Scored(found.row, found.prediction._replace(step_s=seconds))


def _sample(members: Sequence[Scored], generator: np.random.Generator) -> list[Scored]:
    places = generator.permutation(len(members))[:MOST_ROWS]
    return [members[place] for place in places]
