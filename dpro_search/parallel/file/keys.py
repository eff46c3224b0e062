"""The keys of a ``job.toml``: their types, and the errors of a file that has others, each with the nearest legal key or value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

import msgspec

from dpro_search.cluster.table import File
from dpro_search.errors import InputError
from dpro_search.parallel.schedule import Schedule
from dpro_search.parallel.settings import MeshSettings

Precision = Literal["bf16", "fp16", "fp8", "tf32", "fp32"]
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "fp8", "tf32", "fp32")
_NOT_YET: Mapping[str, tuple[str, ...]] = {  # what the file cannot express yet, by parts of keys that people write
    "adapters (LoRA, QLoRA)": ("lora", "adapter"),
    "states of the optimizer in other types than fp32": ("optimizer_dtype", "optimizer_state", "8bit", "moment", "exp_avg"),
    "offloading to the host": ("offload",),
    "the kernel of attention": ("attention", "attn", "flash"),
    "a loss in tiles or chunks": ("tiled", "chunked", "fused_loss", "liger"),
    "experts that share ranks in another way than ep and etp": ("expert_tensor", "expert_model", "moe_"),
    "the DualPipe of DeepSeek-V3": ("dualpipe", "dual_pipe"),
}
_NO_OPTIMIZERS = ("adamw8bit", "adam8bit", "adafactor", "lion", "sgd", "muon", "lamb", "shampoo")
_PATH = re.compile(r" - at `\$\.?([\w.]*)[^`]*`$")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")
_MISSING = re.compile(r"Object missing required field `([^`]*)`")
_EXPECTED = re.compile(r"Expected `(\w+)[^`]*`, got `(\w+)`")
_KINDS = {"int": "a whole number", "str": "a text", "bool": "true or false", "float": "a number", "object": "a table"}
_VALUE = re.compile(r"Invalid enum value (.*)")


class MeasuredBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table ``[[model.times]]``: passes of one micro-batch through one block that somebody measured (`BlockTimes`).

    Attributes
    ----------
    block
        "embedding", "layer" or "head"; of several kinds of layers "layer" is all, and "layer0", "layer1" ... is one.
    forward_us, backward_us
        Duration of a pass on one rank.
    micro_batch, tp, cp, ep
        The strategy under which they were measured.
    sequence
        Tokens of a sequence; None: as the job's.
    """

    block: str
    forward_us: float
    backward_us: float
    micro_batch: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence: int | None = None


class ModelTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table ``[model]``: `capture`, or `name` with what was measured.

    Attributes
    ----------
    capture
        A ``graph.json`` of `dpro-search capture`, from the file's folder.
    name
        As `JobFile.model` where that is a text.
    times
        Measured passes of its blocks.
    """

    capture: str | None = None
    name: str | None = None
    times: tuple[MeasuredBlock, ...] = ()


class JobFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a ``job.toml``.

    Attributes
    ----------
    model
        Name of a published model, or path of a ``config.json``, from the file's folder; or a table.
    cluster
        As ``--cluster`` takes it; a file's path from the file's folder.
    global_batch, sequence
        Sequences of a step, and tokens of a sequence; samples, and None, for a network that is no transformer.
    batch_per_replica
        Sequences of each replica, in place of `global_batch`, so that the batch grows with the devices.
    precision
        Type of matmuls and attention.
    optimizer
        The optimizer, which decides memory: Adam keeps two moments and a copy of the parameters in fp32.
    framework
        The framework that runs the job, one of `FRAMEWORKS`.
    target_sequence
        Tokens that the decoder of an encoder and decoder (T5) reads; None: as many as the encoder, which is said.
    compiled
        Whether `torch.compile` compiles the layers (PyTorch); None: not known, so that the interval holds both.
    tied_embeddings
        Whether the head uses the embedding's matrix; None: as the model's configuration says.
    times
        Recorded times of blocks and exchanges (`dpro-search fit --collect parallel`), from the file's folder.
    cores
        Cores of one machine that all ranks share in turn; None: each has its own.
    runs
        The strategy of the job today; None: `usual_strategy`.
    """

    model: str | ModelTable
    cluster: str
    global_batch: int | None = None
    batch_per_replica: int | None = None
    sequence: int | None = None
    precision: Precision = "bf16"
    optimizer: Literal["adam", "adamw"] = "adam"
    framework: str = "megatron-core"
    tied_embeddings: bool | None = None
    target_sequence: int | None = None
    compiled: bool | None = None
    times: str | None = None
    cores: int | None = None
    runs: MeshSettings | None = None


