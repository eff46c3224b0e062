"""Predictions of the time to the target from the calibration runs alone, beside what other runs took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from dpro_search.costmodel.convergence import Convergence, FittedRun, falling_levels, fit_convergence, reached_at
from dpro_search.errors import InputError
from dpro_search.replay.synchronisation import TimeToLoss, ranked
from dpro_search.runtime.schemes import Pace, parse_scheme
from experiments.adsp.cases import Case
from experiments.adsp.emulate import CHECK_S, LAG_S
from experiments.adsp.journal import Journal
from experiments.adsp.workloads import WORKLOADS


def convergence_of(journal: Journal, workload: str) -> tuple[Convergence, float]:
    """The model of a workload, and seconds that a commit takes beside its paced ones; from its calibration runs.

    Raises `InputError` where there are none.
    """
    records = [record for record in journal.records("calibration") if record["case"]["workload"] == workload]
    if not records:
        raise InputError(f"{workload}: no calibration runs; run `python -m experiments.adsp measure --only calibration` first")
    start = float(np.mean([record["losses"][0][1] for record in records]))
    target = WORKLOADS[workload].target
    levels = falling_levels(start, target)
    convergence = fit_convergence(start, levels, [_short_run(record, levels) for record in records])
    extra = [record["commit_s"] - record["case"]["commit_s"] for record in records if record["how"].startswith("measured")]
    return convergence, max(float(np.mean(extra)), 0.0) if extra else 0.0


def _short_run(record: dict[str, Any], levels: Sequence[float]) -> FittedRun:
    times, losses = np.array(record["losses"]).T
    smooth = np.convolve(losses, np.ones(3) / 3, mode="valid")  # as the target is checked
    ends = np.maximum(times[2:] - LAG_S, 0.0)
    applied = np.array(record["applied"], dtype=float).T
    return FittedRun(
        commit_s=applied[0],
        steps=applied[2],
        weights=applied[3],
        behind_steps=applied[4],
        reached_s=reached_at(ends, smooth, levels),
        scheme=record["case"]["scheme"],
    )


def predictions(journal: Journal, workload: str, paces: Sequence[Pace], schemes: Sequence[str] | None = None) -> list[TimeToLoss]:
    """Predicted times to the target, the fastest first; schemes: None for those of a search."""
    convergence, extra_s = convergence_of(journal, workload)
    longer = [Pace(step_s=pace.step_s, commit_s=pace.commit_s + extra_s, changes=pace.changes) for pace in paces]
    found = ranked(longer, convergence, schemes=None if schemes is None else [parse_scheme(each) for each in schemes])
    return [_found_later(each) for each in found]


def _found_later(found: TimeToLoss) -> TimeToLoss:
    """The time at which a check finds that the target is reached; checks are `CHECK_S` apart."""
    low, high = found.interval_s
    interval_s = (low + LAG_S - CHECK_S, high + LAG_S + CHECK_S)
    return replace(found, time_s=None if found.time_s is None else found.time_s + LAG_S, interval_s=interval_s)


def comparison(journal: Journal, experiment: str) -> dict[str, Any]:
    """Predicted beside measured medians over seeds, for the workloads, mixes and schemes (with a server) of an experiment."""
    groups: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for record in journal.records(experiment):
        case = record["case"]
        if record["time_s"] is not None and not parse_scheme(case["scheme"]).collective:
            groups.setdefault((case["workload"], case["varied"]), {}).setdefault(case["scheme"], []).append(record)
    rows, taus, losses = [], [], []
    for (workload, varied), by_scheme in groups.items():
        paces = Case(**next(iter(by_scheme.values()))[0]["case"]).paces
        found = {str(each.scheme): each for each in predictions(journal, workload, paces, list(by_scheme))}
        measured = {scheme: float(np.median([record["time_s"] for record in records])) for scheme, records in by_scheme.items()}
        for scheme, value in measured.items():
            each = found[str(parse_scheme(scheme))]
            inside = each.interval_s[0] <= value <= each.interval_s[1]
            rows.append((workload, varied, scheme, value, each.time_s, inside))
        if len(measured) > 2:
            order = [found[str(parse_scheme(scheme))].time_s or np.inf for scheme in measured]
            taus.append(kendalltau(list(measured.values()), order).statistic)
            picked = list(measured)[int(np.argmin(order))]
            losses.append(measured[picked] / min(measured.values()) - 1.0)
    errors = [abs(predicted / value - 1.0) for *_, value, predicted, _ in rows if predicted is not None]
    return {
        "rows": rows,
        "median_error_pct": 100 * float(np.median(errors)) if errors else None,
        "coverage": float(np.mean([inside for *_, inside in rows])) if rows else None,
        "kendall_tau": float(np.mean(taus)) if taus else None,
        "picked_loses_pct": [100 * each for each in losses],
    }
