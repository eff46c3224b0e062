"""Means over targets and seeds, as JSON and as tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

CROSS_DEVICE = (
    "shipped",
    "families",
    "other-families",
    "devices",
    "sources",
    "xgboost",
    "unprobed",
    "noise",
    "targets",
    "random-samples",
)
ERRORS = ("mape_pct", "median_ape_pct", "p90_ape_pct", "covered_pct")


def summary(found: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Of rows by "part/seed": macro means (each target alike) over seeds, and their standard deviation between seeds."""
    return {
        "cross_device": _by(found, CROSS_DEVICE, ("predictor", "left_out", "budget"), "target"),
        "by_source": _by(found, CROSS_DEVICE, ("predictor", "left_out", "budget", "source"), "target"),
        "by_target": _by(
            found,
            ("shipped", "families", "other-families", "devices", "sources"),
            ("predictor", "left_out", "budget", "target"),
            "target",
        ),
        "moved_ops": _by(found, ("moved",), ("predictor", "kind"), "target"),
        "cross_model": _by(found, ("cross-model", "shipped-models"), ("left_out", "source", "passes"), "model"),
        "by_model": _by(found, ("cross-model", "shipped-models"), ("left_out", "model", "passes"), "target"),
        "whole_steps": _by(found, ("cross-model", "shipped-models", "whole-steps"), ("left_out", "budget", "step"), "case"),
    }


def _by(
    found: Mapping[str, Sequence[dict[str, Any]]], parts: Sequence[str], keys: Sequence[str], unit: str
) -> list[dict[str, Any]]:
    cells: dict[tuple[Any, ...], dict[str, dict[str, list[dict[str, Any]]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for name, rows in found.items():
        part, seed = name.split("/")
        if part not in parts:
            continue
        for row in rows:
            full = {
                **row,
                "source": str(row.get("model") or row["target"]).split(" ")[0],
                "case": f"{row['target']} {row.get('model')}",
            }
            if all(key in full for key in keys) and ("step" in keys) == ("step" in row):
                cells[tuple(full[key] for key in keys)][seed][full[unit]].append(full)
    result = []
    for key, seeds in sorted(cells.items(), key=lambda pair: tuple(map(str, pair[0]))):
        line: dict[str, Any] = dict(zip(keys, key, strict=True))
        line["units"] = max(len(units) for units in seeds.values())
        line["rows"] = int(np.mean([sum(row["rows"] for rows in units.values() for row in rows) for units in seeds.values()]))
        for error in ERRORS:
            means = [
                float(np.mean([np.mean([row[error] for row in rows]) for rows in units.values() if rows[0].get(error) is not None]))
                for units in seeds.values()
                if any(rows[0].get(error) is not None for rows in units.values())
            ]
            if means:
                line[error] = round(float(np.mean(means)), 2)
                if error == "mape_pct":
                    line["mape_sd_seeds"] = round(float(np.std(means)), 2)
        result.append(line)
    return result


def shown(found: Mapping[str, list[dict[str, Any]]]) -> str:
    """As Markdown tables."""
    parts = []
    for title, lines in found.items():
        if lines:
            names = list(dict.fromkeys(name for line in lines for name in line))
            head = f"| {' | '.join(names)} |\n|{'---|' * len(names)}"
            body = "\n".join(f"| {' | '.join(str(line.get(name, '-')) for name in names)} |" for line in lines)
            parts.append(f"**{title}**\n\n{head}\n{body}")
    return "\n\n".join(parts)
