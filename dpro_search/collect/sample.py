"""The bundled trace: a real recording, used where no trace is given."""

from __future__ import annotations

from pathlib import Path

from dpro_search.errors import MissingCapabilityError

_SAMPLES = Path(__file__).parent.parent / "samples"


def sample_trace_path() -> Path:
    """Folder of the bundled trace; raises `MissingCapabilityError` if the package was built without it."""
    found = sorted(meta.parent for meta in _SAMPLES.glob("*/meta.json"))
    if not found:
        raise MissingCapabilityError(f"{_SAMPLES}: no bundled trace in this installation; name a TRACE folder")
    return found[0]
