"""`read_profile_table`: ops that others measured on a device, from tables of layers, as samples of the device.

Three formats are told apart by their columns:

* Vidur's ``mlp.csv`` (Agrawal et al. 2024, arXiv 2405.05465): a row for each number of tokens of a transformer layer under tensor
  parallelism, times of kernels in ms, in 16 bits;
* Vidur's ``attention.csv``: a prompt's chunk, or one decoding step, behind a cache of keys and values;
* products with columns M, N, K, an element type and a time in us or ms, as benchmarks of inference engines write them; or any ops
  as lines of text (column ``op``, see `OpSpec`).
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpro_search.cluster import Sample
from dpro_search.costmodel.devices.ops import Floats
from dpro_search.costmodel.devices.written import OpSpec
from dpro_search.errors import InputError

Row = Mapping[str, str]
LEAST_US = 0.1
"""Time that no kernel falls below: the largest times of a table below it are in other units."""
LONGEST_US = 1e8
_PRECISIONS = {
    "fp32": "fp32", "float32": "fp32", "float": "fp32", "tf32": "tf32", "fp16": "fp16", "float16": "fp16", "half": "fp16",
    "bf16": "bf16", "bfloat16": "bf16", "fp8": "fp8", "fp8_e4m3": "fp8", "float8_e4m3fn": "fp8", "float8_e4m3fnuz": "fp8",
    "fp8_block": "fp8", "mxfp8": "fp8", "int8": "int8", "fp4": "fp4", "nvfp4": "fp4", "mxfp4": "fp4",
}  # fmt: skip
_BLOCK_SCALED = ("fp8_block", "mxfp8", "nvfp4", "mxfp4", "fp4")
_TIMES = {f"{prefix}{unit}": factor for unit, factor in (("us", 1.0), ("ms", 1e3))
          for prefix in ("", "time_", "latency_", "median_", "mean_", "avg_", "kernel_")}  # fmt: skip


class ProfiledOps(NamedTuple):
    """Ops of a table and their times, us, [n]; `left_out` says in words what was not used."""

    specs: tuple[OpSpec, ...]
    us: Floats
    left_out: tuple[str, ...]

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Samples of a device file; ops that were measured several times count once, with their median."""
        us_of: dict[OpSpec, list[float]] = {}
        for spec, us in zip(self.specs, self.us.tolist(), strict=True):
            us_of.setdefault(spec, []).append(us)
        return tuple(Sample(str(spec), float(np.median(times))) for spec, times in us_of.items())


