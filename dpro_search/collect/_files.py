"""Outputs appear whole or not at all: they are written under a temporary name and renamed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from dpro_search.errors import InputError, MissingCapabilityError

_LOCK, _NEW_S = ".lock", 10.0  # a file that is newer may be about to be locked
DAMAGED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what decoding JSON raises: also for nesting without end


def what_is(path: Path) -> str:
    """What a path is that is not what was asked for, in words."""
    if not path.exists():
        return "no such file or folder"
    if not path.is_dir():
        return "a file"
    for name, what in _FOLDERS.items():
        if (path / name).is_file():
            return what
    return "another folder" if any(path.iterdir()) else "an empty folder"


_FOLDERS = {
    "meta.json": "a trace",
    "run.json": "the folder of a search",
    "job.json": "the raw files of a recorded job, of which 'dpro-search import' makes a trace",
    "plan.json": "an exported plan",
}


def require_new(path: Path) -> None:
    """Raise `InputError` if a verb's output is there already: before the work, not after it."""
    if path.exists():
        raise InputError(f"{path}: exists already; remove it or choose another --out")


@contextmanager
def written_folder(folder: Path) -> Iterator[Path]:
    """A new folder to fill; it gets its name when the block ends, and is removed when the block fails.

    Raises `InputError` if the name is taken, `MissingCapabilityError` if the disk cannot take it.
    """
    require_new(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        tmp = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise MissingCapabilityError(f"{folder}: cannot be written ({error.strerror})") from error
    try:
        yield tmp
        tmp.chmod(0o755)
        tmp.rename(folder)
    except OSError as error:
        raise MissingCapabilityError(f"{folder}: cannot be written ({error.strerror}); nothing was kept") from error
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A temporary folder, removed when the block ends; first, those of this prefix that killed processes left are removed.

    A folder is in use while its file ``.lock`` is locked. The kernel unlocks it when the owner ends, whatever ends it.
    """
    _remove_abandoned(prefix)
    with (
        tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name,
        (Path(name) / _LOCK).open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(name)


def _remove_abandoned(prefix: str) -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*/{_LOCK}"):
        with suppress(OSError), path.open("r+") as lock:  # OSError: it is locked, or somebody else's
            owner, changed_s = os.fstat(lock.fileno()).st_uid, os.fstat(lock.fileno()).st_mtime
            if owner == os.geteuid() and time.time() - changed_s > _NEW_S:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write a whole file, replacing an older one in a single step.

    Raises `MissingCapabilityError` if the disk cannot take it; the older file is then untouched.
    """
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tmp.write_bytes(data)
        tmp.replace(path)
    except OSError as error:
        with suppress(OSError):  # on a read-only disk there is nothing, and the first error is the one to report
            tmp.unlink()
        raise MissingCapabilityError(f"{path}: cannot be written ({error.strerror})") from error
