"""What the real runs of `testbed` say: each case's contenders beside each other, and one table over all cases.

A run's iteration is the mean of its steps without the lowest and the highest fifth, a contender's the median over its runs. Gain is
the part of the default's iteration that is saved. The noise floor is half the range of the default's own runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from scipy.stats import kendalltau

from dpro_search.collect.trace import Trace
from dpro_search.deploy.losses import compare, tolerance_of
from dpro_search.deploy.validate import noise_pct_of, speedup_of, typical_us
from dpro_search.errors import InputError
from dpro_search.kinds import job_of
from dpro_search.search import SearchResult
from dpro_search.space.describe import describe
from dpro_search.space.plan import Plan
from experiments.search.testbed_case import AUTOTUNE, DEFAULT, GRID, PLAN, XLA, Case, Measured, Setup, open_case

_LEAST_SETTINGS = 4  # of which an order says something
GAIN_POINTS = 5.0  # that a plan's measured gain may be from the predicted one
_FUSED = Plan(op_clusters=())  # what XLA does to the losses
_NAMES = {DEFAULT: "default", AUTOTUNE: "autotune", XLA: "XLA auto", GRID: "best of grid", PLAN: "best plan"}

Predict = Callable[[Plan], float | None]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A contender; gains and predictions beside the default, in percent of its iteration."""

    name: str
    setting: str
    runs_us: tuple[float, ...]  # Of each run.
    measured_us: float
    gain_pct: float
    gain_interval_pct: tuple[float, float]  # 95 % of a bootstrap over runs and steps.
    # predicted_us, predicted_gain_pct: From the recording; None: the plan predictor does not know this setting.
    predicted_us: float | None
    predicted_gain_pct: float | None
    losses: str  # Whether it trains the same as the default, in a sentence.


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """How predictions agree with the measured iterations of settings."""

    settings: int  # That ran, and have a prediction.
    tau: float  # Kendall's, of their order.
    # error_pct, largest_error_pct: Median and largest distance of a prediction from what was measured.
    error_pct: float
    largest_error_pct: float


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """A case."""

    setup: Setup
    rows: tuple[Row, ...]
    noise_pct: float
    # grid, grid_failed, grid_of: Settings of the grid that ran, that failed, and that there are.
    grid: int
    grid_failed: int
    grid_of: int
    agreement: Agreement | None  # Of the grid with what is predicted; None where too little ran.
    # Whether the plan is not slower than the best of the grid by more than the noise; None while one of them has not run.
    as_fast_as_grid: bool | None
    # slower_than_grid_pct, slower_than_grid_interval_pct: By how much it is, with 95 % of a bootstrap over runs and steps: the
    # noise floor knows of the default's runs only.
    slower_than_grid_pct: float | None
    slower_than_grid_interval_pct: tuple[float, float] | None
    gain_error: float | None  # Measured less predicted gain of the plan, in points; None while it has not run.
    gain_certain: bool  # What the search said before: whether the plan's interval lies below the default's.
    missing: Mapping[str, str]  # Contenders without a run that ended well, and why.


def report(folder: Path) -> str:
    """Tables of all cases of a folder; each case's numbers go to its ``case.json``. Raises `InputError` if none has run.

    A case whose grid alone has run is in the last table only.
    """
    found, grids = [], {}
    for path in sorted(folder.glob("*/setup.json")):
        case = open_case(path.parent)
        if any(not run.failed for run in case.rounds(DEFAULT)):
            result = compared(case, _predict(case))
            (case.folder / "case.json").write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
            found.append(result)
            agreement = result.agreement
        else:
            grid = list(case.grid().values())
            agreement = agreement_of(grid, _predict(case)) if grid else None
        if agreement is not None:
            grids[case] = agreement
    if not found and not grids:
        raise InputError(f"{folder}: no case has run yet")
    return "\n".join([*_summary(found), "", *_contenders(found), "", *_grids(grids)])


