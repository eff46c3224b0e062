"""Text from files, made safe to display."""

from __future__ import annotations

import unicodedata

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
