"""Text from files, made safe to display."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_DISGUISES = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # control, direction, surrogate, unassigned, line separators

_NEAR = 0.8  # Share of equal characters from which a name is perhaps a slip: "llama4" is none of "llama3-8b".


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


def near_names(name: str, options: Iterable[str], most: int = 3) -> list[str]:
    """Names that were perhaps meant: those that begin with what was typed, and those that differ in a character or two."""
    known = list(options)
    begin = [option for option in known if name and option.startswith(name)]
    return list(dict.fromkeys([*get_close_matches(name, known, n=most, cutoff=_NEAR), *begin]))[:most]


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
