"""A test of many cases goes through all of them, and names those that fail."""

from pathlib import Path

import pytest

from tests.every_case import every_case


def test_every_case_runs_and_those_that_fail_are_named():
    ran = []

    @every_case(("number", "limit"), [(1, 2), (3, 2), (5, 2)])
    @every_case("sign", [1, -1])
    def checked(number, limit, sign):
        ran.append((number, sign))
        with pytest.raises(ValueError, match="negative"):
            raise ValueError("negative" if sign < 0 else "positive")
        assert number < limit

    with pytest.raises(BaseExceptionGroup, match="3 of 3 cases failed") as caught:
        checked()
    assert ran == [(number, sign) for number in (1, 3, 5) for sign in (1, -1)]
    assert [group.__notes__ for group in caught.value.exceptions] == [[f"in the case number={n}, limit=2"] for n in (1, 3, 5)]
    assert [len(group.exceptions) for group in caught.value.exceptions] == [1, 2, 2]


@every_case("text", ["a", "b"])
def test_each_case_has_a_folder_for_itself(tmp_path: Path, text: str):
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text(text)
