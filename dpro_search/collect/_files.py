"""Outputs appear whole or not at all: they are written under a temporary name and renamed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path

import msgspec

from dpro_search.errors import InputError, MissingCapabilityError

_OWNER = ".owner"
DAMAGED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what decoding JSON raises: also for nesting without end


def what_is(path: Path) -> str:
    """Description of a path that is of another kind than expected."""
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
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A temporary folder that is removed when the block ends; those of processes that were killed are removed first.

    A folder is in use while the lock of a file in it is held: the system releases it when its process ends, however it does.
    """
    prefix = f"dpro-search-{purpose}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*/{_OWNER}"):
        if _is_free(left):
            shutil.rmtree(left.parent, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name,
        Path(name, f"{_OWNER}.new").open("wb") as owner,
    ):
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Path(owner.name).rename(Path(name, _OWNER))  # under this name it is always locked
        yield Path(name)


def _is_free(owner: Path) -> bool:
    try:
        with owner.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, gone, or of another user
        return False
    return True


def open_private(path: Path) -> BufferedWriter:
    """Open a new file that only this user can read: output of a job, or its command, may hold secrets."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")


def write_file(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a whole file, which only this user can read if it is private, replacing an older one in a single step.

    Raises `InputError` where the path is that of a folder, `MissingCapabilityError` if the disk cannot take the file; an older one
    is then untouched.
    """
    if path.is_dir():
        raise InputError(f"{path}: a folder; name a file to write")
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_private(tmp) if private else tmp.open("wb") as file:
            file.write(data)
        tmp.replace(path)
    except OSError as error:
        with suppress(OSError):  # on a read-only disk there is nothing, and the first error is the one to report
            tmp.unlink()
        raise MissingCapabilityError(f"{path}: cannot be written ({error.strerror})") from error
