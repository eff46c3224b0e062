"""The fitted predictor as one file, ``latency.npz``: arrays, and a description as JSON. Nothing in it is run."""

from __future__ import annotations

import io
import zipfile
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.costmodel.devices.correction import COORDINATES, Similarity
from dpro_search.costmodel.devices.domain import Domain
from dpro_search.costmodel.devices.features import FEATURES
from dpro_search.costmodel.devices.forest import Forest
from dpro_search.costmodel.devices.model import LatencyModel, Widths
from dpro_search.costmodel.devices.profile import Shares
from dpro_search.costmodel.devices.trees import Trees
from dpro_search.errors import TraceFormatError, TraceVersionError

LATENCY_VERSION = 1
_FOREST = ("feature", "threshold", "leaf")


class LatencyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the arrays are of, and where they come from."""

    version: int = LATENCY_VERSION
    sources: tuple[str, ...]
    devices: tuple[str, ...]
    rows: int
    fitted_at: str
    versions: dict[str, str]
    left_out_mape_pct: dict[str, float]  # By number of measured ops of a device whose architecture was left out.
    features: tuple[str, ...]
    coordinates: tuple[str, ...]
    forest_bases: tuple[float, float]
    roughness: float
    widths: Widths
    usual: Shares


def save(model: LatencyModel, info: LatencyInfo, path: Path) -> None:
    """Write a fitted model."""
    arrays: dict[str, np.ndarray] = {
        "info": np.frombuffer(msgspec.json.encode(info), dtype=np.uint8),
        "deviations": model.similarity.deviations,
        "lengths": model.similarity.lengths,
        "domain_low": model.domain.low.astype(np.float32),
        "domain_high": model.domain.high.astype(np.float32),
        "element_bytes": model.domain.element_bytes,
    }
    for name, forest in (("base", model.trees.base), ("shapes", model.trees.shapes)):
        arrays.update({f"{name}_{part}": getattr(forest, part) for part in _FOREST})
    data = io.BytesIO()
    np.savez_compressed(data, **arrays)  # type: ignore[arg-type]
    path.write_bytes(data.getvalue())


def load(path: Path) -> tuple[LatencyModel, LatencyInfo]:
    """Read what `save` wrote.

    Raises
    ------
    TraceFormatError
        It is damaged or no such file; `TraceVersionError`: it is of another version of the package.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        info = msgspec.json.decode(arrays["info"].tobytes(), type=LatencyInfo)
        if info.version != LATENCY_VERSION or info.features != FEATURES or info.coordinates != COORDINATES:
            raise TraceVersionError(f"{path}: fitted by another version of dpro-search; use the file that this version ships")
        forests = [
            Forest(**{part: arrays[f"{name}_{part}"] for part in _FOREST}, base=base)
            for name, base in zip(("base", "shapes"), info.forest_bases, strict=True)
        ]
        model = LatencyModel(
            trees=Trees(base=forests[0], shapes=forests[1]),
            similarity=Similarity(deviations=arrays["deviations"], roughness=info.roughness, lengths=arrays["lengths"]),
            widths=info.widths,
            domain=Domain(low=arrays["domain_low"], high=arrays["domain_high"], element_bytes=arrays["element_bytes"]),
            usual=info.usual,
        )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, msgspec.MsgspecError) as error:
        if isinstance(error, TraceVersionError):
            raise
        raise TraceFormatError(f"{path}: damaged or no file of op latencies ({error})") from error
    return model, info


def default_model() -> LatencyModel:
    """The predictor that the package ships, fitted to public measurements."""
    return _default()[0]


def default_info() -> LatencyInfo:
    """What it was fitted to."""
    return _default()[1]


@lru_cache(maxsize=1)
def _default() -> tuple[LatencyModel, LatencyInfo]:
    return load(Path(str(files("dpro_search.costmodel.devices") / "latency.npz")))
