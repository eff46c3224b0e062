"""How PyTorch's ``fully_shard`` gathers parameters: prefetching, and resharding after the forward pass."""

from __future__ import annotations

from functools import cached_property

from dpro_search.space.plan import Plan
from dpro_search.space.transformations._base import RECORDED, Choice, JobFacts, Knob, Switch


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

    def __init__(self, job: JobFacts, *, units: int) -> None:
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

    def __init__(self, job: JobFacts, *, units: int) -> None:
        super().__init__(job)
        self._units = units

    def simplest(self, plan: Plan) -> Plan:
        return plan.changed(backward_prefetch_depth=None) if plan.get("backward_prefetch_depth") == 1 else plan

    @cached_property
    def choice(self) -> Choice:
        return self.offered([depth for depth in (2, 3, 4) if depth < self._units])


class KeptUnits(Knob):
    """Units keep their parameters after the forward pass: all, or the last ones, which the backward pass needs first."""

    name = "reshard"
    fields = ("reshard_after_forward", "kept_last_units")

    def __init__(self, job: JobFacts, *, units: int) -> None:
        """`units`: how many give their parameters up in the recorded job."""
        super().__init__(job)
        self._units = units

    def legal(self, plan: Plan) -> str | None:
        if plan.get("reshard_after_forward"):
            return "reshard_after_forward: only 0 can be replayed; leave it out for what was recorded"
        kept = plan.get("kept_last_units")
        if kept is not None and plan.get("reshard_after_forward") is False:
            return "kept_last_units and reshard_after_forward: all units are kept already; leave out one of them"
        if kept is not None and kept > self._units:
            return f"kept_last_units: {self._units} units of the recorded job give their parameters up"
        return None

    @cached_property
    def choice(self) -> Choice:
        grids: dict[str, tuple[dict[str, object], ...]] = {RECORDED: ({},)}
        if self._units:
            some: tuple[dict[str, object], ...] = tuple({"kept_last_units": count} for count in range(1, self._units))
            grids |= {"last": some} if some else {}
            grids["all"] = ({"reshard_after_forward": False},)
        return Choice(name=self.name, fields=self.fields, grids=grids)


class UnitsTogether(Knob):
    """Some units, one after the other in the forward pass, are one: ``fully_shard`` of a list of modules."""

    name = "units-together"
    fields = ("units_together",)

    def __init__(self, job: JobFacts, *, units: int, refused: str | None) -> None:
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

    def __init__(self, job: JobFacts, *, allow_lossy: bool, refused: str | None) -> None:
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
