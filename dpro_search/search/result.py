"""Result of a search: the plans in order, their gains, and whether these are certain."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET

from dpro_search._regular_files import read_regular
from dpro_search._repr import short_repr
from dpro_search.collect._files import DAMAGED, write_file
from dpro_search.collect.trace import Floats
from dpro_search.errors import InputError
from dpro_search.search.objective import Explaining, Reevaluator, Sampled, StrategyFacts
from dpro_search.search.run_folder import Trial
from dpro_search.space.describe import plan_names
from dpro_search.space.plan import Plan, Prediction, setting_names
from dpro_search.space.plan_json import decoded

Stopped = Literal["finished", "timeout", "interrupted", "exhausted", "settled", "complete"]
OnReevaluated = Callable[[int, int, Prediction], None]
MOST_PLANS = 10
DRAWS = 64  # of durations, where plans are ranked by a quantile
PLAN_FILE = "plans/plan-{}.json"  # in a run folder, by number; 1 is the best
_CSV_COLUMNS = (
    *("rank", "file", "predicted_iteration_us", "interval_low_us", "interval_high_us", "speedup", "gain_certain"),
    "peak_memory_bytes",
)
WORTH_MEASURING = 1.03  # smaller predicted gains were noise in real runs, larger ones often real (experiments/testbed/README.md)
NEAR_TIE = 0.01  # iteration times that differ by less than this share of the better one count as equal: real runs differ by more


class PlanSize(NamedTuple):
    """Size of a plan: its number of fields, then of the groups, clusters and ops that it names. Smaller is simpler."""

    fields: int
    named: int


def plan_size(plan: Plan) -> PlanSize:
    """The size of a plan."""
    values = plan.settings.values()
    return PlanSize(len(values), sum(len(value) for value in values if isinstance(value, tuple)))


class RankedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, its prediction and its gain."""

    plan: Plan
    prediction: Prediction
    trial: int  # Number of the trial that evaluated it.
    speedup: float  # Iteration time of the recorded setting over that of the plan.
    gain_certain: bool  # The replay settled, and its whole interval lies below the whole interval of the recorded setting.
    # quantile_us, beats_recorded: If plans were ranked by a quantile: that quantile of its iteration time over resampled durations,
    # and the share of the draws in which the plan is faster than the recorded setting.
    quantile_us: float | None = None
    beats_recorded: float | None = None
    # name, facts: Of a job that explains its plans (`objective.Explaining`): the whole setting in words, and what a result says of
    # it beside the prediction, by the names in JSON. Empty: the plan's own words, and nothing.
    name: str = ""
    facts: StrategyFacts = StrategyFacts()

    __repr__ = short_repr


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a search."""

    run: str  # The run folder.
    trials: int  # Finished trials, the recorded setting included.
    seconds: float  # Wall-clock time of this search, without what an earlier one spent on the same folder.
    # Why it ended; "exhausted": the sampler found no new plan; "settled": the expected further gain was below the prediction error;
    # "complete": no plan that was not evaluated can be faster than the best by more than 0.5 % (`Ranked`).
    stopped: Stopped
    baseline: Prediction  # Prediction of the recorded setting.
    # The best plans, fastest first. Plans within 1 % of each other count as one, represented by the simplest. Infeasible plans are
    # left out, unless no plan is feasible; then the plans with the least memory are listed.
    plans: tuple[RankedPlan, ...]
    workers_lost: int = 0  # Worker processes that ended too early; others took over their work.
    # Pareto front of time and memory of the feasible plans, fastest first; empty if memory does not depend on the plan, or is not
    # known.
    front: tuple[RankedPlan, ...] = ()
    # If plans were ranked by a quantile: share of the draws in which one plan (row) is faster than another (column), [plans,
    # plans].
    beats: tuple[tuple[float, ...], ...] = ()

    __repr__ = short_repr

    @property
    def names(self) -> list[str]:
        """The listed plans in a few words each, different for different plans."""
        names = plan_names([ranked.plan for ranked in self.plans])
        return [ranked.name or name for ranked, name in zip(self.plans, names, strict=True)]

    @property
    def gain_certain(self) -> bool:
        """Whether any plan's interval lies below that of the recorded setting."""
        return any(ranked.gain_certain for ranked in self.plans)

    @property
    def worth_measuring(self) -> bool:
        """Whether no gain is certain, but the best plan's is large enough to measure it with real runs."""
        return self.feasible and not self.gain_certain and self.plans[0].speedup >= WORTH_MEASURING

    @property
    def feasible(self) -> bool:
        """Whether any evaluated plan keeps the limits."""
        return self.plans[0].prediction.infeasible is None

    def save(self) -> None:
        """Write ``plans/``, ``topn.csv``, ``pareto.csv`` and ``result.json`` into the run folder, in place of older ones."""
        folder = Path(self.run)
        for number, ranked in enumerate(self.plans, 1):
            write_file(folder / PLAN_FILE.format(number), ranked.plan.to_json())
        kept = {folder / PLAN_FILE.format(number) for number in range(1, len(self.plans) + 1)}
        for path in {*folder.glob(PLAN_FILE.format("*"))} - kept:
            path.unlink()
        write_file(folder / "topn.csv", _csv(self.plans, PLAN_FILE))
        if self.front:
            write_file(folder / "pareto.csv", _csv(self.front, ""))
        else:
            (folder / "pareto.csv").unlink(missing_ok=True)
        write_file(folder / "result.json", msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @staticmethod
    def load(run: Path) -> SearchResult:
        """Read the result of a run folder; raises `InputError` if it has none."""
        path = run / "result.json"
        try:
            return decoded(read_regular(path), SearchResult)
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); make it with 'dpro-search run'") from error
        except DAMAGED as error:
            raise InputError(f"{path}: not a search result ({error}); make it again with 'dpro-search run'") from error


