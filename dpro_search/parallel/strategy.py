"""`Strategy`: the degrees by which a model is split over devices, and what goes with them."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from dpro_search.errors import InputError
from dpro_search.parallel.layout import Layout
from dpro_search.parallel.model import TENSOR_DIM, Architecture, CapturedModel, Experts, FeedForward, Model, Network
from dpro_search.parallel.schedule import Schedule, check_schedule


class Recompute(StrEnum):
    """Which activations the backward pass computes again."""

    NONE = "none"
    SELECTIVE = "selective"  # some of a layer: see `Selective`
    FULL = "full"  # all of a layer but its input


_POSITIVE = (
    *("dp", "tp", "pp", "cp", "ep", "etp", "virtual_stages", "dp_replicate", "micro_batch", "global_batch", "prefetch_layers"),
)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How one training step of a model is carried out by `devices` ranks.

    Ranks are numbered with tensor parallel neighbours next to each other, then context, data and pipeline parallel ones
    (Megatron-LM's order "tp-cp-ep-dp-pp").
    """

    dp: int = 1  # Replicas of the model; their gradients are summed.
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1  # Devices that share the experts of a layer; they are taken from dp, cp and tp.
    etp: int = 1  # Tensor parallel degree of experts.
    virtual_stages: int = 1  # Groups of layers that each pipeline stage has.
    stage_layers: tuple[int, ...] = ()  # Layers of each stage in the order of the forward pass; empty: as many on each.
    zero_stage: int = 0  # 1: optimizer state is split over dp and cp; 2: gradients too; 3: parameters too (FSDP).
    dp_replicate: int = 1  # Of dp, copies of what ZeRO splits (HSDP; Megatron-LM's optimizer instances); it splits over the others.
    sequence_parallel: bool = False  # Norms and residuals split the sequence over tp.
    cp_ring: bool = False  # Keys and values go round cp's ranks beside the attention; False: they are gathered before it.
    cp_balanced: bool = True  # Each of cp's ranks has as much of a causal attention; False: the last one has most.
    micro_batch: int = 1
    global_batch: int = 1
    recompute: Recompute = Recompute.NONE
    recompute_layers: int = 0  # Of each stage, virtual ones too, the first so many layers are computed again; 0: all.
    schedule: Schedule = Schedule.ONE_F_ONE_B
    # Of zero_stage 3: whether a layer's parameters are freed between its forward and its backward pass, and how many layers ahead
    # they are gathered.
    reshard_after_forward: bool = True
    prefetch_layers: int = 1
    gradient_dtype: Literal["fp32", "bf16"] | None = None  # In which gradients are summed; None: the framework's.
    expert_load: float = 1.0  # Tokens of the experts' rank that has most, over the mean of all ranks.

    def __post_init__(self) -> None:
        if self.zero_stage not in (0, 1, 2, 3):
            raise InputError(f"zero_stage must be 0, 1, 2 or 3, not {self.zero_stage}")
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.stage_layers and min(self.stage_layers) < 0:
            raise InputError(f"stage_layers must be at least 0, not {min(self.stage_layers)}")
        if self.recompute_layers < 0:
            raise InputError(f"recompute_layers must be at least 0, not {self.recompute_layers}")
        if not 1 <= self.expert_load < math.inf:
            raise InputError(f"expert_load must be at least 1 and finite, not {self.expert_load}: 1 is balanced")

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

    def check(self, model: Model, sequence: int) -> None:
        """Raise `InputError` with a reason and the nearest legal value where a model cannot be split like that."""
        per_step = self.dp * self.micro_batch
        if self.global_batch % per_step:
            legal = max(1, round(self.global_batch / per_step)) * per_step
            raise InputError(
                f"global_batch {self.global_batch} does not divide into dp {self.dp} x micro_batch {self.micro_batch}: use {legal}"
            )
        if isinstance(model, Network):
            self._check_network(model)
            return
        if isinstance(model, CapturedModel):
            self._check_captured(model, sequence)
            return
        for layer in model.layers:
            attention, feed_forward = layer.attention, layer.feed_forward
            _divides("tp", self.tp, attention.heads, "heads")
            if attention.kv_heads % self.tp and self.tp % attention.kv_heads:
                raise InputError(f"tp {self.tp} neither divides {attention.kv_heads} kv_heads nor is a multiple of them")
            if isinstance(feed_forward, FeedForward):
                _divides("tp", self.tp, feed_forward.hidden, "the feed-forward width")
            else:
                _divides("ep", self.ep, feed_forward.count, "experts")
                _divides("etp", self.etp, feed_forward.hidden, "the experts' width")
        has_experts = any(isinstance(layer.feed_forward, Experts) for layer in model.layers)
        if not has_experts and self.ep * self.etp > 1:
            raise InputError(f"ep {self.ep}: {model.name} has no experts")
        if self.dp * self.cp * self.tp % (self.ep * self.etp):
            raise InputError(f"ep {self.ep} x etp {self.etp} must divide dp x cp x tp = {self.dp * self.cp * self.tp}")
        ways = self.cp * (self.tp if self.sequence_parallel else 1) * (2 if self.cp > 1 and model.layers[0].attention.causal else 1)
        _divides("cp (twice, for causal attention) x tp of sequence_parallel", ways, sequence, "tokens of a sequence")
        self._check_replicate()
        self._check_stages(model)
        self._check_recompute(model)

    def _check_replicate(self) -> None:
        most = math.gcd(self.dp * self.cp, self.expert_dp)
        if most % self.dp_replicate:
            whole = f"{self.dp * self.cp} replicas (dp x cp)" + (
                "" if most == self.dp * self.cp else f" and {self.expert_dp} of the experts"
            )
            raise InputError(f"dp_replicate {self.dp_replicate} does not divide {whole}: use {_nearest(self.dp_replicate, most)}")
        if self.dp_replicate > 1 and not self.zero_stage:
            raise InputError(f"dp_replicate {self.dp_replicate}: zero_stage 0 splits nothing; use zero_stage 1, or dp_replicate 1")

    def _check_captured(self, model: CapturedModel, sequence: int) -> None:
        axes = {name: getattr(self, name) for name in ("tp", "pp", "cp", "ep", "etp", "virtual_stages")}
        model.check(axes, sequence, self.micro_batch)
        ways = self.cp * (self.tp if self.sequence_parallel else 1)
        if model.sequence is None and ways > 1:
            raise InputError(f"{'cp' if self.cp > 1 else 'sequence_parallel'}: {model.name} has no sequences")
        _divides("cp x tp of sequence_parallel", ways, sequence, "tokens of a sequence")
        self._check_replicate()
        self._check_stages(model)
        self._check_recompute(model)

    def _check_stages(self, model: Architecture | CapturedModel) -> None:
        stages, layers = self.pp * self.virtual_stages, model.layer_count
        if stages > max(layers, 1) and not self.stage_layers:
            said = f"pp {self.pp} x virtual_stages {self.virtual_stages} is more than {layers} layers"
            empty = ", or stage_layers with none on the first and the last stage" if stages <= layers + 2 else ""
            raise InputError(f"{said}: use pp {max(layers // self.virtual_stages, 1)}{empty}")
        if self.stage_layers:
            said = f"stage_layers {_listed(self.stage_layers)}: "
            even = f"use {_listed(even_stages(layers, stages))}"
            if len(self.stage_layers) != stages:
                raise InputError(f"{said}{len(self.stage_layers)} stages, and pp x virtual_stages is {stages}: {even}")
            if sum(self.stage_layers) != layers:
                raise InputError(f"{said}{sum(self.stage_layers)} layers, and {model.name} has {layers}: {even}")
            if 0 in self.stage_layers[1:-1]:
                raise InputError(f"{said}only the first and the last stage may be without layers: {even}")
        if self.virtual_stages > 1 and self.pp == 1:
            raise InputError("virtual_stages needs pp above 1")
        check_schedule(self.schedule, self.pp, self.virtual_stages, self.micro_batches)

    def _check_recompute(self, model: Architecture | CapturedModel) -> None:
        if not self.recompute_layers:
            return
        if self.recompute is Recompute.NONE:
            raise InputError(f"recompute_layers {self.recompute_layers} needs recompute full or selective, not none")
        most = max(self.stage_layers or even_stages(model.layer_count, self.pp * self.virtual_stages))
        if self.recompute_layers > most:
            raise InputError(
                f"recompute_layers {self.recompute_layers}: stages have {most} layers at most; use {most}, or 0 for all"
            )

    def _check_network(self, model: Network) -> None:
        """Networks are split over data parallel ranks, and embedding tables over ranks as experts are."""
        split = [name for name in ("tp", "pp", "cp", "etp", "virtual_stages") if getattr(self, name) > 1]
        if split:
            raise InputError(f"{split[0]} {getattr(self, split[0])}: {model.name} is split over dp only")
        if self.stage_layers or self.recompute_layers:
            name = "stage_layers" if self.stage_layers else "recompute_layers"
            raise InputError(f"{name}: {model.name} has no layers of one kind; leave it out")
        if self.ep > 1:
            if not model.tables:
                raise InputError(f"ep {self.ep}: {model.name} has no embedding tables")
            if self.dp % self.ep:
                raise InputError(f"ep {self.ep} must divide dp = {self.dp}")


