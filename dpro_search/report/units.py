"""Numbers for people, each with the unit that suits it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dpro_search.quantities import count_text, money_text, percent_text, size_text, typeset_time_text

duration = typeset_time_text
size = size_text
percent = percent_text
money = money_text
amount = count_text


def share(value_us: float, total_us: float) -> str:
    """A duration and its part of another: "1.2 ms (3.4 %)"."""
    return f"{duration(value_us)} ({percent(value_us / total_us * 100)})"


def interval(interval_us: Sequence[float]) -> str:
    """An interval of durations: "95.0 to 105.0 ms"; a common unit is written once."""
    low, high = (duration(value) for value in interval_us)
    if low == high:
        return f"{low}, no spread observed"
    return f"{low.removesuffix(high[high.index(' ') :])} to {high}"


def time_scale(values_us: Iterable[float]) -> tuple[str, float]:
    """The unit of an axis of durations, and how many microseconds it has: the largest that the longest duration reaches."""
    longest_us = max(map(abs, values_us), default=0.0)
    return next(((unit, us) for unit, us in (("s", 1e6), ("ms", 1e3)) if longest_us >= us), ("\N{MICRO SIGN}s", 1.0))


def size_scale(values_bytes: Iterable[float]) -> tuple[str, float]:
    """The unit of an axis of sizes, and how many bytes it has."""
    largest = max(values_bytes, default=0.0)
    return next(
        ((unit, 2.0**power) for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20)) if largest >= 2.0**power), ("KiB", 2.0**10)
    )


def signed_percent(value_pct: float) -> str:
    """An error, with its sign: "+3.2 %"; "0.0 %" if it rounds to zero."""
    return f"{value_pct:+z.1f} %".replace("-", "\N{MINUS SIGN}").replace("+0.0 ", "0.0 ")


def ratio(value: float) -> str:
    """A speed-up: "1.33x", with a multiplication sign."""
    return f"{value:.2f}\N{MULTIPLICATION SIGN}"


def count(number: int, noun: str) -> str:
    """A number of things: "1 rank", "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
