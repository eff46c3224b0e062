"""Changes of a PyTorch job by module.

Recomputation is activation checkpointing, as `torch.utils.checkpoint` does it; mixed precision is forward passes under bfloat16
autocast, as `torch.autocast` does it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from dpro_search.collect.modules import LoweredOps, ModuleInfo
from dpro_search.collect.trace import Floats
from dpro_search.costmodel.fused.op_classes import kind_of
from dpro_search.errors import InputError
from dpro_search.graph.ddp import DdpGraph
from dpro_search.machine import machine_constants
from dpro_search.space.plan import Plan
from dpro_search.space.transformations._base import RECORDED, Choice, PlanningFacts, Transformation
from dpro_search.space.transformations.precision import Ratios

_MOST_POINTS = 16
NOT_RECORDED = "the job was recorded before modules were kept, or its model has none that can be named: record it again"
_FIELD = "bfloat16_modules"
NO_AUTOCAST_RECORDED = (
    "the recording does not tell which ops of its modules would run in bfloat16: record the job again, with PyTorch 2.1 or later"
)


class ModuleTransformation(Transformation):
    """A field that names some of a model's modules, none a part of another, in the order in which they run.

    Parameters
    ----------
    modules
        All of the model, in that order.
    candidates
        Names of those that moves may take.
    """

    weight = 2.0

    def __init__(self, job: PlanningFacts, modules: Sequence[ModuleInfo], candidates: Sequence[str]) -> None:
        super().__init__(job)
        self._modules = tuple(modules)
        self._candidates = tuple(candidates)

    def propose(self, plan: Plan, rng: np.random.Generator, hot: Mapping[str, float]) -> Plan:
        """One more module in place of its parts and of what it is a part of, or one less."""
        if not self._candidates:
            return plan
        picked, chosen = self._candidates[rng.integers(len(self._candidates))], set(self._chosen(plan))
        if picked in chosen:
            return self._with(plan, chosen - {picked})
        return self._with(plan, {name for name in chosen if not _nested(name, picked)} | {picked})

    def simplest(self, plan: Plan) -> Plan:
        return self._with(plan, set(self._chosen(plan)))

    def _blocks(self) -> tuple[str, ...]:
        """Candidates that are members of rows of blocks, none a part of another; all candidates without a such row."""
        able = set(self._candidates)
        return outermost([module.name for module in self._modules if module.member and module.name in able] or self._candidates)

    def _chosen(self, plan: Plan) -> tuple[str, ...]:
        return plan.get(self.fields[0]) or ()

    def _with(self, plan: Plan, names: set[str]) -> Plan:
        ordered = tuple(module.name for module in self._modules if module.name in names)
        return plan.changed(**{self.fields[0]: ordered or None})


class ModuleRecomputation(ModuleTransformation):
    """Modules whose forward pass runs a second time, before their backward pass; the first keeps only what goes in and out.

    Those that run first are worth most: the others are behind them in the backward pass, and nothing is left of these by then.
    """

    name = "recomputation"
    fields = ("recomputed_modules",)

    def __init__(self, job: PlanningFacts, modules: Sequence[ModuleInfo]) -> None:
        super().__init__(job, modules, [module.name for module in modules if not module.refusal and module.frees_bytes])

    def legal(self, plan: Plan) -> str | None:
        return refusal(self._modules, plan.recomputed_modules or ())

    @cached_property
    def choice(self) -> Choice | None:
        """The first blocks of the model, and more of them from one grid point to the next."""
        blocks = self._blocks()
        if not blocks:
            return None
        counts = sorted({round(len(blocks) * (i + 1) / _MOST_POINTS) for i in range(_MOST_POINTS)} - {0})
        points = tuple({"recomputed_modules": blocks[:count]} for count in counts)
        return Choice(name=self.name, fields=self.fields, grids={RECORDED: ({},), "first": points})


def refusal(modules: Sequence[ModuleInfo], names: Sequence[str]) -> str | None:
    """Why modules of a recorded job cannot be computed again; None: they can."""
    if (why := unknown_module("recomputed_modules", modules, names)) is not None:
        return why
    for module in modules:
        if module.name in names and module.refusal:
            return f"recomputed_modules: module '{module.name}' cannot be computed again: {module.refusal}"
    return None


def unknown_module(field: str, modules: Sequence[ModuleInfo], names: Sequence[str]) -> str | None:
    """Why a field of a plan cannot name some modules of a recorded job; None: they are known."""
    if names and not modules:
        return f"{field}: {NOT_RECORDED}"
    missing = sorted(set(names) - {module.name for module in modules})
    return f"{field}: the recorded model has no module '{missing[0]}' (it has '{modules[0].name}')" if missing else None


def recomputed(graph: DdpGraph, names: Sequence[str]) -> DdpGraph:
    """A graph in which modules run again before their backward pass; raises `InputError` for those that cannot."""
    why = refusal(graph.modules, names)
    if why is not None:
        raise InputError(f"plan: {why}")
    ready_us, backward_us = graph.ready_us.copy(), graph.backward_us.copy()
    for number in numbers_of(graph.modules, names):
        again_us = graph.again_us[:, :, number]
        late = graph.ready_us > graph.backward_from_us[:, :, number, None]
        ready_us += np.where(late, again_us[:, :, None], 0.0)
        backward_us += again_us
    return replace(graph, ready_us=ready_us, backward_us=backward_us)


def saved_bytes(graph: DdpGraph, names: Sequence[str]) -> int | None:
    """Reduction of the peak of a rank's tensors when modules are recomputed; None if the recording does not tell.

    That peak is at the end of the forward pass, at the start of a module's backward pass, when gradients of all that lies behind it
    have taken the place of what this had kept, or at the end. At its own start, a module that is computed again is whole once more.
    """
    modules, chosen = graph.modules, set(names)
    if any(module.frees_bytes < 0 for module in modules if module.name in chosen):
        return None
    sizes = np.array([tensor.size_bytes for tensor in graph.tensors], dtype=np.int64)
    kept = max((module.frees_bytes + module.behind_bytes for module in modules), default=0)
    ready_us, from_us = graph.ready_us.mean(axis=(0, 1)), graph.backward_from_us.mean(axis=(0, 1))
    freed, recorded, planned = 0, [kept, int(sizes.sum())], [int(sizes.sum())]
    for number, module in enumerate(modules):
        if module.frees_bytes < 0 or module.refusal:
            continue
        level = kept - module.behind_bytes + int(sizes[ready_us < from_us[number]].sum())
        recorded.append(level)
        if module.name in chosen or not any(_nested(module.name, name) for name in chosen):
            planned.append(level - freed)
        freed += module.frees_bytes if module.name in chosen else 0
    return max(recorded) - max(kept - freed, *planned)


def outermost(names: Sequence[str]) -> tuple[str, ...]:
    """Those paths of which no other holds it."""
    return tuple(name for name in names if not any(name.startswith(f"{other}.") for other in names))


def numbers_of(modules: Sequence[ModuleInfo], names: Sequence[str]) -> list[int]:
    """Places of modules, in the order in which they run."""
    selected = set(names)
    return [number for number, module in enumerate(modules) if module.name in selected]


def _nested(one: str, other: str) -> bool:
    return one.startswith(f"{other}.") or other.startswith(f"{one}.")


@dataclass(frozen=True, kw_only=True)
class ModuleChange:
    """Change of the profiled time of a module's passes in bfloat16 (negative: faster), and its uncertainty by type of op."""

    forward_us: float
    backward_us: float
    uncertainties_us: Mapping[str, float]


