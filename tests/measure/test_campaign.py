"""A campaign times what its file lacks, item by item, and goes on where it stopped."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dpro_search.errors import JobError
from dpro_search.measure.campaign import Campaign, Progress

ITEMS = ("a", "b", "c", "d")


class Words(Campaign[str, Progress]):
    """Writes words to a file; those in `failing` cannot be timed."""

    def __init__(self, path: Path, *, limit: int | None = None, failing: str = "", interrupted_at: str = "") -> None:
        self.path, self.failing, self.interrupted_at = path, failing, interrupted_at
        self.words = path.read_text().split() if path.exists() else []
        self.shown: list[tuple[str, int]] = []
        super().__init__(Progress(rows=len(self.words), limit=limit), lambda now: self.shown.append((now.now, now.rows)))

    def missing(self) -> Iterator[str]:
        return (item for item in ITEMS if item not in self.words)

    def measure(self, item: str) -> None:
        self.announce(item)
        if item == self.interrupted_at:
            raise KeyboardInterrupt
        if item in self.failing:
            raise JobError(f"no {item}")
        self.words.append(item)
        self.path.write_text(" ".join(self.words))
        self.added()


class Tolerant(Words):
    def skip(self, item: str, error: JobError) -> None:
        self.progress.failed[str(error)] += 1


def test_a_campaign_times_all_that_its_file_lacks_and_says_so(tmp_path):
    words = Words(tmp_path / "words")
    words.run()
    assert words.path.read_text() == "a b c d"
    assert words.shown == [("a", 0), ("a", 1), ("b", 1), ("b", 2), ("c", 2), ("c", 3), ("d", 3), ("d", 4)]


def test_an_interrupted_campaign_goes_on_where_it_stopped(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        Words(tmp_path / "words", interrupted_at="c").run()
    assert (tmp_path / "words").read_text() == "a b"
    words = Words(tmp_path / "words")
    words.run()
    assert words.path.read_text() == "a b c d"
    assert (words.progress.rows, words.progress.new) == (4, 2)


def test_a_campaign_ends_when_its_file_has_as_many_rows_as_it_is_to_have(tmp_path):
    Words(tmp_path / "words", limit=2).run()
    assert (tmp_path / "words").read_text() == "a b"
    words = Words(tmp_path / "words", limit=2)
    words.run()
    assert words.progress.new == 0


def test_nothing_is_begun_when_the_time_is_up(tmp_path):
    words = Words(tmp_path / "words")
    words.run(seconds=0.0)
    assert not words.path.exists()


def test_an_item_that_fails_ends_a_campaign_unless_it_can_do_without(tmp_path):
    with pytest.raises(JobError, match="no b"):
        Words(tmp_path / "words", failing="b").run()
    assert (tmp_path / "words").read_text() == "a"
    words = Tolerant(tmp_path / "words", failing="bd")
    words.run()
    assert words.path.read_text() == "a c"
    assert words.progress.failed == {"no b": 1, "no d": 1}
