"""Reads and writes machine files: TOML with a table for each section, and in it ``name = { value = ..., source = "..." }``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from dpro_search._text import visible
from dpro_search._toml import TomlFile, nearest
from dpro_search.errors import InputError
from dpro_search.machine.constants import MACHINE_VERSION, SECTIONS, Device, MachineConstants, Origin

BUNDLED = Path(__file__).with_name("testbed.toml")
VARIABLE = "DPRO_SEARCH_MACHINE"  # names the file to use in place of the bundled one


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


class _Constant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table ``{ value = ..., source = "..." }``, whose source is a table ``[sources.NAME]``."""

    value: Any
    source: str


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a file beside its sections."""

    version: int
    name: str
    device: Device
    processors: tuple[str, ...]
    sources: dict[str, dict[str, Any]]


def load_machine(path: Path) -> MachineConstants:
    """Read a machine file; raises `InputError` in one line if it is damaged or of a later version."""
    file = TomlFile(path)
    values = file.values()
    version = values.get("version")
    if version != MACHINE_VERSION:
        raise InputError(f"{path}: machine file of version {visible(str(version))}, this program reads {MACHINE_VERSION}")
    tables = {
        name: msgspec.defstruct(name, [(key, _Constant) for key in section.__struct_fields__], forbid_unknown_fields=True)
        for name, section in SECTIONS.items()
    }
    whole = msgspec.defstruct("whole", list(tables.items()), bases=(_Head,), kw_only=True, forbid_unknown_fields=True)
    read: Any = file.convert(values, whole)
    sources = {name: file.convert(origin, Origin, f"sources.{name}") for name, origin in read.sources.items()}
    origins: dict[str, Origin] = {}
    sections: dict[str, Any] = {}
    for name, section in SECTIONS.items():
        constants: dict[str, _Constant] = msgspec.structs.asdict(getattr(read, name))
        for key, constant in constants.items():
            if constant.source not in sources:
                file.fail(f"{name}.{key}", f"no source is called '{constant.source}'; {nearest(constant.source, list(sources))}")
            file.placed(f"{name}.{key}", partial(_require_plausible, constant.value))
            origins[f"{name}.{key}"] = sources[constant.source]
        sections[name] = file.convert({key: constant.value for key, constant in constants.items()}, section, name)
    return MachineConstants(name=read.name, device=read.device, processors=read.processors, origins=origins, **sections)


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


def _require_plausible(value: Any) -> None:
    """No constant is negative, and none is infinite or more than 1e15."""
    if isinstance(value, list):
        for one in value:
            _require_plausible(one)
    elif isinstance(value, bool) or not isinstance(value, int | float) or not (0 <= value <= 1e15 and math.isfinite(value)):
        raise InputError(f"{value!r} is no number from 0 to 1e15")
