"""Descriptions of trained models as JSON files, whose version is looked at first."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TypeVar

import msgspec

from dpro_search._regular_files import read_regular
from dpro_search.collect._files import DAMAGED
from dpro_search.errors import InputError, TraceFormatError, TraceVersionError

MOST_BYTES = 64 * 2**20  # of a file of a model; a hundred times the bundled one's
MOST_ERROR_PCT = 50.0
"""Mean error on what was left out of a model's fit, in per cent, beyond which it is useless. Empirical: 21 % for the bundled
recording, hundreds for measurements on a busy machine."""

Info = TypeVar("Info", bound=msgspec.Struct)


class _ModelVersion(msgspec.Struct):
    version: int


def read_info(path: Path, kind: type[Info], version: int, what: str) -> Info:
    """Read the description of a model, which is `what` in words.

    Raises
    ------
    InputError
        The file cannot be read.
    TraceVersionError
        It is of another version.
    TraceFormatError
        It is damaged, or too large for a model.
    """
    data = _read(path)
    try:
        file_version = msgspec.json.decode(data, type=_ModelVersion).version
        if file_version != version:
            raise TraceVersionError(f"{path}: model version {file_version}, this program reads {version}; train it again")
        return msgspec.json.decode(data, type=kind)
    except DAMAGED as error:
        raise TraceFormatError(f"{path}: damaged or no {what} ({error})") from error


def _read(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path}: no file; name a folder made by 'dpro-search fit'")
        if status.st_size > MOST_BYTES:
            most = f"{MOST_BYTES >> 20} MiB"
            raise TraceFormatError(f"{path}: more than {most}, as no model has; train it again with 'dpro-search fit'")
        return read_regular(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); name a folder made by 'dpro-search fit'") from error
