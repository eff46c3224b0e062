"""News between islands: the search never waits to write them, and a worker waits only for what is not there yet."""

from __future__ import annotations

import msgspec
import pytest

from dpro_search.search.islands import News
from dpro_search.search.news_pipe import NewsReader, NewsWriter, news_pipe


def found(island: int, round_: int, best: bytes = b"") -> News:
    return News(island, round_, [], 1000.0, 1 + island, best)


def tell(writer: NewsWriter, *news: News) -> bool:
    for one in news:
        writer.add(msgspec.msgpack.encode(one))
    return writer.write()


@pytest.fixture
def ends() -> tuple[NewsWriter, NewsReader]:
    """Of three islands."""
    return news_pipe(3)


def test_an_island_hears_the_others_of_the_round_before_the_last_in_whatever_order_they_came(
    ends: tuple[NewsWriter, NewsReader],
) -> None:
    writer, reader = ends
    tell(writer, found(2, 0), found(2, 1), found(1, 0), found(0, 0), found(1, 1))
    assert reader.before(0, 2) == [found(1, 0), found(2, 0)]
    assert reader.before(1, 2) == [found(0, 0), found(2, 0)], "another island of the same worker"
    assert reader.before(0, 3) == [found(1, 1), found(2, 1)]


def test_what_a_pipe_does_not_take_is_kept_and_goes_when_there_is_room(ends: tuple[NewsWriter, NewsReader]) -> None:
    writer, reader = ends
    plan = b"x" * 20_000
    rounds = [found(island, round_, plan) for round_ in range(5) for island in (1, 2)]
    assert tell(writer, *rounds), "a pipe holds less than 200 KB, and nobody waited"
    for round_ in range(5):
        assert reader.before(0, round_ + 2) == [found(1, round_, plan), found(2, round_, plan)]
        left = writer.write()
    assert not left


def test_a_reader_that_is_gone_is_not_told_and_not_waited_for(ends: tuple[NewsWriter, NewsReader]) -> None:
    writer, reader = ends
    reader.close()
    assert not tell(writer, found(1, 0))


@pytest.mark.parametrize("told", [[], [found(1, 0, b"x" * 200_000)]])
def test_the_end_of_the_search_ends_the_wait(told: list[News], ends: tuple[NewsWriter, NewsReader]) -> None:
    """Even in the middle of what it wrote."""
    writer, reader = ends
    assert tell(writer, *told) == bool(told)
    writer.close()
    with pytest.raises(EOFError):
        reader.before(0, 2)
