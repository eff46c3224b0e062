"""`regrets`: which run to make next, on published groups of runs of one job under several strategies, revealed one at a time.

``python -m experiments.truth next-plan FOLDER``. After each run a policy names the plan that it would keep; its regret is how much
longer that plan takes than the fastest one of the group.

* *correlated*: the order of `PlanBeliefs`, whose errors in common are those of ``parallel/answers/accuracy.toml``.
* *predicted order*: the plans in the order of their predictions; the fastest measured one is kept.
* *random*: the plans in random order; the fastest measured one is kept.
* *TPE*: Optuna's sampler on measured values, with the settings as its parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dpro_search.analysis.plan_beliefs import PlanBeliefs
from dpro_search.parallel.answers.efficiencies import NOISE, log_steps_us, plan_errors
from dpro_search.parallel.costs.scales import MEASURED
from dpro_search.parallel.steps.step_prices import StepPrices
from experiments.truth.contradictions import consistent
from experiments.truth.jobs import workload_of
from experiments.truth.rows import Row
from experiments.truth.score import Scored, group_of

SOURCES = ("hf-ultrascale-playbook", "vtrain", "megatron-bridge", "internevo")
FEWEST = 5  # runs of a group
CHOSEN_ON = "vtrain"  # the source whose groups the policy was chosen on
_SEEDS = range(10)
_SETTINGS = ("dp", "tp", "pp", "cp", "ep", "vpp", "zero_stage", "micro_batch", "recompute")

Policy = Callable[[Sequence[Scored], np.ndarray, int], list[int]]  # the plan that is kept after each run


def regrets(scored: Sequence[Scored], runs: int) -> dict[str, Any]:
    """Mean regret in per cent of each policy before any run and after each, and how many runs it needs for 2 %."""
    groups = list(groups_of(scored))
    answer: dict[str, Any] = {"groups": len(groups), "runs": sum(map(len, groups))}
    chosen_on = np.array([members[0].row.text("source").startswith(CHOSEN_ON) for members in groups])
    for name, policy, seeds in (
        ("correlated", _correlated, (0,)),
        ("predicted order", _predicted_order, (0,)),
        ("random", _random, _SEEDS),
        ("TPE", _tpe, _SEEDS),
    ):
        lost = np.array([[_lost(members, policy, seed, runs) for seed in seeds] for members in groups]).mean(axis=1)
        means = lost.mean(axis=0) * 100
        enough = np.flatnonzero(means <= 2.0)
        answer[name] = {
            f"regret_mean_pct_without_{CHOSEN_ON}": [round(float(mean) * 100, 2) for mean in lost[~chosen_on].mean(axis=0)],
            "regret_mean_pct": [round(float(mean), 2) for mean in means],
            "runs_for_2_pct": int(enough[0]) if len(enough) else None,
        }
    return answer


def groups_of(scored: Sequence[Scored]) -> Iterator[list[Scored]]:
    """Groups of runs that differ in the strategy only; of several runs of one strategy the fastest."""
    groups: dict[tuple[str, ...], dict[tuple[str, ...], Scored]] = defaultdict(dict)
    for one in consistent([each for each in scored if each.timed]):
        if one.row.text("source").startswith(SOURCES):
            strategy = tuple(one.row.text(name) for name in _SETTINGS)
            before = groups[group_of(one.row)].get(strategy)
            if before is None or _seconds(one.row) < _seconds(before.row):
                groups[group_of(one.row)][strategy] = one
    for group in groups.values():
        if len(group) >= FEWEST:
            yield list(group.values())


def _seconds(row: Row) -> float:
    return row.number("step_time_s") or np.inf


def _lost(members: Sequence[Scored], policy: Policy, seed: int, runs: int) -> list[float]:
    """Regret before any run and after each. Plans that are predicted not to fit in memory are not run."""
    fastest = min(np.log(_seconds(one.row)) for one in members)
    members = [one for one in members if one.prediction.fits] or members
    measured = np.log([_seconds(one.row) for one in members])
    kept = policy(members, measured, seed)[: runs + 1]
    kept += [kept[-1]] * (runs + 1 - len(kept))
    return [float(np.exp(measured[plan] - fastest) - 1) for plan in kept]


def beliefs_of(members: Sequence[Scored]) -> PlanBeliefs:
    """The plans of a group as they are predicted."""
    steps = [(StepPrices(workload_of(one.row)), workload_of(one.row).strategy) for one in members]
    logs = log_steps_us(steps, np.zeros((len(steps), len(MEASURED)))) - np.log(1e6)
    return PlanBeliefs(logs=logs, covariance=plan_errors(steps), noise=NOISE)


def _correlated(members: Sequence[Scored], measured: np.ndarray, seed: int) -> list[int]:
    beliefs, runs = beliefs_of(members), dict[int, float]()
    order = []
    while len(runs) < len(members):
        plan = beliefs.after(runs).next_plan(but=runs)
        runs[plan] = float(measured[plan])
        order.append(plan)
    return [beliefs.best, *_fastest_so_far(order, measured)[1:]]


def _predicted_order(members: Sequence[Scored], measured: np.ndarray, seed: int) -> list[int]:
    return _fastest_so_far(np.argsort([one.prediction.step_s for one in members]).tolist(), measured)


def _random(members: Sequence[Scored], measured: np.ndarray, seed: int) -> list[int]:
    return _fastest_so_far(np.random.default_rng(seed).permutation(len(members)).tolist(), measured)


def _tpe(members: Sequence[Scored], measured: np.ndarray, seed: int) -> list[int]:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    values = {name: sorted({one.row.text(name) for one in members}) for name in _SETTINGS}
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=2))
    order: list[int] = []
    for _ in range(20 * len(members)):
        trial = study.ask()
        asked = [trial.suggest_categorical(name, choices) for name, choices in values.items() if len(choices) > 1]
        names = [name for name, choices in values.items() if len(choices) > 1]
        plan = next((n for n, one in enumerate(members) if [one.row.text(name) for name in names] == asked), None)
        if plan is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)  # no such run was published
            continue
        study.tell(trial, float(measured[plan]))
        if plan not in order:
            order.append(plan)
        if len(order) >= min(len(members), 12):
            break
    rest = [plan for plan in np.random.default_rng(seed).permutation(len(members)).tolist() if plan not in order]
    return _fastest_so_far([*order, *rest], measured)


def _fastest_so_far(order: Sequence[int], measured: np.ndarray) -> list[int]:
    """The plan that is kept: before any run the first of the order, then the fastest measured one."""
    fastest = [min(order[:count], key=lambda plan: measured[plan]) for count in range(1, len(order) + 1)]
    return [order[0], *fastest]
