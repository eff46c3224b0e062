"""The bundled table of measured clusters, and the model that was trained on it."""

from __future__ import annotations

from pathlib import Path

from dpro_search.errors import MissingCapabilityError

_SAMPLES = Path(__file__).parent.parent.parent / "samples"
TABLE_NAME, MODEL_NAME = "xla-clusters.jsonl.gz", "xla-fusion-model"


def bundled_table_path() -> Path:
    """The table; raises `MissingCapabilityError` if the package was built without it."""
    path = _SAMPLES / TABLE_NAME
    if not path.is_file():
        raise MissingCapabilityError(f"{path}: no bundled table in this installation; name a TABLE made by --collect xla")
    return path


def bundled_model_path() -> Path:
    """The trained model's folder; raises `MissingCapabilityError` if the package was built without it."""
    path = _SAMPLES / MODEL_NAME
    if not path.is_dir():
        raise MissingCapabilityError(
            f"{path}: no bundled model of fused ops in this installation; train one with 'dpro-search fit' and name its folder"
        )
    return path
