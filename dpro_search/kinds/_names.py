"""The list of the modules of kinds: a new kind adds one line."""

from __future__ import annotations

from importlib import import_module
from typing import Any

KINDS: tuple[str, ...] = (  # in the order in which they are asked whether a trace is theirs; the last one takes any
    "dpro_search.kinds.horovod",
    "dpro_search.kinds.ddp",
    "dpro_search.kinds.fsdp",
    "dpro_search.kinds.kvstore",
    "dpro_search.kinds.byteps",
    "dpro_search.kinds.profiled_ddp",
    "dpro_search.kinds.profiled_fsdp",
    "dpro_search.kinds.synchronised",
    "dpro_search.parallel",
    "dpro_search.kinds.xla",
    "dpro_search.kinds.imported",
)


def registered_kind(name: str) -> Any:
    """The constant ``KIND`` of a module."""
    return import_module(name).KIND


def registered() -> tuple[Any, ...]:
    """Those of all modules in `KINDS`."""
    return tuple(map(registered_kind, KINDS))