def converted(file: File, values: Mapping[str, Any]) -> JobFile:
    """The values with their types; every error of msgspec at its key."""
    try:
        return msgspec.convert(values, JobFile)
    except (msgspec.ValidationError, InputError) as error:
        text = str(error)
    path = _PATH.search(text)
    what = text[: path.start()] if path else text
    key = path.group(1) if path else ""
    tables = {"runs": MeshSettings, "model.times": MeasuredBlock, "model": ModelTable}
    known = next((table.__struct_fields__ for name, table in tables.items() if key.startswith(name)), JobFile.__struct_fields__)
    if unknown := _UNKNOWN.match(what):
        topic = next((words for words in _NOT_YET if any(word in unknown[1].lower() for word in _NOT_YET[words])), None)
        if topic is not None:
            file.fail(f"{key}.{unknown[1]}" if key else unknown[1], f"{topic} cannot be said yet: the prediction would be without")
        file.fail(f"{key}.{unknown[1]}" if key else unknown[1], f"unknown key; {_nearest_text(unknown[1], known)}")
    if missing := _MISSING.match(what):
        file.fail(key, f"'{missing[1]}' is missing; 'dpro-search describe' writes a complete file")
    if value := _VALUE.match(what):
        if value[1].strip("'").lower() in _NO_OPTIMIZERS and key == "optimizer":
            file.fail(key, f"{value[1]} cannot be said yet: only Adam with two moments in fp32 can")
        if key == "runs.schedule" and value[1].strip("'").lower().replace("-", "") in ("dualpipe", "dualpipev3"):
            file.fail(key, "the DualPipe of DeepSeek-V3 cannot be said yet; dual-pipe-v is its variant with one copy of each layer")
        file.fail(key, unknown_text(value[1].strip("'"), _choices(key)))
    if expected := _EXPECTED.match(what):
        return file.fail(key, f"must be {_KINDS.get(expected[1], expected[1])}, not {_KINDS.get(expected[2], expected[2])}")
    named = next((f"runs.{name}" for name in MeshSettings.__struct_fields__ if what.startswith(f"{name} ")), "")
    return file.fail(named or key, what.replace("`", ""))


def fail_at_setting(file: File, text: str, values: Mapping[str, Any]) -> NoReturn:
    """Raise `InputError` at the setting that a message begins with."""
    first = text.split(" ", 1)[0]
    if first in MeshSettings.__struct_fields__ and "runs" in values:
        file.fail(f"runs.{first}", text)
    file.fail(first if first in JobFile.__struct_fields__ else "runs", text)


def _choices(key: str) -> tuple[str, ...]:
    return {
        "precision": PRECISIONS,
        "optimizer": ("adam", "adamw"),
        "runs.zero_stage": ("0", "1", "2", "3"),
        "runs.recompute": ("none", "selective", "full"),
        "runs.gradient_dtype": ("fp32", "bf16"),
        "runs.schedule": tuple(schedule.value for schedule in Schedule),
    }.get(key, ())


def unknown_text(value: str, known: tuple[str, ...]) -> str:
    return f"'{value}' is not known; {_nearest_text(value, known)}"


def _nearest_text(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=1)
    return f"did you mean '{near[0]}'?" if near else f"known are {', '.join(known)}"