def change_of(lowered: LoweredOps, ratios: Ratios) -> ModuleChange:
    """The time of a module's ops in bfloat16, and of its casts, less their time in float32."""
    cast_us = lowered.casts * ratios.cast_us(lowered.cast_elements / max(lowered.casts, 1))
    added, uncertainties_us = {False: cast_us, True: cast_us}, defaultdict[str, float](float)
    unmeasured = machine_constants().errors.unmeasured_ops
    for op in lowered.ops:
        ratio_bounds = ratios.ratio(op.type, op.us / op.calls)
        if ratio_bounds is None:
            uncertainties_us[op.type] += 0.0 if kind_of(op.type) == "free" else unmeasured * op.us
            continue
        added[op.backward] += op.us * (ratio_bounds[0] - 1)
        uncertainties_us[op.type] += op.us * (ratio_bounds[2] - ratio_bounds[1]) / 2
    return ModuleChange(forward_us=added[False], backward_us=added[True], uncertainties_us=uncertainties_us)


def together_us(changes: Sequence[ModuleChange]) -> float:
    """How uncertain the sum of changes is: wholly dependent within a type, independent between types."""
    types = {name for change in changes for name in change.uncertainties_us}
    return math.hypot(*(sum(change.uncertainties_us.get(name, 0.0) for change in changes) for name in types))


class ModulePrecision(ModuleTransformation):
    """Modules whose products, and what lies between them, compute in bfloat16; float32 goes in and comes out."""

    name = "precision"
    fields = (_FIELD,)

    def __init__(self, job: PlanningFacts, modules: Sequence[ModuleInfo], ratios: Ratios) -> None:
        self._gains_us: dict[str, float] = {}
        for module in modules:
            if module.lowered is not None and not module.refusal:
                change = change_of(module.lowered, ratios)
                if change.forward_us + change.backward_us < 0:
                    self._gains_us[module.name] = -change.forward_us - change.backward_us
        super().__init__(job, modules, list(self._gains_us))

    def legal(self, plan: Plan) -> str | None:
        return precision_refusal(self._modules, plan.bfloat16_modules or ())

    def suggested(self, plan: Plan, delay_us: Mapping[str, float]) -> Plan | None:
        """All that gain."""
        suggestion = self._with(plan, set(outermost(self._candidates)))
        return None if suggestion == plan else suggestion

    @cached_property
    def choice(self) -> Choice | None:
        """Blocks of the model, from one grid point to the next more of those that gain most; or all that gain, as wholes."""
        blocks = sorted(self._blocks(), key=lambda name: -self._gains_us[name])
        if not blocks:
            return None
        counts = sorted({round(len(blocks) * (i + 1) / _MOST_POINTS) for i in range(_MOST_POINTS)} - {0})
        points = tuple({_FIELD: self._with(Plan(), set(blocks[:count])).bfloat16_modules} for count in counts)
        grids: dict[str, tuple[Mapping[str, Any], ...]] = {RECORDED: ({},), "blocks": points}
        whole = self._with(Plan(), set(outermost(self._candidates))).bfloat16_modules
        if whole != points[-1][_FIELD]:
            grids["whole"] = ({_FIELD: whole},)
        return Choice(name=self.name, fields=self.fields, grids=grids)


