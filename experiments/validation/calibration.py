"""What a calibration by real runs is worth: errors of predictions before and after, on measured settings that it has not seen.

    python -m experiments.validation.calibration DIR

DIR is what `experiments.validation.frameworks` left. For every job, predictions come from the recording at the base rate. Corrected
once by what `dpro-search validate --top 1` would run, the recorded setting and the changed one that is predicted to be fastest, and
judged on the others; and once by all settings but the one that is judged.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect.trace import Trace
from dpro_search.deploy.validate import noise_pct_of, typical_us
from dpro_search.kinds import Job, job_of
from dpro_search.search.correction import Correction, Knobs, MeasuredPoint, Session, knobs_of, mean_errors_pct
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scenario, readers
from experiments.validation.frameworks import BASE_RATE, SCHEMES, WORKLOADS, Change, Run, Scheme
from experiments.validation.measure import Measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    print("| scheme | workload | settings | as predicted | corrected by all others | settings | as predicted | corrected by one |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    rows: list[tuple[float, ...]] = []
    for scheme in SCHEMES.values():
        for workload in WORKLOADS:
            if (found := _session(options.folder, scheme, workload)) is None:
                continue
            session, knobs = found
            others = mean_errors_pct([session], knobs)
            assert others is not None, "there are changed settings"
            rows.append((*others, *_errors_after_one(session, knobs)))
            before, after, before_one, after_one = (f"{value:.1f} %" for value in rows[-1])
            count = len(session.changed)
            print(f"| {scheme.name} | {workload} | {count} | {before} | {after} | {count - 1} | {before_one} | {after_one} |")
    if rows:
        before, after, before_one, after_one = (f"{value:.1f} %" for value in np.mean(rows, axis=0))
        print(f"| all | mean | | {before} | {after} | | {before_one} | {after_one} |")


def _errors_after_one(session: Session, knobs: Knobs) -> tuple[float, float]:
    """Mean absolute errors of all changed settings but the one predicted to be fastest, %: as predicted, and corrected by that."""
    best = min(session.changed, key=lambda point: point.predicted_us)
    correction = Correction((msgspec.structs.replace(session, changed=(best,)),), knobs)
    judged = [point for point in session.changed if point is not best]
    before = [abs(point.predicted_us / point.measured_us - 1) * 100 for point in judged]
    after = [
        abs(point.predicted_us * correction.of(point.plan, point.half_width)[0] / point.measured_us - 1) * 100 for point in judged
    ]
    return float(np.mean(before)), float(np.mean(after))


def _session(folder: Path, scheme: Scheme, workload: str) -> tuple[Session, Knobs] | None:
    """What was measured of a job at the base rate, and its recorded knobs; None if that is less than two changed settings."""
    recording = Run(scheme=scheme, workload=workload, rate=BASE_RATE).path(folder)
    base = _runs(folder, scheme, workload, None)
    changed = [(change, runs) for change in scheme.changes if (runs := _runs(folder, scheme, workload, change))]
    known = readers()
    of_plans = all(text.partition("=")[0] in known for change, _ in changed for text in change.sets)
    if len(changed) < 2 or not base or not recording.exists() or not of_plans:
        return None
    trace = Trace.load(recording)
    prices = job_of(trace)
    noise = noise_pct_of([np.array(run.iteration_us) for run in base]) / 100
    session = Session(
        recorded=_point(prices, Plan(), base, noise),
        changed=tuple(
            _point(prices, Scenario().changed(change.sets, known=known, job="the job").plan, runs, noise)
            for change, runs in changed
        ),
        recording_us=typical_us([trace.iterations_us()]),
    )
    return session, knobs_of(prices.space.job.values)


def _runs(folder: Path, scheme: Scheme, workload: str, change: Change | None) -> list[Measured]:
    first = Run(scheme=scheme, workload=workload, rate=BASE_RATE, change=change, number=0).path(folder)
    return [msgspec.json.decode(path.read_bytes(), type=Measured) for path in first.parent.glob(first.name.replace(".0.", ".*."))]


def _point(prices: Job, plan: Plan, runs: Sequence[Measured], noise: float) -> MeasuredPoint:
    found = prices.predict(plan)
    return MeasuredPoint(
        plan=plan,
        predicted_us=found.iteration_us,
        interval_us=found.interval_us,
        measured_us=typical_us([np.array(run.iteration_us) for run in runs]),
        noise=noise,
    )


if __name__ == "__main__":
    main()
