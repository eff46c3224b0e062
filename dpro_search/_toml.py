"""Reads TOML files into msgspec structs. Every error is one line with the file, the line, the key and the nearest legal name.

A struct has a field for each key of its table and forbids other keys. A field whose type is a `TomlQuantity` takes a text with a
unit ("100gbit"), or a number in the unit of the field.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from operator import add
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import msgspec

from dpro_search._regular_files import open_regular, without_byte_order_mark
from dpro_search._text import visible
from dpro_search.errors import InputError

_T = TypeVar("_T")
Explain = Callable[[str, object], str | None]

_MOST_BYTES = 1 << 20  # a file that people write has a few kilobytes
_HEADER = re.compile(r"\s*\[(\[?)\s*([\w.\-]+)\s*\]")
_KEY = re.compile(r"\s*([\w.\-]+)\s*=")
_PART = re.compile(r"\[\d+\]|[^.\[\]]+")  # of a path like `host[1].nic.rate`
# Messages of msgspec.
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")
_MISSING = re.compile(r"Object missing required field `([^`]*)`")
_INVALID = re.compile(r"Invalid enum value ")
_LENGTH = re.compile(r"Expected `array` of (?:at (?:least|most) )?length (\d+), got (\d+)")
_EXPECTED = re.compile(r"Expected `([^`]*)`, got `")
_TYPES = {
    "int": "a whole number",
    "str": "a text",
    "bool": "true or false",
    "float": "a number",
    "object": "a table with keys, like [nic]",
    "array": "a list",
}


class TomlError(InputError):
    """Something in a TOML file is wrong; the message says where."""


class TomlQuantity(float):
    """A value in the unit of its field; a subclass names the parser of texts (`dpro_search.quantities`)."""

    parse: ClassVar[Callable[[str], float | None]]  # None: not limited, which is stored as infinity


class TomlFile:
    """A file's name and text, to convert its tables and to say where in it something is wrong.

    Raises
    ------
    InputError
        The file cannot be read, is no UTF-8 text, or is too large.
    """

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
            raise InputError(f"{path}: larger than 1 MiB: such a file has a few kilobytes")

    def values(self) -> dict[str, Any]:
        """The parsed file; raises `InputError` if it is not TOML."""
        try:
            return tomllib.loads(self.text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise InputError(f"{self.path}: not TOML: {_one_line(str(error))}") from error

    def convert(
        self, values: object, struct: type[_T], key: str = "", *, explain: Explain | None = None, if_missing: str = ""
    ) -> _T:
        """A table of the file as a struct.

        Parameters
        ----------
        key
            Key of the table; empty: the file itself.
        explain
            Gets an unknown key and None, or a key and its unknown value; returns the message to show in place of the nearest
            legal name, or None.
        if_missing
            What the message on a missing key ends with.

        Raises
        ------
        TomlError
            A key is unknown or missing, or a value has another type or is impossible.
        """
        try:
            return msgspec.convert(values, struct, dec_hook=_quantity)
        except msgspec.ValidationError as error:
            text = str(error)
        place = _PATH.search(text)
        what, path = (text[: place.start()], place[1]) if place else (text, "")
        at, value = _joined(key, path), _value_at(values, path)
        types = _types_at(msgspec.inspect.type_info(struct), _PART.findall(path))
        names = [field.encode_name for one in types if isinstance(one, msgspec.inspect.StructType) for field in one.fields]
        if unknown := _UNKNOWN.match(what):
            name = _joined(at, unknown[1])
            reason = explain(name, None) if explain else None
            self.fail(name, reason or f"unknown key; {nearest(unknown[1], names)}")
        if missing := _MISSING.match(what):
            self.fail(at, f"'{missing[1]}' is missing{if_missing}")
        if _INVALID.match(what):
            reason = explain(at, value) if explain else None
            words = [str(word) for one in types if isinstance(one, msgspec.inspect.LiteralType) for word in one.values]
            self.fail(at, reason or f"'{value}' is not known; {nearest(str(value), [*words, *(['a table'] if names else [])])}")
        if length := _LENGTH.match(what):
            self.fail(at, f"must be a list of {length[1]} values, not of {length[2]}")
        if expected := _EXPECTED.match(what):
            kinds = [_TYPES.get(kind, kind) for kind in expected[1].split(" | ") if kind != "null"]
            self.fail(at, f"must be {' or '.join(kinds)}, not {_shown(value)}")
        named = next((name for name in names if what.startswith(f"{name} ")), "")
        return self.fail(_joined(at, named), what.replace("`", ""))

    def placed(self, key: str, make: Callable[[], _T]) -> _T:
        """Return the result of `make`. Its `InputError` gets the key's place if it has none."""
        try:
            return make()
        except TomlError:
            raise
        except InputError as error:
            self.fail(key, str(error))

    def fail(self, key: str, what: str) -> NoReturn:
        """Raise `TomlError` at a key."""
        line = self._line(key)
        where = f"{self.path}:{line}" if line else f"{self.path}"
        raise TomlError(_one_line(f"{where}: {key}: {what}" if key else f"{where}: {what}"))

    def _line(self, key: str) -> int | None:
        """Line of a key or of the nearest table around it, by a plain scan; `host[1].nic` is in the second [[host]]."""
        lines = dict(self._keys())
        around = accumulate(_PART.findall(key), _joined)
        return next((lines[table] for table in reversed(list(around)) if table in lines), None)

    def _keys(self) -> Iterator[tuple[str, int]]:
        """Every key of the text with its line; a part of a name that is a list of tables gets the number of the table."""
        table, counts = "", dict[str, int]()
        for number, line in enumerate(self.text.splitlines(), start=1):
            if header := _HEADER.match(line):
                names = header[2].split(".")
                if header[1]:
                    counts[header[2]] = counts.get(header[2], -1) + 1
                lists = [f"[{counts[name]}]" if name in counts else "" for name in accumulate(names, "{}.{}".format)]
                table = ".".join(map(add, names, lists))
                yield table, number
            elif key := _KEY.match(line):
                yield _joined(table, key[1]), number


