"""What a calibration by real runs is worth: errors of predictions before and after, on measured settings that it has not seen.

    python -m experiments.validation.calibration DIR

DIR is what `experiments.validation.frameworks` left. For every job, predictions come from the recording at the base rate. Corrected
once by the runs of the recorded setting alone, and once by all settings but the one that is judged.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from scipy.stats import trim_mean

from dpro_search.cli._jobs import ReplayRequest, verbs_of
from dpro_search.collect.trace import Trace
from dpro_search.search.calibration import Calibration, MeasuredPoint
from dpro_search.space.plan import Plan
from experiments.validation.frameworks import BASE_RATE, SCHEMES, WORKLOADS, Change, Run, Scheme
from experiments.validation.measure import Measured

TRIMMED = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    print("| scheme | workload | settings | as predicted | corrected by the recorded setting | corrected by all others |")
    print("|---|---|---:|---:|---:|---:|")
    columns: list[list[float]] = []
    for scheme in SCHEMES.values():
        for workload in WORKLOADS:
            points = list(_points(options.folder, scheme, workload))
            if len(points) > 2:
                errors = _errors(points)
                columns.append([float(np.mean(column)) for column in errors])
                cells = " | ".join(f"{np.mean(column):.1f} %" for column in errors)
                print(f"| {scheme.name} | {workload} | {len(points) - 1} | {cells} |")
    if columns:
        cells = " | ".join(f"{value:.1f} %" for value in np.mean(columns, axis=0))
        print(f"| all | mean | | {cells} |")


def _errors(points: list[MeasuredPoint]) -> tuple[list[float], list[float], list[float]]:
    """Absolute errors of the changed settings, %: as predicted, after the recorded setting's runs, after all others'."""
    recorded, *changed = points
    by_recorded = Calibration.fit([recorded])
    found: tuple[list[float], list[float], list[float]] = ([], [], [])
    for point in changed:
        by_others = Calibration.fit([other for other in points if other is not point])
        for column, calibration in zip(found, (None, by_recorded, by_others), strict=True):
            us = point.predicted_us if calibration is None else _corrected_us(point, calibration)
            column.append(abs(us / point.measured_us - 1) * 100)
    return found


def _corrected_us(point: MeasuredPoint, calibration: Calibration) -> float:
    rest_us = point.predicted_us - sum(point.breakdown_us.values())
    parts = {**point.breakdown_us, "rest": rest_us}
    return sum(us * calibration.factors.get(name, 1.0) for name, us in parts.items())


def _points(folder: Path, scheme: Scheme, workload: str) -> Iterator[MeasuredPoint]:
    """Predicted and measured: the recorded setting first, then other knobs, on the recorded link as `validate` has it."""
    recording = Run(scheme=scheme, workload=workload, rate=BASE_RATE).path(folder)
    if not recording.exists():
        return
    trace = Trace.load(recording)
    changes: tuple[Change | None, ...] = (None, *scheme.changes)
    for change in changes:
        first = Run(scheme=scheme, workload=workload, rate=BASE_RATE, change=change, number=0).path(folder)
        runs = [
            msgspec.json.decode(path.read_bytes(), type=Measured) for path in first.parent.glob(first.name.replace(".0.", ".*."))
        ]
        if not runs:
            continue
        sets = () if change is None else change.sets
        facts = verbs_of(trace).replay_trace(trace, ReplayRequest(changes=sets))
        yield MeasuredPoint(
            plan=Plan(),
            predicted_us=facts["predicted_iteration_us"],
            breakdown_us=facts["breakdown_us"],
            measured_us=float(np.mean([trim_mean(run.iteration_us, TRIMMED) for run in runs])),
            noise=0.02,
        )


if __name__ == "__main__":
    main()
