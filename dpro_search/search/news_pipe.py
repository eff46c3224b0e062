"""A pipe that carries results to a process that runs islands. The search writes to it without blocking.

So a slow worker does not delay the search, and a worker that begins a round usually has its results already.
"""

from __future__ import annotations

import os
import struct
from collections import defaultdict

import msgspec

from dpro_search.search.islands import FIRST_NEWS, News

_LENGTH = struct.Struct("<q")
_NEWS = msgspec.msgpack.Decoder(News)


def news_pipe(islands: int) -> tuple[NewsWriter, NewsReader]:
    """Both ends, for one worker of a search with so many islands. Each end must be closed in the process that does not use it."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    return NewsWriter(writes), NewsReader(reads, islands)


class NewsWriter:
    """The search's end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self._descriptor

    def add(self, news: bytes) -> None:
        """Take encoded news; to be followed by `write`."""
        self._unsent += _LENGTH.pack(len(news)) + news

    def write(self) -> bool:
        """Write what the pipe takes now; returns whether something is left. Results for a reader that has ended are dropped."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self._descriptor, self._unsent)]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            self._unsent.clear()
        return False

    def close(self) -> None:
        os.close(self._descriptor)


class NewsReader:
    """A worker's end."""

    def __init__(self, descriptor: int, islands: int) -> None:
        self._file = os.fdopen(descriptor, "rb")
        self._islands = islands
        self._rounds: defaultdict[int, dict[int, News]] = defaultdict(dict)

    def before(self, island: int, round_: int) -> list[News]:
        """Wait for the messages that an island receives before a round; raises `EOFError` if the search has ended."""
        self._rounds.pop(round_ - FIRST_NEWS - 1, None)
        heard = self._rounds[round_ - FIRST_NEWS]
        while len(heard.keys() - {island}) < self._islands - 1:
            news = self._read()
            self._rounds[news.round][news.island] = news
        return [heard[other] for other in sorted(heard) if other != island]

    def close(self) -> None:
        self._file.close()

    def _read(self) -> News:
        (length,) = _LENGTH.unpack(self._whole(_LENGTH.size))
        return _NEWS.decode(self._whole(length))

    def _whole(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise EOFError
        return data
