"""Ops of inference engines in the package ``aiconfigurator-core`` (Apache-2.0): products, attention, experts, in CUDA graphs.

The package holds shapes for three engines. Used is vLLM: its products are PyTorch's (``torch.nn.functional.linear``), its attention
is FlashAttention. How far the other engines' products are from it is the noise floor; their attention is of other kernels.

Other engines are used where vLLM's table shows no kernels. Its products with scaled blocks take at least 56 us (H100) to 290 us
(L40S), so that launches are in them: products in 8 and 4 bits are SGLang's, which hold the quantization of the left operand. Latent
attention is TensorRT-LLM's: vLLM's tables hold it together with the products around it. Experts in fp8 with one scale for each
tensor are left out: on H100 they take five times what reading their weights takes, and twice what bf16 takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpro_search.cluster import Device
from dpro_search.costmodel.devices.ops import ELEMENT_BYTES, Ops, Stack, attention, experts, gemm, latent_attention, streamed
from dpro_search.costmodel.devices.profile import peak_flops_per_s
from dpro_search.costmodel.devices.written import STREAMED
from dpro_search.errors import InputError
from experiments.devices.table import Table, device_of, joined_tables, table

ENGINE, QUANTIZED_ENGINE = "vllm", "sglang"
ONE_IN = {
    "gemm": 8, "quantized": 8, "context": 8, "encoder": 2, "generation": 8, "experts": 4, "bmm": 1, "quantize": 2, "latent": 2,
}  # fmt: skip
"""One in so many shapes of each kind is read: the package has 35,742 products for each system and precision."""
PRECISIONS = {"bfloat16": ("bf16", False), "fp8": ("fp8", False), "fp8_block": ("fp8", True), "nvfp4": ("fp4", True)}
"""Its types of operands, with whether they have a scale for each block; others have weights of 4 bits and products of 16."""
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


class _TableKind(NamedTuple):
    engine: str
    pattern: str
    ops: Callable[[Mapping[str, Any], str, bool], Ops]
    sizes: tuple[str, ...]  # Columns that tell shapes apart.
    dtype: str = ""  # Column of the operands' type; empty: bf16.
    dtypes: tuple[str, ...] = ("bfloat16",)  # Types that are used.
    drawn_by: int | None = None  # Number of the first sizes that decide whether a row is used; None: all.


def read(folder: Path | None, skipped: list[str]) -> list[Table]:
    """Tables by system; what is left out is told in `skipped`."""
    if folder is None:
        skipped.append("aiconfigurator-core is not installed: its tables are left out (pip install aiconfigurator-core pyarrow)")
        return []
    tables = []
    for path in sorted(folder.iterdir()):
        name = _NAMES.get(path.name, path.name)
        try:
            device = device_of(name)
        except InputError as error:
            skipped.append(f"aiconfigurator {error}")
            continue
        parts = [table(ops, us, f"aiconfigurator {name}") for ops, us in _of_system(path, device)]
        if parts:
            tables.append(joined_tables(parts))
    return tables


def _of_system(path: Path, device: Device) -> Iterator[tuple[Ops, Any]]:
    for name, kind in _TABLE_KINDS.items():
        last: dict[str, Path] = {}  # By name, the table of the last version of the engine.
        for file in sorted(path.glob(kind.pattern), key=_version):
            if file.parts[-3] == kind.engine:
                last[file.name] = file
        for file in last.values():
            yield from _of_table(file, name, kind, device)


def _version(file: Path) -> list[int]:
    """Numbers of a version like 0.5.14 or 1.3.0rc20."""
    return [int(number) for number in re.findall(r"\d+", file.parts[-2])]


def _of_table(file: Path, name: str, kind: _TableKind, device: Device) -> Iterator[tuple[Ops, Any]]:
    columns = _columns_of(file)
    for dtype in kind.dtypes:
        precision, block_scaled = PRECISIONS[dtype]
        if peak_flops_per_s(device, precision) is None:
            continue
        keep = _usable(columns) & (columns[kind.dtype] == dtype if kind.dtype else True)
        keep &= _spread([columns[size].astype(np.int64) for size in kind.sizes[: kind.drawn_by]]) % ONE_IN[name] == 0
        if keep.any():
            chosen = {column: values[keep] for column, values in columns.items()}
            us = chosen["latency"].astype(float) * 1e3
            yield kind.ops({size: chosen[size].astype(float) for size in kind.sizes}, precision, block_scaled), us


def _columns_of(file: Path) -> dict[str, Any]:
    import pyarrow.parquet as parquet

    rows = parquet.read_table(file)
    return {name: rows[name].to_numpy(zero_copy_only=False) for name in rows.column_names}


# Values that a row must have, where its table has the column: attention in bf16 over all keys, experts that get tokens alike.
_USUAL = {
    "attn_dtype": "bfloat16", "mla_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "window_size": 0, "beam_width": 1,
    "distribution": "balanced", "quant_dtype": "fp8",
}  # fmt: skip


def _usable(columns: Mapping[str, Any]) -> Any:
    keep = columns["latency"] > 0
    for name, value in _USUAL.items():
        if name in columns:
            keep = keep & (columns[name] == value)
    return keep


def _gemm(size: Mapping[str, Any], precision: str, block_scaled: bool) -> Ops:
    sizes = (size[name] for name in ("m", "n", "k"))
    return gemm(*sizes, precision=precision, stack=Stack.SERVING, transposes=1.0, block_scaled=block_scaled)


def _quantized_gemm(size: Mapping[str, Any], precision: str, block_scaled: bool) -> Ops:
    """The left operand is read in 16 bits and written in 8 or 4, then comes the product."""
    m, n, k = (size[name] for name in ("m", "n", "k"))
    return gemm(
        m, n, k, precision=precision, stack=Stack.SERVING, transposes=1.0, block_scaled=block_scaled,
        stream_bytes=(2 + ELEMENT_BYTES[precision]) * m * k,
    )  # fmt: skip


def _attention(size: Mapping[str, Any], precision: str, _: bool) -> Ops:
    """Attention of a prompt, causal, or of an encoder, whose table has no heads of keys."""
    batch, length, heads, head_dim = (size[name] for name in ("batch_size", "isl", "num_heads", "head_dim"))
    causal = "num_key_value_heads" in size
    kv_heads = np.where(size["num_key_value_heads"] == 0, heads, size["num_key_value_heads"]) if causal else heads
    return attention(batch, heads, kv_heads, length, length, head_dim, causal=causal, precision=precision, stack=Stack.SERVING)


def _decoding(size: Mapping[str, Any], precision: str, _: bool) -> Ops:
    """One query for each sequence, behind `step` keys."""
    batch, heads, head_dim = (size[name] for name in ("batch_size", "num_heads", "head_dim"))
    kv_heads = np.where(size["num_key_value_heads"] == 0, heads, size["num_key_value_heads"])
    return attention(batch, heads, kv_heads, 1.0, size["step"] + 1, head_dim, causal=True, precision=precision, stack=Stack.SERVING)


def _latent(size: Mapping[str, Any], precision: str, _: bool) -> Ops:
    queries = size["isl"]
    return latent_attention(size["batch_size"], size["num_heads"], queries, queries + size["step"], precision=precision)


def _experts(size: Mapping[str, Any], precision: str, block_scaled: bool) -> Ops:
    names = ("num_tokens", "hidden_size", "inter_size", "num_experts", "topk", "moe_tp_size", "moe_ep_size")
    tokens, hidden, inner, all_experts, top_k, split, groups = (size[name] for name in names)
    local = np.maximum(all_experts / groups, 1.0)
    return experts(
        tokens, hidden, np.maximum(inner / split, 1.0), local, top_k,
        all_experts=all_experts, precision=precision, block_scaled=block_scaled,
    )  # fmt: skip


_LATENT, _HEAD_DIM = 512.0, 128.0  # of DeepSeek-V3


def _latent_products(size: Mapping[str, Any], precision: str, _: bool) -> Ops:
    """Products of each head, from its size to that of the latent vector; those back have the same FLOPs."""
    return gemm(size["num_tokens"], _LATENT, _HEAD_DIM, batch=size["num_heads"], precision=precision, stack=Stack.SERVING)


def _quantize(size: Mapping[str, Any], precision: str, _: bool) -> Ops:
    """From 16 bits to those of `precision`."""
    op, rows, length = STREAMED["quantize"], size["m"], size["k"]
    return streamed(
        op.kind, rows, length, moved=op.tensors * ELEMENT_BYTES[precision] * rows * length, precision=precision, stack=Stack.SERVING
    )


_HEADS = ("batch_size", "isl", "num_heads", "head_dim")
_TABLE_KINDS = {
    "gemm": _TableKind(ENGINE, "gemm/*/*/gemm_perf.parquet", _gemm, ("m", "n", "k"), "gemm_dtype"),
    "quantized": _TableKind(
        QUANTIZED_ENGINE, "gemm/*/*/gemm_perf.parquet", _quantized_gemm, ("m", "n", "k"), "gemm_dtype",
        ("fp8", "fp8_block", "nvfp4"),
    ),
    "context": _TableKind(
        ENGINE, "attention/*/*/context_attention_perf.parquet", _attention, (*_HEADS, "num_key_value_heads"),
        drawn_by=len(_HEADS),
    ),
    "encoder": _TableKind(ENGINE, "encoder_attention/*/*/encoder_attention_perf.parquet", _attention, _HEADS),
    "generation": _TableKind(
        ENGINE, "attention/*/*/generation_attention_perf.parquet", _decoding, (*_HEADS, "num_key_value_heads", "step")
    ),
    "experts": _TableKind(
        ENGINE, "moe/*/*/moe_perf.parquet", _experts,
        ("num_tokens", "hidden_size", "inter_size", "num_experts", "topk", "moe_tp_size", "moe_ep_size"), "moe_dtype",
        ("bfloat16", "fp8_block", "nvfp4"),
    ),
    "bmm": _TableKind(ENGINE, "mla_bmm/*/*/mla_bmm_perf.parquet", _latent_products, ("num_tokens", "num_heads"), "bmm_dtype"),
    "quantize": _TableKind(ENGINE, "quantize/*/*/scale_matrix_perf.parquet", _quantize, ("m", "k"), dtypes=("fp8",)),
    "latent": _TableKind("trtllm", "mla/*/*/*_mla_perf.parquet", _latent, ("batch_size", "isl", "num_heads", "step")),
}  # fmt: skip


def between_engines(folder: Path) -> dict[str, Any]:
    """|log(latency / that of vLLM)| of bf16 products that another engine has, too, by system."""
    distances = {}
    for path in sorted(folder.iterdir()):
        us_of = {file.parts[-3]: _products(file) for file in sorted(path.glob("gemm/*/*/gemm_perf.parquet"), key=_version)}
        usual = us_of.pop(ENGINE, {})
        logs = [abs(np.log(us / usual[size])) for other in us_of.values() for size, us in other.items() if size in usual]
        if logs:
            distances[f"aiconfigurator {_NAMES.get(path.name, path.name)}"] = np.array(logs)
    return distances


def _products(file: Path) -> dict[tuple[float, ...], float]:
    """Latencies of bf16 products by their sizes, those that `ONE_IN` keeps."""
    columns = _columns_of(file)
    sizes = [columns[name].astype(np.int64) for name in ("m", "n", "k")]
    keep = _usable(columns) & (columns["gemm_dtype"] == "bfloat16") & (_spread(sizes) % ONE_IN["gemm"] == 0)
    chosen = np.column_stack(sizes)[keep].tolist()
    return {tuple(size): us for size, us in zip(chosen, columns["latency"][keep].tolist(), strict=True)}


def _spread(sizes: list[Any]) -> Any:
    """A number of each shape, the same on every system, so that shapes are drawn without regard to their latency."""
    found = np.zeros(len(sizes[0]), dtype=np.uint64)
    for size in sizes:
        found = (found * np.uint64(1000003)) ^ size.astype(np.uint64)
        found = found ^ (found >> np.uint64(7)) * np.uint64(0x9E3779B97F4A7C15)
    return (found >> np.uint64(17)).astype(np.int64)
