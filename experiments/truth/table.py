"""`table_html`: all published runs, predicted and measured, as one page with filters, a picture and figures of what is shown.

The page holds the runs' data, so that it is written where somebody has them, and is no part of the project.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dpro_search.errors import DproSearchError
from dpro_search.parallel.answers.accuracy import accuracy
from dpro_search.parallel.costs.domain import domain_of
from dpro_search.parallel.model import Network
from experiments.truth.contradictions import contradictions
from experiments.truth.jobs import workload_of
from experiments.truth.rows import Row
from experiments.truth.score import Predicted, Scored

_TEMPLATE = Path(__file__).with_name("table.html")
_STRATEGY = ("dp", "tp", "pp", "cp", "ep", "zero_stage", "micro_batch", "recompute")
_ROUNDED = 5  # digits


def table_html(scored: Sequence[Scored], peers: Mapping[str, Callable[[Row], Predicted]]) -> str:
    """The page.

    Parameters
    ----------
    scored
        Runs with our predictions.
    peers
        Other predictors, by name, whose predictions of the same runs stand beside ours.
    """
    timed = [one for one in scored if one.timed]
    wrong = contradictions([one.row for one in timed])
    runs = [_run(one, peers, wrong.get(place, "")) for place, one in enumerate(timed)]
    data = json.dumps({"peers": list(peers), "runs": runs}, separators=(",", ":")).replace("</", "<\\/")
    return _TEMPLATE.read_text("utf-8").replace("{{on}}", escape(accuracy().on)).replace("{{data}}", data)


def _run(one: Scored, peers: Mapping[str, Callable[[Row], Predicted]], wrong: str) -> dict[str, Any]:
    row, workload = one.row, workload_of(one.row)
    device = workload.cluster.groups[0].host.device
    low_s, high_s = accuracy().interval_us(
        one.prediction.step_s, domain_of(workload), device.vendor if device.kind == "gpu" else ""
    )
    measured_s = row.number("step_time_s")
    assert measured_s is not None, "it is timed"
    return {
        "source": row.values["source"],
        "where": row.values.get("source_path", ""),
        "model": row.values["model"],
        "gpu": row.values["gpu"],
        "gpus": int(row.number("n_gpus") or 0),
        "framework": row.values.get("framework", ""),
        "precision": row.values.get("precision", ""),
        "batch": row.values.get("global_batch", ""),
        "sequence": row.values.get("seq_len", ""),
        "strategy": " ".join(f"{name}={row.values[name]}" for name in _STRATEGY if row.values.get(name)),
        "measured": _rounded(measured_s),
        "predicted": _rounded(one.prediction.step_s),
        "interval": [_rounded(low_s), _rounded(high_s)],
        # Formulas of peers are those of transformers.
        "peers": [None if isinstance(workload.model, Network) else _peer(predict, row) for predict in peers.values()],
        "contradicts": wrong,
    }


def _peer(predict: Callable[[Row], Predicted], row: Row) -> float | None:
    try:
        step_s = predict(row).step_s
    except DproSearchError:
        return None
    return _rounded(step_s) if math.isfinite(step_s) else None


def _rounded(value: float) -> float:
    return float(f"{value:.{_ROUNDED}g}")
