"""Errors of predictors on left-out devices, by how much was measured of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpro_search.costmodel.devices.correction import Correction, Similarity
from dpro_search.costmodel.devices.ops import Floats
from experiments.devices.protocol import MEMBERS, LeftOut, samples

BUDGETS = (5, 20, 100)
"""Measured ops of the device that is judged: the probes alone (at most 5), or with more."""
COVERAGE = 0.9


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Predictions for the ops of a target that were neither probes nor samples."""

    target: str
    family: str
    budget: int
    log_error: Floats  # log(predicted / measured), [n].
    deviation: Floats  # Expected of it, [n].
    kind: Floats

    @property
    def score(self) -> Floats:
        """Errors over what was expected, [n]."""
        return np.abs(self.log_error) / self.deviation


def judged(found: Sequence[LeftOut], seed: int, budgets: Sequence[int] = BUDGETS) -> list[Judged]:
    """All targets with all budgets."""
    result = []
    for family in sorted({one.measured.family for one in found}):
        others = [one for one in found if one.measured.family != family]
        weights = member_weights(others)
        similarity = Similarity.fit([(one.measured.points, one.errors(weights)) for one in others], seed=seed)
        for one in found:
            if one.measured.family == family:
                result += [_judge(one, weights, similarity, budget, seed) for budget in budgets]
    return result


def _judge(one: LeftOut, weights: dict[str, float], similarity: Similarity, budget: int, seed: int) -> Judged:
    part = one.measured
    chosen = samples(part, budget, seed)
    rest = part.without(chosen)
    errors, points = one.errors(weights), part.points
    correction, deviation = Correction.fit(similarity, points[chosen], errors[chosen]).at(points[rest])
    return Judged(
        target=part.name,
        family=part.family,
        budget=budget,
        log_error=correction - errors[rest],
        deviation=deviation,
        kind=part.ops.kind[rest],
    )


def member_weights(others: Sequence[LeftOut]) -> dict[str, float]:
    """Members whose mean has the least error on left-out devices: one, or several alike."""

    def error(names: Sequence[str]) -> float:
        weights = {name: 1 / len(names) for name in names}
        return float(np.mean([np.abs(np.expm1(-one.errors(weights))).mean() for one in others]))

    kept = [min(MEMBERS, key=lambda name: error([name]))]
    for name in MEMBERS:
        if name not in kept and error([*kept, name]) < error(kept):
            kept.append(name)
    return {name: 1 / len(kept) for name in kept}


def widths(found: Sequence[Judged]) -> dict[tuple[str, int], float]:
    """By family and budget: deviations that hold 90 % of the ops of targets of the other families, each target with the same weight."""
    result = {}
    for family in {one.family for one in found}:
        for budget in {one.budget for one in found}:
            others = [one for one in found if one.family != family and one.budget == budget]
            scores = np.concatenate([one.score for one in others])
            weight = np.concatenate([np.full(len(one.score), 1 / len(one.score)) for one in others])
            order = np.argsort(scores)
            share = np.cumsum(weight[order]) / (weight.sum() * (1 + 1 / len(others)))
            result[family, budget] = float(scores[order][min(int(np.searchsorted(share, COVERAGE)), len(scores) - 1)])
    return result


def rows(found: Sequence[Judged]) -> list[dict[str, Any]]:
    """A row for each target and budget."""
    limits = widths(found)
    result = []
    for one in found:
        error = np.abs(np.expm1(one.log_error)) * 100
        result.append(
            {
                "target": one.target,
                "family": one.family,
                "budget": one.budget,
                "rows": len(error),
                "mape_pct": float(error.mean()),
                "median_ape_pct": float(np.median(error)),
                "p90_ape_pct": float(np.quantile(error, 0.9)),
                "covered_pct": float((one.score <= limits[one.family, one.budget]).mean() * 100),
            }
        )
    return result


def macro(found: Sequence[dict[str, Any]], name: str, wanted: Callable[[dict[str, Any]], bool] = lambda row: True) -> float:
    """Mean over targets."""
    return float(np.mean([row[name] for row in found if wanted(row)]))
