"""Predictions beside the measurements of `frameworks`: the tables for experiments/validation/README.md.

    python -m experiments.validation.frameworks_report DIR [--results FILE]

A prediction is what `dpro-search replay TRACE --set ...` says. "as recorded" is compared with plain runs of the same job, which no
prediction uses; everything else comes from the recording at the base rate, and is compared with runs of its own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import numpy as np
from scipy.stats import trim_mean

from dpro_search.analysis.predict import ReplayRequest, replay
from dpro_search.collect.trace import SETTLING_STEPS, Trace
from dpro_search.kinds import job_of
from experiments.validation.frameworks import BASE_RATE, RATES, SCHEMES, WORKLOADS, Change, Run, Scheme
from experiments.validation.measure import Measured

WORKERS = 2
TRIMMED = 0.2  # jobs with parameter servers have short and long steps in turn: a median would pick one kind


class Row(msgspec.Struct, kw_only=True):
    """One configuration; `recorded_rate` is that of the recording that predicted it."""

    scheme: str
    workload: str
    recorded_rate: str
    rate: str
    setting: str
    measured_us: list[float]  # of each run: mean without the lowest and highest fifth of the steps
    compute_cpu_us: list[float]
    recording_us: float  # likewise, the recording's own steps outside the profiler
    predicted_us: float
    interval_us: tuple[float, float]
    error_pct: float
    error_at_speed_pct: float  # the same, with the recording's compute scaled to the CPU time that the runs' had
    noise_pct: float  # standard error of the plain runs' mean: of the runs among each other, or of their steps, whichever is larger
    settled: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    rows = [row for scheme in SCHEMES.values() for workload in WORKLOADS for row in workload_rows(options.folder, scheme, workload)]
    recorded = [row for row in rows if row.setting == "as recorded"]
    _print("As recorded", recorded)
    _print("What if: another link", [row for row in rows if row.setting == "another link"])
    _print("What if: another setting", [row for row in rows if row.setting not in ("as recorded", "another link")])
    if options.results:
        options.results.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")


def workload_rows(folder: Path, scheme: Scheme, workload: str) -> list[Row]:
    """Every recording against its own setting, and what the one at the base rate says of other links and settings."""
    wanted: list[tuple[str, str, Change | None]] = [(rate, rate, None) for rate in RATES]
    wanted += [(BASE_RATE, rate, None) for rate in RATES[1:]]
    wanted += [(BASE_RATE, BASE_RATE, change) for change in scheme.changes]
    found = (_row(folder, scheme, workload, recorded_rate, rate, change) for recorded_rate, rate, change in wanted)
    return [row for row in found if row is not None]


def _row(folder: Path, scheme: Scheme, workload: str, recorded_rate: str, rate: str, change: Change | None) -> Row | None:
    recording = Run(scheme=scheme, workload=workload, rate=recorded_rate).path(folder)
    first = Run(scheme=scheme, workload=workload, rate=rate, change=change, number=0).path(folder)
    paths = sorted(first.parent.glob(first.name.replace(".0.json", ".*.json")))
    if not recording.exists() or not paths:
        return None
    runs = [msgspec.json.decode(path.read_bytes(), type=Measured) for path in paths]
    trace = Trace.load(recording)
    sets = () if change is None else change.sets
    if rate != recorded_rate:
        sets = (*sets, f"rate={rate}")
    job = job_of(trace)
    answer = replay(job, ReplayRequest(changes=sets))
    measured = [float(trim_mean(run.iteration_us, TRIMMED)) for run in runs]
    speed = _compute_us(runs) / _recorded_compute_us(trace)
    at_speed = replay(job, ReplayRequest(changes=(*sets, f"compute={speed:.4f}")))
    measured_us = float(np.mean(measured))
    setting = "another link" if rate != recorded_rate else "as recorded"
    return Row(
        scheme=scheme.name,
        workload=workload,
        recorded_rate=recorded_rate,
        rate=rate,
        setting=setting if change is None else change.name,
        measured_us=measured,
        compute_cpu_us=[float(np.median(run.compute_cpu_us)) for run in runs],
        recording_us=float(trim_mean(trace.iterations_us(), TRIMMED)),
        predicted_us=answer.iteration_us,
        interval_us=answer.interval_us,
        error_pct=(answer.iteration_us / measured_us - 1) * 100,
        error_at_speed_pct=(at_speed.iteration_us / measured_us - 1) * 100,
        noise_pct=_noise_us(runs) / measured_us * 100,
        settled=answer.settled,
    )


def _noise_us(runs: list[Measured]) -> float:
    """Standard error of the mean of all runs; a step follows the one before it, so that the steps of one run are not enough."""
    among_steps = float(np.sqrt(np.mean([np.var(run.iteration_us) / len(run.iteration_us) for run in runs]) / len(runs)))
    means = [trim_mean(run.iteration_us, TRIMMED) for run in runs]
    among_runs = float(np.std(means, ddof=1) / np.sqrt(len(means))) if len(means) > 1 else 0.0
    return max(among_steps, among_runs)


def _compute_us(runs: list[Measured]) -> float:
    return float(np.mean([trim_mean(run.compute_cpu_us, TRIMMED) for run in runs]))


def _recorded_compute_us(trace: Trace) -> float:
    """The workers' CPU time for a step outside the profiler."""
    steps = trace.steps
    plain = ~steps.traced & (steps.index >= SETTLING_STEPS)
    return float(np.mean([trim_mean(steps.compute_cpu_us[plain & (steps.rank == rank)], TRIMMED) for rank in range(WORKERS)]))


