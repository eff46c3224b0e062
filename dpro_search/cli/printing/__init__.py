"""Output of the verbs: JSON for programs, consoles and units for people."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpro_search._text import visible
from dpro_search.quantities import percent_text as percent
from dpro_search.quantities import size_text as size
from dpro_search.quantities import time_text as microseconds

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["microseconds", "percent", "print_json", "print_table", "say", "size", "stderr_console", "stdout_console", "warn"]


def print_json(value: Any) -> None:
    """Print one JSON object on stdout, alone on its line; NaN and infinity become null."""
    import msgspec

    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def say(console: Console, sentence: str, style: str = "") -> None:
    """Print a sentence that may contain names from a file, without interpreting markup or escape codes in them."""
    from rich.text import Text

    console.print(Text(visible(sentence), style))


def warn(sentence: str | None) -> None:
    """Print a warning on stderr; nothing for None."""
    if sentence is not None:
        from rich.text import Text

        stderr_console().print(Text(visible(f"warning: {sentence}"), "yellow"), soft_wrap=True)


def stdout_console() -> Console:
    """For results. Plain text where stdout is no terminal or NO_COLOR is set; 80 columns where the width is unknown."""
    return _console(stderr=False)


def stderr_console() -> Console:
    """For progress and logs."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=stderr, highlight=False, width=80)
    return console


def print_table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; only its first column may be long."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for cells in rows:
        table.add_row(*(Text(visible(cell)) for cell in cells))  # names from files may look like markup
    console.print(table)
