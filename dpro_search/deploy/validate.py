"""Interleaved real runs of the recorded setting and of plans, compared with the predictions.

Runs are interleaved (A B C A, A B C A, ...): the recorded setting opens and closes each round, so that it is also compared with
itself. Half the spread of its own runs is the noise floor; a smaller speed-up is noise. No speed-up is reported for a plan whose
losses differ from the recorded setting's. A plan with a run that failed, or did not end, is not run again and has no speed-up;
the other plans are still measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

import msgspec
import numpy as np

from dpro_search._regular_files import read_regular
from dpro_search.collect._files import DAMAGED
from dpro_search.collect.launch.step_times import StepTimes
from dpro_search.collect.trace import Floats
from dpro_search.deploy.jobs import JobRun
from dpro_search.deploy.kept_rounds import FinishedRound, KeptRun
from dpro_search.deploy.losses import Equivalence, compare, tolerance_of, trained_to
from dpro_search.deploy.step_split import ComparedSplit
from dpro_search.deploy.trained_run import TrainedRun
from dpro_search.errors import InputError, JobError
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.plan_json import decoded

STABLE_PCT = 2.0  # half the width of a typical iteration's interval, below which no further rounds are needed
_PATIENCE, _LEAST_PATIENCE_S = 5, 300.0  # time limit of a plan's run: so many times the recorded setting's, and at least this
_BOOTSTRAPS = 2000
_TRIMMED = 0.2
_RECORDED = -1
_CHANGED_PCT = 5.0  # recordings of one job differ by about 4 % from run to run


class RunnableJob(Protocol):
    """A job that can run; `jobs.RecordedJob` is one."""

    def run(self, plan: Plan, *, warmup: int, timeout_s: float | None = None) -> JobRun:
        """One run under a plan, ended after `timeout_s`; the empty plan is the recorded setting."""


class Probed(RunnableJob, Protocol):
    """A job whose script has to change for some plans; `jobs.RecordedJob` is one."""

    def helpers(self, plan: Plan) -> frozenset[str]:
        """Names of the files of a plan that the script has to use."""

    def probe(self, plan: Plan) -> None:
        """A short run that raises `JobError` if the script does not follow the plan."""


class MeasuredPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan on real runs.

    Attributes
    ----------
    measured_us, spread_us
        Median of the runs' typical iterations, and their range. Typical is the trimmed mean, without the lowest and the highest
        fifth of the steps: in jobs with parameter servers short and long steps alternate, and a median would be one of the two.
    stability_pct
        Half the 95 % interval of that median, relative to it.
    speedup_measured, speedup_interval
        Over the recorded setting; the interval holds 95 % of a bootstrap over runs and steps.
    beyond_noise
        The gain (or loss) is larger than the noise floor, and the interval does not touch 1.00.
    losses
        Comparison of the losses with the recorded setting's.
    split
        Where the time of a paced step went, measured beside predicted (`step_split.py`); None: ranks computed.
    """

    plan: Plan
    predicted_us: float
    interval_us: tuple[float, float]
    breakdown_us: dict[str, float] = {}
    measured_us: float
    spread_us: float
    stability_pct: float = 0.0
    error_pct: float
    speedup_predicted: float
    speedup_measured: float
    speedup_interval: tuple[float, float]
    beyond_noise: bool
    losses: Equivalence | None = None
    split: ComparedSplit | None = None


class RefusedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan whose losses differ from the recorded setting's: no speed-up is reported."""

    plan: Plan
    predicted_us: float
    measured_us: float
    losses: Equivalence


class FailedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan with a run that failed or did not end: no speed-up is reported."""

    plan: Plan
    predicted_us: float
    reason: str
    # runs, measured_us: Successful runs before, and their typical iteration (None: there were none).
    runs: int
    measured_us: float | None


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of `validate`; times in us."""

    baseline_us: float
    baseline_predicted_us: float
    baseline_error_pct: float
    baseline_breakdown_us: dict[str, float] = {}  # Of the prediction of the recorded setting.
    baseline_split: ComparedSplit | None = None  # As that of a plan.
    # Iteration time of the recording, if known. If it is far from `baseline_us`, the machine or its links have changed.
    recorded_us: float | None = None
    noise_pct: float  # Half the range of the recorded setting's own runs.
    rounds: int
    paced: bool = False  # Whether ranks waited in place of computing: only what they exchange and wait for was measured.
    kept_rounds: int = 0  # Of `rounds`, those that an interrupted call before this one finished.
    stable: bool = True  # Whether every typical iteration was known to `STABLE_PCT` at the end.
    # plans, refused, failed: Plans with equal or unknown losses; plans with different losses; plans with a failed run.
    plans: tuple[MeasuredPlan, ...]
    refused: tuple[RefusedPlan, ...] = ()
    failed: tuple[FailedPlan, ...] = ()
    trained: tuple[TrainedRun, ...] = ()  # Of a job that is trained to a loss, all runs.

    @staticmethod
    def load(run: Path) -> Validation | None:
        """The validation stored in a run folder; None if nothing was measured. Raises `InputError` if the file is damaged."""
        path = run / "validation.json"
        if not path.is_file():
            return None
        try:
            return decoded(read_regular(path), Validation)
        except (OSError, *DAMAGED, InputError) as error:
            raise InputError(f"{path}: not a validation ({error}); make it again with 'dpro-search validate'") from error

    @property
    def changed_pct(self) -> float | None:
        """Change of the recorded setting's time since the recording; None: within the noise."""
        if self.recorded_us is None:
            return None
        changed = (self.baseline_us / self.recorded_us - 1) * 100
        return changed if abs(changed) > max(self.noise_pct, _CHANGED_PCT) else None


