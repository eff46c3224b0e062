"""Real runs of the recorded setting and of plans, in turn, beside what was predicted.

Runs are interleaved (A B C A, A B C A, ...): the recorded setting opens and closes each round, so that it is also compared with
itself. Half the spread of its own medians is the noise floor; a speed-up inside it proves nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect.job import StepTimes, time_job
from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.collect.trace import Floats
from dpro_search.deploy.horovod import export_horovod, horovod_environment
from dpro_search.errors import InputError
from dpro_search.space.plan import Plan, Prediction

PLAN_VARIABLE = "DPRO_SEARCH_PLAN"
_BOOTSTRAPS = 2000


class MeasuredPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan on real runs.

    Attributes
    ----------
    measured_us, spread_us
        Median of the runs' median iterations, and their range.
    speedup_measured, speedup_interval
        Over the recorded setting; the interval holds 95 % of a bootstrap over runs and steps.
    beyond_noise
        The gain (or loss) is larger than the noise floor, and the interval does not contain 1.
    """

    plan: Plan
    predicted_us: float
    interval_us: tuple[float, float]
    measured_us: float
    spread_us: float
    error_pct: float
    speedup_predicted: float
    speedup_measured: float
    speedup_interval: tuple[float, float]
    beyond_noise: bool


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """All that `validate` measured; times in us."""

    baseline_us: float
    baseline_predicted_us: float
    baseline_error_pct: float
    noise_pct: float
    rounds: int
    plans: tuple[MeasuredPlan, ...]


def validate(
    spec: JobSpec,
    baseline: Prediction,
    plans: Sequence[tuple[Plan, Prediction]],
    *,
    rate_bps: float | None,
    shaped: bool,
    rounds: int = 2,
    warmup: int = 5,
    on_run: Callable[[str, StepTimes], None] = lambda name, times: None,
) -> Validation:
    """Run everything for real and compare.

    Parameters
    ----------
    spec
        The job in its recorded setting.
    on_run
        Called after each run with its name (``recorded`` or ``plan N``) and its steps.

    Raises
    ------
    InputError
        Fewer than two rounds.
    JobError
        A run failed, or its script does not follow a plan's groups.
    """
    if rounds < 2:
        raise InputError(f"--rounds {rounds}: at least 2, or the noise cannot be told")
    runs: dict[int, list[Floats]] = {number: [] for number in range(-1, len(plans))}  # -1: the recorded setting
    with tempfile.TemporaryDirectory(prefix="dpro-search-plans-") as folder:
        specs = {-1: spec} | {number: _with_plan(spec, plan, Path(folder) / str(number)) for number, (plan, _) in enumerate(plans)}
        for _ in range(rounds):
            for number in (-1, *range(len(plans)), -1):
                groups = plans[number][0].tensor_groups if number >= 0 else None
                times = time_job(specs[number], rate_bps=rate_bps, shaped=shaped, warmup=warmup, expected_groups=groups)
                runs[number].append(times.iteration_us)
                on_run("recorded" if number < 0 else f"plan {number}", times)
    medians = {number: np.array([np.median(run) for run in found]) for number, found in runs.items()}
    base_us = float(np.median(medians[-1]))
    noise_pct = float(np.ptp(medians[-1])) / base_us / 2 * 100
    return Validation(
        baseline_us=base_us,
        baseline_predicted_us=baseline.iteration_us,
        baseline_error_pct=(baseline.iteration_us / base_us - 1) * 100,
        noise_pct=noise_pct,
        rounds=rounds,
        plans=tuple(
            _compared(plan, prediction, baseline, runs[number], runs[-1], noise_pct)
            for number, (plan, prediction) in enumerate(plans)
        ),
    )


def _with_plan(spec: JobSpec, plan: Plan, folder: Path) -> JobSpec:
    """The job under a plan: its variables, and its exported folder on PYTHONPATH and in DPRO_SEARCH_PLAN if it has groups."""
    env = {**spec.env, **horovod_environment(plan)}
    if plan.tensor_groups is not None:
        export_horovod(plan, folder)
        env |= {PLAN_VARIABLE: str(folder), "PYTHONPATH": str(folder)}
    return replace(spec, env=env)


def _compared(
    plan: Plan, prediction: Prediction, baseline: Prediction, runs: list[Floats], base_runs: list[Floats], noise_pct: float
) -> MeasuredPlan:
    medians = np.array([np.median(run) for run in runs])
    base_us = float(np.median([np.median(run) for run in base_runs]))
    measured_us = float(np.median(medians))
    speedup = base_us / measured_us
    low, high = _speedup_interval(runs, base_runs)
    return MeasuredPlan(
        plan=plan,
        predicted_us=prediction.iteration_us,
        interval_us=prediction.interval_us,
        measured_us=measured_us,
        spread_us=float(np.ptp(medians)),
        error_pct=(prediction.iteration_us / measured_us - 1) * 100,
        speedup_predicted=baseline.iteration_us / prediction.iteration_us,
        speedup_measured=speedup,
        speedup_interval=(low, high),
        beyond_noise=abs(speedup - 1) * 100 > noise_pct and not low <= 1 <= high,
    )


def _speedup_interval(runs: list[Floats], base_runs: list[Floats]) -> tuple[float, float]:
    """95 % of a bootstrap that draws runs first and steps within them then."""
    rng = np.random.default_rng(0)

    def drawn(found: list[Floats]) -> float:
        chosen = rng.integers(len(found), size=len(found))
        return float(np.median([np.median(rng.choice(found[i], size=len(found[i]))) for i in chosen]))

    ratios = [drawn(base_runs) / drawn(runs) for _ in range(_BOOTSTRAPS)]
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)
