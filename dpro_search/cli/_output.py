"""What the verbs print: JSON for programs, consoles and units for people."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from dpro_search._text import visible
from dpro_search.report.units import percent, size

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["microseconds", "percent", "print_json", "say", "size", "stderr_console", "stdout_console"]


def print_json(value: Any) -> None:
    """Print one JSON object on stdout, alone on its line; NaN and infinity become null."""
    import msgspec

    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def say(console: Console, sentence: str, style: str = "") -> None:
    """Print a sentence that may hold names from a file: they are neither markup nor escape codes."""
    from rich.text import Text

    console.print(Text(visible(sentence), style))


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


def microseconds(value_us: float) -> str:
    """A duration with the unit that suits it: "431.2 ms"."""
    if abs(value_us) < 1e3:
        return f"{value_us:.1f} us"
    return f"{value_us / 1e3:.1f} ms" if abs(value_us) < 1e6 else f"{value_us / 1e6:.2f} s"
