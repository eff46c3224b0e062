"""Ops of Megatron that Sailor profiled (MIT): forward and backward of 16 modules of three models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from dpro_search.cluster import Device
from dpro_search.costmodel.devices.ops import ELEMENT_BYTES, LibraryOpKind, Ops, Stack, gemm, joined, streamed
from dpro_search.errors import InputError
from experiments.devices.table import Table, device_of, joined_tables, read_columns, table

OUT_OF_MEMORY_US = 1e7
"""What the source writes where an op ran out of memory."""
SEQUENCE = 2048
_MIB = 2**20


class Dims(NamedTuple):
    """Of a model, as the sizes of its tensors in the table say; the names of the models leave the vocabulary open."""

    hidden: int
    heads: int
    vocabulary: int


def dims_of(rows: list[dict[str, Any]]) -> Dims:
    """Of the model that rows are of, all on one GPU; sizes are in MiB."""
    sizes = {row["op_name"]: row for row in rows if row["mbs"] == rows[0]["mbs"] and row["dtype"] == rows[0]["dtype"]}
    element = ELEMENT_BYTES[rows[0]["dtype"]]
    tokens = rows[0]["mbs"] * SEQUENCE
    hidden = round(sizes["enc-1st-layernorm"]["input_size"] * _MIB / (tokens * element))
    heads = round(sizes["enc-attention-softmax"]["activations"] * _MIB / (tokens * SEQUENCE * element))
    vocabulary = round(sizes["encoder-embedding"]["weights"] * _MIB / (hidden * element)) - SEQUENCE  # and positions
    return Dims(hidden, heads, vocabulary)


_NEEDED = (
    "op_name", "fwd_us", "bwd_us", "input_size", "weights", "activations", "device", "dtype", "model", "mbs", "tp", "oom",
)  # fmt: skip


def read(folder: Path, skipped: list[str], described: Mapping[str, Device] = MappingProxyType({})) -> list[Table]:
    """Tables by device; what is left out is told in `skipped`."""
    path = folder / "sailor" / "ops.parquet"
    read_in = read_columns(path, _NEEDED, skipped) if path.is_file() else None
    if read_in is None:
        return []
    columns = {name: read_in[name].tolist() for name in _NEEDED}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    bad = [row for row in rows if row["oom"] or max(row["fwd_us"], row["bwd_us"]) >= OUT_OF_MEMORY_US]
    if bad:
        skipped.append(f"{path.name}: {len(bad)} rows hold {OUT_OF_MEMORY_US:g} us, which stands for out of memory")
    # Split over GPUs some ops hold an all-reduce, and `algo` says which dim of a weight is split, so that shapes are not known.
    rows = [row for row in rows if not row["oom"] and row["tp"] == 1]
    dims = {model: dims_of([row for row in rows if row["model"] == model]) for model in sorted({row["model"] for row in rows})}
    found = []
    for name in sorted({row["device"] for row in rows}):
        try:
            device = device_of(name, described)
        except InputError as error:
            skipped.append(f"{path.name}: {error}")
            continue
        parts = [
            part
            for backward in (False, True)
            for model in dims
            if (part := _table(rows, name, device, model, dims[model], backward)) is not None
        ]
        if parts:
            found.append(joined_tables(parts))
    return found


def _table(rows: list[dict[str, Any]], name: str, device: Device, model: str, dims: Dims, backward: bool) -> Table | None:
    column = "bwd_us" if backward else "fwd_us"
    chosen = [row for row in rows if row["device"] == name and row["model"] == model and 0 < row[column] < OUT_OF_MEMORY_US]
    if not chosen:
        return None
    precisions = {"fp32": "fp32" if device.peak.tf32 is None else "tf32"}
    keys = [(row["op_name"], dims, row["mbs"], precisions.get(row["dtype"], row["dtype"])) for row in chosen]
    ops = joined([_op(*key, backward) for key in keys])
    return table(ops, np.array([row[column] for row in chosen]), f"sailor {name}", f"sailor {model}")


@cache
def _op(name: str, dims: Dims, batch: int, precision: str, backward: bool) -> Ops:
    hidden, heads, vocabulary = dims
    element = ELEMENT_BYTES[precision]
    tokens = batch * SEQUENCE
    x, scores = tokens * hidden * element, batch * heads * SEQUENCE * SEQUENCE * element
    masks = 1 / element
    own: dict[str, Any] = {"stack": Stack.MEGATRON, "backward": backward}
    product_precision, precision = precision, "fp32" if precision == "tf32" else precision

    def product(m: float, n: float, k: float, batch: float = 1.0, both: bool = False, bias: bool = True) -> Ops:
        times = 2.0 if backward and both else 1.0
        if backward and not both:
            n, k = k, n
        added = element * m * n if bias and not backward else 0.0
        return gemm(m, n, k, batch=batch, products=times, kernels=times, transposes=1 - backward, stream_bytes=added,
                    precision=product_precision, **own)  # fmt: skip

    if name == "encoder-embedding":
        table_bytes = vocabulary * hidden * element
        moved = 5 * table_bytes + 4 * x if backward else 6 * x
        return streamed(LibraryOpKind.EMBEDDING, tokens, hidden, moved=moved, kernels=3, precision=precision, **own)
    if "layernorm" in name:
        final = 1.0 if name.startswith("final") else 0.0
        return streamed(
            LibraryOpKind.NORM, tokens, hidden, moved=(4 if backward else 2) * x, special=final, precision=precision, **own
        )
    if name == "enc-attention-qkv":
        return product(tokens, 3 * hidden, hidden)
    if name == "enc-attention-score":
        return product(SEQUENCE, SEQUENCE, hidden // heads, batch * heads, both=True, bias=False)
    if name == "enc-attention-softmax":
        return streamed(
            LibraryOpKind.SOFTMAX,
            batch * heads * SEQUENCE,
            SEQUENCE,
            moved=(3 if backward else 2) * scores,
            special=1,
            precision=precision,
            **own,
        )
    if name == "enc-attention-dropout":
        rows = batch * heads * SEQUENCE
        return streamed(
            LibraryOpKind.ELEMENTWISE, rows, SEQUENCE, moved=(2 + masks) * scores, special=2, precision=precision, **own
        )
    if name == "enc-attention-context":
        return product(SEQUENCE, hidden // heads, SEQUENCE, batch * heads, both=True, bias=False)
    if name == "enc-attention-dense":
        return product(tokens, hidden, hidden, bias=False)
    if name in ("enc-post-attention-dropout", "enc-post-MLP-dropout"):
        moved = (2 + masks) * x if backward else (3 + masks) * x
        return streamed(LibraryOpKind.ELEMENTWISE, tokens, hidden, moved=moved, special=3, precision=precision, **own)
    if name == "enc-MLP-GEMM-1":
        return product(tokens, 4 * hidden, hidden)
    if name == "enc-MLP-gelu":
        moved = (12 if backward else 8) * x
        return streamed(LibraryOpKind.ELEMENTWISE, tokens, 4 * hidden, moved=moved, special=4, precision=precision, **own)
    if name == "enc-MLP-GEMM-2":
        return product(tokens, hidden, 4 * hidden, bias=False)
    # gpt-post-process: logits, and a loss of several passes over them in fp32
    logits = tokens * vocabulary
    m, n, k = (tokens, hidden, vocabulary) if backward else (tokens, vocabulary, hidden)
    moved = logits * (16.0 if backward else 28.0 + element)
    return gemm(
        m, n, k, stream_bytes=moved, kernels=5 if backward else 7, kind=LibraryOpKind.LOSS, precision=product_precision, **own
    )
