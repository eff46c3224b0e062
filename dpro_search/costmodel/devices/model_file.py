"""The fitted predictor as one file, ``latency.npz``: arrays, and a description as JSON. Nothing in it is run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dpro_search.collect._files import DAMAGED
from dpro_search.collect.trace_check import read_columns
from dpro_search.costmodel.devices.correction import COORDINATES, PARTS, Similarity
from dpro_search.costmodel.devices.families import FamilyTrees
from dpro_search.costmodel.devices.features import FEATURES
from dpro_search.costmodel.devices.model import BUDGETS, LatencyModel, OpDomain, OpsFit, Trees, Widths
from dpro_search.costmodel.devices.ops import KINDS, STACKS
from dpro_search.costmodel.devices.profile import UsualShares
from dpro_search.costmodel.forest import ARRAY_NAME, Forest
from dpro_search.errors import TraceFormatError, TraceVersionError

LATENCY_VERSION = 4
FITS = "training", "every"
TREES = "base", "shapes"
"""Forests of each fit beside that of `families`; the names of arrays begin with that of the fit."""
PLAIN = "deviations", "lengths", "domain_low", "domain_high", "element_bytes", "families_known", "families_base"
_ARRAYS = re.compile(f"info|({'|'.join(FITS)})_({'|'.join(PLAIN)}|({'|'.join((*TREES, 'families'))})_{ARRAY_NAME})")
_MOST = 1e9  # beyond any number of a fit
_MOST_LOG = 100.0


class FitInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Description of the arrays of one fit."""

    devices: tuple[str, ...]
    rows: int
    left_out_mape_pct: dict[str, float]  # By number of measured ops of a device whose architecture was left out.
    forest_bases: tuple[float, float]  # of base and shapes
    families: tuple[str, ...]  # "source architecture" of each family's trees.
    roughness: float
    widths: Widths


class LatencyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Description of the arrays and of their origin."""

    version: int = LATENCY_VERSION
    sources: tuple[str, ...]
    fitted_at: str
    versions: dict[str, str]
    features: tuple[str, ...]
    coordinates: tuple[str, ...]
    training: FitInfo
    every: FitInfo
    usual: UsualShares


class _VersionedModel(msgspec.Struct, frozen=True):
    version: int


def load(path: Path) -> tuple[LatencyModel, LatencyInfo]:
    """Read a fitted model.

    Raises
    ------
    TraceFormatError
        It is damaged or no such file; `TraceVersionError`: it is of another version of the package.
    """
    try:
        arrays = read_columns(path, _ARRAYS)
        text = arrays["info"].tobytes()
        if msgspec.json.decode(text, type=_VersionedModel).version != LATENCY_VERSION:
            raise TraceVersionError(f"{path}: fitted by another version of dpro-search; use the file that this version ships")
        info = msgspec.json.decode(text, type=LatencyInfo)
        if info.version != LATENCY_VERSION or info.features != FEATURES or info.coordinates != COORDINATES:
            raise TraceVersionError(f"{path}: fitted by another version of dpro-search; use the file that this version ships")
        for wrong, what in _impossible_shares(info.usual):
            if wrong:
                raise ValueError(what)
        training, every = (_fit(arrays, name, part) for name, part in zip(FITS, (info.training, info.every), strict=True))
        model = LatencyModel(training=training, every=every, usual=info.usual)
    except (OSError, ValueError, KeyError, *DAMAGED) as error:
        if isinstance(error, TraceVersionError):
            raise
        raise TraceFormatError(f"{path}: damaged or no file of op latencies ({error})") from error
    return model, info


def _fit(arrays: dict[str, npt.NDArray[Any]], name: str, info: FitInfo) -> OpsFit:
    of_fit = {key.removeprefix(f"{name}_"): array for key, array in arrays.items() if key.startswith(f"{name}_")}
    for wrong, what in _problems(of_fit, info):
        if wrong:
            raise ValueError(f"{name}: {what}")
    base, shapes = (Forest.from_arrays(of_fit, part, len(FEATURES), at) for part, at in zip(TREES, info.forest_bases, strict=True))
    return OpsFit(
        trees=Trees(base=base, shapes=shapes),
        families=_families(of_fit),
        similarity=Similarity(deviations=of_fit["deviations"], roughness=info.roughness, lengths=of_fit["lengths"]),
        widths=info.widths,
        domain=OpDomain(low=of_fit["domain_low"], high=of_fit["domain_high"], element_bytes=of_fit["element_bytes"]),
    )


def _families(arrays: dict[str, npt.NDArray[Any]]) -> FamilyTrees:
    forest = Forest.from_arrays(arrays, "families", len(FEATURES))
    bases, known = arrays["families_base"], arrays["families_known"]
    if bases.dtype.kind != "f" or bases.ndim != 1 or not len(bases) or len(forest.feature) % len(bases):
        raise ValueError("families of another number")
    if not (np.abs(bases) <= _MOST_LOG).all():
        raise ValueError("families with impossible bases")
    if known.dtype != np.bool_ or known.shape != (len(bases), len(KINDS), 2):
        raise ValueError("known kinds of families of another shape")
    return FamilyTrees(forest=forest, bases=bases.astype(np.float64), known=known)


def _problems(arrays: dict[str, npt.NDArray[Any]], info: FitInfo) -> Iterator[tuple[bool, str]]:
    """Check for values that no fit gives, each with its message; compiled loops look at no bounds."""
    domain = {arrays["domain_low"].shape, arrays["domain_high"].shape}
    yield domain != {OpDomain.shape()} or arrays["element_bytes"].ndim != 1, "a domain of another shape"
    alike = arrays["deviations"], arrays["lengths"]
    yield (alike[0].shape, alike[1].shape) != ((len(PARTS),), (len(COORDINATES),)), "a similarity of another shape"
    numbers = (*alike, *(arrays[name] for name in ("domain_low", "domain_high", "element_bytes")))
    yield any(array.dtype.kind != "f" or bool(np.isnan(array).any()) for array in numbers), "arrays that are no numbers"
    yield not all(bool((array > 0).all() and (array <= _MOST).all()) for array in alike), "an impossible similarity"
    yield len(info.widths.deviations) != len(BUDGETS), "intervals of another number"
    scales = info.roughness, info.widths.specs, *info.widths.deviations
    yield not all(0 < scale <= _MOST for scale in scales), "an impossible scale"


def _impossible_shares(usual: UsualShares) -> Iterator[tuple[bool, str]]:
    yield len(usual.floor_us) != len(STACKS), "launches of another number"
    scales = *usual.matrix_by_precision.values(), usual.stream, *usual.floor_us
    yield not all(0 < scale <= _MOST for scale in scales), "an impossible share"


def default_model() -> LatencyModel:
    """The predictor that the package ships, fitted to public measurements."""
    return _default()[0]


def default_info() -> LatencyInfo:
    """Description of the measurements that the shipped predictor was fitted to."""
    return _default()[1]


@lru_cache(maxsize=1)
def _default() -> tuple[LatencyModel, LatencyInfo]:
    return load(Path(str(files("dpro_search.costmodel.devices") / "latency.npz")))
