"""`resolved` makes a `Strategy` of settings; `settings_of` and `change` make settings of a strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

from dpro_search.errors import InputError
from dpro_search.parallel.legality import check_stages_by_cost, check_strategy
from dpro_search.parallel.model import Architecture, CapturedModel, Experts, Layer, Model
from dpro_search.parallel.setting import plain
from dpro_search.parallel.strategy import DEFAULTS, SETTINGS, ParallelSettings, Strategy, phrases


def strategy_text(strategy: Strategy) -> str:
    """The whole strategy as a practitioner says it: "tp 4, pp 8, dp 16, 7 virtual stages, ZeRO-1, no recomputation, micro-batch 1".

    Degrees of 1, and what goes without saying (sequence parallelism with tensor parallelism), are left out.
    """
    said: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        value = getattr(strategy, name)
        if value != DEFAULTS[name] if setting.said is None else setting.said(strategy):
            said[name] = plain(value)
    return ", ".join(phrases(said))


OFFLOADS = ("offload_optimizer", "offload_activations")
OPTIONS = (*OFFLOADS, "cuda_graphs", "overlap_experts")
"""Settings that only some frameworks have."""


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """The part of a job that no plan changes: the model, the batch, the devices, and the framework's defaults."""

    model: Model
    sequence: int
    global_batch: int
    devices: int
    zero_stage: int  # Of the framework, where nothing else is set.
    splits: tuple[str, ...] = ("tp", "pp", "cp", "ep")  # Degrees that the framework has.
    # `OPTIONS` that there are, each with the least stage of ZeRO that it goes with, or why it cannot be.
    options: Mapping[str, int | str] = field(default_factory=dict)
    stages_by_cost: bool = False  # See `Runtime.stages_by_cost`.

    def check_splits(self, strategy: Strategy) -> None:
        """Raise `InputError`, which begins with the setting's name, if a strategy splits what the framework cannot."""
        for degree in ("tp", "pp", "cp", "ep"):
            if getattr(strategy, degree) > 1 and degree not in self.splits:
                has = ", ".join(self.splits) or "data parallel replicas alone"
                raise InputError(f"{degree} must be 1: of tp, pp, cp and ep the framework has {has}")
        for name in OPTIONS:
            least = self.options.get(name, "the framework cannot do that")
            if getattr(strategy, name) and isinstance(least, str):
                raise InputError(f"{name} cannot be true: {least}")
            if getattr(strategy, name) and isinstance(least, int) and strategy.zero_stage < least and strategy.dp * strategy.cp > 1:
                raise InputError(f"{name} goes with zero_stage {least} or more in the framework, not {strategy.zero_stage}")
        if self.stages_by_cost and not strategy.stage_layers:
            check_stages_by_cost(strategy, self.model)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Layers of a transformer. A network has none that could be split."""
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


_USUAL = {name: setting.usual for name, setting in SETTINGS.items() if setting.usual is not None}
_NEEDS = {name: setting.needs for name, setting in SETTINGS.items() if setting.needs is not None and not setting.kept}
_FOLLOWERS = {name: [other for other, setting in SETTINGS.items() if name in setting.follows] for name in SETTINGS}


def resolved(settings: ParallelSettings, fixed: Fixed) -> Strategy:
    """The strategy that settings mean; what is not set follows from what is.

    Raises
    ------
    InputError
        It is impossible: the message begins with the setting's name and gives the nearest legal value.
    """
    given = settings.settings
    if given.get("schedule") == "interleaved" and given.get("virtual_stages", 1) == 1:
        raise InputError("schedule interleaved needs virtual_stages above 1: use virtual_stages=2, or 1f1b")
    values = {**DEFAULTS, **{name: _typed(value, DEFAULTS[name]) for name, value in given.items()}}
    for name, usual in _USUAL.items():
        if name not in given:
            values[name] = usual(values, fixed.devices, fixed.zero_stage)
    for name, (other, least) in _NEEDS.items():
        if values[other] < least:
            values[name] = DEFAULTS[name]
    strategy = Strategy(global_batch=fixed.global_batch, **values)
    if strategy.devices != fixed.devices:
        _refuse_devices(strategy, fixed.devices)
    fixed.check_splits(strategy)
    check_strategy(strategy, fixed.model, fixed.sequence)
    return strategy


def under(runs: ParallelSettings, plan: ParallelSettings) -> ParallelSettings:
    """Settings of a plan over those of today; what belongs to a setting that changes follows anew."""
    changed = plan.settings
    following = dict.fromkeys(follower for name in changed for follower in _FOLLOWERS[name])
    return msgspec.structs.replace(runs, **{**following, **changed}) if changed else runs


def settings_of(strategy: Strategy) -> ParallelSettings:
    """Every setting of a strategy, written out."""
    return ParallelSettings(**{name: plain(getattr(strategy, name)) for name in SETTINGS})


def _typed(value: Any, default: Any) -> Any:
    """A value of a setting as strategies have it."""
    return type(default)(value) if isinstance(default, Enum) else value


_FOLLOWING = tuple(name for name in ParallelSettings.__struct_fields__ if SETTINGS[name].follows or SETTINGS[name].usual)


def change(runs: ParallelSettings, today: Strategy, target: Strategy, fixed: Fixed) -> ParallelSettings:
    """The fewest settings that make another strategy of today's: what follows from others is left out."""
    full, now = settings_of(target).settings, settings_of(today).settings
    kept = {name: value for name, value in full.items() if value != now.get(name)}
    meant = _meant(runs, kept, fixed)
    if meant is not None:  # a change of one setting has taken others back
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


def _refuse_devices(strategy: Strategy, devices: int) -> None:
    rest = strategy.devices // strategy.dp
    product = f"dp {strategy.dp} x tp {strategy.tp} x pp {strategy.pp} x cp {strategy.cp} = {strategy.devices}"
    legal = f"use dp {devices // rest}" if devices % rest == 0 else "leave dp out"
    raise InputError(f"dp {strategy.dp}: {product} are not the {devices} devices: {legal}")