def read_profile_table(path: Path, *, precision: str = "fp16") -> ProfiledOps:
    """Ops of a table in one of the formats above.

    Parameters
    ----------
    precision
        Element type of rows that do not name one.

    Raises
    ------
    InputError
        The file cannot be read, has none of these formats, a value is no number, or its times are not in the format's unit.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = tuple(reader.fieldnames or ())
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read as a table: {error}") from error
    plain = {name: name.strip().lower() for name in columns}
    if len(set(plain.values())) < len(columns):
        raise InputError(f"{path}: two columns have the same name")
    rows = [{plain[name]: (value or "").strip() for name, value in row.items() if name in plain} for row in rows]
    table = _format_of(path, tuple(plain.values()))
    left_out = Counter[str]()
    pairs: list[tuple[OpSpec, float]] = []
    for number, row in enumerate(rows):
        try:
            pairs += table.ops(row, precision, left_out)
        except (ValueError, KeyError) as error:  # an InputError is a ValueError, too
            raise InputError(f"{path}: line {number + 2}: {error}") from error
    unknown = [name for name in plain.values() if name not in table.known and not name.startswith(_IGNORED)]
    reasons = [f"{path.name}: columns that nothing is known of: {', '.join(unknown)}"] if unknown else []
    reasons += [f"{path.name}: {count} {reason}" for reason, count in sorted(left_out.items())]
    us = np.array([time for _, time in pairs])
    _check_units(path, us)
    return ProfiledOps(tuple(spec for spec, _ in pairs), us, tuple(reasons))


class _ProfileFormat(NamedTuple):
    ops: Callable[[Row, str, Counter[str]], Iterator[tuple[OpSpec, float]]]
    known: Sequence[str]


def _format_of(path: Path, columns: Sequence[str]) -> _ProfileFormat:
    times = [name for name in columns if name in _TIMES]
    if {"num_tokens", "n_embd", "n_head"} <= set(columns):
        return _ProfileFormat(_layer_ops, (*_LAYER_SIZES, *(_median(name) for name in _LAYER_OPS), *_OTHER_STATISTICS))
    if {"batch_size", "kv_cache_size", "is_prefill"} <= set(columns):
        return _ProfileFormat(_attention_ops, (*_ATTENTION_SIZES, *map(_median, _ATTENTION_TIMES), *_OTHER_STATISTICS))
    if times and ("op" in columns or {"m", "n", "k"} <= set(columns)):
        return _ProfileFormat(_products(times[0]), ("op", "m", "n", "k", "batch", "dtype", "precision", "backend", times[0]))
    raise InputError(
        f"{path}: no table of ops; it needs num_tokens, n_embd and n_head (Vidur's mlp.csv), batch_size, kv_cache_size and "
        "is_prefill (its attention.csv), or m, n, k (or op) and a time in us or ms"
    )


def _check_units(path: Path, us: Floats) -> None:
    if len(us) and float(us.max()) < LEAST_US:
        raise InputError(f"{path}: the longest op takes {us.max():.3g} us, less than any kernel; are the times in seconds?")
    if len(us) and float(np.median(us)) > LONGEST_US / 1e3:
        raise InputError(f"{path}: half of the ops take more than {np.median(us):.3g} us; are the times in us, not in ms?")


def _median(name: str) -> str:
    return f"time_stats.{name}.median"


_IGNORED = tuple(f"time_stats.{name}" for name in ("attn_input_reshape", "attn_output_reshape"))  # views: nothing is computed
_LAYER_SIZES = (
    "num_tokens", "n_embd", "n_head", "n_kv_head", "n_expanded_embd", "vocab_size", "use_gated_mlp", "num_tensor_parallel_workers",
    "dtype", "precision", "model_name", "",
)  # fmt: skip
_LAYER_OPS = (
    "emb", "input_layernorm", "post_attention_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj", "mlp_up_proj", "mlp_act",
    "act", "mlp_down_proj", "add",
)  # fmt: skip
_ATTENTION_SIZES = (
    "batch_size", "prefill_chunk_size", "kv_cache_size", "is_prefill", "n_embd", "n_head", "n_q_head", "n_kv_head", "block_size",
    "num_tensor_parallel_workers", "max_model_len", "attention_backend", "dtype", "precision", "model_name", "",
)  # fmt: skip
_ATTENTION_TIMES = ("attn_prefill", "attn_decode", "attn_kv_cache_save")
_OTHER_STATISTICS = tuple(
    f"time_stats.{name}.{statistic}" for name in (*_LAYER_OPS, *_ATTENTION_TIMES) for statistic in ("min", "max", "mean", "std")
)


def _layer_ops(row: Row, precision: str, left_out: Counter[str]) -> Iterator[tuple[OpSpec, float]]:
    """Ops of one number of tokens, split over the workers as Megatron splits them."""
    split = _whole(row, "num_tensor_parallel_workers", 1)
    tokens, hidden, heads = (_whole(row, name) for name in ("num_tokens", "n_embd", "n_head"))
    kv_heads, head_dim = _whole(row, "n_kv_head", heads), hidden // heads
    inner = _whole(row, "n_expanded_embd")
    gated = row.get("use_gated_mlp", "").lower() in ("true", "1", "1.0")
    queries, keys = max(heads // split, 1) * head_dim, max(kv_heads // split, 1) * head_dim
    up = (2 if gated else 1) * inner // split
    norm = ("rms_norm" if gated else "layer_norm", {"rows": tokens, "length": hidden})
    activation = ("silu_mul" if gated else "gelu", {"rows": tokens, "length": inner // split})
    specs: dict[str, tuple[str, dict[str, int]]] = {
        "emb": ("embedding", {"rows": tokens, "length": hidden}),
        "input_layernorm": norm,
        "post_attention_layernorm": norm,
        "attn_pre_proj": ("gemm", {"m": tokens, "n": queries + 2 * keys, "k": hidden, "transposes": 1}),
        "attn_rope": ("rope", {"rows": tokens, "length": queries + keys}),
        "attn_post_proj": ("gemm", {"m": tokens, "n": hidden, "k": queries, "transposes": 1}),
        "mlp_up_proj": ("gemm", {"m": tokens, "n": up, "k": hidden, "transposes": 1}),
        "mlp_act": activation,
        "act": activation,
        "mlp_down_proj": ("gemm", {"m": tokens, "n": hidden, "k": inner // split, "transposes": 1}),
        "add": ("add", {"rows": tokens, "length": hidden}),
    }
    for column, (name, sizes) in specs.items():
        us = _time_us(row, _median(column), 1e3)
        if us is not None:
            yield _spec(name, _precision(row, precision), sizes), us


def _attention_ops(row: Row, precision: str, left_out: Counter[str]) -> Iterator[tuple[OpSpec, float]]:
    """Attention of a chunk of a prompt, or of one token for each sequence, behind a cache; and the copy into the cache."""
    split, batch = _whole(row, "num_tensor_parallel_workers", 1), _whole(row, "batch_size")
    all_heads = _whole(row, "n_q_head", _whole(row, "n_head", 0))
    if not all_heads:
        raise InputError("n_q_head (or n_head) is missing")
    head_dim = _whole(row, "n_embd") // all_heads
    heads, kv_heads = max(all_heads // split, 1), max(_whole(row, "n_kv_head", all_heads) // split, 1)
    prefill = row["is_prefill"].lower() in ("true", "1", "1.0")
    queries = _whole(row, "prefill_chunk_size") if prefill else 1
    dtype = _precision(row, precision)
    us = _time_us(row, _median("attn_prefill" if prefill else "attn_decode"), 1e3)
    if us is None:
        left_out["rows without a time of attention"] += 1
    else:
        keys = queries + _whole(row, "kv_cache_size")
        sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "queries": queries, "keys": keys, "head_dim": head_dim}
        yield _spec("attention", dtype, sizes), us
    copied_us = _time_us(row, _median("attn_kv_cache_save"), 1e3)
    if copied_us is not None:
        yield OpSpec.of("copy", dtype, rows=batch * queries, length=2 * kv_heads * head_dim), copied_us


def _products(time: str) -> Callable[[Row, str, Counter[str]], Iterator[tuple[OpSpec, float]]]:
    def ops(row: Row, precision: str, left_out: Counter[str]) -> Iterator[tuple[OpSpec, float]]:
        us = _time_us(row, time, _TIMES[time])
        if us is None:
            left_out["rows without a time"] += 1
        elif row.get("op", "").count("="):
            yield OpSpec.parse(row["op"]), us
        elif not all(row.get(name) for name in ("m", "n", "k")):
            left_out["rows without m, n and k"] += 1
        else:
            sizes = {name: _whole(row, name) for name in ("m", "n", "k")} | {"batch": _whole(row, "batch", 1)}
            scaled = int((row.get("dtype") or row.get("precision") or "").lower() in _BLOCK_SCALED)
            yield _spec("gemm", _precision(row, precision), sizes | {"transposes": 1, "block_scaled": scaled}), us

    return ops


def _spec(name: str, precision: str, sizes: Mapping[str, int]) -> OpSpec:
    return OpSpec(name=name, precision=precision, sizes=tuple(sizes.items()))


def _whole(row: Row, name: str, otherwise: int | None = None) -> int:
    text = row.get(name, "")
    if not text and otherwise is not None:
        return otherwise
    number = float(text) if text else float("nan")
    if not 0 <= number < 2**40:
        raise InputError(f"{name} must be a number of at least 0, not '{text}'")
    return int(number)


def _time_us(row: Row, name: str, factor: float) -> float | None:
    """Time of a column; None: the op was not timed in this row."""
    us = float(row.get(name) or "nan") * factor
    return us if 0 < us < LONGEST_US else None


def _precision(row: Row, otherwise: str) -> str:
    named = (row.get("dtype") or row.get("precision") or otherwise).lower().removeprefix("torch.")
    if named not in _PRECISIONS:
        raise InputError(f"element type '{named}' is not known; use {', '.join(sorted(set(_PRECISIONS.values())))}")
    return _PRECISIONS[named]
