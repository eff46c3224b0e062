"""Which units of a fully sharded model are wrapped together."""

from __future__ import annotations

from collections.abc import Sequence

from dpro_search.graph.sharded_units import ROOT


def unit_groups(units: Sequence[str], together: int | None) -> tuple[tuple[str, ...], ...]:
    """Runs of so many units in the order of the forward pass; the root stays alone. None where each unit is by itself."""
    if not together or together < 2:
        return ()
    own = [unit for unit in units if unit != ROOT]
    alone = [(ROOT,)] if ROOT in units else []
    return (*alone, *(tuple(own[i : i + together]) for i in range(0, len(own), together)))
