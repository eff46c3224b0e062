"""Opens files that a user or a stranger names: only regular files, because a FIFO or a device can block or never end."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors write it before UTF-8 text; no format that is read here begins with it
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read its bytes; `OSError`, which says what the path is, for anything but a regular file.

    The check before opening is for devices, on which opening may act; that after it is for a path that was replaced meanwhile.
    """
    _require_regular(path.stat(), path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # does not wait for the writer of a FIFO
    try:
        _require_regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """The content of a regular file, without a byte-order mark; raises as `open_regular` does."""
    with open_regular(path) as file:
        return file.read().removeprefix(_BYTE_ORDER_MARK)


def without_byte_order_mark(head: bytes) -> bytes:
    """The first bytes of a file, without the mark that they may begin with."""
    return head.removeprefix(_BYTE_ORDER_MARK)


def _require_regular(status: os.stat_result, path: Path) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        raise OSError(
            errno.EINVAL, f"{_KINDS.get(kind, 'something else')}, not a regular file; copy its content to a file", str(path)
        )
