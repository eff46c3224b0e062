"""`compared`: several predictors on the rows that all of them support."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.truth.rows import Row
from experiments.truth.score import Predict, Scored, predicted, table


def compared(rows: Sequence[Row], predictors: Mapping[str, Predict], by: Sequence[str]) -> dict[str, Any]:
    """Figures (`score.table`) of each predictor on the rows that all support, and what each of them supports alone."""
    scored: dict[str, list[Scored]] = {}
    alone: dict[str, Any] = {}
    for name, predict in predictors.items():
        found, left_out, seconds = predicted(rows, predict)
        scored[name] = found
        reasons: Counter[str] = Counter()
        for (_, reason), count in left_out.items():
            reasons[reason] += count
        alone[name] = {
            "supported": sum(one.row.measured for one in found),
            "seconds_per_row": round(seconds, 4),
            "left_out": [{"reason": reason, "rows": count} for reason, count in reasons.most_common(10)],
        }
    shared = set.intersection(*({id(one.row) for one in found} for found in scored.values()))
    common = [row for row in rows if id(row) in shared]
    figures = {name: table([one for one in found if id(one.row) in shared], common, by) for name, found in scored.items()}
    return {"rows": sum(row.measured for row in common), "predictors": figures, "alone": alone}
