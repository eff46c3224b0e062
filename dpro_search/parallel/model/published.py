"""`model`: well-known models by name; `published`: those that are transformers, from ``published.toml``."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib.resources import files
from typing import Any

from dpro_search._text import near_names
from dpro_search.errors import InputError
from dpro_search.parallel.model.architecture import Architecture
from dpro_search.parallel.model.huggingface import from_config
from dpro_search.parallel.model.model import Model
from dpro_search.parallel.model.networks import NETWORKS, network

NOT_KEYS = ("source",)


@lru_cache(maxsize=1)
def _configs() -> dict[str, dict[str, Any]]:
    return tomllib.loads((files("dpro_search.parallel.model") / "published.toml").read_text())


def names() -> tuple[str, ...]:
    """All transformers, in the order of the file."""
    return tuple(_configs())


def model(name: str) -> Model:
    """The transformer or the network of a name like "llama3-8b" or "resnet50"; raises `InputError` for one that is not known."""
    return network(name.lower()) if name.lower() in NETWORKS else published(name)


def published(name: str) -> Architecture:
    """The architecture of a name like "llama3-8b"; raises `InputError` for a name that is not known."""
    config = _configs().get(name.lower())
    if config is None:
        every = (*names(), *NETWORKS)
        near = near_names(name.lower(), every)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(every)}"
        raise InputError(f"model '{name}' is not known: {hint}")
    return from_config({key: value for key, value in config.items() if key not in NOT_KEYS}, name=name.lower())