def validate(
    job: RunnableJob,
    baseline: Prediction,
    plans: Sequence[tuple[Plan, Prediction]],
    *,
    rounds: int = 2,
    most_rounds: int | None = None,
    warmup: int = 5,
    timeout_s: float | None = None,
    numbers: Sequence[int] = (),
    kept: Sequence[FinishedRound] = (),
    precision: str | None = None,
    target_loss: float | None = None,
    on_start: Callable[[str, int, int], None] = lambda name, done, total: None,
    on_run: Callable[[str, StepTimes | JobError], None] = lambda name, run: None,
    on_round: Callable[[FinishedRound], None] = lambda finished: None,
) -> Validation:
    """Run the recorded setting and plans for real, and compare with the predictions.

    Parameters
    ----------
    rounds, most_rounds
        Minimum and maximum number of rounds (None: the minimum), more while some typical iteration is not known to `STABLE_PCT`.
    warmup
        Steps of each run that are left out.
    timeout_s
        Time limit of a run. None: for the recorded setting that of the job, for a plan five times the longest run of the recorded
        setting, at least five minutes.
    numbers
        Of the plans, for `on_start` and `on_run`; empty: from 1 on.
    kept
        Rounds of the same plans that an interrupted call has finished; they count among the rounds.
    precision
        Precision of a parallel job's matrix products, which decides how far losses may differ (`losses.tolerance_of`).
    target_loss
        The loss that every run ends at; None: runs end after their steps.
    on_start
        Called before each run with its name (``recorded`` or ``plan N``), how many have ended, and how many there are to be.
    on_run
        Called after each run with its name and its steps, or why there are none.
    on_round
        Called after each round.

    Raises
    ------
    InputError
        Fewer than two rounds, or a plan that this kind of job cannot follow.
    JobError
        A run of the recorded setting failed, or the first run of every plan (for example because the script does not follow it).
    """
    most_rounds = rounds if most_rounds is None else most_rounds
    if rounds < 2:
        raise InputError(f"--rounds {rounds}: at least 2, so that the noise can be estimated")
    if most_rounds < rounds:
        raise InputError(f"--most-rounds {most_rounds}: at least as many as --rounds {rounds}")
    names = {_RECORDED: "recorded", **{i: f"plan {number}" for i, number in enumerate(numbers or range(1, len(plans) + 1))}}
    rounds_run = _Rounds(job, [plan for plan, _ in plans], warmup, timeout_s, names, on_start, on_run)
    for finished in kept:
        rounds_run.take(finished)
    done = sum(any(one.number != _RECORDED for one in finished.runs) or bool(finished.failed) for finished in kept)
    if not kept and callable(getattr(job, "probe", None)):
        rounds_run.probe(cast("Probed", job))
    while done < rounds or (done < most_rounds and not rounds_run.stable()):
        if plans and len(rounds_run.failures) == len(plans):
            break
        try:
            on_round(rounds_run.round(rounds - done if done < rounds else 1))
        except JobError:
            if (alone := rounds_run.baseline_alone()) is not None:
                on_round(alone)
            raise
        done += 1
    return msgspec.structs.replace(_compared(baseline, plans, rounds_run, done, precision, target_loss), kept_rounds=len(kept))


