"""Models left out whole: groups of models whose programs, on all targets, no fit has seen, judged one group after the other.

The form of the predictor was chosen on `CHOSEN_ON`, which are in no group. The factor that makes the relative error least and the
width of intervals are learned from the errors on the other groups.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import kendalltau

from experiments.tensor_programs.additive import AdditiveTrees, Settings
from experiments.tensor_programs.leaves import LeafRows
from experiments.tensor_programs.table import Programs

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
CHOSEN_ON = ("albert_base", "dcn_v2", "googlenet", "gpt2_medium", "mnasnet", "mobilenet_v2", "qwen2_0_5b", "vgg16")
GROUPS = 6
COVERED = 0.9
FACTORS = np.exp(np.linspace(-0.5, 0.2, 71))
PROBES = 2  # Programs of a task that are timed where predictions are used to tune it.


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Predictions for programs whose models no fit has seen: arrays [targets * programs], NaN where no group holds a program."""

    us: Floats
    group: npt.NDArray[np.int64]  # -1: in no group.
    fitted_samples_per_s: float


def groups(programs: Programs, seed: int) -> list[list[str]]:
    """Models of each group; those that the form was chosen on are in none."""
    every = sorted({model for task in programs.tasks for model in task.models} - set(CHOSEN_ON))
    shuffled = np.random.default_rng(seed).permutation(np.array(every))
    return [list(part) for part in np.array_split(shuffled, min(GROUPS, len(every)))]


def left_out(
    programs: Programs, rows: LeafRows, seed: int, settings: Settings, tasks: int | None = None, limit: int = GROUPS
) -> LeftOut:
    """Fits without each group and predicts it; a task that models of two groups run counts in the first.

    tasks: fit only so many tasks, drawn by the seed (for a learning curve). limit: how many of the groups.
    """
    targets = programs.us.shape[1]
    log_us = np.log(programs.us.T.ravel())
    predicted, place = np.full(len(log_us), np.nan), np.full(len(log_us), -1)
    taken, spent = 0, 0.0
    for number, models in enumerate(groups(programs, seed)[:limit]):
        of_group = np.tile(used_by(programs, models), targets)
        fitted = ~of_group
        if tasks is not None:
            fitted &= np.tile(_some_tasks(programs, fitted[: len(programs)], tasks, seed), targets)
        judged = of_group & (place < 0)
        start = time.process_time()
        trees = AdditiveTrees.fit(rows, log_us, fitted, seed, settings)
        spent += time.process_time() - start
        taken += int(fitted.sum())
        predicted[judged], place[judged] = trees.us(rows, judged), number
    return LeftOut(us=predicted, group=place, fitted_samples_per_s=taken / spent)


def used_by(programs: Programs, models: list[str]) -> Flags:
    """Programs of tasks that one of the models runs."""
    return np.isin(programs.task, [place for place, task in enumerate(programs.tasks) if set(task.models) & set(models)])


def _some_tasks(programs: Programs, among: Flags, count: int, seed: int) -> Flags:
    every = np.unique(programs.task[among])
    return np.isin(programs.task, np.random.default_rng(seed).permutation(every)[:count])


def scaled(prediction: LeftOut, us: Floats) -> Floats:
    """Predictions times the factor that is best for the relative errors of the other groups."""
    scaled_us = prediction.us.copy()
    for number in range(prediction.group.max() + 1):
        others = (prediction.group >= 0) & (prediction.group != number)
        ratio = prediction.us[others] / us[others]
        best = FACTORS[np.argmin([np.abs(factor * ratio - 1).mean() for factor in FACTORS])]
        scaled_us[prediction.group == number] *= best
    return scaled_us


def coverage_pct(prediction: LeftOut, us: Floats) -> tuple[float, float]:
    """Share of programs inside of intervals as wide as the errors on the other groups ask for, and the mean ratio of their ends."""
    off = np.abs(np.log(prediction.us / us))
    inside, width = [], []
    for number in range(prediction.group.max() + 1):
        judged, others = prediction.group == number, (prediction.group >= 0) & (prediction.group != number)
        bound = np.quantile(off[others], COVERED)
        inside.append(off[judged] <= bound)
        width.append(np.exp(2 * bound))
    return 100 * float(np.concatenate(inside).mean()), float(np.mean(width))


def within_tasks(programs: Programs, predicted: Floats, us: Floats) -> dict[str, float]:
    """Kendall's tau inside of a task on a target, how far the best of the predicted ones is from the true best (median and mean),
    and the error of the others after two programs of a task were timed."""
    targets = programs.us.shape[1]
    task = np.concatenate([programs.task + number * len(programs.tasks) for number in range(targets)])
    known = np.isfinite(predicted)
    order = np.flatnonzero(known)[np.argsort(task[known], kind="stable")]
    taus, losses, off = [], [], []
    for places in np.split(order, np.flatnonzero(np.diff(task[order])) + 1):
        if len(places) < 4 or np.ptp(us[places]) == 0:
            continue
        taus.append(kendalltau(predicted[places], us[places]).statistic)
        losses.append(100 * (us[places[np.argmin(predicted[places])]] / us[places].min() - 1))
        probed, rest = places[:PROBES], places[PROBES:]
        factor = np.exp(np.mean(np.log(us[probed] / predicted[probed])))
        off.append(100 * np.abs(factor * predicted[rest] / us[rest] - 1))
    joined = np.concatenate(off)
    return {
        "kendall_tau": float(np.nanmean(taus)), "best_off_mean_pct": float(np.mean(losses)),
        "best_off_median_pct": float(np.median(losses)), "probed_mape_pct": float(joined.mean()),
        "probed_median_pct": float(np.median(joined)),
    }  # fmt: skip
