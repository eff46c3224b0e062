"""Tuned kernels of AMD's library AITER (MIT): products and experts in bf16, fp8, int8 and fp4, the best kernel of each shape."""

from __future__ import annotations

import csv
import gzip
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpro_search.cluster import Device
from dpro_search.costmodel.devices.ops import Ops, Stack, experts, gemm
from dpro_search.costmodel.devices.profile import peak_flops_per_s
from experiments.devices.table import Table, device_of, joined_tables, table

FILE = "aiter_tuned.csv.gz"
# Devices by architecture and number of compute units. The table leaves open which of two products with the same units it was:
# MI300X or MI325X (12 % in the memory's rate), MI350X or MI355X (9 % in peaks).
_DEVICES = {("gfx942", 304): "mi300x", ("gfx950", 256): "mi355x"}
_NEEDED = (
    "gfx", "device", "cu_num", "op", "dtype", "quant", "batch", "M", "N", "K", "us", "err", "token", "model_dim", "inter_dim",
    "experts", "topk",
)  # fmt: skip


class _Format(NamedTuple):
    precision: str
    block_scaled: bool


def read(folder: Path, skipped: list[str]) -> list[Table]:
    """Tables by device; what is left out is told in `skipped`."""
    path = folder / "tuned" / FILE
    if not path.is_file():
        return []
    with gzip.open(path, "rt", newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
        if missing:
            skipped.append(f"{path.name}: has no column {', '.join(missing)}")
            return []
        rows = list(reader)
    reasons: Counter[str] = Counter()
    groups: dict[tuple[str, str, _Format], list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        reason, key = _key(row)
        if key is None:
            reasons[reason] += 1
        else:
            groups[key].append(row)
    skipped += [f"{path.name}: {count} rows left out: {reason}" for reason, count in sorted(reasons.items())]
    parts: dict[str, list[Table]] = defaultdict(list)
    for (name, op, form), chosen in sorted(groups.items()):
        ops = _experts(chosen, form) if op == "fused_moe" else _products(chosen, form)
        parts[name].append(table(ops, np.array([float(row["us"]) for row in chosen]), f"aiter {name}"))
    return [joined_tables(some) for _, some in sorted(parts.items())]


def _key(row: dict[str, str]) -> tuple[str, tuple[str, str, _Format] | None]:
    """Device, op and format of a row, or the reason why it is left out."""
    units = float(row["cu_num"] or 0)
    name = _DEVICES.get((row["gfx"].split(" ")[0], int(units)))
    if name is None:
        return f"{row['device'] or row['gfx']} ({units:.0f} units): no data sheet is known", None
    if not row["us"] or not 0 < float(row["us"]) < float("inf"):
        return "no time", None
    if row["err"] and float(row["err"].rstrip("%")) > 0:
        return "the kernel's result differs from the right one", None
    if row["op"] not in ("gemm", "batched_gemm", "fused_moe"):
        return f"{row['op']}: an op of which only the name is known", None
    form = _format(row)
    if form is None:
        return f"operands of two precisions ({row['quant']})", None
    return _unknown(device_of(name), form), (name, row["op"], form) if peak_flops_per_s(device_of(name), form.precision) else None


def _unknown(device: Device, form: _Format) -> str:
    return f"{device.name} states no peak of {form.precision}"


def _format(row: dict[str, str]) -> _Format | None:
    """Precision of the products, and whether operands have a scale for each block; None: weights of another precision."""
    quant, dtype = row["quant"], row["dtype"]
    if row["op"] == "fused_moe":
        operands = [word.split("=")[1] for word in quant.split(" ")[:2]]
        scaled = "per_1x" in quant
        if operands[0] != operands[1]:
            return None
        known = {"bfloat16": "bf16", "float8_e4m3fnuz": "fp8", "float8_e4m3fn": "fp8", "float4_e2m1fn_x2": "fp4", "int8": "int8"}
        return _Format(known[operands[0]], scaled) if operands[0] in known else None
    if dtype in ("bf16", "bfloat16"):
        return _Format("bf16", False)
    if dtype == "fp4":
        return _Format("fp4", True)
    # "int8/fp8" with a scale for each block is fp8; both have the same peak.
    return _Format("int8" if dtype == "int8" else "fp8", "blockscale" in quant)


def _numbers(rows: list[dict[str, str]], *names: str) -> list[np.ndarray]:
    return [np.array([float(row[name] or 1) for row in rows]) for name in names]


def _products(rows: list[dict[str, str]], form: _Format) -> Ops:
    batch, m, n, k = _numbers(rows, "batch", "M", "N", "K")
    return gemm(
        m, n, k, batch=batch, precision=form.precision, stack=Stack.SERVING, transposes=1.0, block_scaled=form.block_scaled
    )  # fmt: skip


def _experts(rows: list[dict[str, str]], form: _Format) -> Ops:
    tokens, hidden, inner, number, top_k = _numbers(rows, "token", "model_dim", "inter_dim", "experts", "topk")
    return experts(
        tokens, hidden, inner, number, np.maximum(np.minimum(top_k, number), 1), precision=form.precision,
        block_scaled=form.block_scaled,
    )  # fmt: skip
