"""`grid`: the plan that a search picks from one recording, beside the framework's default and a grid of real configurations.

Of each job only the default is recorded: its blocks and the exchanges of the machine. The search sees nothing else; no run of the
grid changes a prediction.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpro_search.api import load
from dpro_search.deploy.validate import noise_pct_of, typical_us
from dpro_search.errors import InputError
from dpro_search.kinds import job_of, load_source, timed_job
from dpro_search.search.result import RankedPlan
from dpro_search.space.plan import Plan
from experiments.parallel.cases import Case
from experiments.parallel.measure import STEPS, command_of, cores_of, rows_of, run_case, save_row

DEFAULT, PICKED = "default", "picked"
TRIALS = 500
_WHOLE, _FULL = ("none",), ("none", "full")
_GRID: Mapping[int, Sequence[tuple[str, Sequence[int], Sequence[str]]]] = {  # ranks: settings, micro-batches, recomputation
    2: (
        ("zero_stage=0", (2, 4, 8), _FULL),
        ("zero_stage=3", (2, 4, 8), _FULL),
        ("zero_stage=1", (4,), _WHOLE),
        ("zero_stage=2", (4,), _WHOLE),
        ("tp=2,sequence_parallel=false", (4, 8, 16), _WHOLE),
        ("pp=2,schedule=gpipe", (4,), _WHOLE),
        ("pp=2", (1, 2, 4), _WHOLE),
        ("pp=2,virtual_stages=2", (2, 4), _WHOLE),
    ),
    4: (
        ("zero_stage=0", (2, 4), _FULL),
        ("zero_stage=3", (2, 4), _FULL),
        ("zero_stage=1", (4,), _WHOLE),
        ("tp=4,sequence_parallel=false", (4, 16), _WHOLE),
        ("tp=2,sequence_parallel=false", (4, 8), _WHOLE),
        ("tp=2,zero_stage=3,sequence_parallel=false", (4, 8), _WHOLE),
        ("pp=4,schedule=gpipe", (2,), _WHOLE),
        ("pp=4", (1, 2, 4), _WHOLE),
        ("pp=4,virtual_stages=2", (2,), _WHOLE),
        ("pp=2", (2, 4), _WHOLE),
        ("tp=2,pp=2,sequence_parallel=false", (2, 4), _WHOLE),
    ),
}


def grid_of(ranks: int) -> Iterator[str]:
    """Settings of the configurations, as ``--set`` takes them."""
    for settings, micro_batches, recompute in _GRID[ranks]:
        for size, again in itertools.product(micro_batches, recompute):
            yield f"{settings},micro_batch={size}" + (f",recompute={again}" if again != "none" else "")


def job_case(model: str, ranks: int, rate: str) -> Case:
    """The job as its framework runs it where nothing is set."""
    return Case(model=model, ranks=ranks, rate=rate, strategy=DEFAULT, settings="", paced=False)


def measure_grid(
    out: Path, cases: Sequence[Case], python: str, rounds: int, say: Callable[[str], None], *, only: str = "", trials: int = TRIALS
) -> None:
    """Record the defaults, search, then run default, picked plan and grid in turn, a round after the other; adds to ``runs.jsonl``.

    What was recorded, searched or run before is kept.

    Parameters
    ----------
    only
        Text that the settings of the grid's configurations have.
    """
    out.mkdir(parents=True, exist_ok=True)
    chosen: list[tuple[Case, str, Plan]] = []
    for case in cases:
        path = case.write(out, cores_of())
        timed_job(path, [], command_of(path, python, STEPS), out / case.times, on_start=lambda what: say(f"timing {what}"))
        say(f"{case.job}: searching")
        chosen += [(case, name, plan) for name, plan in _plans(out, case, say, only, trials)]
    done = {(row.job, row.strategy, row.round) for row in rows_of(out)}
    left = [(number, *each) for number in range(rounds) for each in chosen if (each[0].job, each[1], number) not in done]
    began = time.monotonic()
    for place, (number, case, name, plan) in enumerate(left, 1):
        path = case.write(out, cores_of())
        row = run_case(case, path, command_of(path, python, STEPS), number, name=name, plan=plan)
        save_row(out, row)
        rest_s = (time.monotonic() - began) / place * (len(left) - place)
        typical = f"{np.median(row.iteration_us) / 1e3:.0f} ms" if row.iteration_us else row.failed
        say(f"round {number} {case.job} {name}: {typical} ({place} of {len(left)}, {rest_s / 60:.0f} min left)")


def score_grid(out: Path, cases: Sequence[Case], trials: int = TRIALS) -> list[dict[str, Any]]:
    """Of each job that was measured: measured and predicted gain of the picked plan, and the best of the grid."""
    found = []
    rows = rows_of(out)
    for case in cases:
        runs: dict[str, list[Any]] = {}
        for row in rows:
            if row.job == case.job and row.iteration_us:
                runs.setdefault(row.strategy, []).append(np.array(row.iteration_us))
        grid = {name: typical_us(times) for name, times in runs.items() if name not in (DEFAULT, PICKED)}
        if DEFAULT not in runs or PICKED not in runs or not grid:
            continue
        best = min(grid, key=lambda name: grid[name])
        default_us, picked_us = typical_us(runs[DEFAULT]), typical_us(runs[PICKED])
        ranked = _picked(out, case, trials)
        job: Any = job_of(load_source(out / case.job / "job.toml"))
        errors = [job.replayed(_plan(job, name)).iteration_us / us - 1 for name, us in grid.items()]
        found.append(
            {
                "job": case.job,
                "picked": ranked.plan.settings,
                "default_us": default_us,
                "picked_us": picked_us,
                "best_us": grid[best],
                "best": best,
                "noise_pct": max(noise_pct_of(times) for times in (runs[DEFAULT], runs[PICKED], runs[best])),
                "gain_measured_pct": (default_us / picked_us - 1) * 100,
                "gain_predicted_pct": (ranked.speedup - 1) * 100,
                "picked_over_best": picked_us / grid[best],
                "configurations": len(grid),
                "faster_than_picked": sum(us < picked_us for us in grid.values()),
                "median_error_pct": float(np.median(np.abs(errors))) * 100,
                "failed": sorted({row.strategy for row in rows if row.job == case.job and row.failed}),
            }
        )
    return found


def _plans(out: Path, case: Case, say: Callable[[str], None], only: str, trials: int) -> Iterator[tuple[str, Plan]]:
    yield DEFAULT, Plan()
    yield PICKED, _picked(out, case, trials).plan
    job: Any = job_of(load_source(out / case.job / "job.toml"))
    for settings in grid_of(case.ranks):
        if only not in settings:
            continue
        try:
            plan = _plan(job, settings)
            refused = job.predict(plan).infeasible
        except InputError as error:
            refused = str(error)
        if refused:
            say(f"{case.job} {settings}: left out: {refused}")
        else:
            yield settings, plan


def _plan(job: Any, settings: str) -> Plan:
    return job.job.scenario([settings]).plan


def _picked(out: Path, case: Case, trials: int) -> RankedPlan:
    """The best plan of the search, whose folder is kept."""
    found = load(out / case.job / "job.toml").search(trials=trials, out=out / case.job / "search").result
    return found.plans[0]
