"""The keys of a ``job.toml``: their types, and the errors of a file that has others, each with the nearest legal key or value."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args

import msgspec

from dpro_search._toml import TomlFile, nearest
from dpro_search.parallel.frameworks import Attention, Loss
from dpro_search.parallel.runtime import Runtime
from dpro_search.parallel.strategy import ParallelSettings

Precision = Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4", "tf32", "fp32"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
_STATES_BYTES: Mapping[str, float] = {"fp32": 8.0, "bf16": 4.0, "int8": 2.0}  # Both moments of Adam, for each parameter.
_MAIN_BYTES: Mapping[str, float] = {"fp32": 4.0, "none": 0.0}
# Bytes of an element of a frozen weight. NF4: 4 bits, and a scale in 8 bits for each 64 (Dettmers et al. 2023, "QLoRA", section 3).
_FROZEN_BYTES: Mapping[str, float] = {"nf4": 0.5 + 1 / 64, "fp8": 1.0}
_NO_OPTIMIZERS = ("adafactor", "lion", "sgd", "muon", "lamb", "shampoo")


_MISSPELT = 0.85  # How alike a key and a known one are at least, to be the same but for a slip.
_STATES = f"the type of the optimizer's states is said by optimizer_state = one of {', '.join(map(repr, _STATES_BYTES))}"
_MEANT: tuple[tuple[tuple[str, ...], str], ...] = (
    # Parts of keys that people know from other programs, the first that fits, and how a job.toml says it.
    (("optimizer_dtype", "8bit", "moment", "exp_avg"), _STATES),
    (("offload",), "offloading to the host is said in [runs] by offload_optimizer and offload_activations = true"),
    (("attention", "attn", "flash"), f"the kernel of attention is said by attention = one of {', '.join(get_args(Attention))}"),
    (
        ("tiled", "chunk", "fused_linear", "liger", "cross_entropy"),
        f"how the loss is computed is said by loss = one of {', '.join(get_args(Loss))}; Liger's fused linear loss is tiled",
    ),
    (
        ("expert_parallel", "expert_model", "expert_tensor"),
        "how experts are shared and split is said in [runs] by ep and etp",
    ),
    (
        ("lora", "peft", "target_modules"),
        'adapters are said by lora_rank and lora_targets, and quantized weights below them by frozen_weights = "nf4"',
    ),
    (("checkpoint", "remat", "recomput"), 'recomputation is said in [runs] by recompute = "none", "selective" or "full"'),
    (("cuda_graph", "cudagraph"), "CUDA graphs are said in [runs] by cuda_graphs = true"),
    (("accum",), "micro-batches of a replica follow: global_batch over dp and [runs] micro_batch"),
    (("micro_batch", "per_device", "per_gpu"), "sequences that a device computes at a time are said in [runs] by micro_batch"),
    (("batch",), "a batch is said by global_batch (sequences of a step), or by batch_per_replica"),
    (("seq", "max_length", "context_length"), "tokens of a sequence are said by sequence"),
    (("tensor_parallel", "tensor_model", "tp_"), "tensor parallel ranks are said in [runs] by tp"),
    (("pipeline", "pp_"), "pipeline stages are said in [runs] by pp"),
    (("context_parallel", "cp_"), "context parallel ranks are said in [runs] by cp"),
    (("data_parallel", "fsdp", "zero", "shard"), "what data parallel ranks split is said in [runs] by zero_stage; dp follows"),
    (("dtype", "mixed", "amp"), f"the type of matmuls is said by precision = one of {', '.join(get_args(Precision))}"),
    (("node", "gpu", "world_size"), 'devices are said by cluster, for example "4xhgx-h100"'),
    (("version",), "a version that changes predictions is said by framework_version"),
)


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
    framework_version
        Its version, where an old one runs a step otherwise (`Framework.before`); None: the newest.
    cuda
        The version of CUDA that PyTorch comes with, where it is not NVIDIA's container; None: not known, so that on Hopper, where
        libraries before 12.5 are slower, the interval holds both.
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
    framework_version: str | None = None
    cuda: str | None = None
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
    return file.convert(values, JobToml, explain=_meant, if_missing=advice)


def _meant(key: str, value: object) -> str | None:
    """How the file says what an unknown key, or an unknown value, probably means; None: the nearest known one is as good."""
    table, _, name = key.rpartition(".")
    word = str(value).lower()
    if key == "optimizer" and "8bit" in word:
        return f"'{value}': {_STATES}"
    if key == "optimizer" and word in _NO_OPTIMIZERS:
        return f"'{value}' cannot be said yet: only Adam can"
    if value is not None:
        return None
    if not table and name in ParallelSettings.__struct_fields__:
        return f"it stands in the table [runs]: put {name} below that line"
    if table == "runs" and name in JobToml.__struct_fields__:
        return f"it stands at the top of the file: put {name} before [runs]"
    known = ParallelSettings.__struct_fields__ if table == "runs" else JobToml.__struct_fields__
    if difflib.get_close_matches(name, known, cutoff=_MISSPELT):
        return None
    return next((said for parts, said in _MEANT if any(part in name.lower() for part in parts)), None)


def fail_at_setting(file: TomlFile, text: str, values: Mapping[str, Any]) -> NoReturn:
    """Raise `InputError` at the setting that a message begins with."""
    first = text.split(" ", 1)[0]
    if first in ParallelSettings.__struct_fields__ and "runs" in values:
        file.fail(f"runs.{first}", text)
    file.fail(first if first in JobToml.__struct_fields__ else "runs", text)


def unknown_text(value: str, known: Sequence[str]) -> str:
    """The message on a name that is none of the known ones."""
    return f"'{value}' is not known; {nearest(value, known)}"
