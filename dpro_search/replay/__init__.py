"""Replays a job's graph: how long an iteration takes, as recorded or under a plan.

Names are imported when they are first used: a replay of arrays needs neither the cost models nor what they import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpro_search.replay.replayer import replay
    from dpro_search.replay.timeline import Timeline

__all__ = ["Timeline", "replay"]

_MODULES = {"Timeline": "timeline", "replay": "replayer"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
