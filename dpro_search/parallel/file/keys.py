"""The keys of a ``job.toml``: their types, and the errors of a file that has others, each with the nearest legal key or value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args

import msgspec

from dpro_search._toml import TomlFile, nearest
from dpro_search.parallel.frameworks import Attention, Loss
from dpro_search.parallel.runtime import Runtime
from dpro_search.parallel.strategy import ParallelSettings

Precision = Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4", "tf32", "fp32"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
_NOT_YET: Mapping[str, tuple[str, ...]] = {  # what the file cannot express yet, by parts of keys that people write
    "the DualPipe of DeepSeek-V3": ("dualpipe", "dual_pipe"),
}
_STATES_BYTES: Mapping[str, float] = {"fp32": 8.0, "bf16": 4.0, "int8": 2.0}  # Both moments of Adam, for each parameter.
_MAIN_BYTES: Mapping[str, float] = {"fp32": 4.0, "none": 0.0}
# Bytes of an element of a frozen weight. NF4: 4 bits, and a scale in 8 bits for each 64 (Dettmers et al. 2023, "QLoRA", section 3).
_FROZEN_BYTES: Mapping[str, float] = {"nf4": 0.5 + 1 / 64, "fp8": 1.0}
_STATES_WORDS = ("optimizer_dtype", "8bit", "moment", "exp_avg")
_NO_OPTIMIZERS = ("adafactor", "lion", "sgd", "muon", "lamb", "shampoo")


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
        As `JobToml.model` where that is a text.
    times
        Measured passes of its blocks.
    """

    capture: str | None = None
    name: str | None = None
    times: tuple[MeasuredBlock, ...] = ()


class JobToml(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
        Type of matmuls; attention is in 16 bits where they have fewer.
    optimizer
        The optimizer, which decides memory: Adam keeps two moments and a copy of the parameters in fp32.
    optimizer_state
        Type of the moments; None: as the framework keeps them.
    main_parameters
        Type of the copy of the parameters that the optimizer updates; "none": it updates the parameters themselves; None: as the
        framework keeps it.
    adapters
        Whether only adapters are trained (LoRA), and the model's weights are frozen.
    lora_rank, lora_targets
        Rank of the adapters, and the matrices that they are beside, one of `TARGETS` each; None: not known. They imply `adapters`.
    frozen_weights
        Type of the frozen weights of layers (QLoRA: nf4); None: that of the model.
    framework
        The framework that runs the job, one of `FRAMEWORKS`.
    target_sequence
        Tokens that the decoder of an encoder and decoder (T5) reads; None: as many as the encoder, which is said.
    compiled
        Whether `torch.compile` compiles the layers (PyTorch); None: not known, so that the interval holds both.
    attention
        Kernel of attention; None: the framework's, which `describe` writes.
    loss
        Whether PyTorch's loss has all logits in fp32 ("whole"), those of some tokens at a time ("chunked"), or computes the head's
        product for some tokens at a time, so that logits are never whole ("tiled"); None: as the framework does it.
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
    optimizer_state: Literal["fp32", "bf16", "int8"] | None = None
    main_parameters: Literal["fp32", "none"] | None = None
    adapters: bool = False
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = ()
    frozen_weights: Literal["nf4", "fp8"] | None = None
    framework: str = "megatron-core"
    attention: Attention | None = None
    loss: Loss | None = None
    tied_embeddings: bool | None = None
    target_sequence: int | None = None
    compiled: bool | None = None
    times: str | None = None
    cores: int | None = None
    runs: ParallelSettings | None = None

    def optimizer_bytes(self, runtime: Runtime) -> float | None:
        """Bytes of optimizer state for each parameter; None: as the framework keeps it, which also holds for one key of the two."""
        if self.optimizer_state is None and self.main_parameters is None:
            return None
        moments = runtime.optimizer_bytes - runtime.main_bytes
        states = moments if self.optimizer_state is None else _STATES_BYTES[self.optimizer_state]
        return states + (runtime.main_bytes if self.main_parameters is None else _MAIN_BYTES[self.main_parameters])

    @property
    def frozen_bytes(self) -> float:
        """Bytes of an element of the frozen weights of layers; 0: as of other weights."""
        return _FROZEN_BYTES.get(self.frozen_weights or "", 0.0)

    @property
    def trains_adapters(self) -> bool:
        """Whether only adapters are trained."""
        return self.adapters or self.lora_rank is not None or bool(self.lora_targets)


def converted(file: TomlFile, values: Mapping[str, Any]) -> JobToml:
    """The values with their types; raises `InputError` at the first key that is wrong."""
    advice = "; 'dpro-search describe' writes a complete file"
    return file.convert(values, JobToml, explain=_cannot_be_said, if_missing=advice)


def _cannot_be_said(key: str, value: object) -> str | None:
    """Why a file cannot express what an unknown key, or an unknown value of a key, probably means; None: nobody knows."""
    word = str(value).lower()
    if (key == "optimizer" and "8bit" in word) or any(part in key.lower() for part in _STATES_WORDS):
        known = ", ".join(f'"{each}"' for each in _STATES_BYTES)
        return f"'{value}': the type of the optimizer's states is said by optimizer_state = one of {known}"
    if key == "optimizer" and word in _NO_OPTIMIZERS:
        return f"'{value}' cannot be said yet: only Adam can"
    if key == "runs.schedule" and word.replace("-", "") in ("dualpipe", "dualpipev3"):
        return "the DualPipe of DeepSeek-V3 cannot be said yet; dual-pipe-v is its variant with one copy of each layer"
    if "attention" in key.lower() or "attn" in key.lower():
        known = ", ".join(get_args(Attention))
        return f"the kernel of attention is said by attention = one of {known}"
    if any(part in key.lower() for part in ("tiled", "chunk", "fused_linear", "liger", "cross_entropy")):
        return f"how the loss is computed is said by loss = one of {', '.join(get_args(Loss))}; Liger's fused linear loss is tiled"
    if "expert" in key.lower() and any(part in key.lower() for part in ("tensor", "model", "parallel")):
        return "devices that share the experts, and over which each of them is split, are said in [runs] by ep and etp"
    if "offload" in key:
        return "offloading to the host is said in [runs] by offload_optimizer and offload_activations = true"
    if "lora" in key.lower() or key.lower() in ("peft", "target_modules"):
        return 'adapters are said by lora_rank and lora_targets, and quantized weights below them by frozen_weights = "nf4"'
    name = key.rpartition(".")[2].lower()
    topic = next((topic for topic, words in _NOT_YET.items() if any(word in name for word in words)), None)
    return None if topic is None else f"{topic} cannot be said yet: the prediction would be without"


def fail_at_setting(file: TomlFile, text: str, values: Mapping[str, Any]) -> NoReturn:
    """Raise `InputError` at the setting that a message begins with."""
    first = text.split(" ", 1)[0]
    if first in ParallelSettings.__struct_fields__ and "runs" in values:
        file.fail(f"runs.{first}", text)
    file.fail(first if first in JobToml.__struct_fields__ else "runs", text)


def unknown_text(value: str, known: Sequence[str]) -> str:
    """The message on a name that is none of the known ones."""
    return f"'{value}' is not known; {nearest(value, known)}"
