"""How PyTorch's ``fully_shard`` gathers parameters: prefetching, and resharding after the forward pass."""

from __future__ import annotations

from dpro_search.space.transformations._base import Switch


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
