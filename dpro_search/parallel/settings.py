"""`ParallelSettings`: what a plan, or the table ``[runs]`` of a job's file, says; `resolved` makes a `Strategy` of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec

from dpro_search.errors import InputError
from dpro_search.parallel.model import Architecture, CapturedModel, Experts, Layer, Model
from dpro_search.parallel.schedule import Schedule
from dpro_search.parallel.strategy import Recompute, Strategy
from dpro_search.space.schemes import SchemeSettings, counted

SHAPE = ("tp", "pp", "cp")  # axes beside dp that divide the devices


class ParallelSettings(SchemeSettings, tag="mesh", frozen=True, kw_only=True):
    """How the model of a parallel job is split over devices; None leaves a setting as the job runs today.

    Attributes
    ----------
    tp, pp, dp, cp, ep, etp
        Degrees of tensor, pipeline, data, context and expert parallelism, and of tensor parallelism of experts. dp follows from
        the number of devices where it is not set.
    virtual_stages
        Groups of layers that each pipeline stage has.
    sequence_parallel
        Whether norms and residuals split the sequence over tp; not set: where tp is above 1.
    zero_stage
        ZeRO's stage over dp and cp: 1 optimizer state, 2 gradients too, 3 parameters too (FSDP).
    micro_batch
        Sequences of a micro-batch.
    recompute, schedule
        Activations that the backward pass computes again, and the order of the pipeline's passes.
    recompute_layers
        How many layers of each stage, virtual ones too, `recompute` is about, the first ones; 0: all.
    stage_layers
        Layers of each stage in the order of the forward pass; empty: as many on each.
    dp_replicate
        Of dp and cp, copies of what ZeRO splits (HSDP).
    cp_ring, cp_balanced
        Whether keys and values go round the ranks of cp beside the attention, or are gathered before it; and whether each rank has
        as much of a causal attention.
    reshard, prefetch_layers
        Of ZeRO-3: whether a layer's parameters are freed between its passes, and how many layers ahead they are gathered.
    gradient_dtype
        In which gradients are summed.
    expert_load
        Tokens of the experts' rank that has most, over the mean of all ranks: a property of the job, which no search changes.
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
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v", "dual-pipe-v"] | None = None
    recompute_layers: int | None = None
    stage_layers: tuple[int, ...] | None = None
    dp_replicate: int | None = None
    cp_ring: bool | None = None
    cp_balanced: bool | None = None
    reshard: bool | None = None
    prefetch_layers: int | None = None
    gradient_dtype: Literal["fp32", "bf16"] | None = None
    expert_load: float | None = None

    title = "parallel jobs"
    positive = ("tp", "pp", "dp", "cp", "ep", "etp", "virtual_stages", "micro_batch", "dp_replicate", "prefetch_layers")
    not_negative = ("recompute_layers",)
    words: ClassVar[Mapping[str, Callable[[Any], str]]] = {
        **{name: f"{name} {{}}".format for name in ("tp", "pp", "dp", "cp", "ep", "etp")},
        "virtual_stages": lambda value: f"{value} virtual stages" if value > 1 else "no virtual stages",
        "sequence_parallel": lambda value: "sequence parallel" if value else "no sequence parallel",
        "zero_stage": lambda value: f"ZeRO-{value}" if value else "no ZeRO",
        "micro_batch": lambda value: f"micro-batch {value}",
        "recompute": lambda value: f"{value} recomputation" if value != "none" else "no recomputation",
        "schedule": lambda value: _SCHEDULES.get(value, value),
        "recompute_layers": lambda value: f"recompute {_first_layers(value)}" if value else "recompute all layers",
        "stage_layers": lambda value: f"layers per stage {_repeated(value)}" if value else "as many layers on each stage",
        "dp_replicate": lambda value: f"HSDP, {value} replicas" if value > 1 else "no HSDP",
        "cp_ring": lambda value: "ring attention" if value else "keys and values gathered",
        "cp_balanced": lambda value: "causal attention balanced" if value else "causal attention not balanced",
        "reshard": lambda value: "parameters freed after forward" if value else "parameters kept for backward",
        "prefetch_layers": lambda value: f"gathers {counted('layer')(value)} ahead",
        "gradient_dtype": lambda value: f"gradients in {value}",
        "expert_load": lambda value: f"expert load {value:g}",
    }

    def phrases(self) -> list[str]:
        return _phrases(self.settings)


_SCHEDULES: Mapping[str, str] = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "interleaved 1F1B",
    "zero-bubble": "zero bubble (ZB-H1)",
    "zero-bubble-v": "zero bubble V",
    "dual-pipe-v": "DualPipeV",
}