def nearest(name: str, known: Sequence[str]) -> str:
    """Advice on a name that is not known: "did you mean 'count'?", or the list of all that are."""
    import difflib  # only a wrong file needs it

    near = difflib.get_close_matches(name.lower(), known, n=1)
    return f"did you mean '{near[0]}'?" if near else f"known are {', '.join(known)}"


def _quantity(kind: type[Any], value: object) -> Any:
    """For msgspec: a value of a type that it does not know, which is a `TomlQuantity`."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"must be a quantity, like a text with a unit, not {_shown(value)}")
    quantity = kind.parse(value if isinstance(value, str) else repr(value))
    return kind(float("inf") if quantity is None else quantity)


def _joined(table: str, key: str) -> str:
    return f"{table}{key}" if key.startswith("[") else ".".join(filter(None, (table, key)))


def _value_at(values: Any, path: str) -> object:
    for part in _PART.findall(path):
        values = values[int(part[1:-1]) if part.startswith("[") else part]
    return values


def _types_at(kind: msgspec.inspect.Type, parts: Sequence[str]) -> list[msgspec.inspect.Type]:
    """The types that a value at a path within a value of a type may have."""
    alternatives = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    if not parts:
        return list(alternatives)
    inner = [
        field.type
        for one in alternatives
        if isinstance(one, msgspec.inspect.StructType)
        for field in one.fields
        if field.encode_name == parts[0]
    ]
    inner += [one.item_type for one in alternatives if isinstance(one, msgspec.inspect.VarTupleType | msgspec.inspect.ListType)]
    return [nested for one in inner for nested in _types_at(one, parts[1:])]


def _shown(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) else repr(value)[:40]


def _one_line(text: str) -> str:
    return visible(" ".join(text.split()))
