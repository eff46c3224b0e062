"""`score`: errors of predicted steps, as recorded and from another strategy's recording, and whether orders were kept."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dpro_search.collect.tables.parallel_times import ParallelTimes
from dpro_search.deploy.step_split import PARTS, ComparedSplit, StepSplit, mean_split
from dpro_search.deploy.validate import noise_pct_of, typical_us
from dpro_search.kinds import job_of, load_source
from dpro_search.search.calibration import Calibration
from dpro_search.search.correction import MeasuredPoint, Session
from dpro_search.space.plan import Plan
from experiments.parallel.cases import Case
from experiments.parallel.measure import job_with, plan_of, predicted, prepared, rows_of

ASKED_POINTS = 5.0  # of a step: what bubble, exposed communication and contention may each be wrong by


class Measured(NamedTuple):
    """A case with its runs."""

    case: Case
    us: float
    noise_pct: float  # Half the range of its rounds.
    losses: tuple[float, ...]
    split: StepSplit | None  # Mean over its paced rounds.


def score(out: Path, chosen: Sequence[Case]) -> dict[str, Any]:
    """Of what was measured so far; errors in percent of the measured time."""
    found, failed = _measured(out, chosen)
    rows: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for one in found:
        times = _of_cut(one.case, out)
        prediction = predicted(one.case, out, times)
        error_pct = (prediction.iteration_us / one.us - 1) * 100
        row = {"job": one.case.job, "strategy": one.case.strategy, "measured_us": one.us, "noise_pct": one.noise_pct}
        row |= {"predicted_us": prediction.iteration_us, "error_pct": error_pct, "breakdown_us": prediction.breakdown_us}
        rows.append(row | {"split": _compared(one, out, times)})
        for other in found:
            if other.case.job == one.case.job and other.case.strategy != one.case.strategy:
                us = predicted(one.case, out, _of_cut(other.case, out)).iteration_us
                pair = {"job": one.case.job, "strategy": one.case.strategy, "recorded": other.case.strategy}
                others.append(pair | {"predicted_us": us, "error_pct": (us / one.us - 1) * 100})
    return {
        "as_recorded": _summary([row["error_pct"] for row in rows]),
        "calibrated": _calibrated(found, out),
        "from_another": _summary([row["error_pct"] for row in others]),
        "order": _order(rows),
        "splits": _splits([row["split"] for row in rows if row["split"] is not None]),
        "losses": _losses(found),
        "failed": failed,
        "rows": rows,
        "pairs": others,
    }


def _compared(one: Measured, out: Path, times: ParallelTimes) -> dict[str, Any] | None:
    """Where the time of a paced step went, beside the prediction."""
    if one.split is None:
        return None
    here = job_with(one.case, out, times)
    split = prepared(here).split(plan_of(one.case, here))
    compared: dict[str, Any] = msgspec.to_builtins(ComparedSplit.of(one.split, split))
    return compared


def _splits(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Predicted less measured shares of the step, in points; how many cases are within `ASKED_POINTS` in all of them."""
    points = {name: np.abs([split["points"][name] for split in found]) for name in PARTS} if found else {}
    rows = {name: {"median": float(np.median(each)), "worst": float(each.max())} for name, each in points.items()}
    within = sum(all(abs(value) <= ASKED_POINTS for value in split["points"].values()) for split in found)
    return {"rows": len(found), "within": within, **rows}


def _calibrated(found: Sequence[Measured], out: Path) -> dict[str, Any]:
    """Errors of predictions from the first strategy's recording, before and after a calibration by the job's other strategies."""
    before, after = [], []
    for _, group in itertools.groupby(found, key=lambda one: one.case.job):
        base, *others = group
        times = _of_cut(base.case, out)
        job: Any = job_of(load_source(out / base.case.job / "job.toml"))
        plain = [predicted(one.case, out, times) for one in (base, *others)]
        points = [_point(one, found, plan_of(one.case, job)) for one, found in zip((base, *others), plain, strict=True)]
        recorded = msgspec.structs.replace(points[0], plan=Plan())
        for held, prediction in list(zip(points, plain, strict=True))[1:]:
            changed = tuple(point for point in points[1:] if point is not held)
            fitted = Calibration.fit([Session(recorded=recorded, changed=changed)], job.space.job.values)
            before.append((held.predicted_us / held.measured_us - 1) * 100)
            after.append((fitted.corrected(prediction, held.plan).iteration_us / held.measured_us - 1) * 100)
    return {"before": _summary(before), "after": _summary(after)}


def _point(one: Measured, prediction: Any, plan: Plan) -> MeasuredPoint:
    return MeasuredPoint(
        plan=plan,
        predicted_us=prediction.iteration_us,
        interval_us=prediction.interval_us,
        measured_us=one.us,
        noise=one.noise_pct / 100,
    )


def _measured(out: Path, chosen: Sequence[Case]) -> tuple[list[Measured], list[dict[str, str]]]:
    rows = rows_of(out)
    found = []
    for case in chosen:
        runs = [row for row in rows if (row.job, row.strategy) == (case.job, case.strategy) and row.iteration_us]
        if runs:
            times = [np.array(row.iteration_us) for row in runs]
            splits = [row.split for row in runs if row.split is not None]
            split = mean_split(splits) if splits else None
            found.append(Measured(case, typical_us(times), noise_pct_of(times), runs[0].losses, split))
    names = {(case.job, case.strategy) for case in chosen}
    bad = [
        {"job": row.job, "strategy": row.strategy, "why": row.failed}
        for row in rows
        if row.failed and (row.job, row.strategy) in names
    ]
    return found, bad


def _of_cut(case: Case, out: Path) -> ParallelTimes:
    """What a recording of the case alone has: blocks as it cuts them; exchanges are the machine's."""
    times = ParallelTimes.load(out / case.times)
    job: Any = job_of(load_source(out / case.job / "job.toml"))
    strategy = prepared(job).workload(plan_of(case, job)).strategy
    key = strategy.tp, strategy.sequence_parallel, strategy.micro_batch, strategy.zero_stage == 3
    blocks = tuple(row for row in times.blocks if (row.tp, row.sequence_parallel, row.micro_batch, row.sharded) == key)
    return msgspec.structs.replace(times, blocks=blocks)


def _summary(errors: Sequence[float]) -> dict[str, float]:
    if not errors:
        return {"rows": 0}
    size = np.abs(np.array(errors))
    return {
        "rows": len(errors),
        "median_pct": float(np.median(size)),
        "worst_pct": float(size.max()),
        "bias_pct": float(np.mean(errors)),
    }


def _order(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Pairs of strategies of one job that differ by more than the noise of both, and how many are in the predicted order."""
    pairs = kept = 0
    for one, other in itertools.combinations(rows, 2):
        gap_pct = abs(one["measured_us"] / other["measured_us"] - 1) * 100
        if one["job"] == other["job"] and gap_pct > max(one["noise_pct"] + other["noise_pct"], 1.0):
            pairs += 1
            kept += (one["measured_us"] < other["measured_us"]) == (one["predicted_us"] < other["predicted_us"])
    return {"pairs": pairs, "kept": kept}


def _losses(found: Sequence[Measured]) -> dict[str, float]:
    """The largest relative difference of a loss from that of the first strategy of the job."""
    worst, compared = 0.0, 0
    first: dict[str, tuple[float, ...]] = {}
    for one in found:
        base = first.setdefault(one.case.job, one.losses)
        for mine, theirs in zip(one.losses, base, strict=False):
            worst, compared = max(worst, abs(mine - theirs) / abs(theirs)), compared + 1
    return {"compared": compared, "worst_relative": worst}