def strategy_text(strategy: Strategy) -> str:
    """The whole strategy as a practitioner says it: "tp 4, pp 8, dp 16, 7 virtual stages, ZeRO-1, no recomputation, micro-batch 1".

    Degrees of 1, and what goes without saying (sequence parallelism with tensor parallelism), are left out.
    """
    settings, defaults = settings_of(strategy).settings, settings_of(Strategy(global_batch=strategy.global_batch)).settings
    said = {name: settings[name] for name in ("tp", "pp", "cp", "ep", "etp", "dp", "virtual_stages") if settings[name] > 1}
    if strategy.pp > 1 and strategy.schedule is not Schedule.INTERLEAVED:
        said["schedule"] = strategy.schedule.value
        said.pop("virtual_stages", None)  # those of V schedules are always two
    said |= {name: settings[name] for name in ("stage_layers",) if settings[name]}
    if strategy.tp > 1 and not strategy.sequence_parallel:
        said["sequence_parallel"] = False
    said["zero_stage"] = strategy.zero_stage
    said |= {name: settings[name] for name in ("dp_replicate", "reshard", "prefetch_layers") if settings[name] != defaults[name]}
    said |= {"recompute": strategy.recompute.value, "recompute_layers": strategy.recompute_layers}
    said["micro_batch"] = strategy.micro_batch
    more = ("cp_ring", "cp_balanced", "gradient_dtype", "expert_load")
    said |= {name: settings[name] for name in more if name in settings and settings[name] != defaults.get(name)}
    return ", ".join(_phrases(said))


def _phrases(settings: Mapping[str, Any]) -> list[str]:
    """Words of some settings in their order; settings of one thing as one: "recompute the first 15 layers of each stage"."""
    said, words = dict(settings), ParallelSettings.words
    if said.get("recompute_layers") and "recompute" in said:
        kind = said.pop("recompute")
        if kind == "selective":
            words = {
                **words,
                "recompute_layers": lambda count: f"selective recomputation of {_first_layers(count)}",
            }
    elif "recompute" in said:
        said.pop("recompute_layers", None)
    if said.get("virtual_stages", 1) > 1 and said.get("schedule") == "interleaved":
        del said["schedule"]  # virtual stages are interleaved
    return [words[name](value) for name, value in said.items()]


def _first_layers(count: int) -> str:
    return "the first layer of each stage" if count == 1 else f"the first {count} layers of each stage"


