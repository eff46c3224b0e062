"""What `run --calibrate` is worth on real runs: settings that the calibration has not seen, predicted with and without it.

    python -m experiments.search.calibrated DIR [--run NAME=RUN ...]

DIR is what `experiments.search.testbed` left. A case is calibrated by the real runs of the recorded setting and of its best plan,
as `dpro-search validate` does; or by a run folder that was validated at another time (NAME: the case's folder). Judged are the
settings of its grid of real runs, without the best plan. Predictions are those of the search, corrected or not.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpro_search.collect.trace import Trace
from dpro_search.deploy.validate import noise_pct_of, typical_us
from dpro_search.errors import InputError
from dpro_search.replay.plan_predictor import plan_predictor
from dpro_search.search.calibration import CalibratedObjective, Calibration, MeasuredPoint
from dpro_search.search.objective import Objective
from dpro_search.space.plan import Plan
from experiments.search.testbed_case import DEFAULT, PLAN, Case, Measured, open_case


@dataclass(frozen=True, kw_only=True)
class Worth:
    """Errors of the predictions of settings that a calibration has not seen, %, [settings]."""

    before: Sequence[float]
    after: Sequence[float]


def worth(calibration: Calibration, objective: Objective, measured_us: Mapping[Plan, float]) -> Worth:
    """What a calibration does to predictions of measured settings; those that it was fitted to are left out."""
    seen = {point.plan for point in calibration.points}
    judged = {plan: us for plan, us in measured_us.items() if plan not in seen}
    corrected = CalibratedObjective(objective, calibration)
    return Worth(
        before=[(objective.predict(plan).iteration_us / us - 1) * 100 for plan, us in judged.items()],
        after=[(corrected.predict(plan).iteration_us / us - 1) * 100 for plan, us in judged.items()],
    )


def calibration_of(case: Case, objective: Objective) -> Calibration:
    """From the rounds of a case: the recorded setting and the best plan."""
    base = _ended_well(case.rounds(DEFAULT))
    if not base:
        raise InputError(f"{case.folder}: the default has no run that ended well")
    noise = noise_pct_of([run.times_us for run in base]) / 100
    points = []
    for runs in (base, _ended_well(case.rounds(PLAN))):
        if runs:
            predicted = objective.predict(runs[0].plan)
            points.append(
                MeasuredPoint(
                    plan=runs[0].plan,
                    predicted_us=predicted.iteration_us,
                    breakdown_us=predicted.breakdown_us,
                    measured_us=typical_us([run.times_us for run in runs]),
                    noise=noise,
                )
            )
    return Calibration.fit(points)


def _ended_well(runs: Sequence[Measured]) -> list[Measured]:
    return [run for run in runs if not run.failed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", action="append", default=[], metavar="NAME=RUN", help="calibrate a case by this validated run")
    options = parser.parse_args()
    other = {name: Path(run) for name, _, run in (text.partition("=") for text in options.run)}
    print("| case | calibrated by | settings judged | error as predicted: mean (of the mean) | corrected |")
    print("|---|---|---:|---:|---:|")
    for folder in sorted(path.parent for path in options.folder.glob("*/setup.json")):
        case = open_case(folder)
        grid = {point.plan: typical_us([point.times_us]) for point in case.grid().values() if not point.failed}
        if not grid:
            continue
        objective = plan_predictor(Trace.load(case.trace))
        calibrations = {"its own rounds": calibration_of(case, objective)}
        if folder.name in other:
            calibrations[str(other[folder.name])] = Calibration.load(other[folder.name])
        for name, calibration in calibrations.items():
            found = worth(calibration, objective, grid)
            print(f"| {folder.name} | {name} | {len(found.before)} | {_said(found.before)} | {_said(found.after)} |")


def _said(errors_pct: Sequence[float]) -> str:
    return f"{np.mean(np.abs(errors_pct)):.1f} % ({np.mean(errors_pct):+.1f})"


if __name__ == "__main__":
    main()