class _Rounds:
    """Interleaved runs, by the plan's number.

    Attributes
    ----------
    ended
        Successful runs.
    failures
        Errors of plans that are not run again.
    """

    def __init__(
        self,
        job: RunnableJob,
        plans: Sequence[Plan],
        warmup: int,
        timeout_s: float | None,
        names: Mapping[int, str],
        on_start: Callable[[str, int, int], None],
        on_run: Callable[[str, StepTimes | JobError], None],
    ) -> None:
        self._job, self._plans, self._warmup, self._timeout_s = job, plans, warmup, timeout_s
        self._names, self._on_start, self._on_run = names, on_start, on_run
        self._done = 0
        self._longest_s = 0.0  # of the recorded setting
        self._baseline_before = 0  # Runs of the recorded setting before this round.
        self.ended: dict[int, list[JobRun]] = {number: [] for number in range(_RECORDED, len(plans))}
        self.failures: dict[int, JobError] = {}

    def take(self, finished: FinishedRound) -> None:
        """Count a round of an earlier call."""
        for kept in finished.runs:
            self.ended[kept.number].append(kept.run())
        self.failures |= {number: JobError(reason) for number, reason in finished.failed.items()}
        self._longest_s = max(self._longest_s, finished.longest_s)

    def probe(self, job: Probed) -> None:
        """Find out which plans the script does not follow, by one short run for each set of files that plans need of it.

        Raises `JobError` if it follows none of the plans.
        """
        known: dict[frozenset[str], JobError | None] = {}
        for number, plan in enumerate(self._plans):
            needed = job.helpers(plan)
            if needed and needed not in known:
                self._on_start(f"a probe of {self._names[number]}", 0, 1)
                try:
                    job.probe(plan)
                    known[needed] = None
                except JobError as error:
                    known[needed] = error
            if (failure := known.get(needed)) is not None:
                self.failures[number] = failure
                self._on_run(self._names[number], failure)
        if self.failures and len(self.failures) == len(self._plans):
            raise self.failures[0]

    def baseline_alone(self) -> FinishedRound | None:
        """Runs of the recorded setting in a round that no plan ended; None: there are none."""
        runs = self.ended[_RECORDED][self._baseline_before :]
        if not runs:
            return None
        return FinishedRound(runs=tuple(KeptRun.of(_RECORDED, run) for run in runs), longest_s=self._longest_s)

    def round(self, rounds: int = 1) -> FinishedRound:
        """Run the recorded setting, each plan that has not failed, and the recorded setting; errors are those of `validate`.

        `rounds`: how many there are to be, this one included.
        """
        numbers = [_RECORDED, *(number for number in range(len(self._plans)) if number not in self.failures), _RECORDED]
        total = self._done + rounds * len(numbers)
        before = {number: len(runs) for number, runs in self.ended.items()}
        self._baseline_before = before[_RECORDED]
        for number in numbers:
            self._on_start(self._names[number], self._done, total)
            if number == _RECORDED:
                started = time.monotonic()
                self._keep(number, self._job.run(Plan(), warmup=self._warmup, timeout_s=self._timeout_s))
                self._longest_s = max(self._longest_s, time.monotonic() - started)
            else:
                self._try(number)
            self._done += 1
        return FinishedRound(
            runs=tuple(KeptRun.of(number, run) for number, runs in self.ended.items() for run in runs[before[number] :]),
            failed={number: str(error) for number, error in self.failures.items()},
            longest_s=self._longest_s,
        )

    def stable(self) -> bool:
        """Whether every typical iteration is known to `STABLE_PCT`."""
        rows = [_times(finished) for number, finished in self.ended.items() if number not in self.failures]
        return all(_stability_pct(row) <= STABLE_PCT for row in rows)

    def _keep(self, number: int, run: JobRun) -> None:
        self.ended[number].append(run)
        self._on_run(self._names[number], run.times)

    def _try(self, number: int) -> None:
        limit_s = self._timeout_s or max(_PATIENCE * self._longest_s, _LEAST_PATIENCE_S)
        try:
            self._keep(number, self._job.run(self._plans[number], warmup=self._warmup, timeout_s=limit_s))
        except JobError as error:
            self.failures[number] = error
            self._on_run(self._names[number], error)
            if len(self.failures) == len(self._plans) and not any(map(self.ended.get, self.failures)):
                raise self.failures[0] from None


