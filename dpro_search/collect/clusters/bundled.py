"""The bundled table of measured clusters: a cost model on day one."""

from __future__ import annotations

from pathlib import Path

from dpro_search.errors import MissingCapabilityError

_TABLE = Path(__file__).parent.parent.parent / "samples" / "xla-clusters.jsonl.gz"


def bundled_table_path() -> Path:
    """The table; raises `MissingCapabilityError` if the package was built without it."""
    if not _TABLE.is_file():
        raise MissingCapabilityError(f"{_TABLE}: no bundled table in this installation; name a TABLE made by --collect xla")
    return _TABLE
