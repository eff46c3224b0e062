"""Raw bytes of a file that may be compressed with gzip and may have been cut off."""

from __future__ import annotations

import zlib
from pathlib import Path

from dpro_search.errors import InputError, TraceFormatError

_GZIP_MAGIC = b"\x1f\x8b"
MOST_BYTES = 8 * 2**30  # of a file, unpacked
MOST_TABLE_BYTES = 256 * 2**20  # of a measured table, unpacked: sixteen times the largest in the package


def read_whole(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a file, decompressed where it is gzip whatever its name.

    Raises
    ------
    InputError
        The file cannot be opened.
    TraceFormatError
        Its compressed stream is damaged, ends in the middle, or would unpack to more than `most_bytes`.
    """
    data, cut = read_available(path, most_bytes)
    if cut:
        raise TraceFormatError(f"{path}: the compressed file ends in the middle; copy or record it again")
    return data


def read_available(path: Path, most_bytes: int = MOST_BYTES) -> tuple[bytes, bool]:
    """What can be read of a file, and whether its compressed stream ended in the middle.

    Raises as `read_whole` does, but returns what a cut stream still gives.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    if not raw.startswith(_GZIP_MAGIC):
        return raw, False
    parts, left = [], most_bytes
    while raw.startswith(_GZIP_MAGIC):  # gzip files may be concatenated
        stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        try:
            parts.append(stream.decompress(raw, left))
        except zlib.error as error:
            raise TraceFormatError(f"{path}: damaged gzip data ({error}); copy or record it again") from error
        left -= len(parts[-1])
        if left <= 0:
            raise TraceFormatError(f"{path}: more than {most_bytes / 2**30:g} GiB when unpacked; cut it into smaller files")
        if not stream.eof:
            return b"".join(parts), True
        raw = stream.unused_data
    return b"".join(parts), False
