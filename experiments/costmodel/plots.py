"""How good the model of fused ops is, how much data is enough, and what it looks at: from tables of measured clusters.

    python -m experiments.costmodel.plots TABLE... --out DIR

Writes scores.{json,md}, xla_learning_curve.{json,svg} and xla_importance.{json,svg}.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np

from dpro_search.collect.tables.clusters import read_table
from dpro_search.collect.trace import Floats
from dpro_search.costmodel.fused.cost import FusedCost, fit_fused_cost
from dpro_search.costmodel.fused.features import ClusterFeatures, shaped_features
from dpro_search.costmodel.fused.model_file import FusionModel, FusionModelInfo, distinct
from dpro_search.costmodel.fused.op_parts import PART_FEATURES

_TICKS_PCT = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000)
SHARES = (0.1, 0.3, 1.0)  # of the clusters of the other models
OTHERS = (3, 6)  # models to learn from
DRAWS = 3  # of each point but the last, which takes all
SHOWN = 18
_WIDTH, _HEIGHT, _LEFT, _TOP = 420, 240, 60, 16  # of the plane and its margins, pixels
_COLOURS = ("#0072b2", "#d55e00")  # told apart also by people who see no red and green


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", metavar="TABLE", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tables = [read_table(path) for path in options.tables]
    rows = distinct(tables)
    features = shaped_features([row.cluster for row in rows])
    fused = np.array([row.fused_us for row in rows])
    groups = np.array([row.model for row in rows])
    options.out.mkdir(parents=True, exist_ok=True)
    curve = learning_curve(features, fused, groups, options.seed)
    importance = permutation_importance(features, fused, groups, options.seed)
    info = FusionModel.train(tables).info
    (options.out / "scores.md").write_text(score_table(info))
    scores = {"shapes": info.shapes.scores, "times": info.times.scores}
    for name, found in (("scores", scores), ("xla_learning_curve", curve), ("xla_importance", importance)):
        (options.out / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    (options.out / "xla_learning_curve.svg").write_text(curve_picture(curve))
    (options.out / "xla_importance.svg").write_text(importance_picture(importance[:SHOWN]))
    for point in curve:
        print(f"{point['rows']:6d} rows of {point['models']} models: {point['mape_pct']:.1f} % on left-out models")


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


def learning_curve(features: ClusterFeatures, fused: Floats, groups: np.ndarray[Any, Any], seed: int) -> list[dict[str, Any]]:
    """Error on each left-out model, by how many clusters of all others were learned from, and by how many others."""
    generator = np.random.default_rng(seed)
    names = np.unique(groups)
    points = []
    for share, count in (*((share, len(names) - 1) for share in SHARES), *((1.0, n) for n in OTHERS if n < len(names) - 1)):
        errors, counts = [], []
        draws = DRAWS if (share, count) != (1.0, len(names) - 1) else 1
        for group in np.repeat(names, draws):
            chosen = generator.permutation(names[names != group])[:count]
            others = np.flatnonzero(np.isin(groups, chosen))
            picked = np.sort(generator.permutation(others)[: max(int(share * len(others)), 20)])
            mine = groups == group
            predicted = fit_fused_cost(features[picked], fused[picked]).predict(features[mine])
            errors.append(np.abs(predicted / fused[mine] - 1) * 100)
            counts.append(len(picked))
        error = float(np.concatenate(errors).mean())
        points.append({"rows": round(float(np.mean(counts))), "models": count, "mape_pct": error})
    return points


def permutation_importance(
    features: ClusterFeatures, fused: Floats, groups: np.ndarray[Any, Any], seed: int
) -> list[dict[str, Any]]:
    """By how much the error on left-out models grows when a feature is shuffled among their parts of a class, the largest first."""
    generator = np.random.default_rng(seed)
    columns = range(1, len(PART_FEATURES))
    growth = np.zeros(len(PART_FEATURES))
    for group in np.unique(groups):
        mine = groups == group
        estimator = fit_fused_cost(features[~mine], fused[~mine])
        own = features[mine]
        usual = _error_pct(estimator, own, fused[mine])
        for column in columns:
            shuffled = own.parts.copy()
            for number in np.unique(own.parts[:, 0]):
                alike = np.flatnonzero(own.parts[:, 0] == number)
                shuffled[alike, column] = shuffled[generator.permutation(alike), column]
            error = _error_pct(estimator, dataclasses.replace(own, parts=shuffled), fused[mine])
            growth[column] += (error - usual) * mine.mean()
    return [{"feature": PART_FEATURES[i], "points": float(growth[i])} for i in sorted(columns, key=lambda i: -growth[i])]


def _error_pct(estimator: FusedCost, features: ClusterFeatures, fused: Floats) -> float:
    """Mean error of the logarithm, in per cent: one large error does not decide."""
    return float(np.abs(np.log(estimator.predict(features) / fused)).mean()) * 100


def curve_picture(curve: list[dict[str, Any]]) -> str:
    """The learning curve as SVG."""
    most_models = max(point["models"] for point in curve)
    series = {
        "fewer clusters of all other models": [point for point in curve if point["models"] == most_models],
        "all clusters of fewer models": sorted(
            curve[len(SHARES) :] + curve[len(SHARES) - 1 : len(SHARES)], key=lambda p: p["rows"]
        ),
    }
    low, high = (pick(point["rows"] for point in curve) for pick in (min, max))
    errors = [point["mape_pct"] for point in curve]
    ticks = [tick for tick in _TICKS_PCT if tick < max(errors)] + [min(tick for tick in _TICKS_PCT if tick >= max(errors))]
    ticks = ticks[max(sum(tick <= min(errors) for tick in ticks) - 1, 0) :]

    def x(rows: float) -> float:
        return _LEFT + _WIDTH * math.log(rows / low) / math.log(high / low)

    def y(error: float) -> float:
        return _TOP + _HEIGHT * (1 - math.log(error / ticks[0]) / math.log(ticks[-1] / ticks[0]))

    svg = _canvas("Error on left-out models by measured clusters", _LEFT + _WIDTH + 20, _TOP + _HEIGHT + 90)
    for tick in ticks:
        _add(svg, "line", "grid", x1=_LEFT, x2=_LEFT + _WIDTH, y1=y(tick), y2=y(tick))
        _text(svg, _LEFT - 6, y(tick) + 4, f"{tick} %", "end")
    for point in series["fewer clusters of all other models"]:
        _text(svg, x(point["rows"]), _TOP + _HEIGHT + 18, str(point["rows"]), "middle")
    for number, ((name, points), colour) in enumerate(zip(series.items(), _COLOURS, strict=True)):
        line = " ".join(f"{x(point['rows']):.1f},{y(point['mape_pct']):.1f}" for point in points)
        _add(svg, "polyline", "", points=line, fill="none", stroke=colour, **{"stroke-width": 2})
        for point in points:
            _add(svg, "circle", "", cx=x(point["rows"]), cy=y(point["mape_pct"]), r=3.5, fill=colour)
        _add(svg, "circle", "", cx=_LEFT + 5, cy=_TOP + _HEIGHT + 60 + 20 * number, r=4, fill=colour)
        _text(svg, _LEFT + 15, _TOP + _HEIGHT + 64 + 20 * number, name, "start")
    _text(
        svg,
        _LEFT + _WIDTH / 2,
        _TOP + _HEIGHT + 40,
        "measured clusters of other models; error in per cent, both logarithmic",
        "middle",
    )
    return _written(svg)


def importance_picture(importance: list[dict[str, Any]]) -> str:
    """The permutation importance as SVG."""
    row, left = 19, 130
    most = max(entry["points"] for entry in importance)
    svg = _canvas("Growth of the error when a feature is shuffled", left + _WIDTH + 60, _TOP + row * len(importance) + 40)
    for number, entry in enumerate(importance):
        at, length = _TOP + row * number, _WIDTH * max(entry["points"], 0) / most
        _text(svg, left - 8, at + 13, entry["feature"], "end")
        _add(svg, "rect", "", x=left, y=at + 2, width=length, height=row - 5, fill=_COLOURS[0])
        _text(svg, left + length + 6, at + 13, f"{entry['points']:.1f}", "start")
    _text(svg, left, _TOP + row * len(importance) + 24, "growth of the error when shuffled, points", "start")
    return _written(svg)


def _canvas(title: str, width: float, height: float) -> ElementTree.Element:
    """An empty picture, whose text and grid suit a light and a dark page."""
    shape = {"viewBox": f"0 0 {width:.0f} {height:.0f}", "font-family": "sans-serif", "font-size": "13"}
    svg = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **shape})
    ElementTree.SubElement(svg, "title").text = title
    dark = "@media (prefers-color-scheme: dark) { text { fill: #dddddd } .grid { stroke: #555555 } }"
    ElementTree.SubElement(svg, "style").text = "text { fill: #222222 } .grid { stroke: #cccccc } " + dark
    return svg


def _add(parent: ElementTree.Element, tag: str, group: str, **attributes: str | float) -> ElementTree.Element:
    named = {name: f"{value:.1f}" if isinstance(value, float) else str(value) for name, value in attributes.items()}
    return ElementTree.SubElement(parent, tag, {**({"class": group} if group else {}), **named})


def _text(parent: ElementTree.Element, x: float, y: float, words: str, anchor: str) -> None:
    _add(parent, "text", "", x=x, y=y, **{"text-anchor": anchor}).text = words


def _written(svg: ElementTree.Element) -> str:
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


if __name__ == "__main__":
    main()
