"""Units as people read them, JSON as programs do."""

import json

import pytest

from dpro_search._text import shortened
from dpro_search.cli.printing import microseconds, percent, print_json, print_table, say, size, stdout_console


@pytest.mark.parametrize(
    ("us", "text"), [(0, "0.0 us"), (12.34, "12.3 us"), (431_200, "431.2 ms"), (2_500_000, "2.50 s"), (-1500, "-1.5 ms")]
)
def test_durations(us: float, text: str) -> None:
    assert microseconds(us) == text


@pytest.mark.parametrize(("value_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (24 * 2**20, "24.0 MiB"), (3 * 2**40, "3.0 TiB")])
def test_sizes(value_bytes: float, text: str) -> None:
    assert size(value_bytes) == text


def test_shares() -> None:
    assert percent(3.21) == "3.2 %"


def test_json_is_one_line_without_numbers_that_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"interval_us": (1.5, float("inf")), "name": "ü"})
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"interval_us": [1.5, None], "name": "ü"}


def test_a_pipe_gets_plain_text_80_columns_wide(capsys: pytest.CaptureFixture[str]) -> None:
    console = stdout_console()
    console.print("[red]word[/red]")
    assert capsys.readouterr().out == "word\n"
    assert console.width == 80


def test_names_from_a_file_are_neither_markup_nor_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(stdout_console(), "ops", ("op", "share"), [("[/red]\x1b[31mgemm", "1.0 %")])
    say(stdout_console(), "* [bold]op\x07 takes long")
    out = capsys.readouterr().out
    assert "[/red]\\u{1b}[31mgemm" in out
    assert "* [bold]op\\u{7} takes long" in out


def test_a_name_that_is_too_long_loses_its_middle() -> None:
    assert shortened("a" * 10, 10) == "a" * 10
    assert shortened("begin-" + "x" * 90 + "-end", 20) == "begin-xx...xxxxx-end"