def rank_plans(
    trials: Iterable[Trial], baseline: Prediction, family: Callable[[Plan], Hashable] | None = None
) -> tuple[RankedPlan, ...]:
    """The best distinct plans, fastest first, at most `MOST_PLANS`; with `family` the fastest of each family.

    At least one of them is lossless, if there is a lossless plan.

    Plans that are at most 1 % slower than the fastest form a group; the same is repeated for the remaining plans. The simplest plan
    of a group is listed: fewest fields, then fewest groups, clusters and ops that it names, then fastest, then first found. If no
    plan is feasible, the plans with the least memory are listed.
    """
    distinct = _distinct(trials)
    rest = sorted(_feasible(distinct), key=_time)
    if not rest:
        least = sorted(distinct, key=lambda t: (t.prediction.peak_memory_bytes or math.inf, t.prediction.iteration_us, t.number))
        return tuple(_ranked(trial, baseline) for trial in least[:MOST_PLANS])
    if family is not None:
        fastest = {family(trial.plan): trial for trial in reversed(rest)}
        return tuple(_ranked(trial, baseline) for trial in sorted(fastest.values(), key=_time)[:MOST_PLANS])
    ranked: list[RankedPlan] = []
    while rest and len(ranked) < MOST_PLANS:
        limit_us = rest[0].prediction.iteration_us * (1 + NEAR_TIE)
        ties = [trial for trial in rest if trial.prediction.iteration_us <= limit_us]
        rest = rest[len(ties) :]
        ranked.append(_ranked(min(ties, key=_complexity), baseline))
    return tuple(_with_a_lossless_plan(ranked, distinct, baseline))


def _with_a_lossless_plan(ranked: list[RankedPlan], trials: Iterable[Trial], baseline: Prediction) -> list[RankedPlan]:
    """The plans, the last one replaced by the fastest lossless one if all of them are lossy and there is one."""
    lossless = [trial for trial in _feasible(trials) if not trial.plan.is_lossy and trial.plan != Plan()]
    if not lossless or not all(one.plan.is_lossy or one.plan == Plan() for one in ranked):
        return ranked
    return [*ranked[: MOST_PLANS - 1], _ranked(min(lossless, key=_time), baseline)]


