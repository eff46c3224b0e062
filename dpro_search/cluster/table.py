"""Reads the tables of a TOML file: values with units, unknown keys refused, every error one line with file, line and key."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from dpro_search._regular_files import open_regular, without_byte_order_mark
from dpro_search._text import visible
from dpro_search.errors import InputError

_T = TypeVar("_T")
_MOST_BYTES = 1 << 20  # a cluster file is a few kilobytes
_HEADER = re.compile(r"\s*\[(\[?)\s*([\w.\-]+)\s*\]")
_KEY = re.compile(r"\s*([\w.\-]+)\s*=")


class ClusterFileError(InputError):
    """Something in a cluster file is wrong; the message says where."""


class File:
    """A file's name and text, to say where in it something is wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as stream:
                raw = without_byte_order_mark(stream.read(_MOST_BYTES + 1))
            self.text = raw.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise InputError(f"{path}: cannot be read: {reason}") from error
        if len(raw) > _MOST_BYTES:
            raise InputError(f"{path}: larger than 1 MiB: that is no cluster file")

    def values(self) -> dict[str, Any]:
        """The parsed file."""
        try:
            return tomllib.loads(self.text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise InputError(f"{self.path}: not TOML: {_one_line(str(error))}") from error

    def fail(self, key: str, what: str) -> NoReturn:
        """Raise `InputError` at a key."""
        line = self._line(key)
        where = f"{self.path}:{line}" if line else f"{self.path}"
        raise ClusterFileError(_one_line(f"{where}: {key}: {what}" if key else f"{where}: {what}"))

    def _line(self, key: str) -> int | None:
        """Line of a key or of the nearest table around it, by a plain scan; `host[1].nic` is in the second [[host]]."""
        lines = dict(self._keys())
        while key:
            if key in lines:
                return lines[key]
            key = key.rpartition(".")[0]
        return None

    def _keys(self) -> Iterable[tuple[str, int]]:
        table, counts = "", dict[str, int]()
        for number, line in enumerate(self.text.splitlines(), start=1):
            if header := _HEADER.match(line):
                table = header[2]
                root, _, rest = table.partition(".")
                if header[1]:
                    counts[root] = counts.get(root, -1) + 1
                if root in counts:
                    table = ".".join([f"{root}[{counts[root]}]", *([rest] if rest else [])])
                yield table, number
            elif key := _KEY.match(line):
                yield (f"{table}.{key[1]}" if table else key[1]), number


class Table:
    """One table of a file, whose keys are taken one by one.

    Parameters
    ----------
    prefix
        Key of the table in the file; empty: the file itself.
    known
        Keys that it may have.

    Raises
    ------
    InputError
        It has another key; the nearest known one is named.
    """

    def __init__(self, values: object, file: File, prefix: str, known: Iterable[str]) -> None:
        self.file, self.prefix = file, prefix
        if not isinstance(values, Mapping):
            file.fail(prefix, "must be a table with keys, like [nic]")
        self.values: Mapping[str, Any] = values
        names = tuple(known)
        for key in values:
            if key not in names:
                near = difflib.get_close_matches(key.lower(), names, n=1)
                hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(names)}"
                file.fail(self.key(key), f"unknown key; {hint}")

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def key(self, name: str) -> str:
        """A key as it is in the file."""
        return f"{self.prefix}.{name}" if self.prefix else name

    def fail(self, name: str, what: str) -> NoReturn:
        """Raise `InputError` at a key of this table."""
        self.file.fail(self.key(name), what)

    def required(self, name: str) -> Any:
        """A value that must be there."""
        if name not in self.values:
            self.fail(name, "missing")
        return self.values[name]

    def text(self, name: str, default: str | None = None) -> str:
        """A string; without a default it must be there."""
        value = self.required(name) if default is None else self.values.get(name, default)
        if not isinstance(value, str) or not value.strip():
            self.fail(name, f"must be a text, not {_shown(value)}")
        return visible(value)

    def choice(self, name: str, options: tuple[str, ...], default: str) -> Any:
        """One of some words."""
        value = self.values.get(name, default)
        if value not in options:
            self.fail(name, f"must be {' or '.join(options)}, not {_shown(value)}")
        return value

    def count(self, name: str) -> int | None:
        """A whole number, None if it is not there."""
        value = self.values.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            self.fail(name, f"must be a whole number, not {_shown(value)}")
        return value

    def number(self, name: str) -> float | None:
        """A number, None if it is not there."""
        value = self.values.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)):
            self.fail(name, f"must be a number, not {_shown(value)}")
        return None if value is None else float(value)

    def quantity(self, name: str, parse: Callable[[str], _T]) -> _T | None:
        """A quantity with its unit in a text, or a number in the field's unit; None if it is not there."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            self.fail(name, f"must be a quantity, like a text with a unit, not {_shown(value)}")
        return self.checked(name, lambda: parse(value if isinstance(value, str) else repr(value)))

    def checked(self, name: str, make: Callable[[], _T]) -> _T:
        """Return the result of `make`. Its `InputError` gets the key's place if it has none."""
        try:
            return make()
        except ClusterFileError:
            raise
        except InputError as error:
            self.file.fail(self.key(name) if name else self.prefix, str(error))


def _shown(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) else repr(value)[:40]


def _one_line(text: str) -> str:
    return visible(" ".join(text.split()))
