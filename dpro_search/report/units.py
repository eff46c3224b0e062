"""Numbers for people, each with the unit that suits it."""

from __future__ import annotations

from dpro_search.quantities import percent_text, size_text, time_text


def duration(value_us: float) -> str:
    """A duration: "431.2 ms", or "80.0 µs"."""
    return time_text(value_us).replace("us", "µs")


size = size_text
percent = percent_text


def signed_percent(value_pct: float) -> str:
    """An error, with its sign: "+3.2 %"; "0.0 %" if it rounds to zero."""
    return f"{value_pct:+z.1f} %".replace("-", "\N{MINUS SIGN}").replace("+0.0 ", "0.0 ")


def ratio(value: float) -> str:
    """A speed-up: "1.33x", with a multiplication sign."""
    return f"{value:.2f}\N{MULTIPLICATION SIGN}"


def count(number: int, noun: str) -> str:
    """A number of things: "1 rank", "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
