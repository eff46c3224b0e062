"""Files of a recording: their names, and how they are written whole or not at all. Standard library only."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import tempfile
from typing import Any, Callable

_LEVEL = 4  # of gzip: half the time of the usual 6 on a profile, for files a tenth larger
_TAIL_BYTES = 64


def profile_path(folder: str, window: int, rank: int) -> str:
    """Path of a rank's profile of a window."""
    return os.path.join(folder, "window%d" % window, "rank%05d.json.gz" % rank)


def job_path(folder: str, window: int, rank: int) -> str:
    """Path of the file in which a rank describes the job of a window."""
    return os.path.join(folder, "window%d" % window, "rank%05d.job.json" % rank)


def write_profile(path: str, export: Callable[[str], None]) -> int:
    """Compress what `export` writes to the plain file that it is given; return the bytes of the compressed file.

    The plain file lies on a local disk. Raises `OSError` if a disk is full: `export` itself may not notice.
    """
    handle, plain = tempfile.mkstemp(suffix=".json", prefix="dpro-search-profile-")
    os.close(handle)
    try:
        export(plain)
        _require_whole(plain)
        with open(plain, "rb") as source, written_whole(path) as target:
            with gzip.GzipFile(filename="", mode="wb", fileobj=target, compresslevel=_LEVEL, mtime=0) as packed:
                shutil.copyfileobj(source, packed, 1 << 20)
        return os.path.getsize(path)
    finally:
        os.remove(plain)


def write_json(path: str, value: Any) -> None:
    """Write a value as JSON."""
    with written_whole(path) as target:
        target.write(json.dumps(value, separators=(",", ":"), default=str).encode())


@contextlib.contextmanager
def written_whole(path: str) -> Any:
    """A binary file that takes the name `path` once all of it is on the disk; it leaves nothing if an error is raised."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = os.path.join(os.path.dirname(path), ".%s.%d.tmp" % (os.path.basename(path), os.getpid()))
    try:
        with open(temporary, "wb") as target:
            yield target
            target.flush()
            os.fsync(target.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise


def _require_whole(plain: str) -> None:
    with open(plain, "rb") as file:
        file.seek(max(0, os.path.getsize(plain) - _TAIL_BYTES))
        if not file.read().rstrip().endswith(b"}"):
            raise OSError("the profiler wrote only part of its profile to %s; is that disk full?" % os.path.dirname(plain))
