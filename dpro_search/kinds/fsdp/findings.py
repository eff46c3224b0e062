"""Findings about a fully sharded job: sentences with numbers and the setting to change, the costliest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpro_search.quantities import size_text
from dpro_search.replay.path_findings import exposed_us, path_findings
from dpro_search.replay.path_segments import PathSegment


def findings(
    path: Sequence[PathSegment], gains: Sequence[Mapping[str, Any]], iteration_us: float, regathered_bytes: int
) -> tuple[str, ...]:
    """Those of `path_findings` with the knobs of sharding.

    Parameters
    ----------
    regathered_bytes
        Parameters that are gathered again for the backward pass.
    """
    sentences = {
        "prefetch=1": "Gathering each unit's parameters while the unit before it computes (set_modules_to_forward_prefetch, with "
        "asynchronous all-gathers) would gain {}.",
        "reshard_after_forward=0": "Keeping parameters after the forward pass (reshard_after_forward=False) would gain {}, and "
        f"take up to {size_text(regathered_bytes)} more on each rank.",
    }
    gathers_us = sum(value for name, value in exposed_us(path).items() if name.startswith("all-gather"))
    return path_findings(path, gains, iteration_us, sentences=sentences, parts_us={"all-gathers": gathers_us})
