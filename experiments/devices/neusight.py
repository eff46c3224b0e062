"""Ops of PyTorch that NeuSight measured (MIT): products, convolutions, vector ops; ops inside models, and whole models."""

from __future__ import annotations

import ast
import csv
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpro_search.cluster import Device, Peaks, Provenance
from dpro_search.costmodel.devices.ops import LibraryOpKind, Ops, convolution, gemm, joined, streamed
from dpro_search.costmodel.devices.written import STREAMED
from dpro_search.errors import InputError
from experiments.devices.table import Table, joined_tables, plain_name, read_columns, table

PRECISION = "fp32"  # TF32 was off
_BYTES = 4.0
# Its names of memory-bound ops, as `written` has them; ...u: with a scalar.
VECTOR_OPS = {
    "add": "add", "addu": "add_scalar", "mul": "mul", "mulu": "mul_scalar", "div": "div", "divu": "div_scalar", "pow": "pow",
    "powu": "pow_scalar", "relu": "relu", "tanh": "tanh", "gelu": "gelu", "softmax": "softmax", "ln": "layer_norm",
}  # fmt: skip


def read(folder: Path, skipped: list[str]) -> list[Table]:
    """Tables by device of the ops that were measured by themselves; what is left out is told in `skipped`."""
    found = []
    for name, needed in _COLUMNS.items():
        path = folder / "neusight" / f"{name}.parquet"
        rows = read_columns(path, needed, skipped) if path.is_file() else None
        if rows is None:
            continue
        rows = {column: rows[column] for column in needed}
        if name == "vector":
            unknown = sorted(set(rows["op"]) - set(VECTOR_OPS))
            if unknown:
                skipped.append(f"{path.name}: ops that nothing is known of: {', '.join(map(str, unknown))}")
                rows = {column: values[np.isin(rows["op"], list(VECTOR_OPS))] for column, values in rows.items()}
        for device in sorted(set(rows["device"])):
            mine = rows["device"] == device
            found.append(_single({column: values[mine] for column, values in rows.items()}, name, f"neusight {_plain(device)}"))
    return found


_COLUMNS = {
    "bmm": ("device", "latency_ms", "b", "m", "n", "k"),
    "linear": ("device", "latency_ms", "b", "m", "n", "k"),
    "conv": (
        "device", "latency_ms", "b", "input_channel", "output_channel", "kernel_size", "input_size", "stride", "padding",
    ),
    "vector": ("device", "op", "latency_ms", "b", "h"),
}  # fmt: skip


def described(folder: Path, skipped: list[str]) -> dict[str, Device]:
    """Devices of its ``devices.json`` by their plain names: data sheets in GB/s, MiB, MHz and GFLOP/s in single precision."""
    path = folder / "neusight" / "devices.json"
    if not path.is_file():
        return {}
    found = {}
    try:
        listed = json.loads(path.read_text())
        for row in listed:
            name, peak = str(row["Device"]), row.get("SingleFLOPs") or row.get("SingleFLOPsMM")
            vendor = "AMD" if "AMD" in name.upper() else "NVIDIA"
            device = Device(
                name=name, vendor=vendor, kind="gpu", peak=Peaks(fp32=peak and float(peak) * 1e9),
                memory_bytes_per_s=float(row["Mem_Bw"]) * 1e9, l2_cache_bytes=int(float(row["L2Cache"]) * 2**20),
                cores=int(row["Num_Sm"]), clock_hz=float(row["Freq"]) * 1e6, provenance=Provenance(source="devices.json"),
            )  # fmt: skip
            found |= {plain_name(one): device for one in (name, str(row.get("file", name)))}
    except (ValueError, TypeError, KeyError, AttributeError, InputError) as error:
        skipped.append(f"{path.name}: not all of it can be used: {type(error).__name__} {error}")
    return found


def _plain(device: str) -> str:
    return re.sub(r"[\s_]+", "-", device)


def _single(rows: Mapping[str, Any], name: str, target: str) -> Table:
    us = rows["latency_ms"].astype(float) * 1e3
    if name in ("bmm", "linear"):
        sizes = [rows[key].astype(float) for key in ("m", "n", "k", "b")]
        m, n, k, batch = sizes
        if name == "linear":
            ops = gemm(m, n, k, batch=batch, precision=PRECISION, transposes=1.0, stream_bytes=0.0)
        else:
            ops = gemm(m, n, k, batch=batch, precision=PRECISION)
        return table(ops, us, target)
    if name == "conv":
        keys = ("b", "input_channel", "output_channel", "input_size", "kernel_size")
        images, inputs, outputs, side, window = (rows[key].astype(float) for key in keys)
        stride, padding = rows["stride"].astype(float), rows["padding"].astype(float)
        good = side + 2 * padding >= window
        ops = convolution(
            images[good], inputs[good], outputs[good], side[good], window[good],
            stride=stride[good], padding=padding[good], precision=PRECISION,
        )  # fmt: skip
        return table(ops, us[good], target)
    parts = []
    for op in sorted(set(rows["op"])):
        mine = rows["op"] == op
        parts.append(table(_vector(op, rows["b"][mine].astype(float), rows["h"][mine].astype(float)), us[mine], target))
    return joined_tables(parts)