def _print(title: str, rows: list[Row]) -> None:
    if not rows:
        return
    print(f"\n### {title}\n")
    columns = "plain runs, ms | noise | own steps, ms | predicted, ms | error | at the runs' CPU speed | against own steps"
    print(f"| scheme | workload | link | setting | {columns} |")
    print("|---|---|---|---|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        link = row.rate if row.rate == row.recorded_rate else f"{row.recorded_rate} to {row.rate}"
        runs = ", ".join(f"{value / 1e3:.0f}" for value in row.measured_us)
        own = f"{_own_error_pct(row):+.1f} %" if row.setting == "as recorded" else ""
        print(
            f"| {row.scheme} | {row.workload} | {link} | {row.setting} | {runs} | {row.noise_pct:.1f} % "
            f"| {row.recording_us / 1e3:.0f} | {row.predicted_us / 1e3:.0f} | {row.error_pct:+.1f} % "
            f"| {row.error_at_speed_pct:+.1f} % | {own} |"
        )
    print("\nAbsolute errors, median / worst:\n")
    columns = "against plain runs | at the runs' CPU speed | against own steps | own steps against plain runs | noise | inside"
    print(f"| scheme | rows | {columns} |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in [*SCHEMES, "all"]:
        mine = [row for row in rows if name in (row.scheme, "all")]
        if mine:
            print(f"| {name} | {len(mine)} | {_summary(mine)} |")


def _summary(rows: list[Row]) -> str:
    columns = [[row.error_pct for row in rows], [row.error_at_speed_pct for row in rows]]
    figures = [f"{np.median(np.abs(column)):.1f} / {np.abs(column).max():.1f} %" for column in columns]
    figures += ["", ""]
    if rows[0].setting == "as recorded":
        own = np.abs([_own_error_pct(row) for row in rows])
        drift = np.abs([row.recording_us / np.mean(row.measured_us) - 1 for row in rows]) * 100
        figures[2:] = [f"{np.median(column):.1f} / {column.max():.1f} %" for column in (own, drift)]
    noise = [row.noise_pct for row in rows]
    figures.append(f"{np.median(noise):.1f} / {max(noise):.1f} %")
    inside = sum(row.interval_us[0] <= np.mean(row.measured_us) <= row.interval_us[1] for row in rows)
    return " | ".join([*figures, str(inside)])


def _own_error_pct(row: Row) -> float:
    return (row.predicted_us / row.recording_us - 1) * 100


if __name__ == "__main__":
    main()
