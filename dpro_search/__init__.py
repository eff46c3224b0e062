"""dpro-search: record a distributed training job, replay it under changed strategies, search, export and prove the best plan.

The names in `__all__` are the Python API (`dpro_search.api`), which is loaded when one of them is first used: importing the
package alone costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dpro_search._version import __version__ as __version__

if TYPE_CHECKING:
    from dpro_search.api import (
        Bytes,
        Diagnosis,
        DproSearchError,
        Microseconds,
        Plan,
        Prediction,
        RealRuns,
        Recording,
        Replay,
        Run,
        capture,
        describe,
        import_trace,
        load,
        load_run,
    )

__all__ = [
    "Bytes",
    "Diagnosis",
    "DproSearchError",
    "Microseconds",
    "Plan",
    "Prediction",
    "RealRuns",
    "Recording",
    "Replay",
    "Run",
    "capture",
    "describe",
    "import_trace",
    "load",
    "load_run",
]

if not TYPE_CHECKING:  # a type checker would take any name for known

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return getattr(import_module("dpro_search.api"), name)
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
