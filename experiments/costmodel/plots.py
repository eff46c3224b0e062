"""How good the model of fused ops is, how much data is enough, and what it looks at: from tables of measured clusters.

    python -m experiments.costmodel.plots TABLE... --out DIR

Writes scores.{json,md}, learning_curve.{json,png} and importance.{json,png}. The pictures need matplotlib (the extra "plots"); the
numbers come without it.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dpro_search.collect.clusters.table import read_table
from dpro_search.collect.trace import Floats
from dpro_search.costmodel.learned.features import FEATURES, feature_matrix
from dpro_search.costmodel.learned.model_file import FusionModel, FusionModelInfo, distinct
from dpro_search.costmodel.learned.regressor import FusedTimeRegressor

SHARES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
REPEATS = 3
SHOWN = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", metavar="TABLE", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tables = [read_table(path) for path in options.tables]
    rows = distinct(tables)
    features = feature_matrix([row.cluster for row in rows])
    fused = np.array([row.fused_us for row in rows])
    groups = np.array([row.model for row in rows])
    options.out.mkdir(parents=True, exist_ok=True)
    curve = learning_curve(features, fused, groups, options.seed)
    importance = permutation_importance(features, fused, groups, options.seed)
    info = FusionModel.train(tables).info
    (options.out / "scores.md").write_text(score_table(info))
    scores = {"shapes": info.shapes.scores, "times": info.times.scores}
    for name, found in (("scores", scores), ("learning_curve", curve), ("importance", importance)):
        (options.out / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    if importlib.util.find_spec("matplotlib"):
        _draw(curve, importance, options.out)
    else:
        print("matplotlib is not installed: numbers only (pip install 'dpro-search[plots]')")
    for point in curve:
        print(f"{point['rows']:6d} rows: {point['mape_pct']:.1f} % on left-out models")


def score_table(info: FusionModelInfo) -> str:
    """Scores on left-out models beside the baselines, in Markdown."""
    head = ("left out", "rows", "error %", "without shapes", "sum", "0.8 sum", "in 90 % int.", "pays: right %", "without shapes")
    lines = [(*head, "by the sum", "by 0.8 sum", "never"), ("---",) + ("---:",) * 11]
    for score, blind in zip(info.shapes.scores, info.times.scores, strict=True):
        coverage = None if score.coverage is None else score.coverage * 100
        errors = (score.mape_pct, blind.mape_pct, score.sum_mape_pct, score.scaled_sum_mape_pct, coverage)
        pays = (score.pays_right_pct, blind.pays_right_pct, score.sum_pays_right_pct, score.scaled_sum_pays_right_pct)
        cells = ["-" if value is None else f"{value:.1f}" for value in (*errors, *pays, score.never_pays_right_pct)]
        lines.append((score.model, str(score.rows), *cells))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def learning_curve(features: Floats, fused: Floats, groups: np.ndarray[Any, Any], seed: int) -> list[dict[str, Any]]:
    """Error on each left-out model, by how many clusters of the others were learned from."""
    generator = np.random.default_rng(seed)
    points = []
    for share in SHARES:
        errors, counts = [], []
        for _ in range(REPEATS if share < 1 else 1):
            for group in np.unique(groups):
                others = np.flatnonzero(groups != group)
                chosen = generator.permutation(others)[: max(int(share * len(others)), 20)]
                predicted = FusedTimeRegressor().fit(features[chosen], fused[chosen]).predict(features[groups == group])
                errors.append(np.abs(predicted / fused[groups == group] - 1) * 100)
                counts.append(len(chosen))
        points.append({"rows": round(float(np.mean(counts))), "mape_pct": float(np.concatenate(errors).mean())})
    return points


def permutation_importance(features: Floats, fused: Floats, groups: np.ndarray[Any, Any], seed: int) -> list[dict[str, Any]]:
    """By how much the error on left-out models grows when a feature is shuffled among them, the largest first."""
    generator = np.random.default_rng(seed)
    growth = np.zeros(len(FEATURES))
    for group in np.unique(groups):
        mine = groups == group
        estimator = FusedTimeRegressor().fit(features[~mine], fused[~mine])
        usual = _error_pct(estimator, features[mine], fused[mine])
        for column in range(len(FEATURES)):
            shuffled = features[mine].copy()
            shuffled[:, column] = generator.permutation(shuffled[:, column])
            growth[column] += (_error_pct(estimator, shuffled, fused[mine]) - usual) * mine.mean()
    return [{"feature": FEATURES[i], "points": float(growth[i])} for i in np.argsort(-growth)]


def _error_pct(estimator: FusedTimeRegressor, features: Floats, fused: Floats) -> float:
    """Mean error of the logarithm, in per cent: one large error does not decide."""
    return float(np.abs(np.log(estimator.predict(features) / fused)).mean()) * 100


def _draw(curve: list[dict[str, Any]], importance: list[dict[str, Any]], out: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.plot([point["rows"] for point in curve], [point["mape_pct"] for point in curve], marker="o")
    axes.set(xscale="log", xlabel="measured clusters of other models", ylabel="error on left-out models, %", ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.savefig(out / "learning_curve.png", dpi=120)
    figure, axes = pyplot.subplots(figsize=(6, 5), layout="constrained")
    top = importance[:SHOWN][::-1]
    axes.barh([entry["feature"] for entry in top], [entry["points"] for entry in top])
    axes.set(xlabel="growth of the error when shuffled, points")
    figure.savefig(out / "importance.png", dpi=120)
    pyplot.close("all")


if __name__ == "__main__":
    main()