def _predict(case: Case) -> Predict:
    """What the case's recording predicts."""
    predictor = job_of(Trace.load(case.trace))

    def predict(plan: Plan) -> float | None:
        try:
            return predictor.predict(plan).iteration_us
        except InputError:
            return None

    return predict


def compared(case: Case, predict: Predict) -> CaseResult:
    """What a case's runs say, beside the predictions of its recording."""
    runs = {contender.name: case.rounds(contender.name) for contender in case.contenders()}
    certain = SearchResult.load(case.search).plans[0].gain_certain
    return judged(case.setup, len(case.scheme.grid), runs, list(case.grid().values()), predict, gain_certain=certain)


def judged(
    setup: Setup,
    grid_of: int,
    runs: Mapping[str, Sequence[Measured]],
    grid: Sequence[Measured],
    predict: Predict,
    *,
    gain_certain: bool,
) -> CaseResult:
    """Compare the runs of each contender with the default's.

    Parameters
    ----------
    grid_of
        How many settings the whole grid has.
    predict
        Iteration time of a plan in us, None where it has none.
    """
    ran = {name: [run for run in found if not run.failed] for name, found in runs.items()}
    rows = {name: _row(name, found, ran[DEFAULT], predict) for name, found in ran.items() if found}
    noise_pct = noise_pct_of([run.times_us for run in ran[DEFAULT]])
    plan, best = rows.get(PLAN), rows.get(GRID)
    gain_error = None
    if plan is not None and plan.predicted_gain_pct is not None:
        gain_error = plan.gain_pct - plan.predicted_gain_pct
    slower_pct, slower_interval_pct = None, None
    if plan is not None and best is not None:
        speedup, (low, high) = speedup_of([run.times_us for run in ran[GRID]], [run.times_us for run in ran[PLAN]])
        slower_pct, slower_interval_pct = (speedup - 1) * 100, ((low - 1) * 100, (high - 1) * 100)
    missing = {name: (found[0].failed if found else "not run yet") for name, found in runs.items() if name not in rows}
    return CaseResult(
        setup=setup,
        rows=tuple(rows.values()),
        noise_pct=noise_pct,
        grid=len(grid),
        grid_failed=sum(bool(point.failed) for point in grid),
        grid_of=grid_of,
        agreement=agreement_of(grid, predict),
        as_fast_as_grid=None if plan is None or best is None else plan.measured_us <= best.measured_us * (1 + noise_pct / 100),
        slower_than_grid_pct=slower_pct,
        slower_than_grid_interval_pct=slower_interval_pct,
        gain_error=gain_error,
        gain_certain=gain_certain,
        missing=missing,
    )


def _row(name: str, runs: Sequence[Measured], base: Sequence[Measured], predict: Predict) -> Row:
    times, base_times = [run.times_us for run in runs], [run.times_us for run in base]
    speedup, (low, high) = speedup_of(times, base_times)
    plan = runs[0].plan
    predicted_us, recorded_us = (None if name == XLA else predict(plan)), predict(Plan())
    known = predicted_us is not None and recorded_us is not None
    tolerance = tolerance_of(_FUSED if name == XLA else plan)
    return Row(
        name=name,
        setting="as recorded" if name in (DEFAULT, XLA) else describe(plan),
        runs_us=tuple(typical_us([run]) for run in times),
        measured_us=typical_us(times),
        gain_pct=_gain_pct(speedup),
        gain_interval_pct=(_gain_pct(low), _gain_pct(high)),
        predicted_us=predicted_us,
        predicted_gain_pct=_gain_pct(recorded_us / predicted_us) if known else None,
        losses=compare([run.read_losses() for run in base], [run.read_losses() for run in runs], tolerance).reason,
    )


def _gain_pct(speedup: float) -> float:
    return (1 - 1 / speedup) * 100


