"""`score`: errors of predicted step times, by source and in all."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import kendalltau

from dpro_search.errors import DproSearchError, InputError
from experiments.truth.rows import Row


class Predicted(NamedTuple):
    """What is predicted of a row."""

    step_s: float
    memory_bytes: float | None = None  # What the row's figure counts; None: not predicted.
    fits: bool = True  # Whether the job is predicted to run.


class RefusedError(InputError):
    """A strategy that the framework of the row refuses, or that leaves a rank without work."""


Predict = Callable[[Row], Predicted]
"""Raises `DproSearchError` with a reason for a row that it does not support."""


@dataclass(frozen=True)
class Scored:
    """A row and its prediction."""

    row: Row
    prediction: Predicted

    @property
    def timed(self) -> bool:
        """Whether the row has a measured and a predicted step time."""
        return self.row.measured and math.isfinite(self.prediction.step_s)

    @property
    def error(self) -> float:
        """Relative, above 0 where the prediction is too slow."""
        measured = self.row.number("step_time_s")
        assert measured is not None, "only measured rows are scored"
        return self.prediction.step_s / measured - 1


def predicted(rows: Iterable[Row], predict: Predict) -> tuple[list[Scored], Counter[tuple[str, str]], float]:
    """Predictions of the measured rows, how often which reason of each source left one out, and seconds a row."""
    scored: list[Scored] = []
    left_out: Counter[tuple[str, str]] = Counter()
    started, count = time.process_time(), 0
    for row in rows:
        if row.measured or row.ran_out_of_memory or row.memory_alone:
            count += 1
            try:
                scored.append(Scored(row, predict(row)))
            except RefusedError as error:
                scored.append(Scored(row, Predicted(math.nan, fits=False)))
                left_out[row.values["source"], str(error)] += row.measured
            except DproSearchError as error:
                left_out[row.values["source"], str(error)] += 1
    return scored, left_out, (time.process_time() - started) / max(count, 1)


def figures(scored: Sequence[Scored], rows: int) -> dict[str, Any]:
    """The errors of some rows."""
    if not scored:
        return {"rows": rows, "supported": 0}
    ran = [found for found in scored if found.timed]
    if not ran:
        return {"rows": rows, "supported": 0, **_memory(scored)}
    errors = np.array([found.error for found in ran])
    size = np.abs(errors) * 100
    return {
        "rows": rows,
        "supported": len(ran),
        "mape_pct": round(float(size.mean()), 2),
        "median_ape_pct": round(float(np.median(size)), 2),
        "p90_ape_pct": round(float(np.quantile(size, 0.9)), 2),
        "bias_pct": round(float(np.median(errors)) * 100, 2),
        "kendall_tau": _tau(ran),
        **_regret(ran),
        **_memory(scored),
    }


def _memory(scored: Sequence[Scored]) -> dict[str, Any]:
    """Error of the memory of runs that ended, and how well runs that did not are told from them."""
    pairs = [
        (found.row.number("memory_gb"), found.prediction.memory_bytes)
        for found in scored
        if found.row.measured or found.row.memory_alone
    ]
    errors = np.array([abs(bytes_ / 2**30 / measured - 1) for measured, bytes_ in pairs if measured and bytes_ is not None]) * 100
    counted = [found for found in scored if not found.row.memory_alone]
    out = [found for found in counted if found.row.ran_out_of_memory]
    said = [found for found in counted if not found.prediction.fits]
    right = [found for found in said if found.row.ran_out_of_memory]
    return {
        "memory_rows": len(errors),
        "memory_mape_pct": round(float(errors.mean()), 2) if len(errors) else None,
        "memory_median_ape_pct": round(float(np.median(errors)), 2) if len(errors) else None,
        "memory_within_5_pct": round(float((errors <= 5).mean()), 3) if len(errors) else None,
        "oom": {
            "precision": round(len(right) / len(said), 3) if said else None,
            "recall": round(len(right) / len(out), 3) if out else None,
        },
    }


def group_of(row: Row) -> tuple[str, ...]:
    """What rows have in common that differ in the strategy only."""
    return tuple(row.text(name) for name in ("source", "model", "gpu", "n_gpus", "global_batch", "seq_len", "precision"))


def fifth(rows: Iterable[Row], seed: int) -> set[tuple[str, ...]]:
    """A random fifth of the groups of rows, so that no row is predicted from its neighbours."""
    groups = sorted({group_of(row) for row in rows})
    chosen = np.random.default_rng(seed).permutation(len(groups))[: max(len(groups) // 5, 1)]
    return {groups[place] for place in chosen}


def _tau(scored: Sequence[Scored]) -> float | None:
    """Mean agreement of order within groups that differ in the strategy only; 1 is the same order."""
    taus = [
        kendalltau([_measured_s(each) for each in members], [each.prediction.step_s for each in members]).statistic
        for members in _groups(scored)
        if len(members) >= 5
    ]
    finite = [tau for tau in taus if np.isfinite(tau)]
    return round(float(np.mean(finite)), 3) if finite else None


def _regret(scored: Sequence[Scored]) -> dict[str, float]:
    """How much longer than the fastest run of its group the one takes that is predicted to be fastest, per cent.

    Runs that are not predicted to fit into memory are not chosen. Groups count that have three predictions at least that differ.
    """
    regrets = []
    for members in _groups(scored):
        fitting = [each for each in members if each.prediction.fits] or members
        if len({each.prediction.step_s for each in members}) >= 3:
            chosen = min(fitting, key=lambda each: each.prediction.step_s)
            regrets.append((_measured_s(chosen) / min(map(_measured_s, members)) - 1) * 100)
    if not regrets:
        return {}
    return {"regret_mean_pct": round(float(np.mean(regrets)), 2), "regret_median_pct": round(float(np.median(regrets)), 2)}


def _groups(scored: Sequence[Scored]) -> Iterable[list[Scored]]:
    groups: dict[tuple[str, ...], list[Scored]] = defaultdict(list)
    for each in scored:
        groups[group_of(each.row)].append(each)
    return groups.values()


def _measured_s(scored: Scored) -> float:
    return scored.row.number("step_time_s") or math.nan


def table(scored: Sequence[Scored], rows: Sequence[Row], by: Sequence[str]) -> dict[str, Any]:
    """Figures of all rows and of each value of some columns."""
    found: dict[str, Any] = {"all": figures(scored, sum(row.measured for row in rows))}
    for column in by:
        counts = Counter({row.values.get(column, ""): 0 for row in rows if row.measured or row.memory_alone})
        counts.update(row.values.get(column, "") for row in rows if row.measured)
        found[column] = {
            value: figures([one for one in scored if one.row.values.get(column, "") == value], count)
            for value, count in sorted(counts.items())
        }
    return found
