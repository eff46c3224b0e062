"""Which plan an export takes: the one that real runs proved, else the best that they did not refute; or a plan by its number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpro_search._text import visible
from dpro_search.collect._files import what_is
from dpro_search.deploy.measured_plans import MeasuredTimes, measured_plans
from dpro_search.deploy.validate import MeasuredPlan, Validation
from dpro_search.errors import InputError
from dpro_search.search import SearchResult
from dpro_search.search.result import RankedPlan
from dpro_search.search.run_folder import read_run
from dpro_search.space.describe import describe
from dpro_search.space.plan import Plan, Prediction

_SIGMAS = 1.96  # Half the width of a 95 % interval, in standard deviations.


@dataclass(frozen=True, kw_only=True)
class ChosenPlan:
    """A plan, its predictions, and what `validate` found of it."""

    plan: Plan
    number: int | None = None  # Of a run's plan; None: a plan's own file.
    # Predictions of the plan and of the recorded setting, if it comes from a search.
    expected: tuple[Prediction, Prediction] | None = None
    measured: str = ""  # What `validate` found of it, in words; empty: nothing.
    elsewhere: bool = False  # Whether it was searched for another cluster than the recorded one.
    notes: tuple[str, ...] = ()  # What could not be checked, and why.

    @property
    def about(self) -> tuple[str, ...]:
        """Which plan it is and what is known of it, a sentence each."""
        if self.number is None:
            return tuple(map(visible, self.notes))
        advice = "time it there beside the recorded setting" if self.elsewhere else "`dpro-search validate` does"
        known = f"measured: {self.measured}" if self.measured else f"not measured yet: {advice}"
        return tuple(map(visible, (f"This is plan {self.number} ({describe(self.plan)}): {known}.", *self.notes)))


@dataclass(frozen=True)
class _Verdict:
    """Result of `validate` for a plan; `gain`: the measured speed-up beyond the noise, 1 within it, 0 for no speed-up at all."""

    gain: float
    text: str

    @staticmethod
    def of(measured: MeasuredPlan) -> _Verdict:
        low, high = measured.speedup_interval
        speed = f"{measured.speedup_measured:.2f}x the recorded speed (95 %: {low:.2f} to {high:.2f})"
        if not measured.beyond_noise:
            return _Verdict(1.0, f"no difference beyond the noise, {speed}")
        return _Verdict(measured.speedup_measured, speed)


class PlansOfRun:
    """The plans of a run `folder`.

    Attributes
    ----------
    plans
        By their number.
    info
        Of the search; None: a folder of plans alone.

    Raises
    ------
    InputError
        The folder is no run folder, or one of its files is damaged.
    """

    def __init__(self, source: Path) -> None:
        self.info = read_run(source) if (source / "run.json").is_file() else None  # which refuses links
        paths = sorted((source / "plans").glob("plan-*.json"), key=_number)
        if not paths:
            raise InputError(_no_plans(source))
        self.folder = source
        self.plans = {_number(path): Plan.load(path) for path in paths}
        searched = (source / "result.json").is_file()  # else a folder of plans alone
        self._result = SearchResult.load(source) if searched else None
        measured = measured_plans(source) if self.info is not None else {}
        self._verdicts = {**_reported(measured), **_verdicts(Validation.load(source))}

    def chosen(self, number: int) -> ChosenPlan:
        """Plan `number`; raises `InputError` if none exists."""
        if number not in self.plans:
            path = self.folder / "plans" / f"plan-{number}.json"
            count = len(self.plans)
            raise InputError(f"{path}: no such plan; {self.folder} holds {count} plans (1 is the best); choose one with --plan")
        plan, ranked = self.plans[number], self._ranked(number)
        notes: tuple[str, ...] = ()
        if self._result is not None and ranked is None:
            notes = (f"result.json has no prediction of plan-{number}.json: one of the two was changed, or is damaged.",)
        return ChosenPlan(
            plan=plan,
            number=number,
            expected=None if ranked is None or self._result is None else (ranked.prediction, self._result.baseline),
            measured=self._verdicts[plan].text if plan in self._verdicts else "",
            elsewhere=self.info is not None and self.info.cluster is not None,
            notes=notes,
        )

    @property
    def preferred(self) -> Sequence[int]:
        """Numbers of plans: proved gains first, then by rank what was not measured or is within the noise, refuted ones last."""
        return sorted(self.plans, key=lambda number: (-self._gain(number), number))

    def faster(self, number: int) -> bool:
        """Whether a plan differs from the recorded setting and is predicted, or was measured, to be faster."""
        ranked = self._ranked(number)
        predicted = ranked is None or ranked.speedup > 1
        return self.plans[number] != Plan() and (self._gain(number) > 1 or (self._gain(number) == 1 and predicted))

    def _gain(self, number: int) -> float:
        verdict = self._verdicts.get(self.plans[number])
        return 1.0 if verdict is None else verdict.gain

    def _ranked(self, number: int) -> RankedPlan | None:
        plans = () if self._result is None else self._result.plans
        return next((ranked for ranked in plans if ranked.plan == self.plans[number]), None)


def _reported(measured: Mapping[Plan, MeasuredTimes]) -> Mapping[Plan, _Verdict]:
    """Verdicts on plans that people measured, beside the recorded setting; without a time of that there are none."""
    if Plan() not in measured:
        return {}
    base = measured[Plan()]
    verdicts = {}
    for plan, times in measured.items():
        gain, noise = base.step_us / times.step_us, _SIGMAS * math.hypot(base.noise, times.noise)
        low, high = gain / math.exp(noise), gain * math.exp(noise)
        text = f"{gain:.2f}x the speed without a plan, as reported (95 %: {low:.2f} to {high:.2f})"
        verdicts[plan] = _Verdict(gain if abs(math.log(gain)) > noise else 1.0, text)
    return verdicts


def _verdicts(validation: Validation | None) -> Mapping[Plan, _Verdict]:
    if validation is None:
        return {}
    verdicts = {measured.plan: _Verdict.of(measured) for measured in validation.plans}
    verdicts |= {
        refused.plan: _Verdict(0.0, f"other losses, so no speed-up: {refused.losses.reason}") for refused in validation.refused
    }
    return verdicts | {failed.plan: _Verdict(0.0, f"a failed run: {failed.reason}") for failed in validation.failed}


def _number(path: Path) -> int:
    text = path.stem.removeprefix("plan-")
    if not text.isdecimal():
        raise InputError(f"{path}: no plan of a run; those are plan-1.json, plan-2.json, ...")
    return int(text)


def _no_plans(source: Path) -> str:
    if (source / "run.json").is_file():
        return f"{source}: the search has not ended, and left no plans; continue it with 'dpro-search run --out {source}'"
    what = what_is(source)
    return f"{source}: {what}, not the folder of a search; search with 'dpro-search run TRACE --out RUN', then export RUN"
