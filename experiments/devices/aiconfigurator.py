"""Ops of inference engines in the package ``aiconfigurator-core`` (Apache-2.0): bf16 products and attention, in CUDA graphs.

The package holds shapes for three engines. Used is vLLM: its products are PyTorch's (``torch.nn.functional.linear``), its
attention is FlashAttention. How far the other engines' products are from it is the noise floor; their attention is of other
kernels.
"""

from __future__ import annotations

from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from dpro_search.costmodel.devices.ops import Ops, Stack, attention, gemm
from dpro_search.errors import InputError
from experiments.devices.table import Table, device_of, joined_tables, table

ENGINE = "vllm"
ONE_IN = {"gemm": 8, "context": 8, "encoder": 2}
"""Of the shapes: the package has 35,742 products for each system."""
_NAMES = {"a100_sxm": "a100-sxm-80gb", "b200_sxm": "b200-sxm", "b300_sxm": "b300-sxm", "h100_sxm": "h100-sxm",
          "h200_sxm": "h200-sxm", "rtx_pro_6000_server": "rtx-pro-6000-server"}  # fmt: skip


def systems_folder(given: Path | None) -> Path | None:
    """Where the package's tables are: below a folder that was given, or in the package if it is installed."""
    if given is not None:
        found = sorted(given.rglob("systems/data"))
        if not found:
            raise InputError(f"{given}: no systems/data in it; unpack the package aiconfigurator-core there")
        return found[0]
    spec = find_spec("aiconfigurator_core")
    return Path(spec.origin).parent / "systems" / "data" if spec is not None and spec.origin else None


def read(folder: Path | None, skipped: list[str]) -> list[Table]:
    """Tables by system; what is left out is told in `skipped`."""
    if folder is None:
        skipped.append("aiconfigurator-core is not installed: its tables are left out (pip install aiconfigurator-core pyarrow)")
        return []
    found = []
    for path in sorted(folder.iterdir()):
        name = _NAMES.get(path.name, path.name)
        try:
            device_of(name)
        except InputError as error:
            skipped.append(f"aiconfigurator {error}")
            continue
        ops: list[Table] = []
        for kind, pattern in (
            ("gemm", "gemm/*/*/gemm_perf.parquet"),
            ("context", "attention/*/*/context_attention_perf.parquet"),
            ("encoder", "encoder_attention/*/*/encoder_attention_perf.parquet"),
        ):
            by_engine = {file.parts[-3]: file for file in sorted(path.glob(pattern))}  # the last version of each
            pair = _read(by_engine[ENGINE], kind) if ENGINE in by_engine else None
            if pair is not None:
                ops.append(table(*pair, f"aiconfigurator {name}"))
        if ops:
            found.append(joined_tables(ops))
    return found


def between_engines(folder: Path) -> dict[str, Any]:
    """|log(latency / that of vLLM)| of products that another engine has, too, by system."""
    found = {}
    for path in sorted(folder.iterdir()):
        tables = {file.parts[-3]: _read(file, "gemm") for file in sorted(path.glob("gemm/*/*/gemm_perf.parquet"))}
        usual = tables.pop(ENGINE, None)
        if usual is None:
            continue
        own = {tuple(row): us for row, us in zip(_sizes(usual[0]), usual[1], strict=True)}
        logs = [
            abs(np.log(us / own[tuple(row)]))
            for pair in tables.values()
            if pair is not None
            for row, us in zip(_sizes(pair[0]), pair[1], strict=True)
            if tuple(row) in own
        ]
        if logs:
            found[f"aiconfigurator {_NAMES.get(path.name, path.name)}"] = np.array(logs)
    return found


def _sizes(ops: Ops) -> list[list[float]]:
    return np.column_stack([ops.m, ops.n, ops.k]).tolist()  # type: ignore[no-any-return]


def _read(file: Path, kind: str) -> tuple[Ops, Any] | None:
    import pyarrow.parquet as parquet

    rows = parquet.read_table(file)
    columns: dict[str, Any] = defaultdict(lambda: None)
    for name in rows.column_names:
        columns[name] = rows[name].to_numpy(zero_copy_only=False)
    keep = columns["latency"] > 0
    if kind == "gemm":
        keep &= columns["gemm_dtype"] == "bfloat16"
        sizes = [columns[name].astype(np.int64) for name in ("m", "n", "k")]
    else:
        keep &= columns["attn_dtype"] == "bfloat16"
        sizes = [columns[name].astype(np.int64) for name in ("batch_size", "isl", "num_heads", "head_dim")]
    if kind == "context":
        keep &= (columns["kv_cache_dtype"] == "bfloat16") & (columns["window_size"] == 0) & (columns["step"] == 0)
        keep &= columns["beam_width"] == 1
    keep &= _spread(sizes) % ONE_IN[kind] == 0
    if not keep.any():
        return None
    us = columns["latency"][keep].astype(float) * 1e3
    chosen = [size[keep].astype(float) for size in sizes]
    if kind == "gemm":
        m, n, k = chosen
        return gemm(m, n, k, precision="bf16", stack=Stack.SERVING, transposes=1.0), us
    batch, length, heads, head_dim = chosen
    kv_heads = columns["num_key_value_heads"][keep].astype(float) if kind == "context" else heads
    kv_heads = np.where(kv_heads == 0, heads, kv_heads)
    causal = kind == "context"
    return attention(batch, heads, kv_heads, length, length, head_dim, causal=causal, precision="bf16", stack=Stack.SERVING), us


def _spread(sizes: list[Any]) -> Any:
    """A number of each shape, the same on every system, so that shapes are drawn without regard to their latency."""
    found = np.zeros(len(sizes[0]), dtype=np.uint64)
    for size in sizes:
        found = (found * np.uint64(1000003)) ^ size.astype(np.uint64)
        found = found ^ (found >> np.uint64(7)) * np.uint64(0x9E3779B97F4A7C15)
    return (found >> np.uint64(17)).astype(np.int64)
