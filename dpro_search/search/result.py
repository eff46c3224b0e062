"""What a search found: plans in order, what they gain, and whether that is certain."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from dpro_search.collect._files import write_file
from dpro_search.errors import InputError
from dpro_search.search.run_folder import Trial
from dpro_search.space.plan import Plan, Prediction

Stopped = Literal["finished", "timeout", "interrupted", "exhausted"]
MOST_PLANS = 10
_CSV_COLUMNS = (
    *("rank", "file", "predicted_iteration_us", "interval_low_us", "interval_high_us", "speedup"),
    *("gain_certain", "fusion_threshold_bytes", "cycle_time_us", "tensor_groups", "trial"),
)
NEAR_TIE = 0.01  # iteration times that differ by less than this share of the better one count as equal: real runs differ by more


class RankedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, its price and what it gains.

    Attributes
    ----------
    trial
        Number of the trial that priced it.
    speedup
        Iteration time of the recorded setting over that of the plan.
    gain_certain
        The replay settled, and its whole interval lies below the whole interval of the recorded setting.
    """

    plan: Plan
    prediction: Prediction
    trial: int
    speedup: float
    gain_certain: bool


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a search.

    Attributes
    ----------
    run
        The run folder.
    trials
        Finished trials, the recorded setting included.
    seconds
        Wall-clock time of this search, without what an earlier one spent on the same folder.
    stopped
        Why it ended; "exhausted": the sampler found no plan that was not priced yet.
    baseline
        Price of the recorded setting.
    plans
        The best plans, fastest first. Plans within 1 % of each other count as one, and the simplest speaks for them.
    workers_lost
        Worker processes that ended before their time; others did their work.
    """

    run: str
    trials: int
    seconds: float
    stopped: Stopped
    baseline: Prediction
    plans: tuple[RankedPlan, ...]
    workers_lost: int = 0

    @property
    def gain_certain(self) -> bool:
        """Whether any plan is faster than the recorded setting by more than both intervals allow for."""
        return any(ranked.gain_certain for ranked in self.plans)

    def summary(self) -> dict[str, Any]:
        """The result as the command line prints it with ``--json``."""
        return {
            "run": self.run,
            "trials": self.trials,
            "seconds": self.seconds,
            "stopped": self.stopped,
            "baseline_us": self.baseline.iteration_us,
            "baseline_interval_us": self.baseline.interval_us,
            "best_us": self.plans[0].prediction.iteration_us,
            "speedup": self.plans[0].speedup,
            "gain_certain": self.gain_certain,
            "workers_lost": self.workers_lost,
            "plans": [
                {
                    "plan": msgspec.to_builtins(ranked.plan),
                    "predicted_iteration_us": ranked.prediction.iteration_us,
                    "interval_us": ranked.prediction.interval_us,
                    "peak_memory_bytes": ranked.prediction.peak_memory_bytes,
                    "speedup": ranked.speedup,
                    "gain_certain": ranked.gain_certain,
                }
                for ranked in self.plans
            ],
        }

    def save(self) -> None:
        """Write ``plans/``, ``topn.csv`` and ``result.json`` into the run folder, in place of older ones."""
        folder = Path(self.run)
        for rank, ranked in enumerate(self.plans):
            write_file(folder / "plans" / f"plan-{rank}.json", ranked.plan.to_json())
        for rank in range(len(self.plans), MOST_PLANS):
            (folder / "plans" / f"plan-{rank}.json").unlink(missing_ok=True)
        write_file(folder / "topn.csv", _csv(self.plans))
        write_file(folder / "result.json", msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @staticmethod
    def load(run: Path) -> SearchResult:
        """Read the result of a run folder; raises `InputError` if it has none."""
        path = run / "result.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=SearchResult)
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); make it with 'dpro-search run'") from error
        except msgspec.MsgspecError as error:
            raise InputError(f"{path}: not a search result ({error}); make it again with 'dpro-search run'") from error


def rank_plans(trials: Iterable[Trial], baseline: Prediction) -> tuple[RankedPlan, ...]:
    """The best distinct plans, fastest first, at most `MOST_PLANS`.

    Going from the fastest plan to slower ones, each takes with it all that are at most 1 % slower. Of those the simplest is
    listed: fewest fields, then fewest groups, then fastest, then first found.
    """
    distinct = {trial.plan: trial for trial in sorted(trials, key=lambda t: -t.number)}  # the first trial of a plan stays
    rest = sorted(distinct.values(), key=lambda t: (t.prediction.iteration_us, t.number))
    ranked: list[RankedPlan] = []
    while rest and len(ranked) < MOST_PLANS:
        limit_us = rest[0].prediction.iteration_us * (1 + NEAR_TIE)
        ties = [trial for trial in rest if trial.prediction.iteration_us <= limit_us]
        rest = rest[len(ties) :]
        simplest = min(ties, key=_complexity)
        ranked.append(
            RankedPlan(
                plan=simplest.plan,
                prediction=simplest.prediction,
                trial=simplest.number,
                speedup=baseline.iteration_us / simplest.prediction.iteration_us,
                gain_certain=simplest.prediction.settled and simplest.prediction.interval_us[1] < baseline.interval_us[0],
            )
        )
    return tuple(ranked)


def _complexity(trial: Trial) -> tuple[int, int, float, int]:
    plan = trial.plan
    changes = sum(getattr(plan, field) is not None for field in plan.__struct_fields__)
    return changes, len(plan.tensor_groups or ()), trial.prediction.iteration_us, trial.number


def _csv(plans: tuple[RankedPlan, ...]) -> bytes:
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(_CSV_COLUMNS)
    for rank, ranked in enumerate(plans):
        plan, prediction = ranked.plan, ranked.prediction
        groups = None if plan.tensor_groups is None else len(plan.tensor_groups)
        table.writerow(
            [
                *(rank, f"plans/plan-{rank}.json", prediction.iteration_us, *prediction.interval_us, ranked.speedup),
                *(ranked.gain_certain, plan.fusion_threshold_bytes, plan.cycle_time_us, groups, ranked.trial),
            ]
        )
    return text.getvalue().encode()
