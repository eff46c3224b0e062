"""Predictions beside the measurements of `measure`: tables for experiments/validation/README.md.

    python -m experiments.validation.report DIR [--json] [--workloads W ...]

Every prediction comes from one recording; no measurement of a configuration is used to predict it.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect.trace import Trace
from dpro_search.kinds import job_of
from dpro_search.quantities import parse_rate_bps
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import ClusterChange, Scenario
from experiments.validation.measure import BASE_RATE, CORES, RATES, WORKLOADS, Measured, plans


def truth(folder: Path, rate: str, name: str) -> list[Measured]:
    """Runs of one configuration; the recorded setting's include those that the noise floor is made of."""
    names = [name, "base-again"] if name == "base" else [name]
    paths = [path for wanted in names for path in sorted((folder / f"truth-{rate}").glob(f"{wanted}.[0-9]*.json"))]
    return [msgspec.json.decode(path.read_bytes(), type=Measured) for path in paths]


def median_us(runs: list[Measured]) -> float:
    """Median of the runs' medians."""
    return float(np.median([np.median(run.iteration_us) for run in runs]))


def noise_pct(runs: list[Measured]) -> float:
    """Half the spread of the runs' medians."""
    medians = [float(np.median(run.iteration_us)) for run in runs]
    return (max(medians) - min(medians)) / 2 / float(np.median(medians)) * 100


def recorded_rows(folder: Path, workload: str) -> list[dict]:
    rows = []
    for rate in RATES:
        runs = truth(folder, rate, "base")
        if not (folder / f"trace-{rate}").exists() or not runs:
            continue
        trace = Trace.load(folder / f"trace-{rate}")
        predicted = job_of(trace).predict(Plan())
        own_us = trace.iterations_us()
        rows.append(
            _row(workload, rate, "as recorded", predicted, runs)
            | {"overhead_pct": (np.median(trace.iterations_us(traced=True)) / median_us(runs) - 1) * 100}
            | {"recording_us": float(np.median(own_us))}
        )
    return rows


def what_if_rows(folder: Path, workload: str) -> list[dict]:
    job = job_of(trace := Trace.load(folder / f"trace-{BASE_RATE}"))
    rows = []
    for name, plan in plans(trace).items():
        exported = folder / f"truth-{BASE_RATE}" / f"plan-{name}" / "plan.json"
        measured = Plan.load(exported) if exported.exists() else plan
        if runs := truth(folder, BASE_RATE, name):
            rows.append(_row(workload, BASE_RATE, name, job.predict(measured), runs))
    if runs := truth(folder, BASE_RATE, "ranks-4"):
        four, _ = job.under(Scenario(cluster=ClusterChange(ranks=4, cores=CORES)))
        rows.append(_row(workload, BASE_RATE, "4 ranks on 2 cores", four.predict(Plan()), runs))
    for rate in RATES[1:]:
        if runs := truth(folder, rate, "base"):
            rate_bps = parse_rate_bps(rate)
            other, _ = job.under(Scenario(cluster=ClusterChange(rate_bps=math.inf if rate_bps is None else rate_bps)))
            rows.append(_row(workload, rate, "other link", other.predict(Plan()), runs))
    return rows


def ordering(folder: Path, workload: str, rows: list[dict]) -> tuple[float, int]:
    """Kendall's tau over the pairs of configurations at one rate that differ by more than the noise, and their number."""
    base = truth(folder, BASE_RATE, "base")
    floor = noise_pct(base)
    base_row = [row for row in recorded_rows(folder, workload) if row["rate"] == BASE_RATE]
    same = [row for row in rows if row["rate"] == BASE_RATE and not row["configuration"].startswith("4 ranks")] + base_row
    agree = total = 0
    for i, a in enumerate(same):
        for b in same[:i]:
            difference = a["measured_us"] / b["measured_us"] - 1
            if abs(difference) * 100 > 2 * max(floor, a["noise_pct"], b["noise_pct"]):
                total += 1
                agree += 1 if difference * (a["predicted_us"] - b["predicted_us"]) > 0 else -1
    return (agree / total if total else float("nan")), total


def _row(workload: str, rate: str, name: str, predicted, runs: list[Measured]) -> dict:
    measured = median_us(runs)
    low, high = predicted.interval_us
    return {
        "workload": workload,
        "rate": rate,
        "configuration": name,
        "measured_us": measured,
        "runs": len(runs),
        "noise_pct": noise_pct(runs),
        "predicted_us": predicted.iteration_us,
        "error_pct": (predicted.iteration_us / measured - 1) * 100,
        "inside_interval": low <= measured <= high,
        "settled": predicted.settled,
    }


def _print(title: str, rows: list[dict]) -> None:
    print(f"\n### {title}\n")
    print("| workload | link | configuration | measured ms | runs | noise % | predicted ms | error % |")
    print("|---|---|---|---:|---:|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row['workload']} | {row['rate']} | {row['configuration']} | {row['measured_us'] / 1e3:.1f} | {row['runs']} "
            f"| {row['noise_pct']:.1f} | {row['predicted_us'] / 1e3:.1f} | {row['error_pct']:+.1f} |"
        )
    errors = np.abs([row["error_pct"] for row in rows])
    inside = np.mean([row["inside_interval"] for row in rows]) * 100
    print(f"\n|error|: median {np.median(errors):.1f} %, maximum {errors.max():.1f} %.")
    print(f"{inside:.0f} % of the {len(rows)} medians lie inside the interval of their prediction.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    options = parser.parse_args()
    known = [w for w in options.workloads if (options.folder / w / f"truth-{BASE_RATE}").is_dir()]
    recorded = [row for w in known for row in recorded_rows(options.folder / w, w)]
    changed = {w: what_if_rows(options.folder / w, w) for w in known}
    order = {w: ordering(options.folder / w, w, rows) for w, rows in changed.items()}
    if options.json:
        print(json.dumps({"recorded": recorded, "what_if": changed, "kendall_tau": order}, default=float))
        return
    _print("As recorded: replay of each recording against untraced runs of the same configuration", recorded)
    _print(
        f"What if: everything predicted from the one recording at {BASE_RATE}",
        [row for rows in changed.values() for row in rows],
    )
    print("\n### Overhead of recording: against runs without it\n")
    print("| workload | link | profiled steps % | other steps of the recording % |\n|---|---|---:|---:|")
    for row in recorded:
        others = (row["recording_us"] / row["measured_us"] - 1) * 100
        print(f"| {row['workload']} | {row['rate']} | {row['overhead_pct']:+.1f} | {others:+.1f} |")
    print(f"\nMedian of the profiled steps: {np.median([row['overhead_pct'] for row in recorded]):+.1f} %.")
    print("\n### Order of the configurations at one link rate (pairs that differ by more than the noise)\n")
    print("| workload | Kendall tau | pairs |\n|---|---:|---:|")
    for workload, (tau, pairs) in order.items():
        print(f"| {workload} | {tau:.2f} | {pairs} |")


if __name__ == "__main__":
    main()
