"""Raw bytes of a file that may be compressed with gzip, damaged, cut off, or made to fill the memory."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from dpro_search._regular_files import open_regular, without_byte_order_mark
from dpro_search.collect._memory import available_bytes
from dpro_search.errors import InputError, TraceFormatError
from dpro_search.quantities import size_text

MOST_TABLE_BYTES = 256 * 2**20  # of a measured table, unpacked: sixteen times the largest in the package
PIECE = 4 << 20
GZIP_TRAILER_BYTES = 8  # checksum and length: a damaged stream may be unpacked to them, with other content

_GZIP_MAGIC = b"\x1f\x8b"
_STEP = 16 << 10  # compressed bytes that are read at a time
_MOST_RATIO = 100  # of a trace's bytes to its compressed ones; real ones have 10 to 40
_ANY_RATIO_BYTES = 64 << 20  # unpacked, from which on the ratio is looked at
_MEMORY_SHARE = 1 / 8  # of the available memory that a file's bytes may take: what is made of them takes several times as much


class Unpacked:
    """The content of a file in pieces, decompressed where it is gzip whatever its name.

    Parameters
    ----------
    most_bytes
        Of the content. None: as many as `_MOST_RATIO` allows.
    piece_bytes
        Of each piece at most.

    Attributes
    ----------
    damage
        When the iteration has ended: why the rest of the file could not be unpacked, or "".
    read_bytes, unread_bytes
        Where its compressed data are damaged: bytes before and from there on.

    Raises
    ------
    InputError
        While iterating: the file cannot be read.
    TraceFormatError
        While iterating: it has more than `most_bytes`, or is compressed as no trace is.
    """

    def __init__(self, path: Path, most_bytes: int | None = None, piece_bytes: int = PIECE) -> None:
        self._path, self._most_bytes, self._piece_bytes = path, most_bytes, piece_bytes
        self.damage = ""
        self.read_bytes = self.unread_bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        try:
            with open_regular(self._path) as file:
                read_bytes = 0
                for piece in self._pieces(file):
                    if not read_bytes:
                        piece = without_byte_order_mark(piece)
                    read_bytes += len(piece)
                    self._check(read_bytes, file.tell())
                    yield piece
        except OSError as error:
            raise InputError(f"{self._path}: cannot be read ({error.strerror or error})") from error

    def _pieces(self, file: BufferedReader) -> Iterator[bytes]:
        if file.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC):
            yield from self._decompressed(file)
            return
        while piece := file.read(self._piece_bytes):
            yield piece

    def _decompressed(self, file: BufferedReader) -> Iterator[bytes]:
        """Gzip files may be concatenated."""
        stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        raw = file.read(_STEP)
        while raw:
            before = stream.copy()
            try:
                yield stream.decompress(raw, self._piece_bytes)
            except zlib.error as error:
                self.damage = f"damaged gzip data ({error})"
                unpacked, used = _before_damage(before, raw)
                self.read_bytes = file.tell() - len(raw) + used
                self.unread_bytes = len(raw) - used + len(file.read())
                yield unpacked
                return
            raw = stream.unconsumed_tail
            if stream.eof:
                raw = stream.unused_data or file.read(_STEP)
                if not raw.startswith(_GZIP_MAGIC):
                    return  # the end, or padding
                stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
            raw = raw or file.read(_STEP)
        yield stream.flush()
        if not stream.eof:
            self.damage = "the compressed file ends in the middle"

    def _check(self, found_bytes: int, read_bytes: int) -> None:
        if self._most_bytes is not None:
            if found_bytes > self._most_bytes:
                raise TraceFormatError(
                    f"{self._path}: more than {self._most_bytes / 2**30:g} GiB when unpacked; cut it into smaller files"
                )
        elif found_bytes > max(_ANY_RATIO_BYTES, _MOST_RATIO * read_bytes):
            raise TraceFormatError(
                f"{self._path}: unpacks to more than {_MOST_RATIO} times its size, as no trace does; unpack it first if it is one"
            )


def _before_damage(stream: zlib._Decompress, raw: bytes) -> tuple[bytes, int]:
    """Unpack as many bytes as possible; return them, and the number of compressed bytes before the one that is damaged."""
    unpacked = bytearray()
    for place in range(len(raw)):
        try:
            unpacked += stream.decompress(raw[place : place + 1])
        except zlib.error:
            return bytes(unpacked), place
    return bytes(unpacked), len(raw)


def read_whole(path: Path, most_bytes: int | None = None) -> bytes:
    """The content of a file, decompressed where it is gzip whatever its name.

    Raises
    ------
    InputError
        The file cannot be read.
    TraceFormatError
        Its compressed stream is damaged or ends in the middle, or it has more than `most_bytes` (None: than the memory and the
        ratio of a trace allow).
    """
    data, damage = read_available(path, most_bytes)
    if damage:
        raise TraceFormatError(f"{path}: {damage}; copy or record it again")
    return data


def read_available(path: Path, most_bytes: int | None = None) -> tuple[bytes, str]:
    """Read a file as far as possible; return the bytes, and why its compressed stream has no more: "" where it is whole.

    Raises as `read_whole` does, but returns what a damaged or cut stream still gives.
    """
    allowed = int(available_bytes() * _MEMORY_SHARE)
    pieces = Unpacked(path, most_bytes, piece_bytes=max(min(allowed, _size(path)), PIECE))
    parts: list[bytes] = []
    for piece in pieces:
        parts.append(piece)
        if sum(map(len, parts)) > allowed:
            raise TraceFormatError(
                f"{path}: larger than the {size_text(allowed)} that can be read with the memory that is available; "
                "free some memory, or cut it into smaller files"
            )
    return b"".join(parts), pieces.damage


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
