"""Recorder of PyTorch training scripts: ``from dpro_search.record import Recorder``; needs PyTorch and nothing else.

    with Recorder("runs/rec") as recorder:
        for batch in loader:
            train_step(batch)
            recorder.step()

Every rank does so, and ``dpro-search import runs/rec --out trace`` makes the trace. `TransformersCallback`, `LightningCallback` and
`AccelerateTracker` do the same in those trainers, which they import when they are first used.
"""

from __future__ import annotations

from typing import Any

from dpro_search.runtime import record as _record
from dpro_search.runtime.record import Recorder

__all__ = ["AccelerateTracker", "LightningCallback", "Recorder", "TransformersCallback"]


def __getattr__(name: str) -> Any:
    return getattr(_record, name)
