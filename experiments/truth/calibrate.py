"""`calibrated`: predictions with efficiencies that are learned from a fifth of the groups of rows, for each GPU and framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dpro_search.parallel.answers.efficiencies import STEP, log_steps_us, scaled
from dpro_search.parallel.costs.scales import MEASURED, Scales
from dpro_search.parallel.steps.step_prices import StepPrices, step_us
from experiments.truth.contradictions import consistent
from experiments.truth.jobs import Kind, kind_of, workload_of
from experiments.truth.pooling import Errors, Floats, pooled
from experiments.truth.rows import Row
from experiments.truth.score import Scored, fifth, group_of

ROUNDS = 4  # of slopes: predictions are no straight lines of the efficiencies
FARTHEST = 0.2  # that a parameter moves in a round, where slopes still hold


def calibrated(scored: Sequence[Scored], seed: int) -> list[Scored]:
    """The rows that are not of the fifth, predicted with what is learned from it; nothing is from rows that contradict."""
    measured = [found for found in scored if found.timed]
    chosen = fifth([found.row for found in measured], seed)
    fitted = consistent([found for found in measured if group_of(found.row) in chosen])
    values = learned(fitted, {kind_of(found.row) for found in measured})
    return [_with(found, values[kind_of(found.row)]) for found in measured if group_of(found.row) not in chosen]


def one_factor(scored: Sequence[Scored], seed: int) -> list[Scored]:
    """Predictions times one factor for each GPU and framework, learned from a fifth of the groups; the other rows.

    A group is what differs in the strategy only, so that no row is predicted from its neighbours. What a model's rows share is one
    vote on the factor of their kind.
    """
    fitted = fifth((found.row for found in scored), seed)
    seen = consistent([found for found in scored if found.timed and group_of(found.row) in fitted])
    fit = pooled(error_lines(seen, -np.log1p([found.error for found in seen]), np.ones((len(seen), 1)), _model_of))

    def factor(kind: Kind) -> float:
        return float(np.exp(fit.share(kind) * fit.parameters(kind)[0]))

    return [
        Scored(found.row, found.prediction._replace(step_s=found.prediction.step_s * factor(kind_of(found.row))))
        for found in scored
        if group_of(found.row) not in fitted
    ]


def learned(rows: Sequence[Scored], places: Iterable[Kind]) -> Mapping[Kind, Floats]:
    """Logarithms of the factors of `Scales` in the order of `MEASURED`, of some kinds, among them those of the rows."""
    steps, kinds = [StepPrices(workload_of(found.row)) for found in rows], [kind_of(found.row) for found in rows]
    measured = np.log([found.row.number("step_time_s") or 1.0 for found in rows])
    at = {kind: np.zeros(len(MEASURED)) for kind in {*places, *kinds}}
    share = dict.fromkeys(at, 0.0)
    for number in range(ROUNDS if rows else 0):
        values = np.array([at[kind] for kind in kinds])
        base = log_steps(steps, values)
        if number % 2 == 0:  # they change little in a round
            slopes = np.array([(log_steps(steps, values + step) - base) / STEP for step in STEP * np.eye(len(MEASURED))]).T
        found = pooled(error_lines(rows, measured - base + np.sum(slopes * values, axis=1), slopes, group_of))
        for kind in at:
            at[kind] = at[kind] + np.clip(found.parameters(kind) - at[kind], -FARTHEST, FARTHEST)
            share[kind] = found.share(kind)
    return {kind: share[kind] * values for kind, values in at.items()}


def error_lines(rows: Sequence[Scored], errors: Floats, slopes: Floats, groups: Callable[[Row], object]) -> Errors:
    """The errors of rows, as straight lines of the parameters of their GPU, framework and publisher."""
    kinds = [kind_of(found.row) for found in rows]
    names = [f"{groups(found.row)} {kind}" for found, kind in zip(rows, kinds, strict=True)]
    return Errors(errors=errors, slopes=slopes, kinds=kinds, groups=names)


def _model_of(row: Row) -> object:
    return row.text("source"), row.text("model")


def log_steps(steps: Sequence[StepPrices], values: Floats) -> Floats:
    """Logarithms of predicted steps in seconds with parameters of their own, [rows, parameters]."""
    return log_steps_us([(each, each.workload.strategy) for each in steps], values) - np.log(1e6)


def _with(found: Scored, values: Floats) -> Scored:
    seconds = step_us(replace(workload_of(found.row), scales=scaled(Scales(), values))) / 1e6
    return Scored(found.row, found.prediction._replace(step_s=seconds))
