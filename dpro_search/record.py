"""Recorder of PyTorch training scripts: ``from dpro_search.record import Recorder``; needs PyTorch and nothing else.

    with Recorder("runs/rec") as recorder:
        for batch in loader:
            train_step(batch)
            recorder.step()

Every rank does so, and ``dpro-search import runs/rec --out trace`` makes the trace. `TransformersCallback`, `LightningCallback` and
`AccelerateTracker` do the same in those trainers, which they import when they are first used. `CollectiveStamps` notes when each
rank's collectives begin and end, by which ``dpro-search ranks`` names a slow rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpro_search.runtime import record as _record
from dpro_search.runtime.record import Recorder

if TYPE_CHECKING:
    from dpro_search.runtime.record.accelerate import AccelerateTracker
    from dpro_search.runtime.record.collective_stamps import CollectiveStamps
    from dpro_search.runtime.record.lightning import LightningCallback
    from dpro_search.runtime.record.transformers import TransformersCallback

__all__ = ["AccelerateTracker", "CollectiveStamps", "LightningCallback", "Recorder", "TransformersCallback"]


if not TYPE_CHECKING:  # a type checker would take any name for known

    def __getattr__(name: str) -> Any:
        return getattr(_record, name)
