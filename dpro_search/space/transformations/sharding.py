"""How PyTorch's ``fully_shard`` gathers parameters: prefetching, and resharding after the forward pass."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

from dpro_search.space.plan import Plan
from dpro_search.space.transformations._base import RECORDED, Choice, JobFacts, Knob, grid


class _Switch(Knob):
    """A switch that a replay of a recording can only turn one way: the other is what was recorded, or is not known."""

    turned: ClassVar[bool]

    def __init__(self, job: JobFacts, *, possible: bool = True) -> None:
        """`possible`: whether turning it would change anything about the recorded job."""
        self._possible = possible
        super().__init__(job)

    def legal(self, plan: Plan) -> str | None:
        value = plan.get(self.fields[0])
        if value is None or value is self.turned:
            return None
        return f"{self.fields[0]}: only {int(self.turned)} can be replayed; leave it out for what was recorded"

    @cached_property
    def choice(self) -> Choice:
        grids: dict[str, tuple[dict[str, object], ...]] = {RECORDED: ({},)}
        if self._possible:
            grids["set"] = grid(self.fields[0], (self.turned,))
        return Choice(name=self.name, fields=self.fields, grids=grids)


class Prefetch(_Switch):
    """Each unit's parameters are gathered while the unit before it computes: ``set_modules_to_forward_prefetch``."""

    name = "prefetch"
    fields = ("prefetch",)
    turned = True


class KeepParameters(_Switch):
    """Units keep their parameters after the forward pass: ``reshard_after_forward=False``."""

    name = "reshard"
    fields = ("reshard_after_forward",)
    turned = False