def _repeated(counts: Sequence[int]) -> str:
    """Numbers as ``--set`` takes them, with how often each comes in a row: "7,14x8,7"."""
    groups = [(value, len(list(same))) for value, same in itertools.groupby(counts)]
    return ",".join(f"{value}x{times}" if times > 1 else str(value) for value, times in groups)


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """The part of a job that no plan changes: the model, the batch, the devices, and the framework's defaults."""

    model: Model
    sequence: int
    global_batch: int
    devices: int
    zero_stage: int  # Of the framework, where nothing else is set.

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Heads of a transformer. A network has none that could be split."""
        return self.model.layers if isinstance(self.model, Architecture) else ()

    @property
    def layer_count(self) -> int:
        """Layers that pipeline stages can be made of; 0: none."""
        if isinstance(self.model, CapturedModel):
            return self.model.layer_count if self.model.splits("pp") else 0
        return sum(layer.count for layer in self.layers)

    @property
    def has_tokens(self) -> bool:
        """Whether samples are sequences of tokens."""
        return self.model.sequence is not None if isinstance(self.model, CapturedModel) else bool(self.layers)

    @property
    def heads(self) -> int:
        """The size that degrees of tensor parallelism divide."""
        if isinstance(self.model, CapturedModel):
            return self.model.widths
        return self.layers[0].attention.heads if self.layers else 1

    @property
    def has_context(self) -> bool:
        """Whether sequences can be split over cp."""
        return self.model.splits("cp") if isinstance(self.model, CapturedModel) else bool(self.layers)

    @property
    def micro_batches(self) -> bool:
        """Whether the cost of another micro-batch is known."""
        return "batch" in self.model.grows if isinstance(self.model, CapturedModel) else True

    @property
    def experts(self) -> int:
        """Experts of a layer, or embedding tables, which ranks may share; 0: none."""
        if isinstance(self.model, CapturedModel):
            return 0
        if not isinstance(self.model, Architecture):
            return self.model.tables
        return min((layer.feed_forward.count for layer in self.layers if isinstance(layer.feed_forward, Experts)), default=0)


def resolved(settings: ParallelSettings, fixed: Fixed) -> Strategy:
    """The strategy that settings mean; what is not set follows from what is.

    Raises
    ------
    InputError
        It is impossible: the message begins with the setting's name and gives the nearest legal value.
    """
    tp, pp, cp = settings.tp or 1, settings.pp or 1, settings.cp or 1
    stages = settings.virtual_stages or 1
    if settings.schedule == "interleaved" and stages == 1:
        raise InputError("schedule interleaved needs virtual_stages above 1: use virtual_stages=2, or 1f1b")
    usual = Schedule.INTERLEAVED if stages > 1 else Schedule.ONE_F_ONE_B
    zero_stage = fixed.zero_stage if settings.zero_stage is None else settings.zero_stage
    strategy = Strategy(
        dp=settings.dp or _dp(tp, pp, cp, fixed.devices),
        tp=tp,
        pp=pp,
        cp=cp,
        ep=settings.ep or 1,
        etp=settings.etp or 1,
        virtual_stages=stages,
        stage_layers=settings.stage_layers or (),
        zero_stage=zero_stage,
        dp_replicate=settings.dp_replicate or 1,
        sequence_parallel=tp > 1 if settings.sequence_parallel is None else settings.sequence_parallel and tp > 1,
        cp_ring=bool(settings.cp_ring) and cp > 1,
        cp_balanced=settings.cp_balanced is not False or cp == 1,
        micro_batch=settings.micro_batch or 1,
        global_batch=fixed.global_batch,
        recompute=Recompute(settings.recompute or "none"),
        recompute_layers=settings.recompute_layers or 0,
        schedule=usual if settings.schedule is None else Schedule(settings.schedule),
        reshard_after_forward=settings.reshard is not False or zero_stage < 3,
        prefetch_layers=(settings.prefetch_layers or 1) if zero_stage == 3 else 1,
        gradient_dtype=settings.gradient_dtype,
        expert_load=settings.expert_load or 1.0,
    )
    if strategy.devices != fixed.devices:
        _refuse_devices(strategy, fixed.devices)
    strategy.check(fixed.model, fixed.sequence)
    return strategy


_FOLLOW: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(SHAPE, ("dp",)),
    "virtual_stages": ("schedule",),
    "recompute": ("recompute_layers",),
    "zero_stage": ("dp_replicate", "reshard", "prefetch_layers"),
}
"""Settings that go back to what follows from the others where a setting changes and they are not set beside it."""
_FOLLOWING = ("dp", "sequence_parallel", "schedule", "recompute_layers", "stage_layers", "dp_replicate")
_STAGES = ("pp", "virtual_stages")  # where one changes, `stage_layers` and `recompute_layers` are those of other stages


def under(runs: ParallelSettings, plan: ParallelSettings) -> ParallelSettings:
    """Settings of a plan over those of today; what belongs to a setting that changes follows anew."""
    changed = plan.settings
    following = [other for name in changed for other in _FOLLOW.get(name, ())]
    if changed.keys() & {*_STAGES}:
        following += ["stage_layers", "recompute_layers"]
    changed = {**dict.fromkeys(following), **changed}
    return msgspec.structs.replace(runs, **changed) if changed else runs


def settings_of(strategy: Strategy) -> ParallelSettings:
    """Every setting of a strategy, written out."""
    return ParallelSettings(
        tp=strategy.tp,
        pp=strategy.pp,
        dp=strategy.dp,
        cp=strategy.cp,
        ep=strategy.ep,
        etp=strategy.etp,
        virtual_stages=strategy.virtual_stages,
        sequence_parallel=strategy.sequence_parallel,
        zero_stage=strategy.zero_stage,  # type: ignore[arg-type]
        micro_batch=strategy.micro_batch,
        recompute=strategy.recompute.value,
        schedule=strategy.schedule.value,
        recompute_layers=strategy.recompute_layers,
        stage_layers=strategy.stage_layers,
        dp_replicate=strategy.dp_replicate,
        cp_ring=strategy.cp_ring,
        cp_balanced=strategy.cp_balanced,
        reshard=strategy.reshard_after_forward,
        prefetch_layers=strategy.prefetch_layers,
        gradient_dtype=strategy.gradient_dtype,
        expert_load=strategy.expert_load,
    )


def change(runs: ParallelSettings, today: Strategy, target: Strategy, fixed: Fixed) -> ParallelSettings:
    """The fewest settings that make of today's strategy the wanted one: what follows from others is left out."""
    full, now = settings_of(target).settings, settings_of(today).settings
    kept = {name: value for name, value in full.items() if value != now.get(name)}
    meant = _meant(runs, kept, fixed)
    if meant is not None:  # what a change takes back that is wanted
        now = settings_of(meant).settings
        kept |= {name: value for name, value in full.items() if value != now.get(name)}
    for name in _FOLLOWING:
        fewer = {other: value for other, value in kept.items() if other != name}
        if name in kept and _meant(runs, fewer, fixed) == target:
            kept = fewer
    return ParallelSettings(**(kept if _meant(runs, kept, fixed) == target else full))


def _meant(runs: ParallelSettings, changed: Mapping[str, Any], fixed: Fixed) -> Strategy | None:
    """The strategy of changed settings; None: it is impossible."""
    try:
        return resolved(under(runs, ParallelSettings(**changed)), fixed)
    except InputError:
        return None


def _dp(tp: int, pp: int, cp: int, devices: int) -> int:
    """Replicas that use all devices."""
    rest = tp * pp * cp
    if devices % rest == 0:
        return devices // rest
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


def _refuse_devices(strategy: Strategy, devices: int) -> None:
    rest = strategy.devices // strategy.dp
    product = f"dp {strategy.dp} x tp {strategy.tp} x pp {strategy.pp} x cp {strategy.cp} = {strategy.devices}"
    legal = f"use dp {devices // rest}" if devices % rest == 0 else "leave dp out"
    raise InputError(f"dp {strategy.dp}: {product} are not the {devices} devices: {legal}")
