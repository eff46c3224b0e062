"""The snapshot of predictions: how it is kept, and what counts as drift."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

PATH = Path(__file__).with_name("snapshot.json")
TOLERANCE = 0.01  # of the iteration time; for its parts too, so that a part that is almost nothing may vary
HOW = (
    "If the change is meant: `python -m tests.drift.update --reason 'WHY'`, and commit tests/drift/snapshot.json together with"
    " what moved it, the reason in the commit's message."
)


class Snapshot(msgspec.Struct, forbid_unknown_fields=True):
    """What the predictions were."""

    reason: str  # Why it was changed last.
    predictions: dict[str, dict[str, Any]]  # By the name of the case: ``iteration_us`` and ``breakdown_us``, or ``refused``.


def read() -> Snapshot:
    """The snapshot of this checkout; an empty one if there is none yet."""
    if not PATH.is_file():
        return Snapshot(reason="", predictions={})
    return msgspec.json.decode(PATH.read_bytes(), type=Snapshot)


def drift(before: dict[str, Any] | None, now: dict[str, Any]) -> list[str]:
    """What moved by more than the tolerance, in a line each; nothing if all is as it was."""
    if before is None:
        return ["is new"]
    if "refused" in before or "refused" in now:
        return [] if before == now else [f"was {_short(before)}, is {_short(now)}"]
    allowed_us = TOLERANCE * before["iteration_us"]
    parts = sorted({*before["breakdown_us"], *now["breakdown_us"]})
    rows = [("iteration", before["iteration_us"], now["iteration_us"])]
    rows += [(part, before["breakdown_us"].get(part, 0.0), now["breakdown_us"].get(part, 0.0)) for part in parts]
    return [
        f"{name}: {was_us:.1f} us before, {is_us:.1f} us now ({(is_us - was_us) / before['iteration_us']:+.1%} of the iteration)"
        for name, was_us, is_us in rows
        if not abs(is_us - was_us) <= allowed_us
    ]


def _short(prediction: dict[str, Any]) -> str:
    return f"refused ({prediction['refused']})" if "refused" in prediction else f"{prediction['iteration_us']:.1f} us"
