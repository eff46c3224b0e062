"""`MeshSettings`: what a parallel job's plan, or the table ``[runs]`` of its file, says; `resolved` makes a `Strategy` of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec

from dpro_search.errors import InputError
from dpro_search.graph.model import Architecture, CapturedModel, Experts, Layer, Model
from dpro_search.space.mesh import Recompute, Schedule, Strategy
from dpro_search.space.schemes import SchemeSettings

SHAPE = ("tp", "pp", "cp")  # axes beside dp that divide the devices


class MeshSettings(SchemeSettings, tag="mesh", frozen=True, kw_only=True):
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

    title = "parallel jobs"
    positive = ("tp", "pp", "dp", "cp", "ep", "etp", "virtual_stages", "micro_batch")
    words: ClassVar[Mapping[str, Callable[[Any], str]]] = {
        **{name: f"{name} {{}}".format for name in ("tp", "pp", "dp", "cp", "ep", "etp")},
        "virtual_stages": lambda value: f"{value} virtual stages" if value > 1 else "no virtual stages",
        "sequence_parallel": lambda value: "sequence parallel" if value else "no sequence parallel",
        "zero_stage": lambda value: f"ZeRO-{value}" if value else "no ZeRO",
        "micro_batch": lambda value: f"micro-batch {value}",
        "recompute": lambda value: f"recompute {value}" if value != "none" else "no recomputation",
        "schedule": lambda value: f"schedule {value}",
    }


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What no plan changes: the model, the batch, the devices, and what the framework does where nothing is set."""

    model: Model
    sequence: int
    global_batch: int
    devices: int
    zero_stage: int  # Of the framework, where nothing else is set.

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Of a transformer; a network has none that could be split."""
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
        """What degrees of tensor parallelism divide."""
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


def resolved(settings: MeshSettings, fixed: Fixed) -> Strategy:
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
    strategy = Strategy(
        dp=settings.dp or _dp(tp, pp, cp, fixed.devices),
        tp=tp,
        pp=pp,
        cp=cp,
        ep=settings.ep or 1,
        etp=settings.etp or 1,
        virtual_stages=stages,
        zero_stage=fixed.zero_stage if settings.zero_stage is None else settings.zero_stage,
        sequence_parallel=tp > 1 if settings.sequence_parallel is None else settings.sequence_parallel and tp > 1,
        micro_batch=settings.micro_batch or 1,
        global_batch=fixed.global_batch,
        recompute=Recompute(settings.recompute or "none"),
        schedule=usual if settings.schedule is None else Schedule(settings.schedule),
    )
    if strategy.devices != fixed.devices:
        _refuse_devices(strategy, fixed.devices)
    strategy.check(fixed.model, fixed.sequence)
    return strategy


def under(runs: MeshSettings, plan: MeshSettings) -> MeshSettings:
    """Settings of a plan over those of today; where it changes another axis, dp follows from the devices."""
    changed = plan.settings
    if changed.keys() & {*SHAPE} and "dp" not in changed:
        changed = {**changed, "dp": None}
    if "virtual_stages" in changed and "schedule" not in changed:
        changed = {**changed, "schedule": None}
    return msgspec.structs.replace(runs, **changed) if changed else runs


def settings_of(strategy: Strategy) -> MeshSettings:
    """Every setting of a strategy, written out."""
    return MeshSettings(
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
    )


def change(runs: MeshSettings, today: Strategy, wanted: Strategy, fixed: Fixed) -> MeshSettings:
    """The fewest settings that make of today's strategy the wanted one: what follows from others is left out."""
    full, now = settings_of(wanted).settings, settings_of(today).settings
    kept = {name: value for name, value in full.items() if value != now[name]}
    for name in ("dp", "sequence_parallel", "schedule"):
        fewer = {other: value for other, value in kept.items() if other != name}
        if name in kept and _means(under(runs, MeshSettings(**fewer)), wanted, fixed):
            kept = fewer
    found = MeshSettings(**kept)
    return found if _means(under(runs, found), wanted, fixed) else MeshSettings(**full)


def _means(settings: MeshSettings, wanted: Strategy, fixed: Fixed) -> bool:
    try:
        return resolved(settings, fixed) == wanted
    except InputError:
        return False


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