def explained(plans: Sequence[RankedPlan], explaining: Explaining) -> tuple[RankedPlan, ...]:
    """The plans with their whole settings in words, and further facts."""
    listed = explaining.listed([(ranked.plan, ranked.prediction) for ranked in plans])
    return tuple(
        msgspec.structs.replace(ranked, name=more.name, facts=more.facts) for ranked, more in zip(plans, listed, strict=True)
    )


class BestPlan:
    """The trial that `rank_plans` lists first, of the feasible trials so far; None without one."""

    def __init__(self) -> None:
        self._candidates: list[tuple[tuple[PlanSize, float, int], Trial]] = []  # that no other beats in time and size

    def add(self, trial: Trial) -> None:
        """Take a further trial into account."""
        cost_us, size = trial.prediction.iteration_us, plan_size(trial.plan)
        if trial.prediction.infeasible is not None or any(
            other.prediction.iteration_us <= cost_us and key[0] <= size for key, other in self._candidates
        ):
            return
        self._candidates = [
            (key, other) for key, other in self._candidates if other.prediction.iteration_us < cost_us or key[0] < size
        ]
        self._candidates.append((_complexity(trial), trial))

    @property
    def trial(self) -> Trial | None:
        """The simplest of those that are at most 1 % slower than the fastest."""
        if not self._candidates:
            return None
        limit_us = min(trial.prediction.iteration_us for _, trial in self._candidates) * (1 + NEAR_TIE)
        return min((key, trial) for key, trial in self._candidates if trial.prediction.iteration_us <= limit_us)[1]


def reevaluated_plans(
    plans: Sequence[RankedPlan], reevaluator: Reevaluator, on_reevaluated: OnReevaluated | None = None
) -> tuple[Prediction, tuple[RankedPlan, ...]]:
    """Re-evaluate the recorded setting and plans; feasible plans in the order of their new times, then the others in theirs.

    `on_reevaluated` is called after each with the number of plans done, and of all, and the new prediction; first the recorded
    setting.
    """
    reevaluated: list[Prediction] = []
    for plan in (Plan(), *(ranked.plan for ranked in plans)):
        reevaluated.append(reevaluator.reevaluated(plan))
        if on_reevaluated is not None:
            on_reevaluated(len(reevaluated), len(plans) + 1, reevaluated[-1])
    baseline, *predictions = reevaluated
    ranked_plans = [
        _ranked_plan(ranked.plan, ranked.trial, prediction, baseline) for ranked, prediction in zip(plans, predictions, strict=True)
    ]
    feasible = [ranked for ranked in ranked_plans if ranked.prediction.infeasible is None]
    others = [ranked for ranked in ranked_plans if ranked.prediction.infeasible is not None]
    return baseline, (*sorted(feasible, key=lambda ranked: ranked.prediction.iteration_us), *others)


def pareto_front(trials: Iterable[Trial], baseline: Prediction) -> tuple[RankedPlan, ...]:
    """Pareto front of time and memory, fastest first; empty if memory is unknown or equal for all plans."""
    known = [trial for trial in _feasible(_distinct(trials)) if trial.prediction.peak_memory_bytes is not None]
    if len({trial.prediction.peak_memory_bytes for trial in known}) < 2:
        return ()
    front: list[Trial] = []
    for trial in sorted(known, key=lambda t: (t.prediction.iteration_us, t.prediction.peak_memory_bytes, _complexity(t))):
        if not front or (trial.prediction.peak_memory_bytes or 0) < (front[-1].prediction.peak_memory_bytes or 0):
            front.append(trial)
    return tuple(_ranked(trial, baseline) for trial in front)