def _vector(op: str, rows: Any, length: Any) -> Ops:
    found = STREAMED[VECTOR_OPS[op]]
    moved = found.tensors * _BYTES * rows * length
    return streamed(found.kind, rows, length, moved=moved, precision=PRECISION, special=found.special)


@dataclass(frozen=True, kw_only=True)
class ModelOp:
    """An op of a model on a device: what it computes, and how long each pass of it took; 0: the pass has no op."""

    device: str
    model: str
    mode: str
    sequence: int
    batch: int
    repeated: bool  # Stands for one of each layer.
    forward: Ops | None  # None: only a view.
    backward: Ops | None
    forward_us: float
    backward_us: float
    accumulate_us: float


def model_ops(folder: Path, skipped: list[str] | None = None) -> list[ModelOp]:
    """The ops of all models."""
    path = folder / "neusight" / "model_ops.parquet"
    columns = read_columns(path, _MODEL_COLUMNS, [] if skipped is None else skipped) if path.is_file() else None
    if columns is None:
        return []
    columns.setdefault("variant", np.full(len(columns["device"]), ""))
    columns.setdefault("args", np.full(len(columns["device"]), ""))
    found = []
    known: dict[tuple[str, ...], tuple[Ops | None, Ops | None]] = {}
    lists = {name: column.tolist() for name, column in columns.items()}
    rows = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    _mark_layers(rows)
    for row in rows:
        key = tuple(str(row[column]) for column in ("target", "name", "input_shapes", "output_shape", "dtype"))
        if key not in known:
            try:
                known[key] = _passes(*key)
            except (ValueError, SyntaxError, TypeError, IndexError, InputError):  # an op of other sizes than those that are known
                known[key] = (None, None)
        forward, backward = known[key]
        found.append(
            ModelOp(
                device=_plain(row["device"]),
                model=row["model"],
                mode=row["mode"],
                sequence=row["seq"],
                batch=row["batch"],
                repeated=row["repeated"],
                forward=forward,
                backward=backward,
                forward_us=row["fw_latency"] * 1e3,
                backward_us=row["bw_latency"] * 1e3,
                accumulate_us=row["acc_latency"] * 1e3,
            )
        )
    return found


_MODEL_COLUMNS = (
    "device", "model", "mode", "seq", "batch", "target", "name", "input_shapes", "output_shape", "dtype", "fw_latency",
    "bw_latency", "acc_latency",
)  # fmt: skip


def gemm_tables(ops: list[ModelOp]) -> list[Table]:
    """The products of models, forward and backward, as tables."""
    found: dict[tuple[str, str], list[tuple[Ops, float]]] = {}
    for op in ops:
        for one, us in ((op.forward, op.forward_us), (op.backward, op.backward_us)):
            if one is not None and us > 0 and one.flops[0] > 0:
                found.setdefault((op.device, op.model), []).append((one, us))
    return [
        table(joined([one for one, _ in pairs]), np.array([us for _, us in pairs]), f"neusight {device}", f"neusight {model}")
        for (device, model), pairs in sorted(found.items())
    ]


_LINEAR = re.compile(r"(query|key|value|dense|q_proj|k_proj|v_proj|out_proj|fc1|fc2|lm_head|classifier|decoder|seq_relationship)$")
_NORM = re.compile(r"(ln_\w+|LayerNorm|layer_norm)$")
_EMBEDDING = re.compile(r"(wte|wpe|\w+_embeddings|embed_tokens)$|function embedding")
# Of functions of tensors: tensors of the output's size that the forward and the backward pass move, and kernels of the latter.
_FUNCTIONS = {
    "add": (3, 0, 0), "sub": (3, 0, 0), "mul": (3, 6, 2), "truediv": (3, 2, 1), "pow": (2, 7, 3), "tanh": (2, 3, 1),
    "gelu": (2, 3, 1), "activation_fn": (2, 3, 1), "activation": (2, 3, 1), "where": (2.25, 2, 1), "masked_fill": (2.25, 2, 1),
    "masked_fill_": (2.25, 0, 0), "contiguous": (2, 0, 0), "max": (3, 5, 3), "cumsum": (2, 0, 0),
}  # fmt: skip


