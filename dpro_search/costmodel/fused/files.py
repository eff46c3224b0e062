"""Files of a trained model: trees as XGBoost's own JSON, and a description whose version is looked at first."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path
from typing import TypeVar

import msgspec
import xgboost

from dpro_search._regular_files import read_regular
from dpro_search.costmodel.fused.tree_file import rewritten
from dpro_search.errors import InputError, TraceFormatError, TraceVersionError

MOST_BYTES = 64 * 2**20  # of a file of a model; a hundred times the bundled one's

Info = TypeVar("Info", bound=msgspec.Struct)


class _Version(msgspec.Struct):
    version: int


def trees_json(booster: xgboost.Booster) -> bytes:
    """The trees, as `load_trees` reads them."""
    return bytes(booster.save_raw("json"))


def digest(data: bytes) -> str:
    """What distinguishes a file of trees from any other."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def load_trees(path: Path, expected: str, features: int) -> xgboost.Booster:
    """Read trees that look at so many features, and whose `digest` is known.

    Raises `InputError` or `TraceFormatError` that name the file.
    """
    trees = _read(path)
    if digest(trees) != expected:
        raise TraceFormatError(f"{path}: damaged or of another model; train it again with 'dpro-search fit'")
    booster = xgboost.Booster({"nthread": 1})
    try:
        booster.load_model(bytearray(rewritten(trees, features)))
    except (xgboost.core.XGBoostError, ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise TraceFormatError(f"{path}: damaged or no trees ({reason}); train it again with 'dpro-search fit'") from error
    return booster


def read_info(path: Path, kind: type[Info], version: int, what: str) -> Info:
    """Read the description of a model, which is `what` in words.

    Raises what `load_trees` does, and `TraceVersionError` if it is of another version.
    """
    data = _read(path)
    try:
        found = msgspec.json.decode(data, type=_Version).version
        if found != version:
            raise TraceVersionError(f"{path}: model version {found}, this program reads {version}; train it again")
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceFormatError(f"{path}: damaged or no {what} ({error})") from error


def _read(path: Path) -> bytes:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise InputError(f"{path}: no file; name a folder made by 'dpro-search fit'")
        if found.st_size > MOST_BYTES:
            most = f"{MOST_BYTES >> 20} MiB"
            raise TraceFormatError(f"{path}: more than {most}, as no model has; train it again with 'dpro-search fit'")
        return read_regular(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); name a folder made by 'dpro-search fit'") from error
