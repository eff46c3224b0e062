"""What other ways to shard would gain, and the questions that every job raises (see `replay/ddp/what_if.py`)."""

from __future__ import annotations

from dpro_search.replay.ddp.what_if import ranked_gains
from dpro_search.replay.fsdp.predictor import FsdpPredictor
from dpro_search.space.plan import Plan


def gains(predictor: FsdpPredictor) -> list[dict[str, float | str]]:
    """Iteration time and gain of each question, largest gain first."""
    changed = {
        "prefetch=1": predictor.at(prefetch=True).predict(Plan()),
        "reshard_after_forward=0": predictor.at(reshard=False).predict(Plan()),
    }
    return ranked_gains(predictor, changed)
