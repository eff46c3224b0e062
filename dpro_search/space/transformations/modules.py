"""Changes of a PyTorch job by module; and recomputation: activation checkpointing, as `torch.utils.checkpoint` does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from dpro_search.collect.modules import ModuleInfo
from dpro_search.errors import InputError
from dpro_search.graph.ddp import DdpGraph
from dpro_search.space.plan import Plan
from dpro_search.space.transformations._base import RECORDED, Choice, JobFacts, Transformation

_MOST_POINTS = 16
NOT_RECORDED = "the job was recorded before modules were kept, or its model has none that can be named: record it again"


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

    def __init__(self, job: JobFacts, modules: Sequence[ModuleInfo], candidates: Sequence[str]) -> None:
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
        """Candidates that are members of rows of blocks, none a part of another; all candidates where there is no such row."""
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

    def __init__(self, job: JobFacts, modules: Sequence[ModuleInfo]) -> None:
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
