"""Values that a cluster file takes from the file that it is based on, with the source of each value."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from dpro_search._toml import TomlFile
from dpro_search.cluster.device import Provenance
from dpro_search.errors import InputError

Values = dict[str, Any]
Kind = Literal["machine", "device"]
Find = Callable[[Kind, str], Path]  # the file of what is bundled under a name; raises InputError


def with_base(
    file: TomlFile, values: Values, kind: Kind, find: Find, above: tuple[Path, ...], prefix: str = ""
) -> tuple[Values, Provenance]:
    """Values over those of the file that they are based on, and where each comes from."""
    stated = _provenance(file, values, prefix)
    key = f"{prefix}.base" if prefix else "base"
    if "base" not in values:
        given = Provenance(source=f"given in {file.path.name}") if stated is None else stated
        return {name: value for name, value in values.items() if name != "source"}, given
    if not isinstance(values["base"], str):
        file.fail(key, "must be the name of a bundled machine or device, or a file")
    try:
        path = found_file(file, values["base"], kind, find)
    except InputError as error:
        file.fail(key, str(error))
    if path in (file.path, *above):
        file.fail(key, f"leads back to {path.name}: a file cannot be based on itself")
    base_file = TomlFile(path)
    below, source = with_base(base_file, base_file.values(), kind, find, (file.path, *above))
    changed = {name: value for name, value in values.items() if name not in ("base", "source")}
    given = Provenance(source=f"given in {file.path.name}") if stated is None else stated
    keys = {name for name, _ in _flat(changed)} - {"name", "aliases", "count", "hosts"}
    exceptions = {name: text for name, text in source.exceptions if name not in keys}
    exceptions |= {name: given.of(name) for name in keys}
    merged = _merged({name: value for name, value in below.items() if name != "aliases"}, changed)
    return merged, Provenance(source=source.source, exceptions=tuple(sorted(exceptions.items())))


def found_file(file: TomlFile, name: str, kind: Kind, find: Find) -> Path:
    """The file that a base names: beside this file, or bundled."""
    if name.lower().endswith(".toml"):
        return Path(os.path.realpath(file.path.parent / name))  # `Path.resolve` refuses loops
    return find(kind, name)


def _merged(below: Values, above: Values) -> Values:
    """Tables key by key, all else replaced; a device that is named becomes the base of one that is described."""
    merged = dict(below)
    for key, value in above.items():
        lower = merged.get(key)
        if key == "device" and isinstance(value, Mapping) and isinstance(lower, str):
            lower = {"base": lower}
        merged[key] = _merged(lower, dict(value)) if isinstance(lower, dict) and isinstance(value, Mapping) else value
    return merged


def _provenance(file: TomlFile, values: Values, prefix: str) -> Provenance | None:
    """The sources that a file states for its values: a text, or a table with ``all`` and exceptions by key."""
    source = values.get("source")
    if source is None:
        return None
    key = f"{prefix}.source" if prefix else "source"
    flat = {"all": source} if isinstance(source, str) else dict(_flat(source)) if isinstance(source, Mapping) else {}
    if "all" not in flat or not all(isinstance(text, str) and text.strip() for text in flat.values()):
        file.fail(key, "must be a text, or a table with 'all' and exceptions by key, all of them texts")
    return Provenance(source=flat["all"], exceptions=tuple(sorted(item for item in flat.items() if item[0] != "all")))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of nested tables by their dotted keys."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
