"""How good a model of fused durations is on whole models that it was not trained on, beside three baselines.

The baselines are the sum of the members' times, 0.8 of it (what dPRO's simulation takes for a fused op), and the answer that fusing
never pays.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from dpro_search.collect.clusters.table import MeasuredCluster
from dpro_search.collect.trace import Floats
from dpro_search.costmodel.fused.cost import FusedCost, widening
from dpro_search.costmodel.fused.domain import Domain
from dpro_search.costmodel.intervals import conformal_quantile
from dpro_search.errors import InputError

COVERAGE = 0.9
SCALED_SUM = 0.8
ALL = "all"


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Of the clusters of one model, predicted by a fit on all others (`ALL`: of all clusters so predicted)."""

    model: str
    rows: int
    mape_pct: float
    median_error_pct: float
    coverage: float | None  # share inside the 90 % interval; None: no other models to take its width from
    refused: int  # rows too far from what was measured
    pays_rows: int  # rows whose fused and unfused times are of the same ops, and differ by more than the noise
    pays_right_pct: float | None  # of those, where prediction and measurement agree on whether fusing pays; None: there are none
    sum_mape_pct: float
    sum_pays_right_pct: float | None
    scaled_sum_mape_pct: float
    scaled_sum_pays_right_pct: float | None
    never_pays_right_pct: float | None  # of the answer that fusing never pays


def left_out_scores(rows: Sequence[MeasuredCluster], cost: FusedCost) -> tuple[Score, ...]:
    """A score for each left-out model, by name, and one for all.

    Parameters
    ----------
    rows
        The n clusters that the cost was fitted on, in the same order, grouped by their models.

    Raises
    ------
    InputError
        The rows are of one model only.
    """
    groups = np.array([row.model for row in rows])
    names = sorted(set(groups.tolist()))
    if cost.left_out is None:
        raise InputError("the measured clusters are of one model: scores on left-out models need at least two")
    fused = np.array([row.fused_us for row in rows])
    errors, distance = cost.left_out
    relative = np.abs(errors) / widening(distance)
    inside = np.full(len(rows), np.nan)
    if len(names) > 2:
        for name in names:
            # The width comes from the other models' errors: this one's are not known beforehand.
            mine = groups == name
            inside[mine] = relative[mine] <= conformal_quantile(np.sort(relative[~mine]), COVERAGE)
    refused = Domain.refuses(distance)
    predicted = fused * np.exp(errors)
    members = np.array([sum(row.cluster.op_us) for row in rows])

    def score(name: str, chosen: npt.NDArray[np.bool_]) -> Score:
        picked = [rows[int(i)] for i in np.flatnonzero(chosen)]
        error = np.abs(predicted[chosen] / fused[chosen] - 1) * 100
        answered = inside[chosen & ~refused]
        never = np.full(len(rows), np.inf)
        right = [_pays_right_pct(picked, guess[chosen]) for guess in (predicted, members, SCALED_SUM * members, never)]
        return Score(
            model=name,
            rows=len(picked),
            mape_pct=float(error.mean()),
            median_error_pct=float(np.median(error)),
            coverage=None if len(names) < 3 or not len(answered) else float(answered.mean()),
            refused=int(refused[chosen].sum()),
            pays_rows=sum(row.pays is not None for row in picked),
            pays_right_pct=right[0],
            sum_mape_pct=float(np.abs(members[chosen] / fused[chosen] - 1).mean()) * 100,
            sum_pays_right_pct=right[1],
            scaled_sum_mape_pct=float(np.abs(SCALED_SUM * members[chosen] / fused[chosen] - 1).mean()) * 100,
            scaled_sum_pays_right_pct=right[2],
            never_pays_right_pct=right[3],
        )

    return (*(score(name, groups == name) for name in names), score(ALL, np.ones(len(rows), bool)))


def _pays_right_pct(rows: Sequence[MeasuredCluster], predicted_us: Floats) -> float | None:
    answers = [
        (guess < row.unfused_us) == row.pays for row, guess in zip(rows, predicted_us.tolist(), strict=True) if row.pays is not None
    ]
    return float(np.mean(answers)) * 100 if answers else None