def agreement_of(grid: Sequence[Measured], predict: Predict) -> Agreement | None:
    """How predictions agree with the settings that ran well; None for fewer than four, or where all take the same time."""
    ran = [point for point in grid if not point.failed]
    pairs = [(predicted, typical_us([point.times_us])) for point in ran if (predicted := predict(point.plan)) is not None]
    if len(pairs) < _LEAST_SETTINGS:
        return None
    predicted_us, measured_us = np.array(pairs).T
    tau = float(kendalltau(predicted_us, measured_us).statistic)
    if not np.isfinite(tau):
        return None
    error_pct = abs(predicted_us / measured_us - 1) * 100
    return Agreement(settings=len(pairs), tau=tau, error_pct=float(np.median(error_pct)), largest_error_pct=float(error_pct.max()))


def _summary(results: Sequence[CaseResult]) -> list[str]:
    lines = [
        "| job | workload | link | default, ms | noise | best of grid (settings) | best plan | plan at least as fast? (slower by) "
        "| gain: predicted | measured (95 %) | within 5 points? |",
        "|---|---|---|---:|---:|---:|---:|---|---:|---:|---|",
    ]
    for result in results:
        rows = {row.name: row for row in result.rows}
        plan, grid = rows.get(PLAN), rows.get(GRID)
        failed = f", {result.grid_failed} failed" if result.grid_failed else ""
        fast = _said(result.as_fast_as_grid)
        if result.slower_than_grid_interval_pct is not None:
            low, high = result.slower_than_grid_interval_pct
            fast += f" ({result.slower_than_grid_pct:+.1f} %, {low:+.1f} to {high:+.1f})"
        near = _said(None if result.gain_error is None else abs(result.gain_error) <= GAIN_POINTS)
        lines.append(
            f"| {result.setup.scheme} | {result.setup.workload} | {result.setup.rate} | {rows[DEFAULT].measured_us / 1e3:.0f} "
            f"| {result.noise_pct:.1f} % | {_ms(grid)} ({result.grid} of {result.grid_of}{failed}) | {_ms(plan)} | {fast} "
            f"| {_predicted(plan)}{'' if result.gain_certain else ' ?'} | {_measured_gain(plan)} | {near} |"
        )
    return [*lines, "", "? = the search said that the gain is not certain."]


def _contenders(results: Sequence[CaseResult]) -> list[str]:
    lines = [
        "| job | workload | link | contender | setting | runs, ms | gain: predicted | measured (95 %) | losses |",
        "|---|---|---|---|---|---|---:|---:|---|",
    ]
    for result in results:
        of = f"{result.setup.scheme} | {result.setup.workload} | {result.setup.rate}"
        for row in result.rows:
            runs = ", ".join(f"{us / 1e3:.0f}" for us in row.runs_us)
            gains = "| " if row.name == DEFAULT else f"{_predicted(row)} | {_measured_gain(row)}"
            lines.append(f"| {of} | {_NAMES[row.name]} | {row.setting} | {runs} | {gains} | {row.losses} |")
        lines += [f"| {of} | {_NAMES[name]} | | | | | {why} |" for name, why in result.missing.items()]
    return lines


def _grids(found: Mapping[Case, Agreement]) -> list[str]:
    lines = [
        "| job | workload | link | settings | predictions off by, median | at most | order (Kendall's tau) |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for case, grid in found.items():
        of = f"{case.setup.scheme} | {case.setup.workload} | {case.setup.rate}"
        lines.append(f"| {of} | {grid.settings} | {grid.error_pct:.1f} % | {grid.largest_error_pct:.1f} % | {grid.tau:.2f} |")
    return lines


def _said(verdict: bool | None) -> str:
    return "" if verdict is None else "yes" if verdict else "**no**"


def _ms(row: Row | None) -> str:
    return "" if row is None else f"{row.measured_us / 1e3:.0f}"


def _predicted(row: Row | None) -> str:
    return "" if row is None or row.predicted_gain_pct is None else f"{row.predicted_gain_pct:+.1f} %"


def _measured_gain(row: Row | None) -> str:
    if row is None:
        return ""
    low, high = row.gain_interval_pct
    return f"{row.gain_pct:+.1f} % ({low:+.1f} to {high:+.1f})"
