"""Numbers for people, each with the unit that suits it."""

from __future__ import annotations


def duration(value_us: float) -> str:
    """A duration: "431.2 ms"."""
    if abs(value_us) < 1e3:
        return f"{value_us:.1f} µs"
    return f"{value_us / 1e3:.1f} ms" if abs(value_us) < 1e6 else f"{value_us / 1e6:.2f} s"


def size(value_bytes: float) -> str:
    """A size in binary units: "24.0 MiB"."""
    if abs(value_bytes) < 1024:
        return f"{value_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        value_bytes /= 1024
        if abs(value_bytes) < 1024:
            return f"{value_bytes:.1f} {unit}"
    return f"{value_bytes / 1024:.1f} TiB"


def percent(value_pct: float) -> str:
    """A share: "3.2 %"."""
    return f"{value_pct:.1f} %"


def signed_percent(value_pct: float) -> str:
    """An error, with its sign: "+3.2 %"."""
    return f"{value_pct:+.1f} %".replace("-", "\N{MINUS SIGN}")


def ratio(value: float) -> str:
    """A speed-up: "1.33x", with a multiplication sign."""
    return f"{value:.2f}\N{MULTIPLICATION SIGN}"


def count(number: int, noun: str) -> str:
    """A number of things: "1 rank", "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
