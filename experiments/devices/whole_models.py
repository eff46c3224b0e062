"""Whole models of NeuSight: the sum of predicted ops beside measured inference and training steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpro_search.costmodel.devices.ops import Floats, Ops, joined
from experiments.devices.neusight import ModelOp, labels, model_ops

Predict = Callable[[str, str, Ops], Floats | None]
"""Of a device, a model and n ops: their latencies, us, [n]; None: it cannot."""


def cases(folder: Path) -> list[dict[str, Any]]:
    """Labels with the ops of their model; ops are the same on every device that ran the model."""
    graphs: dict[tuple[Any, ...], list[ModelOp]] = defaultdict(list)
    for op in model_ops(folder):
        graphs[op.model, op.mode, op.sequence, op.batch, op.device].append(op)
    found = []
    for row in labels(folder):
        key = row["model"], row["mode"], int(row["seq"]), int(row["batch"])
        device = row["device"].replace("_", "-")
        same = [ops for name, ops in graphs.items() if name[:4] == key]
        if not same:
            continue
        found.append(
            {
                "device": device,
                "model": row["model"],
                "mode": row["mode"],
                "layers": float(row["num_layer"] or 0),
                "measured_us": float(row["e2e_latency"]) * 1e3,
                "ops": max(same, key=len),
                "own": graphs.get((*key, device)),
            }
        )
    return found


def predicted_us(case: Mapping[str, Any], predict: Predict) -> float | None:
    """The sum of a case's ops, layers counted as often as the model has them."""
    parts: list[Ops] = []
    counts: list[float] = []
    for op in case["ops"]:
        times = case["layers"] if op.repeated else 1.0
        passes = (op.forward, op.backward) if case["mode"] == "train" else (op.forward,)
        for one in passes:
            if one is not None:
                parts.append(one)
                counts.append(times)
    us = predict(case["device"], case["model"], joined(parts))
    return None if us is None else float((us * np.array(counts)).sum())


def measured_sum_us(case: Mapping[str, Any]) -> float | None:
    """The sum of the case's ops as they were measured on its device: what a predictor without error would say."""
    if case["own"] is None:
        return None
    return sum(
        (op.forward_us + (op.backward_us + op.accumulate_us if case["mode"] == "train" else 0.0))
        * (case["layers"] if op.repeated else 1.0)
        for op in case["own"]
        if op.forward is not None
    )


def errors_pct(found: Sequence[Mapping[str, Any]], predict: Callable[[Mapping[str, Any]], float | None]) -> Floats:
    """Absolute errors of the cases that can be predicted, %."""
    pairs = [(predict(case), case["measured_us"]) for case in found]
    return np.array([abs(us / measured - 1) * 100 for us, measured in pairs if us is not None])