def key_without(strategy: Strategy, irrelevant: frozenset[str]) -> Hashable:
    """All settings of a strategy but those that do not change a result: the key under which the result is kept.

    A setting that is added to `Strategy` is part of every key, until somebody names it as irrelevant.
    """
    return tuple(value for name, value in vars(strategy).items() if name not in irrelevant)


def _divides(name: str, ways: int, size: int, what: str) -> None:
    if size % ways:
        below = next(number for number in range(min(ways, size), 0, -1) if not size % number)
        raise InputError(f"{name} {ways} does not divide {size} {what}: use {below}")


def even_stages(layers: int, stages: int) -> tuple[int, ...]:
    """As many layers on each stage; the first ones have those that are left over."""
    each, more = divmod(layers, stages)
    return (each + 1,) * more + (each,) * (stages - more)


def _nearest(value: int, whole: int) -> int:
    """The divisor of a number that is nearest to a value."""
    return min((each for each in range(1, whole + 1) if whole % each == 0), key=lambda each: abs(each - value))


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def layout_of(strategy: Strategy, *, regather_inputs: bool = True) -> Layout:
    """Megatron-LM's layout: heads, widths, the vocabulary over tp, sequences over cp, experts over ep, their widths over etp.

    `regather_inputs` is as in `Layout`; frameworks differ in it.
    """
    tensor = ("tp",)
    return Layout(
        axes={"tp": strategy.tp, "cp": strategy.cp, "ep": strategy.ep, "etp": strategy.etp},
        splits={
            "heads": tensor,
            "kv_heads": tensor,
            "ffn": tensor,
            "shared_ffn": tensor,
            "vocab": tensor,
            TENSOR_DIM: tensor,
            "sequence": ("cp",),
            "experts": ("ep",),
            "expert_ffn": ("etp",),
        },
        stream_axis="tp" if strategy.sequence_parallel else None,
        regather_inputs=regather_inputs,
        ring=strategy.cp_ring,
        balanced=strategy.cp_balanced,
        expert_load=strategy.expert_load,
    )