def precision_refusal(modules: Sequence[ModuleInfo], names: Sequence[str]) -> str | None:
    """Why modules of a recorded job cannot run in bfloat16, or are not known to; None: they can."""
    if (why := unknown_module(_FIELD, modules, names)) is not None:
        return why
    if names and (why := unpriced(modules)) is not None:
        return f"{_FIELD}: {why}"
    for module in modules:
        if module.name in names and (module.refusal or module.lowered is None):
            why = module.refusal or "it computes no product in float32"
            return f"{_FIELD}: module '{module.name}' cannot run in bfloat16 at a known duration: {why}"
    return None


def unpriced(modules: Sequence[ModuleInfo]) -> str | None:
    """Why nothing of a recorded job can be predicted in bfloat16; None: some of it can."""
    return NO_AUTOCAST_RECORDED if all(module.lowered is None for module in modules) else None


def in_bfloat16(graph: DdpGraph, names: Sequence[str], ratios: Ratios) -> DdpGraph:
    """A graph in which modules run in bfloat16; raises `InputError` for those that cannot."""
    why = precision_refusal(graph.modules, names)
    if why is not None:
        raise InputError(f"plan: {why}")
    stretches = _stretches(graph, names, ratios)
    from_us = _later(graph.forward_from_us, stretches)
    return replace(
        graph,
        ready_us=_later(graph.ready_us, stretches),
        backward_us=_later(graph.backward_us, stretches),
        forward_post_us=_later(graph.forward_post_us, stretches),
        forward_from_us=from_us,
        forward_us=_later(graph.forward_from_us + graph.forward_us, stretches) - from_us,
        again_us=_later(graph.forward_from_us + graph.again_us, stretches) - from_us,
        backward_from_us=_later(graph.backward_from_us, stretches),
        backward_until_us=_later(graph.backward_until_us, stretches),
    )


def uncertainty_us(graph: DdpGraph, names: Sequence[str], ratios: Ratios) -> float:
    """How uncertain the length of a step with modules in bfloat16 is because of the ratios."""
    lowered = [graph.modules[number].lowered for number in numbers_of(graph.modules, names)]
    return together_us([change_of(ops, ratios) for ops in lowered if ops is not None])


@dataclass(frozen=True, kw_only=True)
class _Stretch:
    """A part of a rank's core time that takes longer by `more_us`, evenly, [samples, ranks] each."""

    from_us: Floats
    until_us: Floats
    more_us: Floats


def _stretches(graph: DdpGraph, names: Sequence[str], ratios: Ratios) -> list[_Stretch]:
    """The change for the passes of modules. Core time changes in proportion to the profile's time."""
    stretches = []
    for number in numbers_of(graph.modules, names):
        lowered = graph.modules[number].lowered
        assert lowered is not None, "a legal plan has modules with such ops only"
        change = change_of(lowered, ratios)
        begin_us = graph.forward_from_us[:, :, number]
        forward = begin_us, begin_us + graph.forward_us[:, :, number], change.forward_us / max(lowered.forward_us, 1.0)
        backward = (
            graph.backward_from_us[:, :, number],
            graph.backward_until_us[:, :, number],
            change.backward_us / max(lowered.backward_us, 1.0),
        )
        stretches += [
            _Stretch(from_us=from_us, until_us=until_us, more_us=(until_us - from_us) * max(share, -1.0))
            for from_us, until_us, share in (forward, backward)
        ]
    return stretches


def _later(points_us: Floats, stretches: Sequence[_Stretch]) -> Floats:
    """Points on the ranks' core time, [samples, ranks, ...], when stretches of it take longer or shorter."""
    moved = points_us.copy()
    for stretch in stretches:
        shape = (*points_us.shape[:2], *(1,) * (points_us.ndim - 2))
        from_us, until_us, more_us = (column.reshape(shape) for column in (stretch.from_us, stretch.until_us, stretch.more_us))
        moved += more_us * np.clip((points_us - from_us) / np.maximum(until_us - from_us, 1e-9), 0.0, 1.0)
    return moved
