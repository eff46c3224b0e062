"""`Strategy` and `ParallelSettings`: the schema of a parallel job's settings.

A setting is declared once, as a field of `Strategy` with its `Setting`, and named with its type in `ParallelSettings`. Words, the
template of a ``job.toml``, the page, single changes, what a plan leaves out, and keys of caches follow from that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar, Literal

from dpro_search.errors import InputError
from dpro_search.parallel.schedule import Schedule
from dpro_search.parallel.setting import Setting, about, doubled, first_layers, repeated, times
from dpro_search.space.schemes import SchemeSettings, counted


class Recompute(StrEnum):
    """Which activations the backward pass computes again."""

    NONE = "none"
    SELECTIVE = "selective"  # some of a layer: see `Selective`
    FULL = "full"  # all of a layer but its input


def _dp(values: Mapping[str, Any], devices: int, zero_stage: int) -> int:
    """Replicas that use all devices; raises `InputError` where the other degrees do not divide them."""
    tp, pp, cp = values["tp"], values["pp"], values["cp"]
    rest = tp * pp * cp
    if devices % rest == 0:
        return int(devices // rest)
    name, value, others = _first_that_breaks(tp, pp, cp, devices)
    most = devices // others
    nearest = min((number for number in range(1, most + 1) if most % number == 0), key=lambda number: abs(number - value))
    raise InputError(f"{name} {value}: tp {tp} x pp {pp} x cp {cp} = {rest} do not divide {devices} devices: use {name} {nearest}")


def _first_that_breaks(tp: int, pp: int, cp: int, devices: int) -> tuple[str, int, int]:
    """The first axis, in the order tp, cp, pp, with which the product no longer divides the devices, and that of those before."""
    product = 1
    for name, value in (("tp", tp), ("cp", cp), ("pp", pp)):
        if devices % (product * value):
            return name, value, product
        product *= value
    raise AssertionError("the product divides the devices")


_RECOMPUTE = tuple(Recompute)
_SCHEDULES: Mapping[str, str] = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "interleaved 1F1B",
    "zero-bubble": "zero bubble (ZB-H1)",
    "zero-bubble-v": "zero bubble V",
    "dual-pipe-v": "DualPipeV",
    "dual-pipe": "DualPipe",
}


def _other_than_interleaved(strategy: Strategy) -> bool:
    return strategy.pp > 1 and strategy.schedule is not Schedule.INTERLEAVED


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How one training step of a model is carried out by `devices` ranks; fields in the order in which people say them.

    Ranks are numbered with tensor parallel neighbours next to each other, then context, data and pipeline parallel ones
    (Megatron-LM's order "tp-cp-ep-dp-pp").
    """

    tp: int = field(
        default=1,
        metadata=about(
            "tp {}",
            "tensor parallel: heads, widths and vocabulary over so many devices",
            label="tensor parallel (tp)",
            least=1,
            changes=doubled("tp"),
            saves=times("tp"),
        ),
    )
    pp: int = field(
        default=1,
        metadata=about(
            "pp {}",
            "pipeline stages",
            label="pipeline stages (pp)",
            least=1,
            changes=doubled("pp"),
            saves=times("pp"),
        ),
    )
    cp: int = field(
        default=1,
        metadata=about(
            "cp {}",
            "context parallel: parts of each sequence",
            label="context parallel (cp)",
            least=1,
            neutral=True,
            changes=doubled("cp"),
            saves=times("cp"),
        ),
    )
    # Devices that share the experts of a layer; they are taken from dp, cp and tp.
    ep: int = field(
        default=1,
        metadata=about(
            "ep {}",
            "devices that share the experts of a layer",
            label="expert parallel (ep)",
            of_experts=True,
            least=1,
            neutral=True,
            changes=doubled("ep"),
        ),
    )
    etp: int = field(
        default=1,
        metadata=about(
            "etp {}",
            "tensor parallel of the experts",
            label="tensor parallel of experts",
            of_experts=True,
            least=1,
            neutral=True,
        ),
    )
    # Replicas of the model; their gradients are summed.
    dp: int = field(
        default=1,
        metadata=about(
            "dp {}",
            "replicas; follows from the devices",
            label="data parallel (dp)",
            least=1,
            usual=_dp,
            follows=("tp", "pp", "cp"),
        ),
    )
    virtual_stages: int = field(
        default=1,
        metadata=about(
            lambda value: f"{value} virtual stages" if value > 1 else "no virtual stages",
            "groups of layers on each pipeline stage",
            least=1,
            neutral=True,
            detail=True,
            said=lambda strategy: strategy.virtual_stages > 1 and not _other_than_interleaved(strategy),
            changes=doubled("virtual_stages"),
        ),
    )
    schedule: Schedule = field(
        default=Schedule.ONE_F_ONE_B,
        metadata=about(
            lambda value: _SCHEDULES.get(value, value),
            "1f1b, gpipe, zero-bubble, dual-pipe; interleaved (virtual_stages > 1); zero-bubble-v, dual-pipe-v (virtual_stages 2)",
            needs=("pp", 2),
            kept=True,
            usual=lambda values, *_: Schedule.INTERLEAVED if values["virtual_stages"] > 1 else Schedule.ONE_F_ONE_B,
            follows=("virtual_stages",),
            said=_other_than_interleaved,
        ),
    )
    # Layers of each stage in the order of the forward pass; empty: as many on each.
    stage_layers: tuple[int, ...] = field(
        default=(),
        metadata=about(
            lambda value: f"layers per stage {repeated(value)}" if value else "as many layers on each stage",
            "layers of each stage, virtual ones too; without it as many on each",
            "[8, 9, 9, 6]",
            label="layers of each stage",
            follows=("pp", "virtual_stages"),
            detail=True,
            changes=lambda strategy: [()] if strategy.stage_layers else [],
        ),
    )
    # Norms and residuals split the sequence over tp.
    sequence_parallel: bool = field(
        default=False,
        metadata=about(
            "sequence parallel|no sequence parallel",
            "norms and residuals split the sequence over tp",
            needs=("tp", 2),
            usual=lambda values, *_: values["tp"] > 1,
            detail=True,
            said=lambda strategy: strategy.tp > 1 and not strategy.sequence_parallel,
            changes=lambda strategy: [not strategy.sequence_parallel] if strategy.tp > 1 else [],
            saves=lambda strategy: [True] if strategy.tp > 1 and not strategy.sequence_parallel else [],
        ),
    )
    zero_stage: int = field(
        default=0,
        metadata=about(
            lambda value: f"ZeRO-{value}" if value else "no ZeRO",
            "1 splits optimizer state over dp and cp, 2 gradients too, 3 parameters too (FSDP)",
            label="ZeRO stage",
            usual=lambda values, devices, zero_stage: zero_stage,
            said=lambda strategy: True,
            changes=lambda strategy: [stage for stage in range(4) if stage != strategy.zero_stage],
            saves=lambda strategy: range(strategy.zero_stage + 1, 4),
        ),
    )
    # Copies of what ZeRO splits, among dp and cp (HSDP; Megatron-LM's optimizer instances); it splits over the others.
    dp_replicate: int = field(
        default=1,
        metadata=about(
            lambda value: f"HSDP, {value} replicas" if value > 1 else "no HSDP",
            "copies of what ZeRO splits (HSDP): it splits over fewer replicas",
            "2",
            label="HSDP replicas",
            least=1,
            neutral=True,
            follows=("zero_stage",),
            detail=True,
            changes=lambda strategy: doubled("dp_replicate")(strategy) if strategy.zero_stage else [],
            saves=lambda strategy: [1] if strategy.dp_replicate > 1 else [],
        ),
    )
    # Under ZeRO-3, whether a layer's parameters are freed between its forward and its backward pass, and how many layers ahead they
    # are gathered.
    reshard: bool = field(
        default=True,
        metadata=about(
            "parameters freed after forward|parameters kept for backward",
            "ZeRO-3 keeps a layer's parameters from its forward to its backward pass",
            "false",
            needs=("zero_stage", 3),
            follows=("zero_stage",),
            detail=True,
            changes=lambda strategy: [not strategy.reshard] if strategy.zero_stage == 3 else [],
            saves=lambda strategy: [] if strategy.reshard else [True],
        ),
    )
    prefetch_layers: int = field(
        default=1,
        metadata=about(
            lambda value: f"gathers {counted('layer')(value)} ahead",
            "ZeRO-3 gathers so many layers ahead",
            "2",
            least=1,
            needs=("zero_stage", 3),
            follows=("zero_stage",),
            detail=True,
        ),
    )
    recompute: Recompute = field(
        default=Recompute.NONE,
        metadata=about(
            lambda value: f"{value} recomputation" if value != "none" else "no recomputation",
            "none, selective (PyTorch: every second matmul; else the scores) or full (all of a layer but its input)",
            said=lambda strategy: True,
            changes=lambda strategy: [kind for kind in Recompute if kind is not strategy.recompute],
            saves=lambda strategy: _RECOMPUTE[_RECOMPUTE.index(strategy.recompute) + 1 :],
        ),
    )
    # The number of first layers of each stage, virtual ones too, that are computed again; 0: all.
    recompute_layers: int = field(
        default=0,
        metadata=about(
            lambda value: f"recompute {first_layers(value)}" if value else "recompute all layers",
            "recompute only the first so many layers of each stage",
            "2",
            least=0,
            neutral=True,
            follows=("recompute", "pp", "virtual_stages"),
            detail=True,
            said=lambda strategy: True,
            saves=lambda strategy: (
                [{"recompute": "full", "recompute_layers": layers} for layers in (1, 2, 4, 8, 16, 32)]
                if strategy.recompute is Recompute.NONE
                else [0]
                if strategy.recompute_layers
                else []
            ),
        ),
    )
    micro_batch: int = field(
        default=1,
        metadata=about(
            "micro-batch {}",
            "sequences that go through a stage at a time",
            least=1,
            detail=True,
            said=lambda strategy: True,
            changes=doubled("micro_batch"),
            saves=lambda strategy: [1] if strategy.micro_batch > 1 else [],
        ),
    )
    # The optimizer's states are in the host's memory, and its processors update the parameters.
    offload_optimizer: bool = field(
        default=False,
        metadata=about(
            "optimizer on the host|optimizer on the device",
            "the optimizer's states are in the host's memory, and its processors update the parameters",
            "true",
            neutral=True,
            changes=lambda strategy: [False] if strategy.offload_optimizer else [],
            saves=lambda strategy: [] if strategy.offload_optimizer else [True],
        ),
    )
    # What layers keep for the backward pass waits for it in the host's memory.
    offload_activations: bool = field(
        default=False,
        metadata=about(
            "activations on the host|activations on the device",
            "what layers keep for their backward pass is copied to the host's memory and back",
            "true",
            neutral=True,
            changes=lambda strategy: [False] if strategy.offload_activations else [],
            saves=lambda strategy: [] if strategy.offload_activations else [True],
        ),
    )
    # Layers are captured as CUDA graphs.
    cuda_graphs: bool = field(
        default=False,
        metadata=about(
            "CUDA graphs|no CUDA graphs",
            "layers are captured once, and the host starts each with one call",
            "true",
            neutral=True,
            changes=lambda strategy: [not strategy.cuda_graphs],
            saves=lambda strategy: [False] if strategy.cuda_graphs else [],
        ),
    )
    # Tokens go to experts and back while another micro-batch is computed.
    overlap_experts: bool = field(
        default=False,
        metadata=about(
            "experts' exchanges overlapped|experts' exchanges not overlapped",
            "tokens go to experts and back while another micro-batch is computed",
            "true",
            neutral=True,
            changes=lambda strategy: [not strategy.overlap_experts] if strategy.ep > 1 else [],
        ),
    )
    # Keys and values go round cp's ranks beside the attention; False: they are gathered before it.
    cp_ring: bool = field(
        default=False,
        metadata=about(
            "ring attention|keys and values gathered",
            "keys and values go round cp's ranks beside the attention; without it they are gathered before it",
            "true",
            needs=("cp", 2),
            detail=True,
            changes=lambda strategy: [not strategy.cp_ring] if strategy.cp > 1 else [],
        ),
    )
    # Each of cp's ranks has as much of a causal attention; False: the last one has most.
    cp_balanced: bool = field(
        default=True,
        metadata=about(
            "causal attention balanced|causal attention not balanced",
            "the last of cp's ranks has most of a causal attention",
            "false",
            needs=("cp", 2),
            detail=True,
            changes=lambda strategy: [True] if strategy.cp > 1 and not strategy.cp_balanced else [],
        ),
    )
    # In which gradients are summed; None: the framework's.
    gradient_dtype: Literal["fp32", "bf16"] | None = field(
        default=None,
        metadata=about(
            "gradients in {}",
            "fp32 or bf16: in which gradients are summed; without it the framework's",
            '"bf16"',
            detail=True,
        ),
    )
    # Tokens of the experts' rank that has most, over the mean of all ranks: a property of the job, which no search changes.
    expert_load: float = field(
        default=1.0,
        metadata=about(
            "expert load {:g}",
            "tokens of the experts' rank that has most, over the mean",
            "1.2",
            of_experts=True,
            neutral=True,
            detail=True,
        ),
    )
    global_batch: int = 1

    def __post_init__(self) -> None:
        if self.zero_stage not in (0, 1, 2, 3):
            raise InputError(f"zero_stage must be 0, 1, 2 or 3, not {self.zero_stage}")
        for name, least in _LEAST:
            if getattr(self, name) < least:
                raise InputError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.stage_layers and min(self.stage_layers) < 0:
            raise InputError(f"stage_layers must be at least 0, not {min(self.stage_layers)}")
        if not 1 <= self.expert_load < math.inf:
            raise InputError(f"expert_load must be at least 1 and finite, not {self.expert_load}: 1 is balanced")

    @property
    def copies(self) -> int:
        """Copies of each pipeline stage, on two ranks of the pipeline in DualPipe; micro-batches are shared among them."""
        return 2 if self.schedule is Schedule.DUAL_PIPE and self.pp > 1 else 1

    @property
    def devices(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def expert_dp(self) -> int:
        """Replicas of the experts."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def zero_ways(self) -> int:
        """Ranks over which ZeRO splits."""
        return self.dp * self.cp // self.dp_replicate

    @property
    def expert_zero_ways(self) -> int:
        """Ranks over which it splits what belongs to experts."""
        return self.expert_dp // self.dp_replicate

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each replica in a step."""
        return self.global_batch // (self.dp * self.micro_batch)


SETTINGS: Mapping[str, Setting] = {each.name: each.metadata["setting"] for each in fields(Strategy) if each.metadata}
"""Each setting by its name, in the order of `Strategy`."""
DEFAULTS: Mapping[str, Any] = {each.name: each.default for each in fields(Strategy) if each.metadata}
DETAILS = frozenset(("global_batch", *(name for name, setting in SETTINGS.items() if setting.detail)))
"""Fields that do not tell different plans apart."""
_LEAST = (*((name, setting.least) for name, setting in SETTINGS.items() if setting.least is not None), ("global_batch", 1))


def key_without(strategy: Strategy, irrelevant: frozenset[str]) -> Hashable:
    """All settings of a strategy but those that do not change a result: the key under which the result is kept.

    A setting that is added to `Strategy` is part of every key, until somebody names it as irrelevant.
    """
    return tuple(value for name, value in vars(strategy).items() if name not in irrelevant)


class ParallelSettings(SchemeSettings, tag="mesh", frozen=True, kw_only=True):
    """The settings of a plan, or of the table ``[runs]`` of a job's file; None leaves one as the job runs today.

    `Strategy` says what each of them is.
    """

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    virtual_stages: int | None = None
    sequence_parallel: bool | None = None
    zero_stage: Literal[0, 1, 2, 3] | None = None
    micro_batch: int | None = None
    recompute: Literal["none", "selective", "full"] | None = None
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v", "dual-pipe-v", "dual-pipe"] | None = None
    recompute_layers: int | None = None
    stage_layers: tuple[int, ...] | None = None
    dp_replicate: int | None = None
    cp_ring: bool | None = None
    cp_balanced: bool | None = None
    reshard: bool | None = None
    prefetch_layers: int | None = None
    gradient_dtype: Literal["fp32", "bf16"] | None = None
    expert_load: float | None = None
    offload_optimizer: bool | None = None
    offload_activations: bool | None = None
    cuda_graphs: bool | None = None
    overlap_experts: bool | None = None

    title = "parallel jobs"
    positive = tuple(name for name, setting in SETTINGS.items() if setting.least == 1)
    not_negative = tuple(name for name, setting in SETTINGS.items() if setting.least == 0)
    words: ClassVar[Mapping[str, Callable[[Any], str]]] = {name: setting.words for name, setting in SETTINGS.items()}

    def phrases(self) -> list[str]:
        return phrases(self.settings)


def phrases(settings: Mapping[str, Any]) -> list[str]:
    """Words of some settings in their order; settings of one thing as one: "recompute the first 15 layers of each stage"."""
    said, words = dict(settings), ParallelSettings.words
    if said.get("recompute_layers") and "recompute" in said:
        kind = said.pop("recompute")
        if kind == "selective":
            words = {**words, "recompute_layers": lambda count: f"selective recomputation of {first_layers(count)}"}
    elif "recompute" in said:
        said.pop("recompute_layers", None)
    if said.get("virtual_stages", 1) > 1 and said.get("schedule") == "interleaved":
        del said["schedule"]  # virtual stages are interleaved
    return [words[name](value) for name, value in said.items()]
