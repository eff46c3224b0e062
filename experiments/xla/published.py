"""Published runs of TPUs as programs to compile: `requests_of(rows)`, and `compile_all`, which compiles them one after the other.

A row of several slices shares the program of one slice: chips of a slice run the same mesh, and the gradients' all-reduce between
slices is added by `predict`. What cannot be rebuilt from a row, and why, is said by `cannot_rebuild`.

Programs are kept in ~/.cache/dpro-search/programs, each in a folder named after the hash of its request, with a log beside them.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import hashlib
import io
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dpro_search.cluster import parse_cluster
from dpro_search.collect.launch.ranks import environment_python
from dpro_search.errors import DproSearchError
from dpro_search.kinds.xla.capture import ProgramRequest, capture_program
from experiments.xla.recipes import HOST_OFFLOAD, Recipe, recipe_of

PROGRAMS = Path.home() / ".cache" / "dpro-search" / "programs"
TIME_LIMIT_S = 900.0
DECODER_VERSION = 1
"""Counts changes of `decoder` that change programs: it is part of each request's hash."""
COMPILED_BLOCK = 512  # Blocks of the attention kernel as they are compiled: larger ones take minutes more.

_GENERATIONS = {"TPU v4": "v4", "TPU v5p": "v5p", "TPU v6e (Trillium)": "v6e"}
_SHAPES = {("v4", 192): "v4:4x4x12"}  # Slices that Cloud's table of usual shapes lacks.
_DEVICE_AXES = ("fsdp", "fsdp_transpose", "tensor")
_QUERIES = ("query_proj", "key_proj", "value_proj", "qkv_proj")
_MINIMAL = (*_QUERIES, "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo")
_UNSUPPORTED_BLOCKS = {
    "mixtral": "mixture of experts",
    "deepseek": "mixture of experts, latent attention",
    "llama4": "mixture of experts",
}
_TABLE_OF_2023 = ("MaxText default 22B", "MaxText default 52B")
"""Models whose names are their parameters with heads of 256 and an MLP of two products, as MaxText had them when the table was
made (22.1 and 52.3 billion). Today's base.yml gives 25.8 and 65.2 billion."""


@dataclass(frozen=True)
class Row:
    """A published run."""

    number: int  # Place in the file, from 1.
    values: Mapping[str, str]

    def __getitem__(self, name: str) -> str:
        return self.values[name]

    @cached_property
    def mesh(self) -> dict[str, int]:
        return {axis: int(size) for axis, size in (part.split("=") for part in self["mesh"].split())}

    @property
    def generation(self) -> str:
        return _GENERATIONS[self["gpu"]]

    @property
    def slices(self) -> int:
        return self.mesh.get("dcn_data", 1)

    @property
    def chips_per_slice(self) -> int:
        return int(self["n_gpus"]) // self.slices

    @property
    def batch(self) -> int:
        """Sequences of a step for each chip."""
        return int(self["global_batch"]) // int(self["n_gpus"])

    @property
    def block(self) -> str:
        """MaxText's decoder_block."""
        match = re.search(r"decoder_block=(\w+)", self["notes"])
        return match[1] if match else "llama2"

    @property
    def recipe(self) -> Recipe:
        return recipe_of(self["source"], self["model"], self.chips_per_slice, self.batch)

    @property
    def group(self) -> tuple[str, str]:
        return self["source"], self.generation


