"""What stands out in a fully sharded job, as sentences with numbers and the knob to turn, the costliest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpro_search.replay.ddp.critical_path import Segment
from dpro_search.replay.ddp.findings import COMMON, exposed_us, gained, late_ranks, told
from dpro_search.replay.sentences import share


def findings(
    path: Sequence[Segment], gains: Sequence[Mapping[str, Any]], iteration_us: float, regathered_bytes: int
) -> tuple[str, ...]:
    """Sentences on what costs, or would gain, at least 3 % of an iteration.

    Parameters
    ----------
    path
        The critical path of an iteration.
    gains
        Rows of `what_if.gains`.
    iteration_us
        Replayed.
    regathered_bytes
        Parameters that are gathered again for the backward pass.
    """
    sentences = COMMON | {
        "prefetch=1": "Gathering each unit's parameters while the unit before it computes (set_modules_to_forward_prefetch, with "
        "asynchronous all-gathers) would gain {}.",
        "reshard_after_forward=0": "Keeping parameters after the forward pass (reshard_after_forward=False) would gain {}, and "
        f"take up to {regathered_bytes / 1e6:.0f} MB more on each rank.",
    }
    found = [*_communication(path, iteration_us), *late_ranks(path, iteration_us), *gained(gains, sentences, iteration_us)]
    return told(found, iteration_us)


def _communication(path: Sequence[Segment], iteration_us: float) -> list[tuple[float, str]]:
    exposed = exposed_us(path)
    if not exposed:
        return []
    total_us, largest = sum(exposed.values()), max(exposed, key=lambda name: exposed[name])
    gathers_us = sum(value for name, value in exposed.items() if name.startswith("all-gather"))
    return [
        (
            total_us,
            f"Communication that nothing hides takes {share(total_us, iteration_us)}, all-gathers {gathers_us / 1e3:.1f} ms of it, "
            f"{largest} most ({exposed[largest] / 1e3:.1f} ms).",
        )
    ]
