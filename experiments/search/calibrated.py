"""What `run --calibrate` is worth on real runs: settings that the calibration has not seen, predicted with and without it.

    python -m experiments.search.calibrated DIR [--run NAME=RUN ...] [--only NAME ...]
    python -m experiments.search.calibrated --across RUN OTHER

DIR is what `experiments.search.testbed` left. A case is calibrated by its rounds, as `dpro-search validate` does: the recorded
setting, its best plan and the best of its grid; or by a run folder that was validated at another time (NAME: the case's folder).
Judged are the settings of its grid of real runs that the rounds did not have. `--across` calibrates by one validated run and judges
what another one of the same recording measured. Predictions are those of the search, corrected or not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpro_search.collect.trace import Trace
from dpro_search.deploy.of_run import measured_session
from dpro_search.deploy.validate import Validation, measured_plan, noise_pct_of, typical_us
from dpro_search.errors import InputError
from dpro_search.kinds import Job, job_of
from dpro_search.search.calibration import Calibration
from dpro_search.space.plan import Plan, Prediction
from experiments.search.testbed_case import DEFAULT, GRID, PLAN, Case, Measured, open_case


@dataclass(frozen=True, kw_only=True)
class Worth:
    """Errors of predictions of settings that a calibration has not seen, %, and whether their intervals hold, [settings].

    Those of gains are of the time relative to that of the recorded setting, of which what the whole machine does is no part.
    """

    before: Sequence[float]
    after: Sequence[float]
    gain_before: Sequence[float]
    gain_after: Sequence[float]
    held_before: Sequence[bool]
    held_after: Sequence[bool]


def worth(calibration: Calibration, base: tuple[Prediction, float], judged: Mapping[Plan, tuple[Prediction, float]]) -> Worth:
    """What a calibration does to predictions of the recorded setting (`base`) and of others: prediction, measured time in us."""
    predicted = [(found, calibration.corrected(found, plan), us) for plan, (found, us) in judged.items()]
    us_before, us_after = base[0].iteration_us / base[1], calibration.corrected(base[0], Plan()).iteration_us / base[1]
    return Worth(
        before=[(before.iteration_us / us - 1) * 100 for before, _, us in predicted],
        after=[(after.iteration_us / us - 1) * 100 for _, after, us in predicted],
        gain_before=[(before.iteration_us / us / us_before - 1) * 100 for before, _, us in predicted],
        gain_after=[(after.iteration_us / us / us_after - 1) * 100 for _, after, us in predicted],
        held_before=[_holds(before, us) for before, _, us in predicted],
        held_after=[_holds(after, us) for _, after, us in predicted],
    )


def calibration_of(case: Case, prices: Job, recording_us: float) -> Calibration:
    """From the rounds of a case: what `validate` would leave of them."""
    base = _ended_well(case.rounds(DEFAULT))
    if not base:
        raise InputError(f"{case.folder}: the default has no run that ended well")
    base_runs = [run.times_us for run in base]
    baseline, noise_pct = prices.predict(Plan()), noise_pct_of(base_runs)
    contenders = {runs[0].plan: runs for name in (PLAN, GRID) if (runs := _ended_well(case.rounds(name)))}
    plans = [
        measured_plan(plan, prices.predict(plan), baseline, [run.times_us for run in runs], base_runs, noise_pct)
        for plan, runs in contenders.items()
        if plan != Plan()
    ]
    validation = Validation(
        baseline_us=typical_us(base_runs),
        baseline_predicted_us=baseline.iteration_us,
        baseline_error_pct=(baseline.iteration_us / typical_us(base_runs) - 1) * 100,
        recorded_us=recording_us,
        noise_pct=noise_pct,
        rounds=len(base),
        plans=tuple(plans),
    )
    return Calibration.fit([measured_session(validation, baseline)], prices.space.job.values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--run", action="append", default=[], metavar="NAME=RUN", help="calibrate a case by this validated run")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="cases (a pattern each)")
    parser.add_argument("--across", nargs=2, type=Path, action="append", default=[], metavar=("RUN", "OTHER"))
    options = parser.parse_args()
    other = {name: Path(run) for name, _, run in (text.partition("=") for text in options.run)}
    print("| case | calibrated by | settings | error (of the mean): as predicted | corrected | of the gain | corrected | held |")
    print("|---|---|---:|---:|---:|---:|---:|---|")
    for run, judged in options.across:
        last = Calibration.load(judged).sessions[-1]
        points = {point.plan: (_prediction(point.predicted_us, point.interval_us), point.measured_us) for point in last.changed}
        base = (_prediction(last.recorded.predicted_us, last.recorded.interval_us), last.recorded.measured_us)
        _print(judged.name, run.name, worth(Calibration.load(run), base, points))
    if options.folder is None:
        return
    for folder in sorted({path.parent for only in options.only for path in options.folder.glob(f"{only}/setup.json")}):
        case = open_case(folder)
        trace = Trace.load(case.trace)
        prices = job_of(trace)
        grid, defaults = _grid(case, prices), _ended_well(case.rounds(DEFAULT))
        if not grid or not defaults:
            continue
        base = (prices.predict(Plan()), typical_us([run.times_us for run in defaults]))
        calibrations = {"its own rounds": calibration_of(case, prices, typical_us([trace.iterations_us()]))}
        if folder.name in other:
            calibrations[other[folder.name].name] = Calibration.load(other[folder.name])
        for name, calibration in calibrations.items():
            _print(folder.name, name, worth(calibration, base, grid))
            print(calibration.summary, file=sys.stderr)


def _grid(case: Case, prices: Job) -> dict[Plan, tuple[Prediction, float]]:
    """Settings of the grid that are not in the rounds, by what they mean: prediction and measured time in us."""
    seen = {prices.space.simplest(run.plan) for name in (DEFAULT, PLAN, GRID) for run in case.rounds(name)}
    ended_well = [point for point in case.grid().values() if not point.failed and prices.space.simplest(point.plan) not in seen]
    return {point.plan: (prices.predict(point.plan), typical_us([point.times_us])) for point in ended_well}


def _prediction(us: float, interval_us: tuple[float, float]) -> Prediction:
    return Prediction(iteration_us=us, interval_us=interval_us, breakdown_us={}, peak_memory_bytes=None, source="extrapolated")


def _ended_well(runs: Sequence[Measured]) -> list[Measured]:
    return [run for run in runs if not run.failed]


def _holds(prediction: Prediction, us: float) -> bool:
    low, high = prediction.interval_us
    return low <= us <= high


def _print(case: str, by: str, found: Worth) -> None:
    held = f"{np.mean(found.held_before):.0%} -> {np.mean(found.held_after):.0%}"
    errors = " | ".join(_said(column) for column in (found.before, found.after, found.gain_before, found.gain_after))
    print(f"| {case} | {by} | {len(found.before)} | {errors} | {held} |")


def _said(errors_pct: Sequence[float]) -> str:
    return f"{np.mean(np.abs(errors_pct)):.1f} % ({np.mean(errors_pct):+.1f})"


if __name__ == "__main__":
    main()
