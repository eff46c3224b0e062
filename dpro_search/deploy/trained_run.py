"""`TrainedRun`: what a training to a target loss took."""

from __future__ import annotations

import msgspec


class TrainedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A training to a target loss. Steps, commits and bytes are those of all workers until then."""

    synchronisation: str
    seed: int
    time_s: float
    final_loss: float
    steps: int
    commits: int
    bytes: int
    waiting_share: float
