"""Text from files, made safe to display."""

from __future__ import annotations

import re
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


_SECRET = r"[\w.\-]*(?:key|token|secret|password|passwd|credentials?)"  # names whose values nobody should read
_MASK = "***"
_SECRET_OPTION = re.compile(rf"--?{_SECRET}", re.IGNORECASE)
_SECRETS = (
    re.compile(rf"""((?<![\w.\-]){_SECRET}["']?\s*=\s*)("[^"]*"|'[^']*'|[^\s,;&"']+)""", re.IGNORECASE),  # NAME=value, --name=value
    re.compile(rf"""(["']{_SECRET}["']\s*:\s*)("[^"]*"|'[^']*'|[^\s,}}"']+)""", re.IGNORECASE),  # of JSON
    re.compile(rf"""((?<![\w.\-])--{_SECRET}\s+)("[^"]*"|'[^']*'|(?!--)[^\s"']+)""", re.IGNORECASE),  # --name value
    re.compile(r"(://[^/\s:@]*:)([^/\s@]+)(?=@)"),  # of an address: user:password@host
)


def without_secrets(words: Sequence[str]) -> list[str]:
    """The words of a command in which values of options and variables that end in key, token, secret or password are masked."""
    masked: list[str] = []
    hidden = False  # whether the word is the value of the option before it
    for word in words:
        masked.append(_MASK if hidden and not word.startswith("--") else text_without_secrets(word))
        hidden = _SECRET_OPTION.fullmatch(word) is not None
    return masked


def holds_secrets(words: Sequence[str]) -> bool:
    """Whether a command has values that `without_secrets` masks; a file that needs them must be private."""
    return without_secrets(words) != list(words)


def text_without_secrets(text: str) -> str:
    """A text, such as a command or output of a job, with the same values masked."""
    for pattern in _SECRETS:
        text = pattern.sub(rf"\1{_MASK}", text)
    return text
