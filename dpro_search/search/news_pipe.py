"""How news reach a process that runs islands: through a pipe into which the search never waits to write.

So a worker that has fallen behind keeps nobody, and one that is about to begin a round has mostly been told already.
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
    """Both ends, for a worker that is one of those that run so many islands. To be closed in the process that does not use them."""
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
        """Write what the pipe takes now; whether something is left. To a reader that is gone there is nothing to say."""
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
        """What an island hears before a round; waits for it. Raises `EOFError` if the search is gone."""
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
        found = self._file.read(count)
        if len(found) < count:
            raise EOFError
        return found
