"""Gains of other ways to shard, in addition to the questions of every job."""

from __future__ import annotations

from dpro_search.kinds._predictor import Gains
from dpro_search.kinds.fsdp.predictor import FsdpPredictor
from dpro_search.space.plan import Plan

PLANS = {"prefetch=1": Plan.of(prefetch=True), "reshard_after_forward=0": Plan.of(reshard_after_forward=False)}


def gains(predictor: FsdpPredictor) -> Gains:
    """Iteration time and gain of each question, largest gain first."""
    return predictor.gains(PLANS)
