"""Plans within JSON: reading what version 1 wrote, and plans as settings by name, which tools outside read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from dpro_search.space.plan import upgraded

_T = TypeVar("_T")


def decoded(raw: bytes | str, kind: type[_T]) -> _T:
    """Decode JSON with plans (values of keys ``plan``) of this version or version 1; raises what msgspec does."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError:
        return converted(msgspec.json.decode(raw), kind)


def converted(value: Any, kind: type[_T]) -> _T:
    """The same of JSON that is decoded already."""
    return msgspec.json.decode(msgspec.json.encode(_each_plan(value, upgraded)), type=kind)


def by_setting(value: Any) -> Any:
    """A value as plain lists and dictionaries, in which each plan (value of a key ``plan``) has its settings side by side."""
    return _each_plan(msgspec.to_builtins(value), _flat)


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    scheme_fields = {name: value for name, value in fields.get("scheme", {}).items() if name != "name"}
    return {**scheme_fields, **{name: value for name, value in fields.items() if name != "scheme"}}


def _each_plan(value: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if isinstance(value, dict):
        changed = {key: _each_plan(each, change) for key, each in value.items()}
        return changed | {"plan": change(changed["plan"])} if isinstance(changed.get("plan"), dict) else changed
    return type(value)(_each_plan(each, change) for each in value) if isinstance(value, list | tuple) else value