def _compared(
    baseline: Prediction,
    plans: Sequence[tuple[Plan, Prediction]],
    rounds_run: _Rounds,
    rounds: int,
    precision: str | None = None,
    target_loss: float | None = None,
) -> Validation:
    runs = rounds_run.ended
    base = _times(runs[_RECORDED])
    base_us = typical_us(base)
    noise_pct = noise_pct_of(base)
    measured: list[MeasuredPlan] = []
    refused: list[RefusedPlan] = []
    failed: list[FailedPlan] = []
    for number, (plan, prediction) in enumerate(plans):
        times_us, expected_us = _times(runs[number]), prediction.iteration_us
        if number in rounds_run.failures:
            reason, before_us = str(rounds_run.failures[number]), typical_us(times_us) if times_us else None
            failed.append(FailedPlan(plan=plan, predicted_us=expected_us, reason=reason, runs=len(times_us), measured_us=before_us))
            continue
        tolerance = tolerance_of(plan, precision)
        losses = compare([run.losses for run in runs[_RECORDED]], [run.losses for run in runs[number]], tolerance)
        if target_loss is not None:
            losses = trained_to(target_loss)
        if losses.verdict == "different":
            refused.append(RefusedPlan(plan=plan, predicted_us=expected_us, measured_us=typical_us(times_us), losses=losses))
        else:
            row = measured_plan(plan, prediction, baseline, times_us, base, noise_pct, losses)
            measured.append(msgspec.structs.replace(row, split=ComparedSplit.mean([run.split for run in runs[number]])))
    return Validation(
        baseline_us=base_us,
        baseline_predicted_us=baseline.iteration_us,
        baseline_error_pct=(baseline.iteration_us / base_us - 1) * 100,
        baseline_breakdown_us=baseline.breakdown_us,
        baseline_split=ComparedSplit.mean([run.split for run in runs[_RECORDED]]),
        noise_pct=noise_pct,
        rounds=rounds,
        stable=rounds_run.stable(),
        plans=tuple(measured),
        refused=tuple(refused),
        failed=tuple(failed),
    )


def measured_plan(
    plan: Plan,
    prediction: Prediction,
    baseline: Prediction,
    runs: list[Floats],
    base_runs: list[Floats],
    noise_pct: float,
    losses: Equivalence | None = None,
) -> MeasuredPlan:
    """Compare the iterations of a plan's runs with those of the recorded setting, each [steps]."""
    measured_us = typical_us(runs)
    speedup, (low, high) = speedup_of(runs, base_runs)
    return MeasuredPlan(
        plan=plan,
        predicted_us=prediction.iteration_us,
        interval_us=prediction.interval_us,
        breakdown_us=prediction.breakdown_us,
        measured_us=measured_us,
        spread_us=float(np.ptp([typical_us([run]) for run in runs])),
        stability_pct=_stability_pct(runs),
        error_pct=(prediction.iteration_us / measured_us - 1) * 100,
        speedup_predicted=baseline.iteration_us / prediction.iteration_us,
        speedup_measured=speedup,
        speedup_interval=(low, high),
        beyond_noise=is_beyond_noise(speedup, (low, high), noise_pct),
        losses=losses,
    )


def is_beyond_noise(speedup: float, interval: tuple[float, float], noise_pct: float) -> bool:
    """Whether a speed-up differs from 1 by more than the noise floor, and its interval, as it is shown, does not touch 1.00."""
    low, high = (round(end, 2) for end in interval)
    return abs(speedup - 1) * 100 > noise_pct and not low <= 1 <= high


def _times(runs: Sequence[JobRun]) -> list[Floats]:
    return [run.times.iteration_us for run in runs]


def typical_us(runs: Sequence[Floats]) -> float:
    """Median over runs of a run's typical iteration: the mean without the lowest and the highest fifth of its steps."""
    from scipy.stats import trim_mean  # imported here, because it is slow to import and a search does not need it

    return float(np.median([trim_mean(run, _TRIMMED) for run in runs]))


def noise_pct_of(runs: Sequence[Floats]) -> float:
    """Half the range of the typical iterations of one setting's runs, relative to their median."""
    return float(np.ptp([typical_us([run]) for run in runs])) / typical_us(runs) / 2 * 100


def speedup_of(runs: Sequence[Floats], base_runs: Sequence[Floats]) -> tuple[float, tuple[float, float]]:
    """Speed of some runs over that of others, each [steps], and its 95 % interval: a bootstrap over runs and steps."""
    rng = np.random.default_rng(0)
    low, high = np.percentile(_drawn_us(base_runs, rng) / _drawn_us(runs, rng), [2.5, 97.5]).tolist()
    return typical_us(base_runs) / typical_us(runs), (low, high)


def _stability_pct(runs: Sequence[Floats]) -> float:
    """Half the 95 % bootstrap interval of the typical iteration, relative to it."""
    low, middle, high = np.percentile(_drawn_us(runs, np.random.default_rng(0)), [2.5, 50, 97.5])
    return float((high - low) / 2 / middle * 100)


def _drawn_us(runs: Sequence[Floats], rng: np.random.Generator) -> Floats:
    """Typical iterations of a bootstrap that draws runs first and steps within them then, [draws]."""
    from scipy.stats import trim_mean

    of_run = np.array([trim_mean(rng.choice(run, size=(_BOOTSTRAPS, len(run))), _TRIMMED, axis=1) for run in runs])
    chosen = rng.integers(len(runs), size=(len(runs), _BOOTSTRAPS))
    drawn: Floats = np.median(of_run[chosen, np.arange(_BOOTSTRAPS)], axis=0)
    return drawn
