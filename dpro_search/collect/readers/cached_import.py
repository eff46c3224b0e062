"""``trace_of_profile(path)``: the trace of raw files, imported once into a cache and found there again by their content."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dpro_search._compiled import private_folder
from dpro_search._regular_files import open_regular
from dpro_search._version import __version__
from dpro_search.collect._files import what_is
from dpro_search.collect.readers.importers import files_of, import_trace, is_recognised
from dpro_search.collect.trace import TRACE_VERSION
from dpro_search.errors import InputError

_FOLDER = "dpro-search-imported"


class CachedTrace(NamedTuple):
    """The trace of raw files."""

    folder: Path
    is_new: bool  # Whether it was imported now, and not by an earlier command.


def trace_of_profile(path: Path) -> CachedTrace | None:
    """The trace of a file or a folder of files in a format that `import` reads; None for anything else.

    Raises `InputError` or `TraceFormatError` for a damaged file.
    """
    files = [path] if path.is_file() else files_of(path) if what_is(path) == "another folder" else []
    if not any(is_recognised(file) for file in files):
        return None
    folder = _cache() / _digest(files)
    if folder.is_dir():
        return CachedTrace(folder, False)
    trace = import_trace([path])
    try:
        trace.save(folder)
    except InputError:
        if not folder.is_dir():  # else another process was faster
            raise
    return CachedTrace(folder, True)


def _digest(files: Sequence[Path]) -> str:
    """Identifies files by their names and content, and the readers by their code: a changed reader imports anew."""
    digest = hashlib.sha256(f"{__version__} {TRACE_VERSION}".encode())
    for module in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(f"{module.name} {module.stat().st_size} {module.stat().st_mtime_ns}".encode())
    for file in files:
        digest.update(b"\0" + file.name.encode(errors="surrogateescape") + b"\0")
        with open_regular(file) as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:32]


def _cache() -> Path:
    """A folder of this user: in the home's cache, or where that cannot be written, under the temporary directory."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dpro-search" / "imported"
    try:
        usual.mkdir(parents=True, exist_ok=True)
        if os.access(usual, os.W_OK):
            return usual
    except OSError:
        pass
    private = private_folder(f"{_FOLDER}-{os.getuid()}")
    return Path(tempfile.mkdtemp(prefix=f"{_FOLDER}-")) if private is None else private