def by_quantile(plans: Sequence[RankedPlan], times_us: Floats, quantile: float) -> tuple[tuple[RankedPlan, ...], Floats]:
    """Plans in the order of a quantile of their iteration times, and the share of draws in which one is faster than another.

    Parameters
    ----------
    times_us
        Of each plan and, last, of the recorded setting, over the same draws, [plans + 1, samples].
    """
    at = np.quantile(times_us, quantile, axis=1)
    share = beats(times_us)
    order = np.argsort(at[:-1], kind="stable").tolist()
    ranked = tuple(
        msgspec.structs.replace(plans[i], quantile_us=float(at[i]), beats_recorded=float(share[i, len(plans)])) for i in order
    )
    return ranked, share[np.ix_(order, order)]


def sampled_us(objective: Sampled, plans: Sequence[Plan], samples: int = DRAWS, seed: int = 0) -> Floats:
    """Iteration times of plans over the same draws, [plans, samples]."""
    return np.stack([objective.sampled(plan, samples=samples, seed=seed) for plan in plans])


def beats(times_us: Floats) -> Floats:
    """In which share of the samples a plan (row) is faster than another (column); ties count half, [plans, plans].

    Parameters
    ----------
    times_us
        [plans, samples].
    """
    faster = times_us[:, None, :] < times_us[None, :, :]
    equal = times_us[:, None, :] == times_us[None, :, :]
    share: Floats = (faster + equal / 2).mean(axis=2)
    return share


def _distinct(trials: Iterable[Trial]) -> list[Trial]:
    """The first trial of each plan."""
    return list({trial.plan: trial for trial in sorted(trials, key=lambda t: -t.number)}.values())


def _time(trial: Trial) -> tuple[float, int]:
    return trial.prediction.iteration_us, trial.number


def _feasible(trials: Iterable[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.prediction.infeasible is None]


def _ranked(trial: Trial, baseline: Prediction) -> RankedPlan:
    return _ranked_plan(trial.plan, trial.number, trial.prediction, baseline)


def _ranked_plan(plan: Plan, trial: int, prediction: Prediction, baseline: Prediction) -> RankedPlan:
    return RankedPlan(
        plan=plan,
        prediction=prediction,
        trial=trial,
        speedup=baseline.iteration_us / prediction.iteration_us,
        gain_certain=prediction.infeasible is None and prediction.settled and prediction.interval_us[1] < baseline.interval_us[0],
    )


def _complexity(trial: Trial) -> tuple[PlanSize, float, int]:
    return plan_size(trial.plan), trial.prediction.iteration_us, trial.number


def _csv(plans: tuple[RankedPlan, ...], file: str) -> bytes:
    """A table of plans; settings that are lists by their length, and whole where a job tells the whole ``strategy`` of a plan."""
    text = io.StringIO(newline="")
    table = csv.writer(text)
    names = setting_names()
    facts = [msgspec.structs.asdict(ranked.facts) for ranked in plans]
    more = [name for name, value in facts[0].items() if isinstance(value, int | float | None)] if plans else []
    words = ["name"] if any(ranked.name for ranked in plans) else []
    table.writerow((*_CSV_COLUMNS, *more, *words, *names, "trial"))
    for number, ranked in enumerate(plans, 1):
        plan, prediction = ranked.plan, ranked.prediction
        strategy = ranked.facts.strategy
        whole: Mapping[str, object] = {} if strategy is UNSET else strategy
        values = [whole.get(name, plan.get(name)) for name in names]
        table.writerow(
            [
                *(number, file.format(number), prediction.iteration_us, *prediction.interval_us, ranked.speedup),
                *(
                    ranked.gain_certain,
                    prediction.peak_memory_bytes,
                    *(facts[number - 1][name] for name in more),
                    *([ranked.name] if words else []),
                ),
                *(len(value) if isinstance(value, tuple) else value for value in values),
                ranked.trial,
            ]
        )
    return text.getvalue().encode()
