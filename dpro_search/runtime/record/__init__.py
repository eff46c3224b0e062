"""Recorder and stamps of collectives for PyTorch training scripts on any number of hosts; `dpro_search.record` is the public name.

A rank writes two files for each window of recorded steps into a folder that all ranks share: ``window0/rank00003.json.gz``, the
profile of PyTorch's profiler, and ``window0/rank00003.job.json``, which describes the job as this rank sees it.
`dpro-search import` reads the folder. `CollectiveStamps` notes when collectives begin and end, for `dpro-search ranks`. Standard
library and PyTorch only; Python 3.8 and later.
"""

from __future__ import annotations

from typing import Any

from .recorder import Recorder

__all__ = ["AccelerateTracker", "CollectiveStamps", "LightningCallback", "Recorder", "TransformersCallback"]

_MODULES = {
    "AccelerateTracker": "accelerate",
    "CollectiveStamps": "collective_stamps",
    "LightningCallback": "lightning",
    "TransformersCallback": "transformers",
}


def __getattr__(name: str) -> Any:
    """A class whose module is imported when it is first used; those for trainers import the trainer."""
    if name not in _MODULES:
        raise AttributeError("module %r has no attribute %r" % (__name__, name))
    from importlib import import_module

    return getattr(import_module("." + _MODULES[name], __name__), name)
