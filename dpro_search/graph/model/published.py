"""`published`: architectures of well-known models by name, from ``published.toml``."""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from typing import Any

from dpro_search.errors import InputError
from dpro_search.graph.model.architecture import Architecture
from dpro_search.graph.model.huggingface import from_config

NOT_KEYS = ("source",)


@lru_cache(maxsize=1)
def _configs() -> dict[str, dict[str, Any]]:
    return tomllib.loads((files("dpro_search.graph.model") / "published.toml").read_text())


def names() -> tuple[str, ...]:
    """All names, in the order of the file."""
    return tuple(_configs())


def published(name: str) -> Architecture:
    """The architecture of a name like "llama3-8b"; raises `InputError` for a name that is not known."""
    config = _configs().get(name.lower())
    if config is None:
        near = get_close_matches(name.lower(), names(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names())}"
        raise InputError(f"model '{name}' is not known: {hint}")
    return from_config({key: value for key, value in config.items() if key not in NOT_KEYS}, name=name.lower())
