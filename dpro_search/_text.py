"""Text from files, made safe to display."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

_DISGUISES = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # control, direction, surrogate, unassigned, line separators


def visible(text: str) -> str:
    r"""The text with characters that hide, reorder or control it (for example a terminal's escape) made visible: "\u{1b}"."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(f"\\u{{{ord(c):x}}}" if unicodedata.category(c) in _DISGUISES else c for c in text)


def shortened(text: str, most: int) -> str:
    """The text with at most so many characters: a longer text loses its middle."""
    if len(text) <= most:
        return text
    head = (most - 3) // 2
    return f"{text[:head]}...{text[len(text) - (most - 3 - head) :]}"


def listed(words: Sequence[str]) -> str:
    """Words as a sentence has them: "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def numbers_text(numbers: Iterable[int], most: int = 8) -> str:
    """Numbers in order, with runs of three and more as one: "0 to 3, 5, 7"; of more than `most` runs the first, and an ellipsis."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [
        text for first, last in runs for text in ((f"{first} to {last}",) if last > first + 1 else map(str, range(first, last + 1)))
    ]
    return ", ".join(texts[:most]) + (" ..." if len(texts) > most else "")
