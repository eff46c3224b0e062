"""Reads and writes machine files: TOML with a table for each section, and in it ``name = { value = ..., source = "..." }``."""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from dpro_search._regular_files import open_regular, without_byte_order_mark
from dpro_search._text import visible
from dpro_search.errors import InputError
from dpro_search.machine.constants import MACHINE_VERSION, SECTIONS, Device, MachineConstants, Origin

BUNDLED = Path(__file__).with_name("testbed.toml")
VARIABLE = "DPRO_SEARCH_MACHINE"  # names the file to use in place of the bundled one
_MOST_BYTES = 1 << 20
_HEAD = ("version", "name", "device", "processors", "sources")


def machine_constants() -> MachineConstants:
    """The constants that predictions of this process use: of the file that DPRO_SEARCH_MACHINE names, else the bundled ones.

    A file is read once. Raises `InputError` if it cannot be.
    """
    return _cached(os.environ.get(VARIABLE) or None)


@cache
def _cached(path: str | None) -> MachineConstants:
    if path is None:
        return load_machine(BUNDLED)
    try:
        return load_machine(Path(path))
    except InputError as error:
        raise InputError(f"{VARIABLE}: {error}") from error


def load_machine(path: Path) -> MachineConstants:
    """Read a machine file; raises `InputError` in one line if it is damaged or of a later version."""
    values = _values(path)
    version = values.get("version")
    if version != MACHINE_VERSION:
        raise InputError(f"{path}: machine file of version {visible(str(version))}, this program reads {MACHINE_VERSION}")
    if unknown := sorted(set(values) - {*_HEAD, *SECTIONS}):
        raise InputError(f"{path}: unknown key {visible(unknown[0])!r} (known: {', '.join((*_HEAD, *SECTIONS))})")
    try:
        sources = msgspec.convert(values.get("sources"), dict[str, Origin])
        origins: dict[str, Origin] = {}
        sections: dict[str, Any] = {}
        for name, section_type in SECTIONS.items():
            plain: dict[str, Any] = {}
            for key, entry in _table(values.get(name), name).items():
                sourced = _table(entry, f"{name}.{key}")
                if set(sourced) != {"value", "source"}:
                    raise InputError(f"{name}.{key} must be {{ value = ..., source = ... }}")
                if not isinstance(sourced["source"], str) or sourced["source"] not in sources:
                    raise InputError(f"{name}.{key}: no source is called {sourced['source']!r}")
                _require_plausible(sourced["value"], f"{name}.{key}")
                plain[key], origins[f"{name}.{key}"] = sourced["value"], sources[sourced["source"]]
            sections[name] = _section(plain, section_type, name)
        return MachineConstants(
            name=msgspec.convert(values.get("name"), str),
            device=msgspec.convert(values.get("device"), Device),
            processors=msgspec.convert(values.get("processors"), tuple[str, ...]),
            origins=origins,
            **sections,
        )
    except (InputError, msgspec.ValidationError) as error:
        raise InputError(f"{path}: damaged machine file: {visible(str(error))}") from error


def machine_toml(constants: MachineConstants) -> str:
    """The text of a machine file."""
    names = {origin: f"source{number}" for number, origin in enumerate(dict.fromkeys(constants.origins.values()), start=1)}
    return "\n".join(_lines(constants, names)) + "\n"


def _lines(constants: MachineConstants, names: Mapping[Origin, str]) -> Iterator[str]:
    yield f"version = {MACHINE_VERSION}"
    yield f"name = {_text(constants.name)}"
    yield f"device = {_text(constants.device)}"
    yield f"processors = [{', '.join(map(_text, constants.processors))}]"
    for origin, name in names.items():
        yield ""
        yield f"[sources.{name}]"
        yield from (f"{field} = {_text(getattr(origin, field))}" for field in Origin.__struct_fields__)
    for section in SECTIONS:
        yield ""
        yield f"[{section}]"
        section_constants = getattr(constants, section)
        for key in section_constants.__struct_fields__:
            source = names[constants.origins[f"{section}.{key}"]]
            yield f"{key} = {{ value = {_number(getattr(section_constants, key))}, source = {_text(source)} }}"


def _text(value: str) -> str:
    return json.dumps(visible(value))  # a basic string of TOML has JSON's escapes


def _number(value: Any) -> str:
    return f"[{', '.join(map(_number, value))}]" if isinstance(value, tuple) else repr(value)


def _values(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as stream:
            raw = without_byte_order_mark(stream.read(_MOST_BYTES + 1))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > _MOST_BYTES:
        raise InputError(f"{path}: larger than 1 MiB: that is no machine file")
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{path}: damaged machine file: {visible(str(error))}") from error


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where} is missing or no table")
    return value


def _section(plain: dict[str, Any], section_type: type[Any], name: str) -> Any:
    try:
        return msgspec.convert(plain, section_type)
    except msgspec.ValidationError as error:
        raise InputError(f"[{name}]: {error}") from error


def _require_plausible(value: Any, where: str) -> None:
    """No constant is negative, and none is infinite or more than 1e15."""
    if isinstance(value, list):
        for one in value:
            _require_plausible(one, where)
    elif isinstance(value, bool) or not isinstance(value, int | float) or not (0 <= value <= 1e15 and math.isfinite(value)):
        raise InputError(f"{where}: {value!r} is no number from 0 to 1e15")
