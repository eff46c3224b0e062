"""How PyTorch's ``fully_shard`` gathers and reduces: prefetching, resharding, shards over fewer ranks, units computed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from dpro_search.space.plan import Plan
from dpro_search.space.transformations._base import RECORDED, Choice, Knob, PlanningFacts, Switch, Transformation

_MOST_POINTS = 8  # of a grid
_MOST_SHOWN = 8  # in an error


class Prefetch(Switch):
    """Each unit's parameters are gathered while the unit before it computes: ``set_modules_to_forward_prefetch``."""

    name = "prefetch"
    fields = ("prefetch",)
    turned = True


class KeepParameters(Switch):
    """Units keep their parameters after the forward pass: ``reshard_after_forward=False``."""

    name = "reshard"
    fields = ("reshard_after_forward",)
    turned = False


class ForwardPrefetch(Knob):
    """Parameters are gathered some units ahead in the forward pass: ``set_modules_to_forward_prefetch`` of so many units."""

    name = "prefetch"
    fields = ("prefetch", "prefetch_depth")

    def __init__(self, job: PlanningFacts, *, units: int) -> None:
        super().__init__(job)
        self._units = units

    def legal(self, plan: Plan) -> str | None:
        if plan.get("prefetch") is False:
            return "prefetch: only 1 can be replayed; leave it out for what was recorded"
        if plan.get("prefetch_depth") is not None and not plan.get("prefetch"):
            return "prefetch_depth: goes with prefetch=1"
        return None

    def simplest(self, plan: Plan) -> Plan:
        return plan.changed(prefetch_depth=None) if plan.get("prefetch_depth") == 1 else plan

    @cached_property
    def choice(self) -> Choice:
        deeper = tuple({"prefetch": True, "prefetch_depth": depth} for depth in (2, 3, 4) if depth < self._units)
        return Choice(name=self.name, fields=self.fields, grids={RECORDED: ({},), "set": ({"prefetch": True}, *deeper)})


class BackwardPrefetch(Knob):
    """The same in the backward pass, where FSDP gathers one unit ahead by itself: ``set_modules_to_backward_prefetch``."""

    name = "backward-prefetch"
    fields = ("backward_prefetch_depth",)

    def __init__(self, job: PlanningFacts, *, units: int) -> None:
        super().__init__(job)
        self._units = units

    def simplest(self, plan: Plan) -> Plan:
        return plan.changed(backward_prefetch_depth=None) if plan.get("backward_prefetch_depth") == 1 else plan

    @cached_property
    def choice(self) -> Choice:
        return self.offered([depth for depth in (2, 3, 4) if depth < self._units])


class KeptUnits(Knob):
    """Units keep their parameters after the forward pass: all; the last ones, which the backward pass needs first; or any.

    Of any, those with the fewest bytes: a gather of few bytes takes hardly less than one of many, and what is kept takes memory.
    """

    name = "reshard"
    fields = ("reshard_after_forward", "kept_last_units", "kept_units")

    def __init__(self, job: PlanningFacts, units: Sequence[str]) -> None:
        """`units`: those that give their parameters up in the recorded job, the last of the forward pass first."""
        super().__init__(job)
        self._units = tuple(units)

    def legal(self, plan: Plan) -> str | None:
        if plan.get("reshard_after_forward"):
            return "reshard_after_forward: only 0 can be replayed; leave it out for what was recorded"
        kept = plan.get("kept_last_units")
        if kept is not None and plan.get("reshard_after_forward") is False:
            return "kept_last_units and reshard_after_forward: all units are kept already; leave out one of them"
        if kept is not None and kept > len(self._units):
            return f"kept_last_units: {len(self._units)} units of the recorded job give their parameters up"
        named = plan.get("kept_units")
        if named is None:
            return None
        if kept is not None or plan.get("reshard_after_forward") is False:
            return "kept_units goes with neither kept_last_units nor reshard_after_forward; leave out one of them"
        unknown = next((name for name in named if name not in self._units), None)
        if unknown is not None:
            return f"kept_units: '{unknown}' does not give its parameters up; units that do are {_listed(self._units) or 'none'}"
        return None

    def simplest(self, plan: Plan) -> Plan:
        named = plan.get("kept_units")
        if named is None:
            return plan
        kept = tuple(unit for unit in self._units if unit in named)
        if len(kept) == len(self._units) > 0:
            return plan.changed(kept_units=None, reshard_after_forward=False)
        if kept == self._units[: len(kept)]:
            return plan.changed(kept_units=None, kept_last_units=len(kept) or None)
        return plan.changed(kept_units=kept)

    @cached_property
    def choice(self) -> Choice:
        grids: dict[str, tuple[dict[str, object], ...]] = {RECORDED: ({},)}
        if self._units:
            some: tuple[dict[str, object], ...] = tuple({"kept_last_units": count} for count in range(1, len(self._units)))
            grids |= {"last": some} if some else {}
            small = self._smallest_first
            grids |= {"small": tuple({"kept_units": small[:count]} for count in range(1, len(small)))} if small else {}
            grids["all"] = ({"reshard_after_forward": False},)
        return Choice(name=self.name, fields=self.fields, grids=grids)

    @property
    def _smallest_first(self) -> tuple[str, ...]:
        """Units by their bytes; none where these are not known, or the order is that of the last ones."""
        sizes = {tensor.name: tensor.size_bytes for tensor in self.job.tensors}
        if not all(sizes.get(unit, 0) > 0 for unit in self._units):
            return ()
        order = tuple(sorted(self._units, key=lambda unit: sizes[unit]))  # equal ones: the last first
        return () if order == self._units else order