@dataclass(frozen=True, kw_only=True)
class Request:
    """A program to compile."""

    config: dict[str, object]  # Fields of `decoder.DecoderConfig`.
    on: str
    mesh: dict[str, int]
    flags: str

    @cached_property
    def key(self) -> str:
        text = json.dumps([DECODER_VERSION, dataclasses.asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def folder(self) -> Path:
        return PROGRAMS / f"published-{self.key}"

    @property
    def error_file(self) -> Path:
        return PROGRAMS / f"published-{self.key}.error"


def read_rows(path: Path) -> list[Row]:
    with gzip.open(path, "rt") as file:
        return [Row(number, values) for number, values in enumerate(csv.DictReader(io.StringIO(file.read())), 1)]


def cannot_rebuild(row: Row) -> str:
    """Why a row cannot be compiled; empty if it can."""
    if not row["mesh"] or not row["global_batch"]:
        return "the source states no batch and mesh"
    if row["precision"] != "bf16":
        return f"products in {row['precision']} (AQT) are not in the model"
    return _UNSUPPORTED_BLOCKS.get(row.block, "")


def request_of(row: Row) -> Request:
    """The program of a row, for one slice; the row must be one that can be rebuilt."""
    recipe, sequence = row.recipe, int(row["seq_len"])
    saved, offloaded = rematerialisation(row["recompute"])
    old = row["model"] in _TABLE_OF_2023
    head_dim = 256 if old or row.block == "gemma3" else 128
    config = {
        "block": row.block if row.block in ("gpt3", "gemma3") else "llama",
        "layers": int(row["layers"]),
        "hidden": int(row["hidden"]),
        "heads": int(row["heads"]),
        "kv_heads": int(row["kv_heads"]),
        "head_dim": head_dim,
        "ffn_hidden": int(row["ffn_hidden"]),
        "vocab": int(row["vocab"]),
        "sequence": sequence,
        "per_device_batch": row.batch,
        "tied": row["tied_embeddings"] == "1",
        "gated": not old and row.block != "gpt3",
        "window": 1024 if row.block == "gemma3" else 0,
        "saved": saved,
        "offloaded": offloaded,
        "iota_embed": recipe.iota_embed,
        "attention_block": min(recipe.block, sequence),
        "compiled_block": COMPILED_BLOCK,
        "fused_backward": recipe.fused,
        "bf16_weights": recipe.bf16_weights,
    }
    mesh = {axis: row.mesh[axis] for axis in _DEVICE_AXES if row.mesh.get(axis, 1) > 1}
    return Request(config=config, on=topology(row.generation, row.chips_per_slice), mesh=mesh, flags=recipe.flags)


def rematerialisation(text: str) -> tuple[list[str], list[str]]:
    """Names of the tensors that are kept on the device, and in the host's memory, by the text of a row's column `recompute`."""
    policy, *tensors = text.removeprefix("remat_policy=").split()
    if policy == "full":
        return [], []
    if policy == "minimal":
        return list(_MINIMAL), []
    if policy == "qkv_proj_offloaded":
        return [], list(_QUERIES)
    assert policy == "custom", f"an unknown policy, {policy}"
    places = [tensor.split("=") for tensor in tensors]
    return [name for name, where in places if where == "device"], [name for name, where in places if where == "offload"]


def topology(generation: str, chips: int) -> str:
    """The topology of so many chips, as libtpu names it: "v6e:16x16"."""
    known = _SHAPES.get((generation, chips))
    if known is not None:
        return known
    cores = 2 if generation in ("v4", "v5p") else 1  # that Cloud's names count
    return parse_cluster(f"{generation}-{chips * cores}").name.rpartition(" x ")[2]


def requests_of(rows: Sequence[Row]) -> list[Request]:
    """The distinct programs of all rows that can be rebuilt: first those that compile fast, with many rows and few chips."""
    by_key: dict[str, list[Row]] = {}
    requests: dict[str, Request] = {}
    for row in rows:
        if not cannot_rebuild(row):
            request = request_of(row)
            requests[request.key] = request
            by_key.setdefault(request.key, []).append(row)

    def place(key: str) -> tuple[bool, int, int]:
        slow = HOST_OFFLOAD in requests[key].flags or requests[key].config["block"] == "gemma3"  # 15 minutes and more
        return slow, -len(by_key[key]), by_key[key][0].chips_per_slice

    return [requests[key] for key in sorted(requests, key=place)]


def compile_all(rows: Sequence[Row], python: str | None = None) -> None:
    """Compile what is not yet there, one program after the other, and write down what happens."""
    PROGRAMS.mkdir(parents=True, exist_ok=True)
    for request in requests_of(rows):
        if request.folder.exists() or request.error_file.exists():
            continue
        started = time.monotonic()
        try:
            compile_one(request, python or str(environment_python("jax")))
            result = "done"
        except DproSearchError as error:
            result = str(error)
            request.error_file.write_text(result)
        with (PROGRAMS / "published.log").open("a") as log:
            log.write(
                f"{time.strftime('%H:%M:%S')} {request.key} {request.on} {request.mesh} {request.config['layers']} layers of "
                f"{request.config['hidden']}: {time.monotonic() - started:.0f} s, {result}\n"
            )


def compile_one(request: Request, python: str) -> None:
    script = PROGRAMS / f"published-{request.key}.py"
    script.write_text(
        f"import sys\n\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n\nimport decoder\n\n\ndef step(mesh):\n"
        f"    return decoder.training_step(mesh, decoder.DecoderConfig(**{hashable(request.config)!r}))\n"
    )
    os.environ["LIBTPU_INIT_ARGS"] = request.flags  # the worker inherits it
    capture_program(
        ProgramRequest(script=script, function="step", on=request.on, mesh=request.mesh, python=python, time_limit_s=TIME_LIMIT_S),
        request.folder,
    )


def hashable(config: Mapping[str, object]) -> dict[str, object]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in config.items()}
