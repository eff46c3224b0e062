"""``short_repr``: what Python shows of a value, on one screen at the most, however large the value is.

A class takes it as ``__repr__ = short_repr``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec

_MOST = 1200  # characters: 15 lines of a terminal
_MOST_OF_TEXT = 80
_MOST_ITEMS = 4
_MOST_DEPTH = 4


def short_repr(value: Any) -> str:
    """The fields that are not at their default, with long ones cut: arrays by type and shape, sequences by their first items."""
    return _cut(_shown(value, 0), _MOST)


def short_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call with named arguments, cut as `short_repr` does."""
    return _cut(f"{name}({', '.join(f'{key}={_shown(value, 1)}' for key, value in arguments.items())})", _MOST)


def _shown(value: Any, depth: int) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"<{value.dtype}{list(value.shape)}>"
    if isinstance(value, float) and type(value).__repr__ is float.__repr__:
        return f"{value:.6g}"
    if isinstance(value, str | bytes):
        return repr(value) if len(value) <= _MOST_OF_TEXT else _cut(repr(value[:_MOST_OF_TEXT]), _MOST_OF_TEXT)
    if isinstance(value, Mapping):
        return _items(
            (f"{_shown(key, depth + 1)}: {_shown(one, depth + 1)}" for key, one in value.items()), len(value), "{}", depth
        )
    if isinstance(value, tuple | list | set | frozenset):
        brackets = "()" if isinstance(value, tuple) else "[]" if isinstance(value, list) else "{}"
        return _items((_shown(one, depth + 1) for one in value), len(value), brackets, depth)
    if isinstance(value, msgspec.Struct) and type(value).__repr__ not in (msgspec.Struct.__repr__, short_repr):
        return _cut(repr(value), 2 * _MOST_OF_TEXT)
    if isinstance(value, type) or not (dataclasses.is_dataclass(value) or isinstance(value, msgspec.Struct)):
        return _cut(repr(value), _MOST_OF_TEXT)
    fields = list(_fields(value))
    if fields and depth >= _MOST_DEPTH:
        return f"{type(value).__name__}(...)"
    return f"{type(value).__name__}({', '.join(f'{name}={_shown(one, depth + 1)}' for name, one in fields)})"


def _items(shown: Iterator[str], count: int, brackets: str, depth: int) -> str:
    if depth >= _MOST_DEPTH and count:
        return f"{brackets[0]}{count} items{brackets[1]}"
    items = list(islice(shown, _MOST_ITEMS))
    more = [f"... {count - len(items)} more"] if count > len(items) else []
    return f"{brackets[0]}{', '.join([*items, *more])}{brackets[1]}"


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Fields of a dataclass or struct that are to be shown and say something."""
    if dataclasses.is_dataclass(value):
        defaults = [(field.name, field.default) for field in dataclasses.fields(value) if field.repr]
    else:
        defaults = [(field.name, field.default) for field in msgspec.structs.fields(value)]
    for name, default in defaults:
        field_value = getattr(value, name)
        sized = hasattr(field_value, "__len__") and not hasattr(field_value, "dtype")
        if (
            field_value is not None
            and not (sized and len(field_value) == 0)
            and not (type(field_value) is type(default) and field_value == default)
        ):
            yield name, field_value


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