class UnitsTogether(Knob):
    """Some units, one after the other in the forward pass, are one: ``fully_shard`` of a list of modules."""

    name = "units-together"
    fields = ("units_together",)

    def __init__(self, job: PlanningFacts, *, units: int, refused: str | None) -> None:
        """`units`: how many there are beside the root."""
        super().__init__(job)
        self._units, self._refused = units, refused

    def legal(self, plan: Plan) -> str | None:
        together = plan.get("units_together")
        if together is None:
            return None
        if self._refused is not None:
            return f"units_together: {self._refused}"
        return None if together <= max(self._units, 1) else f"units_together: there are {self._units} units beside the root"

    def simplest(self, plan: Plan) -> Plan:
        return plan.changed(units_together=None) if plan.get("units_together") == 1 else plan

    @cached_property
    def choice(self) -> Choice:
        return self.offered([] if self._refused else [count for count in (2, 3, 4, 6, 8, 12, 16) if count <= self._units])


class ReduceDtype(Knob):
    """Gradients are reduced in half precision: ``MixedPrecisionPolicy(reduce_dtype=...)``. Changes the numbers."""

    name = "reduce-dtype"
    fields = ("reduce_dtype",)

    def __init__(self, job: PlanningFacts, *, allow_lossy: bool, refused: str | None) -> None:
        super().__init__(job)
        self._allowed, self._refused = allow_lossy, refused

    def legal(self, plan: Plan) -> str | None:
        if plan.get("reduce_dtype") is None:
            return None
        if self._refused is not None:
            return f"reduce_dtype: {self._refused}"
        return None if self._allowed else f"reduce_dtype '{plan.get('reduce_dtype')}' changes the numbers; only with --allow-lossy"

    @cached_property
    def choice(self) -> Choice:
        return self.offered(["bfloat16", "float16"] if self._allowed and self._refused is None else [])


class ShardRanks(Knob):
    """Parameters are shared by fewer neighbouring ranks, and copied to the others (HSDP): a mesh of two dimensions."""

    name = "shard-ranks"
    fields = ("shard_ranks",)

    def __init__(self, job: PlanningFacts, *, ranks: int, shared_by: int | None, refused: str | None) -> None:
        """`ranks`: of the job; `shared_by`: how many share the parameters in the recorded one."""
        super().__init__(job)
        self._ranks, self._shared_by, self._refused = ranks, shared_by, refused

    def legal(self, plan: Plan) -> str | None:
        shard_ranks = plan.get("shard_ranks")
        if shard_ranks is None:
            return None
        if self._refused is not None:
            return f"shard_ranks: {self._refused}"
        if self._ranks % shard_ranks or shard_ranks < 2:
            return f"shard_ranks: {self._ranks} ranks do not make groups of {shard_ranks}; use {_listed(self._divisors)}"
        return None

    def simplest(self, plan: Plan) -> Plan:
        return plan.changed(shard_ranks=None) if plan.get("shard_ranks") == self._shared_by else plan

    @property
    def _divisors(self) -> list[int]:
        return [count for count in range(2, self._ranks + 1) if self._ranks % count == 0]

    @cached_property
    def choice(self) -> Choice:
        return self.offered([] if self._refused else [count for count in self._divisors if count != self._shared_by])


class RecomputedUnits(Transformation):
    """Units of a profiled job whose forward pass runs again in the backward pass; the first ones are worth most memory."""

    name = "recomputation"
    fields = ("recomputed_modules",)
    weight = 2.0

    def __init__(self, job: PlanningFacts, units: Sequence[str]) -> None:
        """`units`: those that can, in the order of the forward pass."""
        super().__init__(job)
        self._units = tuple(units)

    def legal(self, plan: Plan) -> str | None:
        unknown = next((name for name in plan.recomputed_modules or () if name not in self._units), None)
        if unknown is None:
            return None
        known = f"units that can are {_listed(self._units)}" if self._units else "the profile does not mark what units compute"
        return f"recomputed_modules: '{unknown}' cannot be computed again: {known}"

    def propose(self, plan: Plan, rng: np.random.Generator, hot: Mapping[str, float]) -> Plan:
        """One more unit or one less."""
        if not self._units:
            return plan
        chosen = set(plan.recomputed_modules or ()) ^ {self._units[int(rng.integers(len(self._units)))]}
        return self._with(plan, chosen)

    def simplest(self, plan: Plan) -> Plan:
        return self._with(plan, set(plan.recomputed_modules or ()))

    def _with(self, plan: Plan, chosen: set[str]) -> Plan:
        return plan.changed(recomputed_modules=tuple(unit for unit in self._units if unit in chosen) or None)

    @cached_property
    def choice(self) -> Choice:
        """The first units, and more of them from one grid point to the next."""
        counts = sorted({-(-len(self._units) * part // _MOST_POINTS) for part in range(1, _MOST_POINTS + 1)} - {0})
        points = tuple({"recomputed_modules": self._units[:count]} for count in counts)
        return Choice(name=self.name, fields=self.fields, grids={RECORDED: ({},)} | ({"first": points} if points else {}))


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values[:_MOST_SHOWN])) + (", ..." if len(values) > _MOST_SHOWN else "")
