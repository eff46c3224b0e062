"""What other ways to shard would gain, beside the questions that every job raises."""

from __future__ import annotations

from dpro_search.kinds._predictor import Gains
from dpro_search.kinds.fsdp.predictor import FsdpPredictor
from dpro_search.space.plan import Plan

_PLANS = {"prefetch=1": Plan.of(prefetch=True), "reshard_after_forward=0": Plan.of(reshard_after_forward=False)}


def gains(predictor: FsdpPredictor) -> Gains:
    """Iteration time and gain of each question, largest gain first."""
    return predictor.gains(_PLANS)