_FIRST_LAYER = re.compile(r"(\.h\.0\.|layer\.0\.|layers\.0\.|_h_0_|layer_0_|layers_0_)")


def _mark_layers(rows: list[dict[str, Any]]) -> None:
    """Says of each row whether it is of the one layer that stands for all: rows from the first to the last that name it."""
    runs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        runs.setdefault(tuple(row[key] for key in ("device", "model", "mode", "seq", "batch", "variant")), []).append(row)
    for run in runs.values():
        inside = [
            place for place, row in enumerate(run) if any(_FIRST_LAYER.search(str(row[key])) for key in ("target", "name", "args"))
        ]
        for place, row in enumerate(run):
            row["repeated"] = bool(inside) and inside[0] <= place <= inside[-1]


def _passes(target: str, name: str, input_shapes: str, output_shape: str, dtype: str) -> tuple[Ops | None, Ops | None]:
    """The ops of both passes; None where nothing runs on the device."""
    shapes, made = ast.literal_eval(input_shapes), ast.literal_eval(output_shape)
    elements = float(np.prod(made))
    if elements < 2 or not shapes:
        return None, None
    own = {"precision": PRECISION}
    last = target.rsplit(".", 1)[-1]
    if target == "addmm":
        return _product(*shapes[1], shapes[2][1], bias=True, transposes=0.0)
    if target in ("matmul", "bmm"):
        left, right = shapes[:2]
        return _batched(float(np.prod(left[:-2])), left[-2], right[-1], left[-1], name.endswith("matmul"))
    if (target.count(".") and _LINEAR.search(target)) or target in ("lm_head", "classifier"):
        inside = shapes[0][-1]
        return _product(float(np.prod(shapes[0])) / inside, inside, made[-1], bias="lm_head" not in target, transposes=1.0)
    rows, length = elements / made[-1], float(made[-1])
    if _NORM.search(last):
        return tuple(  # type: ignore[return-value]
            streamed(LibraryOpKind.NORM, rows, length, moved=times * _BYTES * elements, backward=back, kernels=kernels, **own)
            for times, back, kernels in ((2, False, 1), (4, True, 2))
        )
    if "softmax" in target:
        return tuple(  # type: ignore[return-value]
            streamed(LibraryOpKind.SOFTMAX, rows, length, moved=times * _BYTES * elements, backward=back, special=1, **own)
            for times, back in ((2, False), (3, True))
        )
    if _EMBEDDING.search(target):
        return tuple(  # type: ignore[return-value]
            streamed(LibraryOpKind.EMBEDDING, rows, length, moved=2 * _BYTES * elements, backward=back, **own)
            for back in (False, True)
        )
    if "drop" in target:  # a mask of one byte an element; the backward pass multiplies by it
        return tuple(  # type: ignore[return-value]
            streamed(LibraryOpKind.ELEMENTWISE, rows, length, moved=times * _BYTES * elements, backward=back, special=2, **own)
            for times, back in ((2.25, False), (2.25, True))
        )
    if last in _FUNCTIONS:
        forward, backward, kernels = _FUNCTIONS[last]
        tensors = [shape for shape in shapes if float(np.prod(shape)) > 1]
        if forward == 3 and len(tensors) < 2:  # with a scalar
            forward, backward, kernels = 2, min(backward, 2), min(kernels, 1)
        special = {"tanh": 1.0, "gelu": 1.0, "pow": 2.0, "truediv": 1.0}.get(last, 0.0)
        ahead = streamed(LibraryOpKind.ELEMENTWISE, rows, length, moved=forward * _BYTES * elements, special=special, **own)
        if not backward:
            return ahead, None
        moved = backward * _BYTES * elements
        return ahead, streamed(
            LibraryOpKind.ELEMENTWISE, rows, length, moved=moved, special=special, backward=True, kernels=kernels, **own
        )
    return None, None


def _product(m: float, k: float, n: float, *, bias: bool, transposes: float) -> tuple[Ops, Ops]:
    """A product with a weight, and the gradients of both of its operands."""
    del bias  # the epilogue of the product adds it
    ahead = gemm(m, n, k, precision=PRECISION, transposes=transposes)
    return ahead, gemm(m, k, n, precision=PRECISION, backward=True, products=2, kernels=2)


def _batched(batch: float, m: float, n: float, k: float, right_transposed: bool) -> tuple[Ops, Ops]:
    ahead = gemm(m, n, k, batch=batch, precision=PRECISION, transposes=float(right_transposed))
    return ahead, gemm(m, k, n, batch=batch, precision=PRECISION, backward=True, products=2, kernels=2)


def labels(folder: Path) -> list[dict[str, str]]:
    """Measured whole models: rows of one device without fusion."""
    path = folder / "neusight" / "e2e_labels.csv"
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if not row.get("variant")]
