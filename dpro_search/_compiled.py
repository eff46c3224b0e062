"""``njit``: compiles a function with numba, and keeps the compiled code on disk where this user may write.

Numba writes beside the package or into the user's home, and raises an error where it may write to neither, as in a container
that runs as another user. Then a private folder of this user under the temporary directory takes the code. Numba's files are
pickles, which run code when they are read: a folder that another user can write to is not used.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])
if TYPE_CHECKING:
    from numba.core.dispatcher import Dispatcher


def njit(*, nogil: bool = False, inline: Literal["never", "always"] = "never") -> Callable[[_Function], Dispatcher[_Function]]:
    """Return the decorator that compiles a function without Python objects; the options are those of `numba.njit`."""

    def compiled(function: _Function) -> Dispatcher[_Function]:
        try:
            return numba.njit(cache=True, nogil=nogil, inline=inline)(function)
        except RuntimeError:  # numba may write to none of its usual folders
            folder = private_folder(f"dpro-search-numba-{os.getuid()}")
        with _cached_in(folder):
            return numba.njit(cache=folder is not None, nogil=nogil, inline=inline)(function)

    return compiled


@cache
def private_folder(name: str) -> Path | None:
    """Make a temporary folder that only this user can read and write, or check one that exists; None if there can be none."""
    try:
        folder = Path(tempfile.gettempdir(), name)
        around = folder.parent.stat()
        others_may_rename = around.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not around.st_mode & stat.S_ISVTX
        if others_may_rename or around.st_uid not in (0, os.getuid()):
            return None
        folder.mkdir(mode=0o700, exist_ok=True)
        itself = folder.lstat()  # a link is not followed: another user may have made it
        private = stat.S_ISDIR(itself.st_mode) and itself.st_uid == os.getuid() and not stat.S_IMODE(itself.st_mode) & 0o077
        return folder if private and os.access(folder, os.W_OK | os.X_OK) else None
    except OSError:
        return None


@contextmanager
def _cached_in(folder: Path | None) -> Iterator[None]:
    """Let numba write into the folder what is decorated in this block; the setting for other functions stays as it was."""
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = str(folder or before)
    try:
        yield
    finally:
        config.CACHE_DIR = before
